"""Attention of one new token a sequence over its paged cache: the op, whichever implementation runs it."""

import functools
from typing import Any

import jax

from pallas_kernels.decode_attention_triton import decode_attention_triton
from pallas_kernels.decode_attention_xla import decode_attention_xla
from pallas_kernels.dispatch import Implementation, dispatch, supports_triton
from pallas_kernels.pool import KVPool
from pallas_kernels.validation import check_array, check_attention


@jax.named_scope("paged_decode_attention")
def paged_decode_attention(
    q: jax.Array,
    pool: KVPool,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Returns softmax(scale * q K^T) V for each row: [num_seqs, num_heads, head_dim] in q's dtype.

    q: [num_seqs, num_heads, head_dim], floating; num_heads is a multiple of num_kv_heads, and head h reads kv
        head h // (num_heads / num_kv_heads).
    block_tables: int32 [num_seqs, max_blocks], each id a block of the pool; padding entries are 0.
    seq_lens: int32 [num_seqs], tokens, the one being decoded included: its K/V is in the pool already. A row
        of length 0 is padding and gives zeros.
    scale: None means 1 / sqrt(head_dim). soft_cap: scores become soft_cap * tanh(scores / soft_cap).
    sliding_window: tokens seen, the one being decoded included; None sees all.

    implementation: "auto", "triton" or "xla", see dispatch; "triton" raises ValueError where it cannot run.

    Sums in float32; XLA multiplies in float32 too, the kernel in the pool's dtype. Nothing in a slot that
    holds no visible token reaches the result, NaN included. Work follows seq_lens, not max_blocks. Raises
    ValueError when shapes, dtypes or options do not fit.
    """
    check_attention(
        q, pool, block_tables, seq_lens, rows="num_seqs", soft_cap=soft_cap, sliding_window=sliding_window
    )
    check_array("q", q, "num_seqs num_heads head_dim", (seq_lens.shape[0], None, None))
    options: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap, "sliding_window": sliding_window}
    return dispatch(
        implementation,
        supports_triton(q, pool),
        functools.partial(decode_attention_triton, **options),
        functools.partial(decode_attention_xla, **options),
        q,
        pool,
        block_tables,
        seq_lens,
    )
