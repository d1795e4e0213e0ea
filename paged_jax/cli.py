"""The command line: `paged-jax generate` and `paged-jax chat`."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from paged_jax.errors import InvalidPrompt, PagedJaxError
from paged_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from paged_jax.llm import LLM
    from paged_jax.outputs import RequestOutput

app = typer.Typer(
    name="paged-jax",
    help="Text generation in JAX over a paged KV cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_stderr = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)

Model = Annotated[str, typer.Option(help="A Hugging Face directory, a .gguf file, or a hub id org/name.")]
Dtype = Annotated[str, typer.Option(help="Of the weights: auto, float32, bfloat16 or float16.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Tokens of prompt and answer together, at most.")]
BlockSize = Annotated[int, typer.Option(help="Tokens a block.")]
NumBlocks = Annotated[int | None, typer.Option(help="Blocks of the pool, the null block included.")]
KvCacheGib = Annotated[float | None, typer.Option(help="Size of the pool in GiB, instead of --num-blocks.")]
MaxNumSeqs = Annotated[int, typer.Option(help="Sequences that run at once.")]
Implementation = Annotated[str, typer.Option(help="Of the paged attention: auto, triton or xla.")]
MaxTokens = Annotated[
    int | None,
    typer.Option(help="Tokens at most. Default: 16, in a chat up to the context's end."),
]
Temperature = Annotated[float | None, typer.Option(help="0 takes the most likely token.")]
TopK = Annotated[int | None, typer.Option(help="Keep the k most likely tokens; 0: all.")]
TopP = Annotated[float | None, typer.Option(help="Keep the most likely tokens that sum to this.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]


@app.command()
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; none: one a line from stdin.")] = None,
    *,
    model: Model,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A file with one prompt a line, added to the arguments.")
    ] = None,
    chat_template: Annotated[bool, typer.Option(help="Put each prompt through the chat template.")] = False,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    dtype: Dtype = "auto",
    max_model_len: MaxModelLen = None,
    block_size: BlockSize = 16,
    num_blocks: NumBlocks = None,
    kv_cache_gib: KvCacheGib = None,
    implementation: Implementation = "auto",
    max_num_seqs: MaxNumSeqs = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Continue each prompt, all of them in one batch."""
    texts = [*(prompts or []), *(_prompts_of(prompt_file) if prompt_file else [])]
    if not texts and prompt_file is None:
        texts = _lines(sys.stdin.read())
    if not texts:
        raise InvalidPrompt("no prompt: give some as arguments, or one a line in --prompt-file or on stdin.")
    given = _given(max_tokens, temperature, top_k, top_p, seed)
    llm = _load(
        model,
        dtype=dtype,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_cache_gib=kv_cache_gib,
        implementation=implementation,
        max_num_seqs=max_num_seqs,
    )
    params = _params(llm, given)
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always", UserWarning)
        if chat_template:
            outputs = llm.chat([[{"role": "user", "content": text}] for text in texts], params)
        else:
            outputs = llm.generate(texts, params)
    for note in notes:
        _stderr.print(f"note: {note.message}", style="yellow")
    if as_json:
        print(json.dumps([_record(text, output) for text, output in zip(texts, outputs, strict=True)]))
        return
    for text, output in zip(texts, outputs, strict=True):
        print(text + output.outputs[0].text if not chat_template else output.outputs[0].text)
        if len(outputs) > 1:
            print("-" * 40)


@app.command()
def chat(
    *,
    model: Model,
    message: Annotated[str | None, typer.Option(help="Ask this, print the answer and leave.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    dtype: Dtype = "auto",
    max_model_len: MaxModelLen = None,
    block_size: BlockSize = 16,
    num_blocks: NumBlocks = None,
    kv_cache_gib: KvCacheGib = None,
    implementation: Implementation = "auto",
) -> None:
    """Talk with a model; answers appear as they are generated. /clear forgets, /exit or Ctrl-D leaves."""
    given = _given(max_tokens, temperature, top_k, top_p, seed)
    llm = _load(
        model,
        dtype=dtype,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_cache_gib=kv_cache_gib,
        implementation=implementation,
        max_num_seqs=1,
    )
    params = _params(llm, given)
    beginning = [{"role": "system", "content": system}] if system else []
    if message is not None:
        _answer(llm, [*beginning, {"role": "user", "content": message}], params)
        return
    conversation = list(beginning)
    for line in _turns():
        if line == "/clear":
            conversation = list(beginning)
            continue
        turn = {"role": "user", "content": line}
        try:
            answer = _answer(llm, [*conversation, turn], params)
        except PagedJaxError as error:
            _stderr.print(f"error: {error}", style="red")
            _stderr.print("the message was not taken; /clear forgets what was said before", style="dim")
            continue
        except KeyboardInterrupt:
            print(flush=True)
            continue
        conversation += [turn, {"role": "assistant", "content": answer}]


def main() -> None:
    """The entry point: errors of ours become one line and exit code 1."""
    try:
        app()
    except PagedJaxError as error:
        _stderr.print(f"error: {error}", style="red")
        sys.exit(1)


def _load(model: str, **options: object) -> LLM:
    from paged_jax.llm import LLM

    llm = LLM(model, **options)  # type: ignore[arg-type]  # each option has LLM's own type
    _stderr.print(llm.describe(), style="dim")
    return llm


def _given(
    max_tokens: int | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
) -> dict[str, Any]:
    """The sampling options that were given, checked before a model is loaded for them."""
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
    }
    given = {name: value for name, value in options.items() if value is not None}
    SamplingParams(**given)
    return given


def _params(llm: LLM, given: dict[str, Any]) -> SamplingParams:
    """The model's own recommendation, changed only where an option was given.

    An option that sampling alone needs turns sampling on, also where the model recommends none.
    """
    default = llm.get_default_sampling_params()
    if default.is_greedy and given.keys() & {"top_k", "top_p", "seed"}:
        default = replace(default, temperature=1.0)
    return replace(default, **given)


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Stream one answer to stdout and return it; Ctrl-C frees what it held."""
    engine = llm.engine
    request = engine.make_request("chat", llm.chat_prompt(messages), params, default_max_tokens=None)
    engine.add(request)
    shown = ""
    try:
        while engine.has_unfinished:
            for output in engine.step():
                text = output.outputs[0].text
                print(text[len(shown) :], end="", flush=True)
                shown = text
                if output.outputs[0].finish_reason == "length":
                    _stderr.print("\n[cut: the token limit or the context's end was reached]", style="dim")
    finally:
        engine.abort("chat")
    print(flush=True)
    return shown


def _turns() -> Iterator[str]:
    """What the user types, a line a turn, until /exit or the end of input."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line == "/exit":
            return
        if line:
            yield line


def _prompts_of(path: Path) -> list[str]:
    try:
        return _lines(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidPrompt(f"--prompt-file {path}: expected a text file in UTF-8: {error}") from error


def _lines(text: str) -> list[str]:
    return [line for line in text.split("\n") if line.strip()]  # splitlines() would end lines at more


def _record(prompt: str, output: RequestOutput) -> dict[str, object]:
    completion = output.outputs[0]
    return {
        "prompt": prompt,
        "prompt_tokens": len(output.prompt_token_ids),
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
    }
