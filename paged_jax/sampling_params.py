"""What a user asks of the sampling: one frozen, checked record a request."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from enum import Enum
from functools import partial
from numbers import Integral, Real
from typing import Self

from paged_jax.errors import InvalidSamplingParams

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
class SamplingParams:
    """How the next token is chosen, and when to stop.

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

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Name unknown fields, which the generated initialiser would answer with a bare TypeError."""
        known = [field.name for field in fields(cls)]
        for name in kwargs:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                raise InvalidSamplingParams(
                    f"{name}={kwargs[name]!r}: no such sampling field."
                    + (f" Did you mean {close[0]}?" if close else "")
                    + f" There are: {', '.join(known)}."
                )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check every field and keep it as plain Python: numpy's numbers are welcome, a list of ids too."""
        keep = partial(object.__setattr__, self)
        keep("temperature", _number("temperature", self.temperature, "a number >= 0", lambda x: x >= 0))
        keep("top_p", _number("top_p", self.top_p, "a number in (0, 1]", lambda x: 0 < x <= 1))
        top_k = "an integer >= 1, or 0 or -1 for all tokens"
        keep("top_k", _integer("top_k", self.top_k, top_k, lambda x: x >= -1))
        if self.seed is not None:
            seed = "None or 0 <= seed < 2**64"
            keep("seed", _integer("seed", self.seed, seed, lambda x: 0 <= x <= MAX_SEED))
        if self.max_tokens is not None and self.max_tokens is not UNSET:
            max_tokens = "an integer >= 1, or None for no limit but the context"
            keep("max_tokens", _integer("max_tokens", self.max_tokens, max_tokens, lambda x: x >= 1))
        ids = "a sequence of token ids >= 0"
        if isinstance(self.stop_token_ids, str | bytes) or not isinstance(self.stop_token_ids, Iterable):
            raise _invalid("stop_token_ids", self.stop_token_ids, ids)
        tokens = [_integer("stop_token_ids", token, ids, lambda x: x >= 0) for token in self.stop_token_ids]
        keep("stop_token_ids", tuple(tokens))
        keep("min_tokens", _integer("min_tokens", self.min_tokens, "an integer >= 0", lambda x: x >= 0))
        self.max_tokens_or(None)
        keep("stop", _stop_strings(self.stop))
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise _invalid(name, getattr(self, name), "True or False")
        if self.logprobs is not None:
            logprobs = f"None or an integer from 0 to {MAX_LOGPROBS}"
            keep("logprobs", _integer("logprobs", self.logprobs, logprobs, lambda x: 0 <= x <= MAX_LOGPROBS))

    def max_tokens_or(self, default: int | None) -> int | None:
        """max_tokens, or the default where it was not given; None is no limit.

        Raises InvalidSamplingParams where that is less than min_tokens.
        """
        limit = default if self.max_tokens is UNSET else self.max_tokens
        if limit is not None and self.min_tokens > limit:
            which = "the default max_tokens" if self.max_tokens is UNSET else "max_tokens"
            raise _invalid("min_tokens", self.min_tokens, f"{limit} at most, which is {which}={limit}")
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


def _invalid(name: str, given: object, expected: str) -> InvalidSamplingParams:
    return InvalidSamplingParams(f"{name}={given!r}: expected {expected}.")


def _stop_strings(stop: object) -> tuple[str, ...]:
    """Stop strings as a tuple; one str is one of them."""
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(string, str) for string in strings):
        raise _invalid("stop", stop, "a str or a sequence of them")
    if "" in strings:
        raise _invalid("stop", stop, "no empty string, which would end every answer at once")
    return tuple(map(str, strings))


def _number(name: str, value: object, expected: str, ok: Callable[[float], bool]) -> float:
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):  # an int past the largest float is as little of use as infinity
            number = float(value)
    if not math.isfinite(number) or not ok(number):
        raise _invalid(name, value, expected)
    return number


def _integer(name: str, value: object, expected: str, ok: Callable[[int], bool]) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not ok(int(value)):
        raise _invalid(name, value, expected)
    return int(value)
