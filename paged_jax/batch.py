"""A step's numbers as one int32 array: packed with numpy on the host, taken apart inside the jitted program.

Both directions stand here because they share one layout. The array is fresh each step: once handed to JAX
it is never written again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from paged_jax.sampling_params import SamplingParams
from paged_jax.scheduler import Schedule
from pallas_kernels import DecodeMetadata, Metadata, PrefillMetadata

Variant = Literal["greedy", "temperature", "filtered"]
"""What the sampling of a step must be able to do; the dearer ones are compiled in only when asked for."""

_INT32_MAX = 2**31 - 1
_PER_SEQUENCE = 7  # seq_len, temperature, top_k, top_p, two words of the seed, sample index


@dataclass(frozen=True)
class BatchShape:
    """The static part of a step: together with the variant it names one compiled program."""

    phase: Literal["prefill", "decode"]
    num_tokens: int
    num_seqs: int
    max_blocks: int

    @property
    def size(self) -> int:
        """int32 elements of the packed array."""
        return 3 * self.num_tokens + (self.num_seqs + 1) + self.num_seqs * (_PER_SEQUENCE + self.max_blocks)


class SamplingState(NamedTuple):
    """One row a sequence: temperature, top_p float32; top_k, sample, position int32; seed uint32 [.., 2]."""

    temperature: Array
    top_k: Array
    top_p: Array
    seed: Array
    sample: Array
    position: Array


class Batch(NamedTuple):
    """What pack makes: the array, what shape it has, and which sampling it needs."""

    packed: np.ndarray
    shape: BatchShape
    variant: Variant


_A = TypeVar("_A", np.ndarray, Array)


class _Views(NamedTuple, Generic[_A]):
    tokens: _A
    positions: _A
    slots: _A
    query_start: _A
    sequences: _A
    block_tables: _A


def _views(packed: _A, shape: BatchShape) -> _Views[_A]:
    tokens, seqs = shape.num_tokens, shape.num_seqs
    starts = 3 * tokens
    rows = starts + seqs + 1
    tables = rows + seqs * _PER_SEQUENCE
    return _Views(
        tokens=packed[:tokens],
        positions=packed[tokens : 2 * tokens],
        slots=packed[2 * tokens : 3 * tokens],
        query_start=packed[starts:rows],
        sequences=packed[rows:tables].reshape(seqs, _PER_SEQUENCE),
        block_tables=packed[tables:].reshape(seqs, shape.max_blocks),
    )


def variant_of(params: list[SamplingParams]) -> Variant:
    """The cheapest sampling that serves all of them."""
    if any(p.filters for p in params):
        return "filtered"
    return "greedy" if all(p.is_greedy for p in params) else "temperature"


def pack(schedule: Schedule, shape: BatchShape, *, num_slots: int) -> Batch:
    """Lay a schedule out in a fresh array.

    num_slots: slots of a pool; padding tokens get slots of their own past it, so that they write nowhere.
    """
    packed = np.zeros(shape.size, np.int32)
    views = _views(packed, shape)
    floats = views.sequences.view(np.float32)
    views.slots[:] = num_slots + np.arange(shape.num_tokens)
    start = 0
    for row, entry in enumerate(schedule.entries):
        end = start + entry.num_tokens
        sequence = entry.sequence
        params, seed = sequence.request.params, sequence.request.seed
        views.tokens[start:end] = sequence.token_ids[entry.first_position : entry.seq_len]
        views.positions[start:end] = np.arange(entry.first_position, entry.seq_len)
        views.slots[start:end] = entry.slots
        views.query_start[row + 1] = end
        views.sequences[row, 0] = entry.seq_len
        floats[row, 1] = 0 if params.is_greedy else _positive_float32(params.temperature)
        views.sequences[row, 2] = min(params.top_k, _INT32_MAX)
        floats[row, 3] = _positive_float32(params.top_p)
        views.sequences[row, 4:6] = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32).view(np.int32)
        views.sequences[row, 6] = sequence.index
        blocks = sequence.table.blocks
        views.block_tables[row, : len(blocks)] = blocks
        start = end
    views.query_start[len(schedule.entries) + 1 :] = start
    sampled = [entry.sequence.request.params for entry in schedule.entries if entry.samples]
    return Batch(packed, shape, variant_of(sampled))


def _positive_float32(value: float) -> float:
    """The value, or the nearest that is a normal float32 and so is its inverse: neither 0 nor infinity."""
    smallest = float(np.finfo(np.float32).tiny)
    return min(max(value, smallest), 1 / smallest)


def unpack(packed: Array, shape: BatchShape) -> tuple[Array, Metadata, Array, SamplingState]:
    """Inside the program: tokens, the operations' metadata, each sequence's last token's index, sampling."""
    views = _views(packed, shape)
    rows = views.sequences
    seq_lens = rows[:, 0]
    common = (views.positions, views.slots, views.block_tables, seq_lens)
    metadata: Metadata
    if shape.phase == "decode":
        metadata = DecodeMetadata(*common)
        last = jnp.arange(shape.num_seqs)
    else:
        metadata = PrefillMetadata(*common, views.query_start)
        last = jnp.maximum(views.query_start[1:] - 1, 0)
    sampling = SamplingState(
        temperature=lax.bitcast_convert_type(rows[:, 1], jnp.float32),
        top_k=rows[:, 2],
        top_p=lax.bitcast_convert_type(rows[:, 3], jnp.float32),
        seed=lax.bitcast_convert_type(rows[:, 4:6], jnp.uint32),
        sample=rows[:, 6],
        position=seq_lens,
    )
    return views.tokens, metadata, last, sampling
