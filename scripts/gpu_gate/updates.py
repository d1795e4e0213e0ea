"""KV writes and block copies on one donated pool, over dtypes, block sizes and head dims."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from gpu_gate import checks
from gpu_gate.compiling import Program, abstract, abstract_pool, compile_for
from gpu_gate.targets import Target
from pallas_kernels import copy_blocks, write_kv

KV_HEADS, NUM_TOKENS, POOL_TOKENS = 8, 64, 65536


@dataclass(frozen=True)
class UpdateCase:
    """One op at one shape; the pool is donated."""

    op: Literal["write_kv", "copy_blocks"]
    head_dim: int
    block_size: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.op:<12} D{self.head_dim} B{self.block_size:<4} {self.dtype}"

    def trace(self, target: Target) -> jax.stages.Traced:
        """64 tokens, or 64 pairs of blocks."""
        dtype, device = jnp.dtype(self.dtype), target.device()
        shape = (POOL_TOKENS // self.block_size, KV_HEADS, self.block_size, self.head_dim)
        pool = abstract(abstract_pool(shape, dtype), device)
        ids = abstract(jax.ShapeDtypeStruct((NUM_TOKENS,), jnp.int32), device)
        if self.op == "copy_blocks":
            return jax.jit(copy_blocks, donate_argnums=0).trace(pool, ids, ids)
        new = abstract(jax.ShapeDtypeStruct((NUM_TOKENS, KV_HEADS, self.head_dim), dtype), device)
        return jax.jit(write_kv, donate_argnums=0).trace(pool, new, new, ids)

    def complaints(self, target: Target) -> tuple[Program, list[str]]:
        """Compiles the case; what is wrong with it."""
        program = compile_for(target, lambda: self.trace(target))
        tensor = POOL_TOKENS * KV_HEADS * self.head_dim * jnp.dtype(self.dtype).itemsize
        found = checks.in_place(program, tensor_bytes=tensor, donated_bytes=2 * tensor)
        found += checks.capturable(program) + checks.no_atomics(program, self.op)
        if len(program.launches) > 6:
            found.append(f"{len(program.launches)} launches for one layer's pool")
        return program, found


def update_cases() -> Iterator[UpdateCase]:
    """Both ops; every dtype and block size once or more."""
    for op in ("write_kv", "copy_blocks"):
        yield UpdateCase(op, 128, 16, "bfloat16")
        yield UpdateCase(op, 80, 8, "float16")
        yield UpdateCase(op, 64, 128, "float32")
