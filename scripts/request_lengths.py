"""Requests for benchmarks: their lengths, from traces or distributions, and prompts of these lengths."""

from __future__ import annotations

import csv
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np


@dataclass(frozen=True)
class LogNormal:
    """Numbers of tokens of this mean, their logarithms normal with this deviation."""

    mean: float
    sigma: float

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """One from each of `count` equally likely ranges, in random order: few are as good as many."""
        ranks = (np.arange(count) + 0.5) / count
        values = np.exp(self.sigma * np.array([NormalDist().inv_cdf(rank) for rank in ranks.tolist()]))
        return rng.permutation(np.rint(values * self.mean / values.mean()).astype(int).clip(1))


def read_lengths(trace: Path, count: int) -> np.ndarray:
    """Prompt and answer tokens of a trace's first requests, int [count, 2]; exits if it has fewer."""
    with trace.open(newline="", encoding="utf-8") as file:
        rows = [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]
    if len(rows) < count:
        sys.exit(f"{trace}: {len(rows)} requests; give --requests {len(rows)} or fewer.")
    return np.array(rows[:count])


def cut_prompt(text: list[int], num_tokens: int, index: int) -> list[int]:
    """A prompt from a text, which goes round; those of different indices do not begin alike."""
    return np.take(text, np.arange(num_tokens) + 37 * index, mode="wrap").tolist()
