"""Beam search on the host: from a step's log-probabilities to the next beams and the finished hypotheses.

Small arrays alone come to the host: for each beam the most likely tokens. A beam's whole row of logits is
asked for only where constraints, or a very wide search, reach beyond those.

The rules are those of Hugging Face's generate(num_beams=...). Candidates (a beam, its next token) are ranked
by the sum of their log-probabilities. One that ends a hypothesis, by an end token, a stop string or its
length, is finished if it ranks within the first beam_width, and dropped otherwise. The best beam_width of
the others go on, so the finished ones never starve the search. Of the finished ones the best beam_width by
score are kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from paged_jax.beam_constraints import Constraints, bad_word_ids
from paged_jax.beam_params import BeamSearchParams
from paged_jax.detokenizer import Decodes
from paged_jax.prompt import Encodes
from paged_jax.schedule import RowScores
from paged_jax.sequence import FinishReason, TokenLogprobs
from paged_jax.text_stream import TextStream


class Tokenizer(Encodes, Decodes, Protocol):
    """Both ways."""


class Beam(Protocol):
    """A running beam, as the search sees it: a Sequence."""

    token_ids: list[int]
    sum_logprob: float
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason | None

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens."""
        ...

    @property
    def num_output_tokens(self) -> int:
        """How many those are."""
        ...


class Candidate(NamedTuple):
    """A beam's next token: place of the beam, what the sum of log-probabilities comes to with it."""

    parent: int
    token: int
    sum_logprob: float


@dataclass(frozen=True)
class Hypothesis:
    """A finished continuation. num_steps: the step that finished it, counted from 1."""

    token_ids: list[int]
    sum_logprob: float
    score: float
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: list[TokenLogprobs]
    num_steps: int


class BeamSearch:
    """One request's search: what is finished, and what comes next. The running beams are the caller's.

    end_ids: every token that ends a hypothesis. max_new_tokens: at which length all of them end.
    """

    def __init__(
        self,
        params: BeamSearchParams,
        *,
        end_ids: frozenset[int],
        max_new_tokens: int,
        tokenizer: Tokenizer,
        vocab_size: int,
        prompt_index: int = 0,
    ) -> None:
        self.params = params
        self.constraints = Constraints(
            params,
            end_ids=end_ids,
            bad_words=bad_word_ids(params.bad_words, tokenizer),
            vocab_size=vocab_size,
            prompt_index=prompt_index,
        )
        self.end_ids = end_ids
        self.max_new_tokens = max_new_tokens
        self.hypotheses: list[Hypothesis] = []
        self.is_done = False
        """Whether nothing can follow that would change the hypotheses."""
        self._tokenizer = tokenizer
        self._texts: dict[tuple[int, ...], TextStream] = {}

    def advance(self, beams: Sequence[Beam], scores: RowScores, places: Sequence[int]) -> list[Candidate]:
        """The beams that follow, best first; none where the search has ended.

        beams: the running ones, all of one length. places: where each one's row is in the scores. Takes up
        what finishes in this step; called again for the same step, it comes to the same.
        """
        width, step = self.params.beam_width, beams[0].num_output_tokens + 1
        is_last = step >= self.max_new_tokens
        children: list[Candidate] = []
        finished = [found for found in self.hypotheses if found.num_steps < step]
        texts: dict[tuple[int, ...], TextStream] = {}
        rows = [_Row(self, beam, scores, at) for beam, at in zip(beams, places, strict=True)]
        streams = [row.candidates(parent) for parent, row in enumerate(rows)]
        for rank, (_, candidate) in enumerate(heapq.merge(*streams)):
            beam = beams[candidate.parent]
            reason, stop_reason = self._ending(beam, candidate.token, texts)
            if reason is None and is_last:
                reason = "length"
            if reason is None:
                children.append(candidate)
            elif rank < width:
                finished.append(self._hypothesis(beam, step, reason, stop_reason, candidate, rows))
            if len(children) == width or (is_last and rank + 1 == width):
                break
        for beam, row in zip(beams, rows, strict=True):
            if row.is_dead_end:
                finished.append(self._hypothesis(beam, step, "stop", None))
        finished.sort(key=lambda found: -found.score)
        self.hypotheses = finished[:width]
        self._texts = texts
        self.is_done = self._is_over(children, step)
        return [] if self.is_done else children

    def results(self, beams: Sequence[Beam]) -> list[Hypothesis]:
        """The hypotheses to give back, best first.

        beams: the last ones; they count as they stand where something else than the search has ended them.
        """
        found = [
            self._hypothesis(beam, beam.num_output_tokens, beam.finish_reason, None)
            for beam in beams
            if not self.is_done and beam.finish_reason is not None and beam.num_output_tokens
        ]
        found = sorted([*self.hypotheses, *found], key=lambda one: -one.score)
        return found[: self.params.num_returned]

    def logprobs_of(
        self, beam: Beam, candidate: Candidate, scores: RowScores, place: int
    ) -> list[TokenLogprobs]:
        """What is known of a child's tokens: nothing unless it is asked for."""
        if self.params.logprobs is None:
            return []
        return [*beam.logprobs, _token_logprobs(scores, place, candidate.token, self.params.logprobs)]

    def score(self, sum_logprob: float, num_tokens: int) -> float:
        """sum of log-probabilities / generated tokens ** length_penalty."""
        return sum_logprob / max(num_tokens, 1) ** self.params.length_penalty

    def _is_over(self, children: list[Candidate], step: int) -> bool:
        if not children:
            return True
        if len(self.hypotheses) < self.params.beam_width:
            return False
        early = self.params.early_stopping
        if early is True:
            return True
        # The sum only falls, so a penalty over 0 makes the longest the best that can come of it.
        length = self.max_new_tokens if early == "never" and self.params.length_penalty > 0 else step
        return self.score(children[0].sum_logprob, length) <= self.hypotheses[-1].score

    def _ending(
        self, beam: Beam, token: int, texts: dict[tuple[int, ...], TextStream]
    ) -> tuple[FinishReason | None, int | str | None]:
        """Why the token ends a hypothesis, if it does; keeps the texts of those that go on."""
        if token in self.end_ids:
            return "stop", token if token in self.params.stop_token_ids else None
        if not self.params.stop:
            return None, None
        text = self._text_of(beam.output_token_ids).copy()
        if (matched := self._push(text, token)) is not None:
            return "stop", matched
        texts[(*beam.output_token_ids, token)] = text
        return None, None

    def _text_of(self, output: list[int]) -> TextStream:
        """The text of a running beam; made anew where it is not known."""
        key = tuple(output)
        if key not in self._texts:
            text = TextStream(self._tokenizer, self.params.stop, self.params.include_stop_str_in_output)
            for token in output:
                self._push(text, token)
            self._texts[key] = text
        return self._texts[key]

    def _push(self, text: TextStream, token: int) -> str | None:
        return text.push(token, may_stop=text.num_tokens >= self.params.min_tokens)

    def _hypothesis(
        self,
        beam: Beam,
        step: int,
        reason: FinishReason,
        stop_reason: int | str | None,
        candidate: Candidate | None = None,
        rows: Sequence[_Row] = (),
    ) -> Hypothesis:
        token_ids, total, logprobs = beam.output_token_ids, beam.sum_logprob, beam.logprobs
        if candidate is not None:
            row = rows[candidate.parent]
            token_ids, total = [*token_ids, candidate.token], candidate.sum_logprob
            logprobs = self.logprobs_of(beam, candidate, row.scores, row.place)
        return Hypothesis(
            token_ids=token_ids,
            sum_logprob=total,
            score=self.score(total, len(token_ids)),
            finish_reason=reason,
            stop_reason=stop_reason,
            logprobs=list(logprobs),
            num_steps=step,
        )


