#!/usr/bin/env python
"""Times the attention operations at the demo model's shape, beside attention over a contiguous cache.

Several layers with pools of their own run in one donated program; the variants take turns, so that other work
on the machine meets all of them, and the fastest call counts.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from pallas_kernels import KVPool, paged_decode_attention, paged_prefill_attention

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
LAYER_BYTES = 400e6  # at most, over all layers of a program

Program = Callable[[], Any]


def paged_cache(seq_lens: np.ndarray, layers: int) -> tuple[tuple[KVPool, ...], jax.Array]:
    """Pools of random float32, one a layer, and shuffled block tables [num_seqs, max_blocks]."""
    rng = np.random.default_rng(0)
    blocks = -(-seq_lens // BLOCK_SIZE)
    num_blocks = int(blocks.sum()) + 1
    free = iter(rng.permutation(np.arange(1, num_blocks)))
    tables = np.zeros((len(seq_lens), int(blocks.max())), np.int32)
    for row, count in zip(tables, blocks, strict=True):
        row[:count] = [next(free) for _ in range(count)]
    shape = (layers, 2, num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    values = rng.standard_normal(shape, dtype=np.float32)
    return tuple(KVPool(jnp.asarray(k), jnp.asarray(v)) for k, v in values), jnp.asarray(tables)


def contiguous_attention(q: jax.Array, cache: KVPool, seq_lens: jax.Array) -> jax.Array:
    """Decode over k, v [num_seqs, num_kv_heads, max_len, head_dim]: what no paging would cost."""
    rows = q.reshape(q.shape[0], KV_HEADS, -1, HEAD_DIM) / HEAD_DIM**0.5
    scores = jnp.einsum("shgd,shkd->shgk", rows, cache.k, precision=jax.lax.Precision.HIGHEST)
    visible = jnp.arange(cache.k.shape[2]) < seq_lens[:, None]
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1)
    out = jnp.einsum("shgk,shkd->shgd", weights, cache.v, precision=jax.lax.Precision.HIGHEST)
    return out.reshape(q.shape)


def through_layers(
    attend: Callable[..., jax.Array], q: jax.Array, caches: tuple[KVPool, ...], *args: jax.Array
) -> Program:
    """A call of `attend` in each layer, one after the other, the caches donated and kept."""

    def step(caches: tuple[KVPool, ...]) -> tuple[jax.Array, tuple[KVPool, ...]]:
        x = q
        for cache in caches:
            x = q + attend(x, cache, *args)
        return x, caches

    program = jax.jit(step, donate_argnums=0)
    held = [caches]

    def call() -> None:
        _, held[0] = jax.block_until_ready(program(held[0]))

    return call


def fastest_ms(programs: dict[str, Program], seconds: float) -> dict[str, float]:
    """Milliseconds of each program's fastest call; they take turns for `seconds` each."""
    best = dict.fromkeys(programs, float("inf"))
    for program in programs.values():
        program()
    end = time.perf_counter() + seconds * len(programs)
    while time.perf_counter() < end:
        for name, program in programs.items():
            for _ in range(3):
                start = time.perf_counter()
                program()
                best[name] = min(best[name], (time.perf_counter() - start) * 1e3)
    return best


def decode_table(batches: list[int], contexts: list[int], seconds: float) -> Table:
    table = Table(title="Decode attention, one layer, float32")
    for heading in ("batch", "context", "paged ms", "GB/s", "contiguous ms", "GB/s"):
        table.add_column(heading, justify="right")
    for batch in batches:
        for context in contexts:
            seq_lens = np.full(batch, context, np.int32)
            num_bytes = batch * context * KV_HEADS * HEAD_DIM * 2 * 4
            layers = int(np.clip(LAYER_BYTES // num_bytes, 2, 8))
            pools, tables = paged_cache(seq_lens, layers)
            lens = jnp.asarray(seq_lens)
            q = jnp.ones((batch, HEADS, HEAD_DIM))
            shape = (batch, KV_HEADS, context, HEAD_DIM)
            dense = tuple(KVPool(jnp.ones(shape), jnp.ones(shape)) for _ in range(layers))
            programs = {
                "paged": through_layers(paged_decode_attention, q, pools, tables, lens),
                "contiguous": through_layers(contiguous_attention, q, dense, lens),
            }
            cells = []
            for ms in fastest_ms(programs, seconds).values():
                cells += [f"{ms / layers:.3f}", f"{num_bytes / (ms / layers) / 1e6:.1f}"]
            table.add_row(str(batch), str(context), *cells)
    return table


def prefill_table(seconds: float) -> Table:
    table = Table(title="Prefill attention of 512 tokens, one layer, float32")
    for heading in ("prompts", "tokens each", "ms"):
        table.add_column(heading, justify="right")
    layers = 4
    for prompts in (1, 8, 64):
        seq_lens = np.full(prompts, 512 // prompts, np.int32)
        pools, tables = paged_cache(seq_lens, layers)
        starts = jnp.asarray(np.arange(prompts + 1) * seq_lens[0], jnp.int32)
        q = jnp.ones((512, HEADS, HEAD_DIM))
        args = (tables, jnp.asarray(seq_lens), starts)
        program = through_layers(paged_prefill_attention, q, pools, *args)
        ms = fastest_ms({"paged": program}, seconds)["paged"]
        table.add_row(str(prompts), str(seq_lens[0]), f"{ms / layers:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few shapes, under a minute")
    quick = parser.parse_args().quick
    batches, contexts = ([1, 8, 32], [256]) if quick else ([1, 8, 32], [64, 256, 512, 1024, 2048])
    seconds = 0.5 if quick else 2.0
    console = Console()
    console.print(decode_table(batches, contexts, seconds))
    console.print(prefill_table(seconds))


if __name__ == "__main__":
    main()
