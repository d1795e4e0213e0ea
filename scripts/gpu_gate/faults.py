"""Programs with a planted fault each: a gate that lets one of them pass is broken.

All are one small decode step over four layers: write the token's K and V, attend. `clean` has no fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from gpu_gate import checks
from gpu_gate.compiling import Program, abstract, abstract_pool, compile_for
from gpu_gate.targets import Target
from pallas_kernels import KVPool, paged_decode_attention, write_kv

LAYERS, NUM_SEQS, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 4, 16, 32, 8, 128, 16, 1024
TENSOR_BYTES = 2 * NUM_BLOCKS * KV_HEADS * BLOCK_SIZE * HEAD_DIM
CACHE_BYTES = 2 * LAYERS * TENSOR_BYTES

Write = Callable[[KVPool, jax.Array, jax.Array, jax.Array], KVPool]


@dataclass(frozen=True)
class Fault:
    """A program, and a word that one of the complaints about it must hold; None for a clean one."""

    name: str
    expected: str | None
    trace: Callable[[Target], jax.stages.Traced]

    def complaints(self, target: Target) -> tuple[Program, list[str]]:
        """What the gate's checks say about the program."""
        program = compile_for(target, lambda: self.trace(target))
        found = checks.in_place(program, tensor_bytes=TENSOR_BYTES, donated_bytes=CACHE_BYTES)
        return program, found + checks.capturable(program) + checks.no_atomics(program, "write_kv")


def _arrays(target: Target) -> tuple[KVPool, tuple[jax.ShapeDtypeStruct, ...]]:
    """One layer's pool and (q, slots, block_tables, seq_lens), abstract on the target."""
    pool = abstract_pool((NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_DIM), jnp.bfloat16)
    q = jax.ShapeDtypeStruct((NUM_SEQS, HEADS, HEAD_DIM), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((NUM_SEQS,), jnp.int32)
    tables = jax.ShapeDtypeStruct((NUM_SEQS, 64), jnp.int32)
    return abstract((pool, (q, ids, tables, ids)), target.device())


def _layer(
    write: Write, pool: KVPool, x: jax.Array, slots: jax.Array, tables: jax.Array, lens: jax.Array
) -> tuple[jax.Array, KVPool]:
    new = x[:, ::4]
    pool = write(pool, new, 2 * new, slots)
    return x + paged_decode_attention(x, pool, tables, lens), pool


def _unrolled(target: Target, *, write: Write = write_kv, donate: bool = True) -> jax.stages.Traced:
    pool, args = _arrays(target)

    def step(cache: tuple[KVPool, ...], x: jax.Array, *rest: jax.Array) -> tuple[jax.Array, list[KVPool]]:
        pools = []
        for layer in cache:
            x, layer = _layer(write, layer, x, *rest)
            pools.append(layer)
        return x, pools

    return jax.jit(step, donate_argnums=(0,) if donate else ()).trace((pool,) * LAYERS, *args)


def _scanned(target: Target) -> jax.stages.Traced:
    pool, args = _arrays(target)
    stacked = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((LAYERS, *a.shape), a.dtype, sharding=a.sharding), pool
    )

    def step(cache: KVPool, x: jax.Array, *rest: jax.Array) -> tuple[jax.Array, KVPool]:
        return jax.lax.scan(lambda x, layer: _layer(write_kv, layer, x, *rest), x, cache)

    return jax.jit(step, donate_argnums=0).trace(stacked, *args)


@jax.named_scope("write_kv")
def _write_that_may_collide(pool: KVPool, k: jax.Array, v: jax.Array, slots: jax.Array) -> KVPool:
    block, offset = slots // pool.block_size, slots % pool.block_size
    return KVPool(
        pool.k.at[block, :, offset].set(k, mode="drop"), pool.v.at[block, :, offset].set(v, mode="drop")
    )


FAULTS = (
    Fault("clean", None, _unrolled),
    Fault("scan over layers, the pool as xs and ys", "a layer's K or more", _scanned),
    Fault("missing donation", "not aliased", lambda target: _unrolled(target, donate=False)),
    Fault(
        "scatter that may collide",
        "atomic instructions",
        lambda target: _unrolled(target, write=_write_that_may_collide),
    ),
)