class _Row:
    """One beam's next tokens, best first."""

    def __init__(self, search: BeamSearch, beam: Beam, scores: RowScores, place: int) -> None:
        self.search, self.beam, self.scores, self.place = search, beam, scores, place
        self.is_dead_end = False
        """Whether it turned out that nothing may follow; known once its candidates were asked for."""

    def candidates(self, parent: int) -> Iterator[tuple[tuple[float, int, int], Candidate]]:
        """With what they are ranked by: the sum, then the beam, then the token."""
        is_empty = True
        for token, logprob in self._tokens():
            is_empty = False
            total = self.beam.sum_logprob + logprob
            yield (-total, parent, token), Candidate(parent, token, total)
        self.is_dead_end = is_empty

    def _tokens(self) -> Iterator[tuple[int, float]]:
        constraints = self.search.constraints
        token_ids = self.beam.token_ids
        banned = constraints.banned(token_ids, self.beam.num_output_tokens)
        if not constraints.needs_all:
            top = self.scores.top_ids[self.place].tolist()
            values = self.scores.top_logprobs[self.place].tolist()
            for token, logprob in zip(top, values, strict=True):
                if token not in banned and logprob != -np.inf:
                    yield token, logprob
            if len(top) == constraints.vocab_size:
                return
            banned |= set(top)
        yield from self._beyond(banned)

    def _beyond(self, banned: set[int]) -> Iterator[tuple[int, float]]:
        """Of all tokens but the banned ones: the few that are wanted as a rule first, then the rest."""
        values = log_softmax(self.scores.logits(self.place))
        self.search.constraints.apply(values, self.beam.token_ids)
        values[list(banned)] = -np.inf
        few = min(2 * self.search.params.beam_width + 16, len(values))
        best = np.sort(np.argpartition(-values, few - 1)[:few])
        best = best[np.argsort(-values[best], kind="stable")]
        yield from _likely(best, values)
        rest = np.argsort(-values, kind="stable")
        yield from _likely(rest[~np.isin(rest, best)], values)


def _likely(tokens: np.ndarray, values: np.ndarray) -> Iterator[tuple[int, float]]:
    for token in tokens.tolist():
        if values[token] == -np.inf:
            return
        yield token, float(values[token])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64 [vocab_size], fresh, of logits of any float dtype."""
    values = logits.astype(np.float64)
    values -= values.max()
    return values - np.log(np.exp(values).sum())


def _token_logprobs(scores: RowScores, place: int, token: int, k: int) -> TokenLogprobs:
    """The model's own numbers for a token, whatever constraints made of them."""
    ids, values = scores.top_ids[place].tolist(), scores.top_logprobs[place].tolist()
    likely = [pair for pair in zip(ids, values, strict=True) if pair[1] != -np.inf]
    if token in ids:
        at = ids.index(token)
        own, rank = values[at], 1 + sum(value > values[at] for value in values)
    else:
        every = log_softmax(scores.logits(place))
        own, rank = float(every[token]), 1 + int((every > every[token]).sum())
    return TokenLogprobs(token, own, rank, likely[:k])
