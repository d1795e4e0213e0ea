"""Compiled programs by their key: compiled when first asked for, or all of them ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import NamedTuple

from jax.stages import Compiled, Traced

from paged_jax.buckets import ProgramKey
from paged_jax.compilation_cache import cache_counts

Progress = Callable[[int, int, int], None]
"""Takes (programs done, programs in all, how many of them came from the cache on disk)."""


class WarmUp(NamedTuple):
    """What a warm-up did. cache_hits: programs that came from the cache on disk.

    seconds: it took; seconds_saved: that compiling those would have taken, less reading them.
    """

    num_programs: int
    cache_hits: int
    seconds: float
    seconds_saved: float


class Programs:
    """trace: makes the program of a key; it is compiled for the default device, once."""

    def __init__(self, trace: Callable[[ProgramKey], Traced]) -> None:
        self._trace = trace
        self._compiled: dict[ProgramKey, Compiled] = {}

    def __getitem__(self, key: ProgramKey) -> Compiled:
        """The program, compiled now if it was not yet."""
        found = self._compiled.get(key)
        if found is None:
            found = self._compiled[key] = self._trace(key).lower().compile()
        return found

    def __len__(self) -> int:
        """How many were compiled."""
        return len(self._compiled)

    def warm_up(self, keys: Iterable[ProgramKey], progress: Progress) -> WarmUp:
        """Compile those of the keys that were not compiled yet."""
        keys = list(keys)
        start, before = perf_counter(), cache_counts()
        progress(0, len(keys), 0)
        for done, key in enumerate(keys, 1):
            self[key]
            progress(done, len(keys), cache_counts().hits - before.hits)
        after = cache_counts()
        return WarmUp(
            num_programs=len(keys),
            cache_hits=after.hits - before.hits,
            seconds=perf_counter() - start,
            seconds_saved=after.seconds_saved - before.seconds_saved,
        )

    def clear(self) -> None:
        """Forget all of them."""
        self._compiled.clear()
