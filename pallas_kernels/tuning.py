"""Tile sizes, warps, pipeline stages and splits of the attention kernels, from static shapes alone.

The tables hold, for a dtype's bytes and a head_dim's power of two, the largest tile that compiles without a
register spill, and within the shared memory, on sm_80 and sm_90 (scripts/check_gpu_program.py compiles each).
A tuner with a device may replace any entry.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.triton_tile import padded

NUM_SMS = 132
"""Streaming multiprocessors assumed where no GPU is at hand: an H100's or H200's."""

PROGRAMS_PER_SM = 2
"""Decode programs that keep an SM's memory pipeline full."""

MIN_SPLIT = 256
"""Tokens below which a share of the context is not worth a program and its part of the combine."""

MAX_SPLITS = 64


@dataclass(frozen=True)
class DecodeSettings:
    """tile_k: tokens an iteration; splits: programs over the context of one (sequence, kv head)."""

    tile_k: int
    num_warps: int
    num_stages: int
    splits: int = 1


@dataclass(frozen=True)
class PrefillSettings:
    """rows: tokens x query heads of a tile, a power of two; tile_k: tokens an iteration."""

    rows: int
    tile_k: int
    num_warps: int
    num_stages: int


_Choice = tuple[int, int, int, int]
_Table = dict[tuple[int, int], list[_Choice]]

MAX_GROUP = {2: 64, 4: 32}
"""Query heads of a kv head at most, by the bytes of an operand: what every tile below has rows for."""

# (bytes of an operand, head_dim; see _key) -> [(rows, tile_k, num_warps, num_stages)], rows ascending
_DECODE: _Table = {
    (2, 64): [(16, 128, 4, 3), (64, 64, 4, 3)],
    (2, 96): [(16, 64, 4, 3), (64, 64, 8, 3)],
    (2, 128): [(16, 64, 4, 3), (64, 64, 8, 3)],
    (2, 192): [(16, 64, 8, 3), (64, 32, 8, 3)],
    (2, 256): [(16, 64, 8, 3), (64, 32, 8, 3)],
    (4, 64): [(16, 64, 4, 2), (64, 16, 8, 2)],
    (4, 96): [(16, 32, 4, 2), (64, 16, 8, 2)],
    (4, 128): [(16, 32, 4, 2), (64, 16, 8, 2)],
    (4, 192): [(16, 16, 4, 2), (64, 16, 8, 2)],
    (4, 256): [(64, 16, 8, 2)],
}
_PREFILL: _Table = {
    (2, 64): [(16, 64, 4, 2), (64, 64, 4, 2), (128, 64, 8, 2)],
    (2, 96): [(16, 64, 4, 2), (32, 64, 4, 2), (64, 32, 4, 2)],
    (2, 128): [(16, 64, 4, 2), (32, 64, 4, 2), (64, 32, 4, 2), (128, 64, 8, 2)],
    (2, 192): [(16, 32, 4, 2), (64, 32, 8, 2)],
    (2, 256): [(16, 32, 4, 2), (64, 32, 8, 2)],
    (4, 64): [(16, 32, 4, 2), (64, 16, 8, 2)],
    (4, 96): [(16, 32, 4, 2), (32, 16, 8, 3)],
    (4, 128): [(16, 32, 4, 2), (64, 16, 8, 2)],
    (4, 192): [(16, 16, 4, 2), (32, 16, 8, 2)],
    (4, 256): [(32, 16, 8, 2)],
}


def decode_settings(
    dtype: jnp.dtype, head_dim: int, *, group: int, programs: int, context: int, sms: int | None = None
) -> DecodeSettings:
    """Settings for operands of `dtype`.

    group: query heads of a kv head; programs: num_seqs * num_kv_heads; context: tokens that a block table has
    room for; sms: None asks the device. The splits fill the device PROGRAMS_PER_SM times over, in shares of
    MIN_SPLIT tokens or more.
    """
    _, tile_k, num_warps, num_stages = _smallest(_DECODE, dtype, head_dim, group=group, rows=group)
    wanted = -(-PROGRAMS_PER_SM * (sms or device_sms()) // programs)
    splits = 1
    while splits < min(wanted, MAX_SPLITS) and context >= 2 * splits * MIN_SPLIT:
        splits *= 2
    return DecodeSettings(tile_k, num_warps, num_stages, splits)


def prefill_settings(dtype: jnp.dtype, head_dim: int, *, group: int, queries: int) -> PrefillSettings:
    """Settings for operands of `dtype`.

    group: query heads of a kv head; queries: tokens of a sequence, on average at most. Few queries take a
    small tile, since a row without one costs as much as any other.
    """
    return PrefillSettings(
        *_smallest(_PREFILL, dtype, head_dim, group=group, rows=group * queries, at_least=group)
    )


def decode_choices() -> list[tuple[int, int, int]]:
    """The table's entries: (bytes of an operand, head_dim, rows)."""
    return [(*key, choice[0]) for key, choices in _DECODE.items() for choice in choices]


def prefill_choices() -> list[tuple[int, int, int]]:
    """The table's entries: (bytes of an operand, head_dim, rows)."""
    return [(*key, choice[0]) for key, choices in _PREFILL.items() for choice in choices]


def _smallest(
    table: _Table, dtype: jnp.dtype, head_dim: int, *, group: int, rows: int, at_least: int = 1
) -> _Choice:
    """The first choice with `rows` rows or more, else the last; only those with `at_least` rows count."""
    choices = [c for c in table[dtype.itemsize, _key(head_dim, group)] if c[0] >= at_least]
    return next((choice for choice in choices if choice[0] >= rows), choices[-1])


def _key(head_dim: int, group: int) -> int:
    """64 up to there, 128 or 256; 96 or 192 where head_dim or group is no power of two.

    Masks and divisions take registers then.
    """
    width = max(64, padded(head_dim))
    regular = head_dim == width and group & (group - 1) == 0
    return width if regular or width == 64 else width * 3 // 4


def device_sms() -> int:
    """Multiprocessors of the default GPU, or NUM_SMS."""
    if jax.default_backend() != "gpu":
        return NUM_SMS
    return int(getattr(jax.devices()[0], "core_count", NUM_SMS))
