"""The options that say how long requests are, shared by the commands that plan and simulate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paged_jax.cli_values import numbers_of
from paged_jax.errors import InvalidArgument, TokenizerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from paged_jax.request_trace import Lengths, Trace

TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", help="Requests' lengths: CSV, JSON lines or ShareGPT-style JSON."),
]
Mean = Annotated[
    str | None, typer.Option(help="Instead: mean tokens, of prompt and answer together or as PROMPT,ANSWER.")
]
Std = Annotated[str | None, typer.Option(help="Their standard deviation, in the same form.")]
Tokenizer = Annotated[
    Path | None, typer.Option(help="A tokenizer.json that counts the tokens of a trace of texts.")
]
CharactersPerToken = Annotated[float, typer.Option(help="Without one: so many characters are a token.")]
SkipInvalid = Annotated[bool, typer.Option("--skip-invalid", help="Leave bad requests out, and count them.")]


def trace_of(
    trace: Path | None,
    mean_tokens: str | None,
    std_tokens: str | None,
    *,
    tokenizer: Path | None,
    characters_per_token: float,
    skip_invalid: bool,
    num_requests: int,
    requests_per_second: float | None = None,
    seed: int = 0,
) -> Trace | None:
    """The requests of a file, or made up; None where neither was asked for."""
    from paged_jax.request_trace import made_up_trace, read_trace

    if trace is not None and mean_tokens is not None:
        raise InvalidArgument("--trace and --mean-tokens: both say how long requests are; give one.")
    if std_tokens is not None and mean_tokens is None:
        raise InvalidArgument.of("--std-tokens", std_tokens, "--mean-tokens beside it")
    if trace is not None:
        return read_trace(
            trace,
            skip_invalid=skip_invalid,
            count_tokens=_counter(tokenizer) if tokenizer else None,
            characters_per_token=characters_per_token,
        )
    if mean_tokens is None:
        return None
    prompt, answer = _lengths(mean_tokens, std_tokens or "0")
    return made_up_trace(
        num_requests, prompt=prompt, output=answer, requests_per_second=requests_per_second, seed=seed
    )


def _lengths(mean: str, std: str) -> tuple[Lengths, Lengths]:
    """What is said of the whole is halved between prompt and answer."""
    from paged_jax.request_trace import Lengths

    expected = "a number of tokens, or two: PROMPT,ANSWER"
    means = numbers_of("--mean-tokens", mean, (1, 2), expected)
    stds = numbers_of("--std-tokens", std, (1, 2), expected)
    if len(means) == 1:
        means = [means[0] / 2] * 2
    if len(stds) == 1:  # the halves are independent, so their variances add up
        stds = [stds[0] / 2**0.5] * 2
    return Lengths(means[0], stds[0]), Lengths(means[1], stds[1])


def _counter(path: Path) -> Callable[[str], int]:
    """Counts a text's tokens, without special ones."""
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more specific
        raise TokenizerError(f"--tokenizer {path}: cannot be read: {error}") from error
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
