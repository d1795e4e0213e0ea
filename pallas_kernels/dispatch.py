"""Which implementation of an op runs: decided while tracing, from static shapes and one argument.

"auto" is the Triton kernel where a program is lowered for CUDA and the shapes allow it, else XLA; "triton" is
the kernel or an error, and where there is no CUDA device the same kernel interpreted; "xla" is always XLA.
The choice leaves no conditional behind, since a program is lowered for one platform.
"""

import functools
import re
from collections.abc import Callable
from typing import Literal, TypeVar, get_args

import jax
from jax import lax

from pallas_kernels.pool import KVPool
from pallas_kernels.triton_tile import compute_dtype
from pallas_kernels.tuning import MAX_GROUP

Implementation = Literal["auto", "triton", "xla"]
T = TypeVar("T")
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)

MAX_HEAD_DIM = 256
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def supports_triton(q: jax.Array, pool: KVPool) -> str | None:
    """Why the attention kernels cannot serve these shapes and dtypes, or None where they can.

    Reads shapes and dtypes alone, so abstract arrays do, and what the default GPU is, where there is one.
    """
    group = q.shape[1] // pool.num_kv_heads
    if pool.head_dim > MAX_HEAD_DIM:
        return f"head_dim {pool.head_dim} is over {MAX_HEAD_DIM}: a tile of keys would not fit an SM"
    for name, dtype in (("q", q.dtype), ("pool", pool.k.dtype)):
        if dtype.name not in DTYPES:
            return f"{name} is {dtype.name}; the kernels take {', '.join(DTYPES)}"
    if q.dtype.itemsize == 1:
        return f"q is {q.dtype.name}; single bytes are for the pool alone"
    if q.dtype.itemsize == 4 and pool.k.dtype.itemsize == 1:
        return f"q is {q.dtype.name} over a {pool.k.dtype.name} pool: the products would spill registers"
    operand = compute_dtype(q.dtype, pool.k.dtype)
    if group > MAX_GROUP[operand.itemsize]:
        return f"{group} query heads a kv head are over {MAX_GROUP[operand.itemsize]} in {operand.name}"
    return pool_reason(pool)


def pool_reason(pool: KVPool) -> str | None:
    """Why no kernel can serve this pool, or None."""
    return offset_reason(pool) or _device_reason(pool)


def offset_reason(pool: KVPool) -> str | None:
    """Why a kernel would compute wrong addresses, or None.

    Triton counts elements in int32 unless an array is over 2^32 bytes; only single bytes slip between.
    """
    size = pool.k.size * pool.k.dtype.itemsize
    if pool.k.size <= 2**31 or size > 2**32:
        return None
    return (
        f"pool.k {pool.k.dtype.name}{list(pool.k.shape)} takes {size / 2**30:.2f} GiB: between 2 and 4 GiB,"
        " element offsets of a single-byte dtype overflow the int32 that Triton computes them in."
        " Use fewer blocks (2 GiB at most for K, and for V), or more than 4 GiB"
    )


def _device_reason(pool: KVPool) -> str | None:
    if jax.default_backend() != "gpu":
        return None
    capability = str(getattr(jax.devices()[0], "compute_capability", "8.0"))
    if not re.fullmatch(r"\d+\.\d+", capability):
        return f"the GPU, {capability}, is not one of NVIDIA's"
    needed = (8, 9) if pool.k.dtype.itemsize == 1 else (8, 0)
    if tuple(int(part) for part in capability.split(".")) >= needed:
        return None
    return (
        f"the GPU has compute capability {capability}; {needed[0]}.{needed[1]} or more is needed for a"
        f" {pool.k.dtype.name} pool"
    )


def check_implementation(implementation: str) -> None:
    """Raises ValueError unless it is one of IMPLEMENTATIONS."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {IMPLEMENTATIONS}; got {implementation!r}")


def dispatch(
    implementation: Implementation,
    reason: str | None,
    kernel: Callable[..., T],
    fallback: Callable[..., T],
    *operands: object,
) -> T:
    """Runs `kernel(*operands, interpret=...)` or `fallback(*operands)`.

    reason: why the kernel cannot run, or None. Raises ValueError for "triton" where there is a reason, and
    for an implementation that does not exist.
    """
    check_implementation(implementation)
    if implementation == "triton" and reason is not None:
        raise ValueError(f"implementation='triton' cannot run: {reason}. 'auto' takes XLA here.")
    if implementation == "xla" or reason is not None:
        return fallback(*operands)
    elsewhere = functools.partial(kernel, interpret=True) if implementation == "triton" else fallback
    compiled = functools.partial(kernel, interpret=False)
    return lax.platform_dependent(*operands, cuda=compiled, default=elsewhere)
