"""Compiled programs kept on disk, so that a second start does not compile them again."""

from __future__ import annotations

import hashlib
import os
import platform
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax

_HIT = "/jax/compilation_cache/cache_hits"
_SAVED = "/jax/compilation_cache/compile_time_saved_sec"


class CacheCounts(NamedTuple):
    """Since the first call of cache_counts. hits: programs that were on disk; seconds_saved: by them."""

    hits: int
    seconds_saved: float


class _Listener:
    """Adds up what JAX tells about its cache; JAX keeps a listener for good, so there is one."""

    def __init__(self) -> None:
        self.counts = CacheCounts(0, 0.0)
        jax.monitoring.register_event_listener(self._event)
        jax.monitoring.register_event_duration_secs_listener(self._duration)

    def _event(self, event: str, **_: Any) -> None:
        if event == _HIT:
            self.counts = self.counts._replace(hits=self.counts.hits + 1)

    def _duration(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _SAVED:
            self.counts = self.counts._replace(seconds_saved=self.counts.seconds_saved + duration_secs)


@cache
def _listener() -> _Listener:
    return _Listener()


def cache_counts() -> CacheCounts:
    """What the cache on disk gave this process so far; take the difference of two."""
    return _listener().counts


def enable_compilation_cache() -> None:
    """Let JAX keep compiled programs under the user's cache folder, unless the user chose a place already.

    A program for the CPU may use any instruction of the machine that compiled it, and home folders are
    shared: each kind of processor has a folder of its own.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home, as in some containers: compile anew each time
        return
    jax.config.update("jax_compilation_cache_dir", str(root / "paged_jax" / f"programs-{_processor()}"))
    # A step has small programs too, and every start would compile them again.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    facts = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    return hashlib.sha256("\n".join([platform.machine(), platform.processor(), *facts]).encode()).hexdigest()[
        :12
    ]
