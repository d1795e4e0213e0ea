"""How long something takes on a device that works behind the host's back.

One program holds many calls in a row, each fed by the one before, so that none can be left out or overlap.
They go round several caches that together exceed the device's L2 cache several times, as a model's layers do:
a cache that stayed in L2 would show a bandwidth that no model gets. Programs are started back to back and
waited for once at the end, so that the host's part is hidden; the fastest round counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

L2_BYTES = 256 << 20  # several times any GPU's


def num_caches(cache_bytes: int, *, most: int = 16) -> int:
    """Caches of that size to go round, so that their bytes exceed L2."""
    return max(1, min(most, -(-L2_BYTES // cache_bytes)))


def chained(
    attend: Callable[..., jax.Array], q: jax.Array, caches: Sequence[object], *rest: object, repeats: int
) -> Callable[[jax.Array], jax.Array]:
    """One program of `repeats` calls; each call's result, shaped like q, is the next one's query."""

    def run(q: jax.Array, caches: Sequence[object], rest: tuple[object, ...]) -> jax.Array:
        for i in range(repeats):
            q = attend(q, caches[i % len(caches)], *rest)
        return q

    program = jax.jit(run).lower(q, caches, rest).compile()
    return lambda q: program(q, caches, rest)


def seconds_per_call(
    program: Callable[[jax.Array], jax.Array], q: jax.Array, *, repeats: int, seconds: float
) -> float:
    """The time of one of the program's `repeats` calls, from rounds over `seconds` in all."""

    def round_of(starts: int) -> float:
        start = time.perf_counter()
        x = q
        for _ in range(starts):
            x = program(x)
        jax.block_until_ready(x)
        return (time.perf_counter() - start) / starts

    round_of(1)
    starts = max(1, min(50, int(0.02 / max(round_of(1), 1e-6))))
    best, end = round_of(starts), time.perf_counter() + seconds
    while time.perf_counter() < end:
        best = min(best, round_of(starts))
    return best / repeats


def copy_bandwidth(num_bytes: int, seconds: float) -> float:
    """Bytes a second, read and written, of adding 1 to an array of `num_bytes`: what a copy reaches."""
    x = jnp.zeros(num_bytes // 4, jnp.float32)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)

    def round_of(x: jax.Array) -> tuple[float, jax.Array]:
        start = time.perf_counter()
        for _ in range(10):
            x = add(x)
        jax.block_until_ready(x)
        return (time.perf_counter() - start) / 10, x

    _, x = round_of(x)
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        took, x = round_of(x)
        best = min(best, took)
    return 2 * x.nbytes / best
