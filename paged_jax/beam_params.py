"""What a user asks of a beam search: one frozen, checked record a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from paged_jax.param_checks import (
    CheckedFields,
    integer,
    invalid,
    number,
    token_ids,
)
from paged_jax.sampling_params import UNSET, SamplingParams, Unset

MOST_LENGTH_PENALTY = 20
"""An exponent of the length: beyond, the power of a long answer's is no float any more."""
PrefixAllowedTokens = Callable[[int, list[int]], Iterable[int]]


@dataclass(frozen=True)
class BeamSearchParams(CheckedFields):
    """How a beam search goes, and when it ends. The names and their meanings are Hugging Face's.

    beam_width: hypotheses that are kept in each step. n: how many of them are given back, the best first;
    None: all. A hypothesis' score is the sum of its tokens' log-probabilities divided by
    length ** length_penalty, where length counts generated tokens, the one that ended it included.
    early_stopping: when a search ends of which beam_width hypotheses are finished. True: at once. False:
    when the best running beam, if it ended now, would score no better than the worst finished one. "never":
    when no running beam can score better however long it grows.
    max_tokens, min_tokens, stop, stop_token_ids, ignore_eos, include_stop_str_in_output, logprobs: as in
    SamplingParams, for each hypothesis. temperature: 0, the only one there is.

    What follows changes the log-probabilities before anything is ranked, and they are not normalised again:
    repetition_penalty (> 0): those of tokens that occur in the prompt or the answer are multiplied by it.
    no_repeat_ngram_size: no sequence of so many tokens occurs twice in prompt and answer (0: it may).
    allowed_token_ids: no other tokens are generated. bad_words: none of these is generated; texts, which
    count with and without a space before them, or sequences of ids. An end token that is one of them is not
    generated either (transformers leaves it out of the list).
    prefix_allowed_tokens_fn: called in each step for each beam with (index of the prompt in the call, ids of
    prompt and answer so far); returns the ids that may come next. Where it returns none, or all of these
    rules together leave no token, the beam is finished as it stands (transformers drops it).
    """

    beam_width: int = 4
    max_tokens: int | Unset | None = UNSET
    min_tokens: int = 0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    ignore_eos: bool = False
    n: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    no_repeat_ngram_size: int = 0
    repetition_penalty: float = 1.0
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()
    logprobs: int | None = None
    prefix_allowed_tokens_fn: PrefixAllowedTokens | None = None
    temperature: float = 0.0

    def __post_init__(self) -> None:
        """Check every field and keep it as plain Python."""
        keep = partial(object.__setattr__, self)
        keep("beam_width", integer("beam_width", self.beam_width, "an integer >= 1", lambda x: x >= 1))
        if self.n is not None:
            n = f"None or an integer from 1 to beam_width={self.beam_width}"
            keep("n", integer("n", self.n, n, lambda x: 1 <= x <= self.beam_width))
        exponent = f"a number from -{MOST_LENGTH_PENALTY} to {MOST_LENGTH_PENALTY}"
        keep(
            "length_penalty",
            number("length_penalty", self.length_penalty, exponent, lambda x: abs(x) <= MOST_LENGTH_PENALTY),
        )
        early = self.early_stopping
        if not isinstance(early, bool) and not (isinstance(early, str) and early == "never"):
            raise invalid("early_stopping", early, 'True, False or "never"')
        size = "an integer >= 1, or 0 to allow repetitions"
        keep(
            "no_repeat_ngram_size",
            integer("no_repeat_ngram_size", self.no_repeat_ngram_size, size, lambda x: x >= 0),
        )
        penalty = "a number > 0; over 1 discourages repetitions"
        keep(
            "repetition_penalty",
            number("repetition_penalty", self.repetition_penalty, penalty, lambda x: x > 0),
        )
        if self.allowed_token_ids is not None:
            keep("allowed_token_ids", token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise invalid("allowed_token_ids", (), "one id at least, or None to allow all")
        keep("bad_words", _bad_words(self.bad_words))
        fn = self.prefix_allowed_tokens_fn
        if fn is not None and not callable(fn):
            raise invalid("prefix_allowed_tokens_fn", fn, "None or a function of (prompt index, token ids)")
        temperature = "0: a beam search takes the most likely tokens; use SamplingParams to sample"
        keep("temperature", number("temperature", self.temperature, temperature, lambda x: x == 0))
        common = self.sampling_params()  # checks the rest
        for name in ("max_tokens", "min_tokens", "stop", "stop_token_ids", "logprobs"):
            keep(name, getattr(common, name))

    @property
    def num_returned(self) -> int:
        """Hypotheses that are given back."""
        return self.beam_width if self.n is None else self.n

    def sampling_params(self) -> SamplingParams:
        """What of it applies to each of the running beams."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            logprobs=self.logprobs,
        )


def _bad_words(words: object) -> tuple[str | tuple[int, ...], ...]:
    expected = "a sequence of texts, or of sequences of token ids, none of them empty"
    if isinstance(words, str | bytes) or not isinstance(words, Sequence):
        raise invalid("bad_words", words, expected)
    kept = tuple(word if isinstance(word, str) else token_ids("bad_words", word, expected) for word in words)
    if not all(kept):
        raise invalid("bad_words", words, expected)
    return kept
