"""The attentions that are compared: this project's, JAX's bundled paged one, dense ones without paging."""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from roofline import DecodeShape, PrefillShape

from gpu_bench import caches
from gpu_bench.timing import chained, num_caches, seconds_per_call
from pallas_kernels import paged_decode_attention, paged_prefill_attention

BLOCK_SIZE = 16
DTYPE = jnp.bfloat16


@dataclass(frozen=True)
class Setting:
    """How long to measure and how often to repeat; interpret runs Pallas kernels where there is no GPU."""

    seconds: float
    repeats: int
    interpret: bool
    most_caches: int = 16

    def time(
        self, attend: Callable[..., jax.Array], q: jax.Array, layers: list[Any], *rest: jax.Array
    ) -> float:
        """Microseconds of one call."""
        program = chained(attend, q, layers, *rest, repeats=self.repeats)
        return 1e6 * seconds_per_call(program, q, repeats=self.repeats, seconds=self.seconds)

    def count(self, cache_bytes: int) -> int:
        """Caches to go round."""
        return num_caches(cache_bytes, most=self.most_caches)


def paged(shape: DecodeShape, setting: Setting) -> float:
    """This project's decode attention."""
    tables, num_blocks = caches.shuffled_tables(shape.num_seqs, -(-shape.context // BLOCK_SIZE))
    layers = caches.pools(
        setting.count(shape.kv_bytes), num_blocks, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim, DTYPE
    )
    lens = jnp.full((shape.num_seqs,), shape.context, jnp.int32)
    attend = functools.partial(paged_decode_attention, implementation="triton")
    return setting.time(attend, _queries(shape), layers, tables, lens)


def bundled(shape: DecodeShape, setting: Setting) -> float:
    """JAX's own paged attention for GPUs: pools [num_kv_heads, num_blocks, block_size, head_dim]."""
    op = importlib.import_module("jax.experimental.pallas.ops.gpu.paged_attention").paged_attention
    blocks_each = -(-shape.context // BLOCK_SIZE)
    tables, num_blocks = caches.shuffled_tables(shape.num_seqs, blocks_each)
    size = (shape.num_kv_heads, num_blocks, BLOCK_SIZE, shape.head_dim)
    layers = [
        (caches.values(size, DTYPE, 2 * i), caches.values(size, DTYPE, 2 * i + 1))
        for i in range(setting.count(shape.kv_bytes))
    ]
    lens = jnp.full((shape.num_seqs,), shape.context, jnp.int32)
    splits = next(n for n in (16, 8, 4, 2, 1) if blocks_each % (8 * n) == 0 or n == 1)

    def attend(q: jax.Array, cache: tuple[jax.Array, jax.Array], *rest: jax.Array) -> jax.Array:
        return op(q, *cache, *rest, k_splits=splits, interpret=setting.interpret)

    return setting.time(attend, _queries(shape), layers, tables, lens)


def dense(shape: DecodeShape, setting: Setting, implementation: str) -> float:
    """jax.nn.dot_product_attention over a contiguous cache: what no paging would cost."""
    layers = caches.contiguous(
        setting.count(shape.kv_bytes),
        shape.num_seqs,
        shape.context,
        shape.num_kv_heads,
        shape.head_dim,
        DTYPE,
    )
    lens = jnp.full((shape.num_seqs,), shape.context, jnp.int32)

    def attend(q: jax.Array, cache: tuple[jax.Array, jax.Array], lens: jax.Array) -> jax.Array:
        options: Any = {"implementation": implementation, "key_value_seq_lengths": lens}
        return jax.nn.dot_product_attention(q[:, None], *cache, **options)[:, 0]

    return setting.time(attend, _queries(shape), layers, lens)


def torch_sdpa(shape: DecodeShape | PrefillShape, setting: Setting) -> float:
    """torch's scaled_dot_product_attention over a contiguous cache. ImportError without torch."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not setting.interpret:
        raise ImportError("this torch has no CUDA")
    prefill = isinstance(shape, PrefillShape)
    rows = shape.context if prefill else 1
    q = torch.randn(
        shape.num_seqs, shape.num_heads, rows, shape.head_dim, device=device, dtype=torch.bfloat16
    )
    size = (shape.num_seqs, shape.num_kv_heads, shape.context, shape.head_dim)
    kv_bytes = 2 * shape.itemsize * shape.num_seqs * shape.num_kv_heads * shape.context * shape.head_dim
    layers = [
        [torch.randn(size, device=device, dtype=torch.bfloat16) for _ in "kv"]
        for _ in range(setting.count(kv_bytes))
    ]
    attend = functools.partial(
        torch.nn.functional.scaled_dot_product_attention, is_causal=prefill, enable_gqa=True
    )

    def round_of() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        start, x = time.perf_counter(), q
        for i in range(setting.repeats):
            x = attend(x, *layers[i % len(layers)])
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / setting.repeats

    best, end = round_of(), time.perf_counter() + setting.seconds
    while time.perf_counter() < end:
        best = min(best, round_of())
    return 1e6 * best


def paged_prefill(shape: PrefillShape, setting: Setting) -> float:
    """This project's prefill attention over whole prompts."""
    tables, num_blocks = caches.shuffled_tables(shape.num_seqs, -(-shape.context // BLOCK_SIZE))
    layers = caches.pools(1, num_blocks, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim, DTYPE)
    lens = jnp.full((shape.num_seqs,), shape.context, jnp.int32)
    starts = jnp.arange(shape.num_seqs + 1, dtype=jnp.int32) * shape.context
    q = caches.values((shape.num_seqs * shape.context, shape.num_heads, shape.head_dim), DTYPE)
    attend = functools.partial(paged_prefill_attention, implementation="triton")
    return setting.time(attend, q, layers, tables, lens, starts)


def dense_prefill(shape: PrefillShape, setting: Setting, implementation: str) -> float:
    """jax.nn.dot_product_attention over contiguous prompts."""
    layers = caches.contiguous(1, shape.num_seqs, shape.context, shape.num_kv_heads, shape.head_dim, DTYPE)
    q = caches.values((shape.num_seqs, shape.context, shape.num_heads, shape.head_dim), DTYPE)

    def attend(q: jax.Array, cache: tuple[jax.Array, jax.Array]) -> jax.Array:
        options: Any = {"implementation": implementation, "is_causal": True}
        return jax.nn.dot_product_attention(q, *cache, **options)

    return setting.time(attend, q, layers)


def _queries(shape: DecodeShape) -> jax.Array:
    return caches.values((shape.num_seqs, shape.num_heads, shape.head_dim), DTYPE)


DECODE: dict[str, Callable[[DecodeShape, Setting], float]] = {
    "paged": paged,
    "bundled": bundled,
    "dense cudnn": functools.partial(dense, implementation="cudnn"),
    "dense xla": functools.partial(dense, implementation="xla"),
    "torch": torch_sdpa,
}
PREFILL: dict[str, Callable[[PrefillShape, Setting], float]] = {
    "paged": paged_prefill,
    "dense cudnn": functools.partial(dense_prefill, implementation="cudnn"),
    "dense xla": functools.partial(dense_prefill, implementation="xla"),
    "torch": torch_sdpa,
}
