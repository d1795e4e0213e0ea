"""What a batch looks like to the paged operations: which slots it writes and which blocks it reads.

One record a phase. Both are pytrees of int32 arrays with fixed shapes; padding follows the operations'
rules (a padded token has a slot of its own past the pool's end, a padded row has length 0).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax import Array

from pallas_kernels.decode_attention import paged_decode_attention
from pallas_kernels.dispatch import Implementation
from pallas_kernels.kv_write import write_kv
from pallas_kernels.pool import KVPool
from pallas_kernels.prefill_attention import paged_prefill_attention


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeMetadata:
    """One query token a sequence.

    positions: [num_seqs] place of the token in its sequence; slots: [num_seqs] where its K/V goes;
    block_tables: [num_seqs, max_blocks]; seq_lens: [num_seqs] tokens to attend to, this one included.
    """

    positions: Array
    slots: Array
    block_tables: Array
    seq_lens: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillMetadata:
    """Several query tokens a sequence, packed: the last ones of its seq_lens tokens.

    positions, slots: [num_tokens]; block_tables: [num_seqs, max_blocks]; seq_lens: [num_seqs];
    query_start: [num_seqs + 1] where each sequence's tokens begin in the packed array.
    """

    positions: Array
    slots: Array
    block_tables: Array
    seq_lens: Array
    query_start: Array


Metadata = DecodeMetadata | PrefillMetadata


def paged_attention(
    q: Array,
    k: Array,
    v: Array,
    pool: KVPool,
    metadata: Metadata,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
    implementation: Implementation = "auto",
) -> tuple[Array, KVPool]:
    """Write a layer's new keys and values into its pool, then attend through the block tables.

    q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim], positions already
    applied. Returns the attention's output, shaped and typed like q, and the pool with the tokens in it
    (in place when the pool is donated).
    """
    pool = write_kv(pool, k, v, metadata.slots)
    if isinstance(metadata, DecodeMetadata):
        out = paged_decode_attention(
            q,
            pool,
            metadata.block_tables,
            metadata.seq_lens,
            scale=scale,
            soft_cap=soft_cap,
            sliding_window=sliding_window,
            implementation=implementation,
        )
    else:
        out = paged_prefill_attention(
            q,
            pool,
            metadata.block_tables,
            metadata.seq_lens,
            metadata.query_start,
            scale=scale,
            soft_cap=soft_cap,
            sliding_window=sliding_window,
            implementation=implementation,
        )
    return out, pool
