"""Scores of every next token without a model, after which beams split and die as a real model's do.

The token of rank r has a probability in proportion to r ** -a, over a vocabulary of 50,000. log(a - 1) is
normal, which gives the most likely token 0.18, 0.31, 0.59, 0.89 and 0.99 at the percentiles 10, 25, 50, 75
and 90: about as a small chat model does along its likelier answers. Each context has an a of its own: the
request, the position and the last 3 to 128 generated tokens, how many depends on the request. So beams that
differ further back than that go on alike, as two wordings of one thought do, and stay apart for long; others
split and die quickly.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Seq

import numpy as np

from paged_jax.schedule import RowScores
from paged_jax.sequence import Sequence

VOCAB_SIZE, TOP = 50_000, 20
SHARPNESS_MEAN, SHARPNESS_SIGMA = -0.05, 1.37
SHORTEST_MEMORY, LONGEST_MEMORY = 3, 128
_LOG_RANKS = np.log(np.arange(1, TOP + 1))


def made_up_scores(sequences: Seq[Sequence]) -> RowScores:
    """A row for each of them; the same for the same tokens."""
    sharpness = np.array([[_sharpness(sequence)] for sequence in sequences])
    weights = -sharpness * _LOG_RANKS
    ends = (TOP + 0.5) ** (1 - sharpness) - VOCAB_SIZE ** (1 - sharpness)
    mass = np.exp(weights).sum(axis=1, keepdims=True) + ends / (sharpness - 1)
    logprobs = (weights - np.log(mass)).astype(np.float32)
    ids = np.broadcast_to(np.arange(TOP), logprobs.shape)
    all_ranks = np.log(np.arange(1, VOCAB_SIZE + 1))
    return RowScores(ids, logprobs, lambda row: -sharpness[row] * all_ranks)


def _sharpness(sequence: Sequence) -> float:
    position = sequence.num_output_tokens
    seed = sequence.request.seed
    memory = round(SHORTEST_MEMORY * (LONGEST_MEMORY / SHORTEST_MEMORY) ** (seed / 2**64))
    last = sequence.token_ids[len(sequence.token_ids) - min(position, memory) :]
    rng = random.Random(hash((seed, position, *last)))
    return 1 + math.exp(rng.gauss(SHARPNESS_MEAN, SHARPNESS_SIGMA))
