"""Trace-time checks of shapes and dtypes. They read static properties alone and raise `ValueError`."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.pool import KVPool


def check_array(name: str, array: jax.Array, axes: str, shape: Sequence[int | None]) -> None:
    """Raises unless `array` has `shape`; None allows any extent of 1 or more, and `axes` names them."""
    wanted = "[" + ", ".join(axes.split()) + "]"
    if array.ndim != len(shape):
        raise ValueError(f"{name} must be {wanted}, of rank {len(shape)}; got shape {array.shape}")
    for axis, got, want in zip(axes.split(), array.shape, shape, strict=True):
        if got < 1 or (want is not None and got != want):
            expected = "1 or more" if want is None else want
            raise ValueError(f"{name} must be {wanted} with {axis} = {expected}; got shape {array.shape}")


def check_int32(name: str, array: jax.Array, axes: str, shape: Sequence[int | None]) -> None:
    """Raises unless `array` is int32 of `shape`."""
    check_array(name, array, axes, shape)
    if array.dtype != jnp.int32:
        raise ValueError(f"{name} must be int32; got {array.dtype} of shape {array.shape}")


def check_floating(name: str, array: jax.Array, axes: str, shape: Sequence[int | None]) -> None:
    """Raises unless `array` is floating point of `shape`."""
    check_array(name, array, axes, shape)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{name} must be floating point; got {array.dtype} of shape {array.shape}")


def check_pool(pool: KVPool) -> None:
    """Raises unless k and v are alike: [num_blocks, num_kv_heads, block_size, head_dim], floating."""
    check_floating("pool.k", pool.k, "num_blocks num_kv_heads block_size head_dim", [None] * 4)
    if pool.k.shape != pool.v.shape or pool.k.dtype != pool.v.dtype:
        raise ValueError(
            "pool.k and pool.v must have one shape and dtype; "
            f"got k {pool.k.dtype}{list(pool.k.shape)} and v {pool.v.dtype}{list(pool.v.shape)}"
        )


def check_attention(
    q: jax.Array,
    pool: KVPool,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    rows: str,
    soft_cap: float | None,
    sliding_window: int | None,
) -> None:
    """Checks what decode and prefill attention share; `rows` names q's first axis."""
    check_pool(pool)
    check_floating("q", q, f"{rows} num_heads head_dim", [None, None, pool.head_dim])
    if q.shape[1] % pool.num_kv_heads:
        raise ValueError(
            f"num_heads must be a multiple of num_kv_heads; got q {q.shape} "
            f"({q.shape[1]} heads) and pool.k {pool.k.shape} ({pool.num_kv_heads} kv heads)"
        )
    check_int32("seq_lens", seq_lens, "num_seqs", [None])
    check_int32("block_tables", block_tables, "num_seqs max_blocks", [seq_lens.shape[0], None])
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be above 0, or None; got {soft_cap}")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be 1 or more tokens, or None; got {sliding_window}")
