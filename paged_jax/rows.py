"""The state of running sequences on the device: a row each, written when placed, kept from step to step.

What a sequence needs in every step and what does not change stands here, so that a decode step sends three
numbers a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from paged_jax.sampling_params import MAX_SUPPRESSED_IDS
from paged_jax.sequence import Sequence

_INT32_MAX = 2**31 - 1
_NUMBERS = 10
"""int32 of a packed row before the suppressed ids and the table."""


class Sampling(NamedTuple):
    """How each row's tokens are chosen: arrays of one leading axis, rows.

    temperature (0: greedy), top_p float32; top_k (0 or less: all), sample int32; seed uint32 [.., 2].
    suppressed: int32 [.., 64], ids that are not sampled while the sequence has fewer than min_position
    tokens, int32; padded with ids past every vocabulary, each its own. num_logprobs: int32, of the most
    likely tokens; -1 where no logprobs are wanted.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    seed: Array
    sample: Array
    min_position: Array
    suppressed: Array
    num_logprobs: Array


class RowState(NamedTuple):
    """tables: int32 [num_rows, max_blocks], padded with the null block; last_token: int32 [num_rows]."""

    tables: Array
    last_token: Array
    sampling: Sampling


_ABSENT = (0, 0, 1, 0, 0, 0, _INT32_MAX, -1)
"""Sampling of a row that is not there."""


def padding_ids(width: int) -> Array:
    """int32 [width], ids past every vocabulary, each its own: what `suppressed` is padded with."""
    return _INT32_MAX - jnp.arange(width, dtype=jnp.int32)


def allocate_rows(num_rows: int, max_blocks: int) -> RowState:
    """Rows of zeros: whoever uses one places it first."""

    def zeros(*shape: int, dtype: type = jnp.int32) -> Array:
        return jnp.zeros((num_rows, *shape), dtype)

    sampling = Sampling(
        temperature=zeros(dtype=jnp.float32),
        top_k=zeros(),
        top_p=zeros(dtype=jnp.float32),
        seed=zeros(2, dtype=jnp.uint32),
        sample=zeros(),
        min_position=zeros(),
        suppressed=zeros(MAX_SUPPRESSED_IDS),
        num_logprobs=zeros(),
    )
    return RowState(zeros(max_blocks), zeros(), sampling)


def sampling_of(sampling: Sampling, rows: Array) -> Sampling:
    """Each row's, [len(rows), ..]; a row out of range is greedy and wants nothing."""
    return Sampling(
        *(
            values.at[rows].get(mode="fill", fill_value=absent)
            for values, absent in zip(sampling, _ABSENT, strict=True)
        )
    )


def packed_row(max_blocks: int) -> int:
    """int32 elements of a packed row."""
    return _NUMBERS + MAX_SUPPRESSED_IDS + max_blocks


def pack_rows(sequences: Seq[Sequence], *, size: int, num_rows: int, max_blocks: int) -> np.ndarray:
    """What a place program needs of sequences that have a row, fresh: int32 [size, ..].

    At most `size` of them. Padding has row ids past num_rows, each its own: it is written nowhere.
    """
    packed = np.zeros((size, packed_row(max_blocks)), np.int32)
    floats = packed.view(np.float32)
    packed[:, 0] = num_rows + np.arange(size)
    tables = packed[:, _NUMBERS + MAX_SUPPRESSED_IDS :]
    packed[:, _NUMBERS : _NUMBERS + MAX_SUPPRESSED_IDS] = _INT32_MAX - np.arange(MAX_SUPPRESSED_IDS)
    packed[: len(sequences), 0] = np.array([sequence.row for sequence in sequences], np.int32)
    for at, sequence in enumerate(sequences):
        request = sequence.request
        params, seed = request.params, request.seed
        packed[at, 1] = sequence.token_ids[-1]
        floats[at, 2] = 0 if params.is_greedy else _positive_float32(params.temperature)
        packed[at, 3] = min(params.top_k, _INT32_MAX)
        floats[at, 4] = _positive_float32(params.top_p)
        packed[at, 5:7] = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32).view(np.int32)
        packed[at, 7] = sequence.index
        packed[at, 9] = request.num_logprobs
        if params.min_tokens > 0:
            packed[at, 8] = min(len(request.prompt_token_ids) + params.min_tokens, _INT32_MAX)
            ids = [
                token for token in sorted(request.stop_token_ids) if token <= _INT32_MAX - MAX_SUPPRESSED_IDS
            ]
            packed[at, _NUMBERS : _NUMBERS + MAX_SUPPRESSED_IDS][: len(ids)] = ids
        blocks = sequence.table.blocks
        tables[at, : len(blocks)] = blocks
    return packed


def place(state: RowState, packed: Array) -> RowState:
    """Inside the program: the rows of pack_rows, written over whatever was there."""
    numbers = packed[:, :_NUMBERS]
    suppressed = packed[:, _NUMBERS : _NUMBERS + MAX_SUPPRESSED_IDS]
    sampling = Sampling(
        temperature=lax.bitcast_convert_type(numbers[:, 2], jnp.float32),
        top_k=numbers[:, 3],
        top_p=lax.bitcast_convert_type(numbers[:, 4], jnp.float32),
        seed=lax.bitcast_convert_type(numbers[:, 5:7], jnp.uint32),
        sample=numbers[:, 7],
        min_position=numbers[:, 8],
        suppressed=suppressed,
        num_logprobs=numbers[:, 9],
    )
    new = RowState(packed[:, _NUMBERS + MAX_SUPPRESSED_IDS :], numbers[:, 1], sampling)
    rows = numbers[:, 0]
    with jax.named_scope("rows"):
        return jax.tree.map(
            lambda old, value: old.at[rows].set(value, mode="drop", unique_indices=True), state, new
        )


def _positive_float32(value: float) -> float:
    """The value, or the nearest that is a normal float32 and so is its inverse: neither 0 nor infinity."""
    smallest = float(np.finfo(np.float32).tiny)
    return min(max(value, smallest), 1 / smallest)
