"""Causal attention of packed new tokens over their paged cache: the op, whichever implementation runs it."""

import functools
from typing import Any

import jax

from pallas_kernels.dispatch import Implementation, dispatch, supports_triton
from pallas_kernels.pool import KVPool
from pallas_kernels.prefill_attention_triton import prefill_attention_triton
from pallas_kernels.prefill_attention_xla import prefill_attention_xla
from pallas_kernels.validation import check_attention, check_int32


@jax.named_scope("paged_prefill_attention")
def paged_prefill_attention(
    q: jax.Array,
    pool: KVPool,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start: jax.Array,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Returns causal softmax(scale * q K^T) V, packed like q: [num_tokens, num_heads, head_dim] in q's dtype.

    q: [num_tokens, num_heads, head_dim], floating; heads map to kv heads as in paged_decode_attention.
    block_tables: int32 [num_seqs, max_blocks], each id a block of the pool; padding entries are 0.
    seq_lens: int32 [num_seqs], tokens in the pool, the queries' own included.
    query_start: int32 [num_seqs + 1], ascending from 0. Rows query_start[s]:query_start[s + 1] of q are the
        last tokens of sequence s, any number of them, none included; rows after query_start[-1] are padding
        and give zeros.
    scale, soft_cap, sliding_window: as in paged_decode_attention; a query at position i sees positions j with
        i - sliding_window < j <= i.
    implementation: "auto", "triton" or "xla", see dispatch; "triton" raises ValueError where it cannot run.

    Sums in float32; XLA multiplies in the wider of q's and the pool's dtypes, the kernel in the pool's.
    Nothing in a slot outside the sequences' own tokens reaches the result, NaN included. Work follows the
    lengths, not max_blocks. Raises ValueError when shapes, dtypes or options do not fit.
    """
    check_attention(
        q, pool, block_tables, seq_lens, rows="num_tokens", soft_cap=soft_cap, sliding_window=sliding_window
    )
    num_seqs = seq_lens.shape[0]
    check_int32("query_start", query_start, "num_seqs+1", (num_seqs + 1,))
    options: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap, "sliding_window": sliding_window}
    return dispatch(
        implementation,
        supports_triton(q, pool),
        functools.partial(prefill_attention_triton, **options),
        functools.partial(prefill_attention_xla, **options),
        q,
        pool,
        block_tables,
        seq_lens,
        query_start,
    )
