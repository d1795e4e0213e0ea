"""What each step of a simulation held, as columns: the raw numbers behind every figure it prints."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

COLUMNS = ("start", "seconds", "running", "waiting", "reserved", "written", "ahead", "stranded")


@dataclass(frozen=True)
class StepSeries:
    """One row a step; float64 or int64 [num_steps].

    start, seconds: when it began and how long it took. running, waiting: sequences that hold memory, requests
    in the queue. reserved: slots taken from the pool; of these written: hold a token, a shared one counted
    once; ahead: are still to be written by the request that holds them. stranded: free slots that a waiting
    request could not use because they do not lie together.
    """

    start: np.ndarray
    seconds: np.ndarray
    running: np.ndarray
    waiting: np.ndarray
    reserved: np.ndarray
    written: np.ndarray
    ahead: np.ndarray
    stranded: np.ndarray

    def __len__(self) -> int:
        return len(self.start)

    @property
    def total_seconds(self) -> float:
        """From the start of the first step to the end of the last."""
        return float(self.start[-1] + self.seconds[-1] - self.start[0]) if len(self) else 0.0

    def mean(self, column: str) -> float:
        """Weighted by how long each step took."""
        return self.mean_of(getattr(self, column))

    def mean_of(self, values: np.ndarray) -> float:
        """The same, of any number for each step."""
        total = self.seconds.sum()
        return float((values * self.seconds).sum() / total) if total else 0.0

    def peak(self, column: str) -> float:
        """The largest value of a column."""
        return float(getattr(self, column).max()) if len(self) else 0.0


class SeriesBuilder:
    """Collects steps, one by one or many at once."""

    def __init__(self) -> None:
        self._single: list[tuple[float, ...]] = []
        self._parts: list[np.ndarray] = []

    def add(
        self,
        *,
        start: float,
        seconds: float,
        running: int,
        waiting: int,
        reserved: int,
        written: int,
        ahead: int = 0,
        stranded: int = 0,
    ) -> None:
        """One step."""
        self._single.append((start, seconds, running, waiting, reserved, written, ahead, stranded))

    def add_many(self, **columns: np.ndarray) -> None:
        """Several steps; a column that is left out is 0."""
        self._flush()
        num_steps = len(columns["start"])
        part = np.zeros((len(COLUMNS), num_steps))
        for place, name in enumerate(COLUMNS):
            if name in columns:
                part[place] = columns[name]
        self._parts.append(part)

    def build(self) -> StepSeries:
        """All steps so far."""
        self._flush()
        empty = np.zeros((len(COLUMNS), 0))
        columns = np.concatenate(self._parts, axis=1) if self._parts else empty
        whole = [column if place < 2 else column.astype(np.int64) for place, column in enumerate(columns)]
        return StepSeries(*whole)

    def _flush(self) -> None:
        if self._single:
            self._parts.append(np.array(self._single, np.float64).T)
            self._single = []
