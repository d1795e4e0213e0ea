"""Which kernels the gate compiles: every pair of head shape, head_dim, block_size, dtype and op occurs.

Rows (i, j) of a 5 x 5 array: column c takes level (i + c * j) mod 5. Any two columns then meet in every pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal

import jax
import jax.numpy as jnp
from roofline import DecodeShape

from gpu_gate import checks
from gpu_gate.compiling import Program, abstract, abstract_pool, compile_for
from gpu_gate.targets import Target
from pallas_kernels import paged_decode_attention, paged_prefill_attention
from pallas_kernels.tuning import decode_choices, prefill_choices

HEADS = ((32, 8), (32, 32), (64, 8), (32, 1), (9, 3))  # GQA 4, MHA, GQA 8, MQA, an odd one
HEAD_DIMS = (128, 64, 80, 96, 256)
BLOCK_SIZES = (16, 8, 32, 64, 128)
DTYPES = ("bfloat16", "float16", "float32", "bfloat16", "float32")
OPS: tuple[Op, ...] = ("decode", "split decode", "prefill", "decode", "prefill")
CONTEXT = 8192  # tokens that a block table has room for
POOL_TOKENS = 65536

_OPTIONS: dict[str, Any] = {"sliding_window": 1000, "soft_cap": 30.0}

Op = Literal["decode", "split decode", "prefill"]


@dataclass(frozen=True)
class KernelCase:
    """One kernel at one shape."""

    op: Op
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    pool_tokens: int = POOL_TOKENS
    queries: int = 128
    """Tokens of a sequence in a prefill."""
    sliding_window: int | None = None
    soft_cap: float | None = None

    def __str__(self) -> str:
        shape = f"{self.num_heads}/{self.num_kv_heads} D{self.head_dim} B{self.block_size}"
        options = f" {self.queries} queries" if self.op == "prefill" and self.queries != 128 else ""
        options += ", window, soft cap" if self.soft_cap else ""
        return f"{self.op:<12} {shape:<18} {self.dtype}{options}"

    @property
    def num_seqs(self) -> int:
        """Few sequences are split over the context, many are not."""
        return {"decode": 512, "split decode": 2, "prefill": 16}[self.op]

    @property
    def roofline(self) -> DecodeShape:
        """The memory traffic of the decode at full context, a layer."""
        itemsize = jnp.dtype(self.dtype).itemsize
        return DecodeShape(self.num_seqs, CONTEXT, self.num_heads, self.num_kv_heads, self.head_dim, itemsize)

    def trace(self, target: Target) -> jax.stages.Traced:
        """The operation as the decoder calls it, with the kernel insisted upon."""
        dtype = jnp.dtype(self.dtype)
        shape = (self.pool_tokens // self.block_size, self.num_kv_heads, self.block_size, self.head_dim)
        pool = abstract_pool(shape, dtype)
        seqs = jax.ShapeDtypeStruct((self.num_seqs,), jnp.int32)
        tables = jax.ShapeDtypeStruct((self.num_seqs, CONTEXT // self.block_size), jnp.int32)
        rows = self.num_seqs * (self.queries if self.op == "prefill" else 1)
        q = jax.ShapeDtypeStruct((rows, self.num_heads, self.head_dim), dtype)
        starts = jax.ShapeDtypeStruct((self.num_seqs + 1,), jnp.int32)
        options: dict[str, Any] = {"sliding_window": self.sliding_window, "soft_cap": self.soft_cap}
        options["implementation"] = "triton"
        if self.op == "prefill":
            prefill = jax.jit(partial(paged_prefill_attention, **options))
            return prefill.trace(*abstract((q, pool, tables, seqs, starts), target.device()))
        decode = jax.jit(partial(paged_decode_attention, **options))
        return decode.trace(*abstract((q, pool, tables, seqs), target.device()))

    def complaints(self, target: Target) -> tuple[Program, list[str]]:
        """Compiles the case; what is wrong with it."""
        program = compile_for(target, lambda: self.trace(target))
        # Prefill cuts its queries into tiles first: small XLA kernels, once a step and not once a layer.
        most = {"decode": 1, "split decode": 2, "prefill": 16}[self.op]
        found = checks.attention_kernel(program, low_precision=self.dtype != "float32", most_launches=most)
        names = checks.pallas_kernels(program)
        launch = program.launch(names[0]) if names else None
        if launch and self.op != "prefill" and (launch.grid[2] > 1) != (self.op == "split decode"):
            found.append(f"{launch.grid[2]} splits in a {self.op}")
        return program, found


def _row(i: int, j: int) -> KernelCase:
    heads, head_dim, block_size, dtype, op = ((i + column * j) % 5 for column in range(5))
    return KernelCase(OPS[op], *HEADS[heads], HEAD_DIMS[head_dim], BLOCK_SIZES[block_size], DTYPES[dtype])


def covering_set() -> Iterator[KernelCase]:
    """25 cases, the usual shapes first."""
    yield from (_row(i, j) for i, j in product(range(5), repeat=2))


def every_setting() -> Iterator[KernelCase]:
    """A case for each entry of the tuning tables, with a window and a soft cap, which take registers."""
    dtypes = {2: "bfloat16", 4: "float32"}
    for itemsize, head_dim, rows in decode_choices():
        heads = (32, 8) if rows == 16 else (32, 1)  # a group of 4, or of 32
        yield KernelCase("decode", *heads, head_dim, 16, dtypes[itemsize], **_OPTIONS)
    for itemsize, head_dim, rows in prefill_choices():
        yield KernelCase("prefill", 32, 8, head_dim, 16, dtypes[itemsize], queries=rows // 4, **_OPTIONS)


def few() -> list[KernelCase]:
    """Every head_dim, block_size, dtype and operation once or more, for a quick look."""
    return [_row(0, j) for j in range(5)]


def whole_grid() -> Iterator[KernelCase]:
    """Every operation, head_dim, block_size and dtype with each other; the head shapes take turns."""
    combinations = product(dict.fromkeys(OPS), HEAD_DIMS, BLOCK_SIZES, dict.fromkeys(DTYPES))
    for number, (op, head_dim, block_size, dtype) in enumerate(combinations):
        yield KernelCase(op, *HEADS[number % 5], head_dim, block_size, dtype)
