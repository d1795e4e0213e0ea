"""What a beam search forbids and discourages: applied to log-probabilities before anything is ranked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral

import numpy as np

from paged_jax.beam_params import BeamSearchParams
from paged_jax.errors import ConstraintFailed, InvalidSamplingParams
from paged_jax.prompt import Encodes


class Constraints:
    """Those of one request. prompt_index: its place in the call, which prefix_allowed_tokens_fn is told."""

    def __init__(
        self,
        params: BeamSearchParams,
        *,
        end_ids: frozenset[int],
        bad_words: Sequence[Sequence[int]],
        vocab_size: int,
        prompt_index: int,
    ) -> None:
        self.min_tokens = params.min_tokens
        # A tokenizer may know more ids than the model has: those never come.
        self.end_ids = frozenset(token for token in end_ids if token < vocab_size)
        self.vocab_size = vocab_size
        self._ngram = params.no_repeat_ngram_size
        self._penalty = params.repetition_penalty
        self._bad_words = [tuple(word) for word in bad_words if max(word) < vocab_size]
        self._allowed = None if params.allowed_token_ids is None else frozenset(params.allowed_token_ids)
        self._fn = params.prefix_allowed_tokens_fn
        self._prompt_index = prompt_index

    @property
    def needs_all(self) -> bool:
        """Whether a token beyond the most likely few may be the best one left."""
        return self._penalty != 1 or self._allowed is not None or self._fn is not None

    def banned(self, token_ids: list[int], num_output_tokens: int) -> set[int]:
        """Tokens that must not come next: ends before min_tokens, repeated n-grams, bad words."""
        banned = set(self.end_ids) if num_output_tokens < self.min_tokens else set()
        for word in self._bad_words:
            before = len(word) - 1
            if before <= len(token_ids) and tuple(token_ids[len(token_ids) - before :]) == word[:-1]:
                banned.add(word[-1])
        if self._ngram and len(token_ids) >= self._ngram:
            size = self._ngram - 1
            last = token_ids[len(token_ids) - size :]
            banned.update(
                token_ids[at + size]
                for at in range(len(token_ids) - size)
                if token_ids[at : at + size] == last
            )
        return banned

    def apply(self, scores: np.ndarray, token_ids: list[int]) -> None:
        """Penalise and forbid in place: scores are log-probabilities, float64 [vocab_size]."""
        if self._penalty != 1:
            seen = np.unique(np.array(token_ids, np.int64))
            scores[seen] = np.where(
                scores[seen] < 0, scores[seen] * self._penalty, scores[seen] / self._penalty
            )
        allowed = self._allowed
        if self._fn is not None:
            chosen = self._ask(token_ids)
            allowed = chosen if allowed is None else allowed & chosen
        if allowed is not None:
            kept = np.array(sorted(allowed), np.int64)
            some = scores[kept]
            scores[:] = -np.inf
            scores[kept] = some

    def _ask(self, token_ids: list[int]) -> frozenset[int]:
        """What the user's function allows; ConstraintFailed if it fails, or gives what is no token."""
        assert self._fn is not None
        try:
            given = list(self._fn(self._prompt_index, list(token_ids)))
        except Exception as error:
            raise ConstraintFailed(
                f"prefix_allowed_tokens_fn failed after {len(token_ids)} tokens:"
                f" {type(error).__name__}: {error}"
            ) from error
        for token in given:
            is_id = isinstance(token, Integral) and not isinstance(token, bool)
            if not is_id or not 0 <= int(token) < self.vocab_size:
                raise ConstraintFailed(
                    f"prefix_allowed_tokens_fn gave {token!r} after {len(token_ids)} tokens:"
                    f" expected token ids from 0 to {self.vocab_size - 1}."
                )
        return frozenset(map(int, given))


def bad_word_ids(words: Iterable[str | Sequence[int]], tokenizer: Encodes) -> list[tuple[int, ...]]:
    """The token ids of bad words: a text's with a space before it and without.

    InvalidSamplingParams for what the tokenizer can not encode.
    """
    before = tokenizer.encode("")
    found: list[tuple[int, ...]] = []
    for word in words:
        if isinstance(word, str):
            try:
                spellings = [tokenizer.encode(text)[len(before) :] for text in (word, " " + word.lstrip())]
            except ValueError as error:  # such as a lone surrogate, which is no character
                raise InvalidSamplingParams(f"bad_words={word!r}: {error}") from error
            found += [tuple(ids) for ids in spellings if ids]
        else:
            found.append(tuple(word))
    return list(dict.fromkeys(found))
