"""What a user asks of the sampling: one frozen, checked record a request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

from paged_jax.errors import InvalidSamplingParams
from paged_jax.param_checks import (
    CheckedFields,
    boolean,
    integer,
    invalid,
    number,
    stop_strings,
    token_ids,
)

DEFAULT_MAX_TOKENS = 16
"""Tokens that `generate` answers with at most when max_tokens was not given (`chat`: no limit)."""

MAX_SEED = 2**64 - 1

MAX_LOGPROBS = 20
"""Most likely tokens whose log-probabilities can be asked for."""

MAX_SUPPRESSED_IDS = 64
"""End ids that min_tokens can hold back: the model's own and stop_token_ids together."""


class Unset(Enum):
    """The value of a field that was not given, where that differs from every value one can give."""

    UNSET = "not given"


UNSET = Unset.UNSET


@dataclass(frozen=True)
class SamplingParams(CheckedFields):
    """How the next token is chosen, and when to stop.

    n: answers to sample, each with a stream of random numbers of its own; they share the prompt's blocks.
    temperature: 0 takes the most likely token; otherwise logits are divided by it (> 0).
    top_k: keep the k most likely tokens (0 or -1: all). top_p: then keep the fewest tokens whose
    probabilities sum to top_p or more (0 < top_p <= 1).
    seed: 0 <= seed < 2**64; the same seed and prompt give the same tokens whatever shares the batch. Not
    given: each request of each call draws its own.
    max_tokens: tokens to generate at most; None: up to the end of the context. Not given: 16 in
    `generate`, which says so when it cut an answer; up to the end of the context in `chat`.
    stop_token_ids: end at any of these, beside the model's own end tokens. ignore_eos: do not end at the
    model's own.
    min_tokens: no end token is sampled, and no stop string looked for, before this many tokens.
    stop: one string, or several, that end the answer where its text holds one; the text is cut before it,
    or after it with include_stop_str_in_output.
    logprobs: give the chosen token's log-probability and those of the k most likely, 0 <= k <= 20; None:
    none of them.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | Unset | None = UNSET
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        """Check every field and keep it as plain Python: numpy's numbers are welcome, a list of ids too."""
        keep = partial(object.__setattr__, self)
        keep("temperature", number("temperature", self.temperature, "a number >= 0", lambda x: x >= 0))
        keep("top_p", number("top_p", self.top_p, "a number in (0, 1]", lambda x: 0 < x <= 1))
        top_k = "an integer >= 1, or 0 or -1 for all tokens"
        keep("top_k", integer("top_k", self.top_k, top_k, lambda x: x >= -1))
        keep("n", integer("n", self.n, "an integer >= 1", lambda x: x >= 1))
        if self.n > 1 and self.is_greedy:
            raise invalid("n", self.n, "1 with temperature=0, which would give the same answer n times")
        if self.seed is not None:
            seed = "None or 0 <= seed < 2**64"
            keep("seed", integer("seed", self.seed, seed, lambda x: 0 <= x <= MAX_SEED))
        if self.max_tokens is not None and self.max_tokens is not UNSET:
            max_tokens = "an integer >= 1, or None for no limit but the context"
            keep("max_tokens", integer("max_tokens", self.max_tokens, max_tokens, lambda x: x >= 1))
        keep("stop_token_ids", token_ids("stop_token_ids", self.stop_token_ids))
        keep("min_tokens", integer("min_tokens", self.min_tokens, "an integer >= 0", lambda x: x >= 0))
        self.max_tokens_or(None)
        keep("stop", stop_strings(self.stop))
        for name in ("ignore_eos", "include_stop_str_in_output"):
            boolean(name, getattr(self, name))
        if self.logprobs is not None:
            logprobs = f"None or an integer from 0 to {MAX_LOGPROBS}"
            keep("logprobs", integer("logprobs", self.logprobs, logprobs, lambda x: 0 <= x <= MAX_LOGPROBS))

    def max_tokens_or(self, default: int | None) -> int | None:
        """max_tokens, or the default where it was not given; None is no limit.

        Raises InvalidSamplingParams where that is less than min_tokens.
        """
        limit = default if self.max_tokens is UNSET else self.max_tokens
        if limit is not None and self.min_tokens > limit:
            which = "the default max_tokens" if self.max_tokens is UNSET else "max_tokens"
            raise invalid("min_tokens", self.min_tokens, f"{limit} at most, which is {which}={limit}")
        return limit

    def end_ids(self, eos_ids: Iterable[int]) -> frozenset[int]:
        """Every token id that ends the answer, where eos_ids are the model's own.

        Raises InvalidSamplingParams where min_tokens has to hold back more of them than it can.
        """
        ids = frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos_ids))
        if self.min_tokens and len(ids) > MAX_SUPPRESSED_IDS:
            raise InvalidSamplingParams(
                f"min_tokens={self.min_tokens} with {len(ids)} end ids (stop_token_ids and the model's own):"
                f" expected {MAX_SUPPRESSED_IDS} at most, or min_tokens=0."
            )
        return ids

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0

    @property
    def filters(self) -> bool:
        """Whether top_k or top_p removes tokens, which costs a sort of the vocabulary."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1)
