"""Beam search in the plainest way, in float64, and made-up language models to search.

Written from the rules of Hugging Face transformers' generate(num_beams=...) and its logits processors, so
that two programs with nothing in common come to the same hypotheses.
"""

import zlib
from typing import NamedTuple

import numpy as np


class MadeUpModel:
    """Token ids to float32 logits [vocab_size]: any numbers, but the same ids always give the same ones.

    spread: how much better the best tokens are. look_back: how many of the last tokens matter; None: all.
    """

    def __init__(self, vocab_size, *, seed=0, spread=1.5, look_back=None):
        self.vocab_size, self.seed, self.spread, self.look_back = vocab_size, seed, spread, look_back
        self._known = {}

    def __call__(self, token_ids):
        key = tuple(token_ids if self.look_back is None else token_ids[-self.look_back :])
        if key not in self._known:
            rng = np.random.default_rng([self.seed, zlib.crc32(np.array(key).tobytes()), len(key)])
            logits = np.zeros(self.vocab_size, np.float32)
            while len(np.unique(logits)) < self.vocab_size:  # no ties
                logits = (self.spread * rng.standard_normal(self.vocab_size)).astype(np.float32)
            self._known[key] = logits
        return self._known[key]

    def greedy(self, token_ids):
        return int(np.argmax(self(token_ids)))


def log_softmax(logits):
    """float64, whatever the logits' dtype."""
    values = np.asarray(logits, np.float64)
    peak = values.max()
    return values - (peak + np.log(np.sum(np.exp(values - peak))))


class Found(NamedTuple):
    """A finished hypothesis: its generated tokens, the sum of their log-probabilities, and why it ended."""

    token_ids: list
    total: float
    score: float
    finish_reason: str


def naive_beam_search(
    model,
    prompt,
    *,
    beam_width,
    max_tokens,
    end_ids=(),
    n=None,
    length_penalty=1.0,
    early_stopping=False,
    ends=lambda answer: False,
    **constraints,
):
    """The hypotheses, best first. ends: whether the text of an answer completes a stop string."""

    def score(total, length):
        return total / max(length, 1) ** length_penalty

    running, finished = [((), 0.0)], []
    for length in range(1, max_tokens + 1):
        candidates = []
        for answer, total in running:
            values = constrained(
                log_softmax(model([*prompt, *answer])), prompt, answer, end_ids, **constraints
            )
            possible = [token for token in range(len(values)) if values[token] != -np.inf]
            candidates += [((*answer, token), total + values[token]) for token in possible]
            if not possible:
                finished.append(Found(list(answer), total, score(total, len(answer)), "stop"))
        candidates.sort(key=lambda candidate: -candidate[1])
        running = []
        for rank, (answer, total) in enumerate(candidates):
            stops = answer[-1] in end_ids or ends(answer)
            if stops or length == max_tokens:
                if rank < beam_width:
                    reason = "stop" if stops else "length"
                    finished.append(Found(list(answer), total, score(total, length), reason))
            elif len(running) < beam_width:
                running.append((answer, total))
        finished = sorted(finished, key=lambda one: -one.score)[:beam_width]
        if not running:
            break
        if len(finished) == beam_width:
            longest = max_tokens if early_stopping == "never" and length_penalty > 0 else length
            if early_stopping is True or score(running[0][1], longest) <= finished[-1].score:
                break
    return finished[:n]


def constrained(
    values,
    prompt,
    answer,
    end_ids,
    *,
    min_tokens=0,
    repetition_penalty=1.0,
    no_repeat_ngram_size=0,
    bad_words=(),
    allowed_token_ids=None,
    prefix_allowed_tokens_fn=None,
):
    """The log-probabilities with what is forbidden at -inf; they are not normalised again."""
    values, ids = values.copy(), [*prompt, *answer]
    for token in set(ids):
        values[token] *= repetition_penalty if values[token] < 0 else 1 / repetition_penalty
    for token in range(len(values)):
        then = [*ids, token]
        forbidden = len(answer) < min_tokens and token in end_ids
        forbidden |= any(then[-len(word) :] == list(word) for word in bad_words)
        if no_repeat_ngram_size and len(ids) >= no_repeat_ngram_size:
            grams = [
                then[at : at + no_repeat_ngram_size] for at in range(len(then) - no_repeat_ngram_size + 1)
            ]
            forbidden |= grams[-1] in grams[:-1]
        forbidden |= allowed_token_ids is not None and token not in allowed_token_ids
        if forbidden:
            values[token] = -np.inf
    if prefix_allowed_tokens_fn is not None:
        allowed = set(prefix_allowed_tokens_fn(0, ids))
        values[[token for token in range(len(values)) if token not in allowed]] = -np.inf
    return values
