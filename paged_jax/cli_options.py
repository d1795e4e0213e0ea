"""The options that the commands share, and what becomes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paged_jax.beam_params import BeamSearchParams
from paged_jax.errors import InvalidPrompt
from paged_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from paged_jax.llm import LLM

Model = Annotated[str, typer.Option(help="A Hugging Face directory, a .gguf file, or a hub id org/name.")]
Dtype = Annotated[str, typer.Option(help="Of the weights: auto, float32, bfloat16 or float16.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Tokens of prompt and answer together, at most.")]
BlockSize = Annotated[int, typer.Option(help="Tokens a block.")]
NumBlocks = Annotated[int | None, typer.Option(help="Blocks of the pool, the null block included.")]
KvCacheGib = Annotated[float | None, typer.Option(help="Size of the pool in GiB, instead of --num-blocks.")]
MaxNumSeqs = Annotated[int, typer.Option(help="Sequences that run at once.")]
MaxNumBatchedTokens = Annotated[int, typer.Option(help="Tokens that a step computes at most.")]
PrefixCaching = Annotated[
    bool,
    typer.Option(
        "--prefix-caching/--no-prefix-caching", help="Share the blocks of prompts that begin alike."
    ),
]
PreemptionMode = Annotated[
    str, typer.Option(help="What a request that gives its blocks back does: auto, recompute or swap.")
]
SwapSpaceGib = Annotated[float, typer.Option(help="Host memory to swap to, at most.")]
BatchInvariant = Annotated[
    bool, typer.Option("--batch-invariant", help="The same bits whatever shares the batch; slower.")
]
WarmUp = Annotated[
    bool, typer.Option("--warm-up/--no-warm-up", help="Compile every program first, not when it is needed.")
]
Implementation = Annotated[str, typer.Option(help="Of the paged attention: auto, triton or xla.")]

MaxTokens = Annotated[
    int | None,
    typer.Option(help="Tokens at most. Default: 16, in a chat up to the context's end."),
]
MinTokens = Annotated[int | None, typer.Option(help="No end before so many tokens.")]
Temperature = Annotated[float | None, typer.Option(help="0 takes the most likely token.")]
TopK = Annotated[int | None, typer.Option(help="Keep the k most likely tokens; 0: all.")]
TopP = Annotated[float | None, typer.Option(help="Keep the most likely tokens that sum to this.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
Stop = Annotated[list[str] | None, typer.Option(help="End at this text; may be given several times.")]


def given_params(*, default_max_tokens: int | None, **options: object) -> dict[str, Any]:
    """The sampling options that were given, checked before a model is loaded for them."""
    given = {name: value for name, value in options.items() if value not in (None, [])}
    checked: BeamSearchParams | SamplingParams
    kind = BeamSearchParams if "beam_width" in given else SamplingParams
    checked = kind(**given)  # type: ignore[arg-type]  # it checks them
    common = checked if isinstance(checked, SamplingParams) else checked.sampling_params()
    common.max_tokens_or(default_max_tokens)
    return given


def params_for(llm: LLM, given: dict[str, Any]) -> SamplingParams:
    """The model's own recommendation, changed only where an option was given.

    An option that sampling alone needs turns sampling on, also where the model recommends none.
    """
    default = llm.get_default_sampling_params()
    draws = given.keys() & {"top_k", "top_p", "seed"} or given.get("n", 1) > 1
    if default.is_greedy and draws:
        default = replace(default, temperature=1.0)
    return replace(default, **given)


def lines(text: str) -> list[str]:
    """The lines that are not blank."""
    return [line for line in text.split("\n") if line.strip()]  # splitlines() would end lines at more


def prompts_of(path: Path) -> list[str]:
    """The prompts of a file, one a line; InvalidPrompt if it can not be read."""
    try:
        return lines(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidPrompt(f"--prompt-file {path}: expected a text file in UTF-8: {error}") from error
