"""How many CPU cores a benchmark may use, the same number for both of its sides."""

from __future__ import annotations

import os


def take_threads(wanted: int | None) -> int:
    """Keep this process to so many cores (None: to those that it has); returns how many those are.

    JAX has no option for its threads: when its backend starts it takes the cores that it may use. So this
    comes before.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    threads = min(wanted or 10**9, len(cores) or os.cpu_count() or 1)
    if cores:
        os.sched_setaffinity(0, set(cores[:threads]))
    return threads
