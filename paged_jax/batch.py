"""A step's numbers as one int32 array each: packed with numpy on the host, taken apart inside the program.

Both directions stand here because they share one layout. An array is fresh each time: once handed to JAX it
is never written again. What a sequence needs beside these numbers lies in its row, see rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from paged_jax.buckets import Variant
from paged_jax.rows import RowState
from paged_jax.schedule import Chunk
from paged_jax.sequence import Sequence
from pallas_kernels import DecodeMetadata, KVPool, PrefillMetadata


class DecodeInputs(NamedTuple):
    """rows, tokens: int32 [num_seqs]; a row out of range is padding. tables: of all rows, up to date."""

    rows: Array
    tokens: Array
    metadata: DecodeMetadata
    tables: Array


def variant_of(sequences: Seq[Sequence]) -> Variant:
    """The cheapest sampling that serves all of them in this step."""
    drawn = False
    for sequence in sequences:
        params = sequence.request.params
        if sequence.request.num_logprobs >= 0:
            return "full"
        if params.min_tokens and sequence.num_output_tokens < params.min_tokens:
            return "full"
        if params.temperature:
            if params.top_k > 0 or params.top_p < 1:
                return "full"
            drawn = True
    return "temperature" if drawn else "greedy"


def pack_decode(sequences: Seq[Sequence], *, size: int, num_rows: int) -> np.ndarray:
    """Rows, positions and blocks of a decode step, fresh: int32 [3, size].

    The token that is computed is each sequence's last one; its slot is the last of the table. Sequences that
    share the block of that slot are forks that share the token too: the first of them writes it, the others
    carry block 0, and need a row that was placed with the block in its table. Padding has row ids past
    num_rows, each its own.
    """
    packed = np.zeros((3, size), np.int32)
    count = len(sequences)
    tables = [sequence.table for sequence in sequences]
    blocks = [table.blocks[-1] for table in tables]
    packed[0, :count] = np.array([sequence.row for sequence in sequences], np.int32)
    packed[0, count:] = np.arange(num_rows, num_rows + size - count)
    packed[1, :count] = [table.num_tokens - 1 for table in tables]
    packed[2, :count] = blocks
    if len(set(blocks)) < count:
        first = np.unique(packed[2, :count], return_index=True)[1]
        kept = packed[2, first]
        packed[2, :count] = 0
        packed[2, first] = kept
    return packed


def decode_inputs(packed: Array, state: RowState, pool: KVPool) -> DecodeInputs:
    """Inside the program: what a decode step computes. A row of block 0 writes nothing, no table either."""
    rows, positions, blocks = packed
    num_rows = len(state.last_token)
    each = jnp.arange(len(rows), dtype=jnp.int32)
    writes = blocks > 0
    # Dropped because they are out of range, and unique: no atomics.
    at = jnp.where(writes, rows, num_rows + each)
    entry = state.tables.at[at, positions // pool.block_size]
    with jax.named_scope("rows"):
        tables = entry.set(blocks, mode="drop", unique_indices=True)
    slots = jnp.where(
        writes,
        blocks * pool.block_size + positions % pool.block_size,
        pool.num_blocks * pool.block_size + each,
    )
    metadata = DecodeMetadata(
        positions=positions,
        slots=slots,
        block_tables=tables.at[rows].get(mode="fill", fill_value=0),
        seq_lens=jnp.where(rows < num_rows, positions + 1, 0),
    )
    return DecodeInputs(rows, state.last_token.at[rows].get(mode="fill", fill_value=0), metadata, tables)


def prefill_elements(size: int, num_seqs: int) -> int:
    """int32 elements of a packed prefill."""
    return size + 3 * num_seqs + 1


def pack_prefill(chunks: Seq[Chunk], *, size: int, num_seqs: int, num_rows: int) -> np.ndarray:
    """Tokens [size], then where each chunk's begin [num_seqs + 1], rows and ends [num_seqs], fresh, int32.

    At most num_seqs chunks, of `size` tokens together. An end is the sequence's tokens that have a slot once
    the chunk is computed.
    """
    packed = np.zeros(prefill_elements(size, num_seqs), np.int32)
    starts = packed[size : size + num_seqs + 1]
    rows, ends = packed[size + num_seqs + 1 :].reshape(2, num_seqs)
    rows[:] = num_rows
    rows[: len(chunks)] = np.array([chunk.sequence.row for chunk in chunks], np.int32)
    ends[: len(chunks)] = [chunk.end for chunk in chunks]
    count = 0
    for at, chunk in enumerate(chunks):
        packed[count : count + chunk.num_tokens] = chunk.sequence.token_ids[chunk.start : chunk.end]
        count += chunk.num_tokens
        starts[at + 1] = count
    starts[len(chunks) + 1 :] = count
    return packed


def prefill_inputs(
    packed: Array, tables: Array, pool: KVPool, num_seqs: int
) -> tuple[Array, PrefillMetadata]:
    """Inside the program: the tokens, int32 [size], and where they stand. tables: of all rows."""
    size = len(packed) - prefill_elements(0, num_seqs)
    query_start = packed[size : size + num_seqs + 1]
    rows, ends = packed[size + num_seqs + 1 :].reshape(2, num_seqs)
    block_tables = tables.at[rows].get(mode="fill", fill_value=0)
    token = jnp.arange(size, dtype=jnp.int32)
    # Which chunk each token belongs to; a search would be a loop.
    chunk = (token[:, None] >= query_start[1:]).sum(axis=1, dtype=jnp.int32)
    real = chunk < num_seqs
    chunk = jnp.minimum(chunk, num_seqs - 1)
    positions = jnp.where(real, ends[chunk] - (query_start[chunk + 1] - token), 0)
    blocks = block_tables.at[chunk, positions // pool.block_size].get(mode="promise_in_bounds")
    slots = jnp.where(
        real,
        blocks * pool.block_size + positions % pool.block_size,
        pool.num_blocks * pool.block_size + token,
    )
    return packed[:size], PrefillMetadata(positions, slots, block_tables, ends, query_start)
