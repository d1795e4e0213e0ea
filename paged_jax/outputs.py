"""What a request gives back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Self
from weakref import WeakKeyDictionary

from paged_jax.beam_search import Beam, BeamSearch
from paged_jax.detokenizer import REPLACEMENT, Decodes
from paged_jax.errors import PagedJaxError
from paged_jax.sequence import FinishReason, RequestMetrics, TokenLogprobs
from paged_jax.text_stream import TextStream


@dataclass(frozen=True)
class Logprob:
    """How likely a token was: its natural log-probability, and its rank, where 1 is the most likely.

    decoded_token: its text by itself, U+FFFD for a part of a character; special tokens by their names.
    """

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One generated continuation.

    text leaves out special tokens, and the stop string that ended it unless that was asked for; token_ids
    holds every generated id, those that ended it included.
    finish_reason: "stop" (an end token or a stop string), "length" (max_tokens, or the end of the context or
    of the pool), "abort", or None while it goes on. stop_reason: the stop string, or the one of
    stop_token_ids, that ended it; None for the model's own end tokens.
    logprobs: for each of token_ids, by token id, the chosen token and the k most likely, best first; None
    unless asked for. cumulative_logprob: the sum over the chosen ones; None unless that or a beam search was
    asked for.
    score: of a hypothesis of a beam search, what they are ranked by: cumulative_logprob / length **
    length_penalty, with constraints worked into both.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    score: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A request with its continuations so far.

    outputs: in order of their index: the samples, or the hypotheses of a beam search, best first.
    error: why it was refused or given up, where errors are returned and not raised; then there are no
    continuations.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: PagedJaxError | None = None

    @classmethod
    def refused(cls, request_id: str, prompt: object, error: PagedJaxError) -> Self:
        """The output of a prompt that an error kept from being answered."""
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        return cls(
            request_id=request_id,
            prompt=text if isinstance(text, str) else None,
            prompt_token_ids=[],
            outputs=[],
            finished=True,
            metrics=RequestMetrics(arrival_time=monotonic()),
            error=error,
        )

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt whose keys and values came from the prefix cache."""
        return self.metrics.num_cached_tokens


class CutAnswers(UserWarning):
    """Some of a call's answers ended at the default max_tokens, which may not be what was wanted."""

    def __init__(self, num_cut: int, num_answers: int, max_tokens: int) -> None:
        self.num_cut, self.num_answers, self.max_tokens = num_cut, num_answers, max_tokens
        super().__init__(
            f"{num_cut} of {num_answers} answers were cut at the default max_tokens={max_tokens}:"
            " pass max_tokens=..., or max_tokens=None to go on to the context's end."
        )


def hypothesis_outputs(
    search: BeamSearch, beams: Sequence[Beam], tokenizer: Decodes
) -> list[CompletionOutput]:
    """What a search has found. beams: its last ones; those that it did not end itself count as they stand."""
    params = search.params
    outputs = []
    for index, found in enumerate(search.results(beams)):
        text = TextStream(tokenizer, params.stop, params.include_stop_str_in_output)
        for token in found.token_ids:
            text.push(token, may_stop=text.num_tokens >= params.min_tokens)
        matched = text.finish()
        stopped = matched is not None and found.finish_reason != "abort"
        logprobs = None
        if params.logprobs is not None:
            logprobs = token_logprobs(found.logprobs, tokenizer, params.logprobs)
        outputs.append(
            CompletionOutput(
                index=index,
                text=text.text,
                token_ids=list(found.token_ids),
                finish_reason="stop" if stopped else found.finish_reason,
                stop_reason=matched if stopped else found.stop_reason,
                cumulative_logprob=found.sum_logprob,
                logprobs=logprobs,
                score=found.score,
            )
        )
    return outputs


def token_logprobs(
    sampled: Sequence[TokenLogprobs],
    tokenizer: Decodes,
    k: int,
    so_far: Sequence[dict[int, Logprob]] = (),
) -> list[dict[int, Logprob]]:
    """CompletionOutput.logprobs for these tokens; so_far: what it was for the first of them, taken over."""
    text = _texts_of(tokenizer)
    return [*so_far, *(_by_token(token, k, text) for token in sampled[len(so_far) :])]


def _by_token(token: TokenLogprobs, k: int, text: Callable[[int], str]) -> dict[int, Logprob]:
    entries = {
        token_id: Logprob(logprob, rank, text(token_id))
        for rank, (token_id, logprob) in enumerate(token.top[:k], 1)
    }
    entries[token.token_id] = Logprob(token.logprob, token.rank, text(token.token_id))
    return entries


_known: WeakKeyDictionary[Decodes, dict[int, str]] = WeakKeyDictionary()
"""Texts of single tokens, by tokenizer: the same few come up again and again."""


def _texts_of(tokenizer: Decodes) -> Callable[[int], str]:
    known = _known.setdefault(tokenizer, {})

    def text(token: int) -> str:
        if token not in known:
            known[token] = _text_of(token, tokenizer)
        return known[token]

    return text


def _text_of(token: int, tokenizer: Decodes) -> str:
    """Text of a token after another one, as some tokenizers drop a space at the start of what they decode."""
    once = tokenizer.decode([token], skip_special_tokens=False)
    if REPLACEMENT in once:
        return once
    return tokenizer.decode([token, token], skip_special_tokens=False)[len(once) :]
