"""Block addresses past 2^31 elements: a kernel must multiply block ids in 64 bits there.

Triton counts elements in int32 unless an array is over 2^32 bytes. What a kernel does with its block ids can
be read off its PTX: the distance between two blocks of a pool occurs as the factor of a product.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpu_gate.compiling import Program, compile_for
from gpu_gate.kernel_cases import KernelCase, Op
from gpu_gate.targets import Target

SMALL, LARGE = 65536, 4_000_000
"""Tokens of a pool: of 8 kv heads of 128, the large one has 4 x 10^9 elements for K alone."""


@dataclass(frozen=True)
class AddressCase:
    """A kernel over a pool whose offsets fit 32 bits, or do not."""

    op: Op
    wide: bool

    def __str__(self) -> str:
        size = "over" if self.wide else "under"
        return f"{self.op}, a pool {size} 2^31 elements"

    def complaints(self, target: Target) -> tuple[Program, list[str]]:
        """Compiles the case; what is wrong with its products."""
        # A block_size of 32, because at 16 two blocks are as far apart as two tiles in shared memory.
        case = KernelCase(self.op, 32, 8, 128, 32, "bfloat16", pool_tokens=LARGE if self.wide else SMALL)
        program = compile_for(target, lambda: case.trace(target))
        kernels = [kernel.body for name, kernel in program.kernels.items() if "attention" in name]
        if not kernels:
            return program, ["the attention kernel is not among the compiler's PTX"]
        narrow, wide = products(kernels[0], case.num_kv_heads * case.block_size * case.head_dim)
        found = []
        if self.wide and (narrow or not wide):
            found.append(f"{narrow} products of block ids are taken in 32 bits, {wide} in 64")
        if not self.wide and not narrow:
            found.append("no product of a block id is found, so a narrow one would not be either")
        return program, found


def products(body: str, factor: int) -> tuple[int, int]:
    """How many products with a power of two a kernel takes in 32 and in 64 bits.

    A 32-bit one that is widened afterwards has overflowed already.
    """
    shift = factor.bit_length() - 1
    narrow = rf"\bshl\.b32\s+[^;]*, {shift};|\b(?:mul|mad)\.lo\.[us]32\s+[^;]*, {factor}(?:;|,)"
    wide = (
        rf"\bshl\.b64\s+[^;]*, {shift};|\b(?:mul|mad)\.(?:wide\.[us]32|lo\.[us]64)\s+[^;]*, {factor}(?:;|,)"
    )
    return len(re.findall(narrow, body)), len(re.findall(wide, body))


def address_cases() -> list[AddressCase]:
    """Both kernels over both pools; the small ones show that the check can tell."""
    return [AddressCase(op, wide) for op in ("decode", "prefill") for wide in (False, True)]
