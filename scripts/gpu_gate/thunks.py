"""Reads the launch sequence that XLA dumps: how many kernels and copies, and each kernel's launch shape."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

_STEP = re.compile(r"^\s*\d+: (k\w+)", re.MULTILINE)
_LAUNCH = re.compile(
    r"(\S+) grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+),.*?\]\s+shared_memory: (\d+) bytes"
)


class Launch(NamedTuple):
    """One kernel launch: blocks along x, y, z; threads of a block; bytes of dynamic shared memory."""

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    shared_memory: int


def thunk_kinds(text: str) -> Counter[str]:
    """How often each kind of thunk occurs: kKernel, kCustomKernel, kGemm, kCopy, kWhile, ..."""
    return Counter(_STEP.findall(text))


def launches(text: str) -> list[Launch]:
    """The kernels in the order in which they start."""
    return [
        Launch(name, (int(x), int(y), int(z)), int(threads), int(shared))
        for name, x, y, z, threads, shared in _LAUNCH.findall(text)
    ]
