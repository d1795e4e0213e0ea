"""The Triton kernels against float64 over a pairwise covering set of what they may be given.

Off a GPU they are interpreted. Settings are factors too: any tile, any number of splits must give one result.
"""

from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paged_cache import INTERPRET, QUICK, STATIC, assert_matches_oracle, paged
from support.pairwise import pairwise

from pallas_kernels.decode_attention_triton import decode_attention_triton
from pallas_kernels.prefill_attention_triton import prefill_attention_triton, query_tiles
from pallas_kernels.tuning import DecodeSettings, PrefillSettings

SHAPES = {
    "block_size": [1, 3, 8, 16, 32, 128],
    "head_dim": [10, 64, 80, 96, 128, 256],
    "heads": [(4, 4), (8, 2), (9, 3), (5, 5), (7, 1)],
    "dtype": ["float32", "bfloat16", "float16"],
    "options": [
        {},
        {"soft_cap": 3.0},
        {"sliding_window": 1},
        {"sliding_window": 40},
        {"scale": 0.5, "soft_cap": 20.0, "sliding_window": 130},
    ],
    "poison": [np.nan, np.inf],
    "shared": [False, True],
    "tile_k": [16, 32, 128],
}
DECODE = SHAPES | {"lengths": ["edges", "long", "dead"], "splits": [1, 2, 3, 16]}
PREFILL = SHAPES | {"lengths": ["edges", "long", "idle"], "rows": [16, 64], "queries": ["all", "few"]}


def lengths(kind, block_size):
    b = block_size
    return {
        "edges": [0, 1, b - 1, b, b + 1],
        "long": [151, 2 * b, 0, 77],
        "dead": [0, 0, 20, 0],
        "idle": [0, 9, 0, 33, 5],
    }[kind]


def case_of(row, queries=None):
    """The row's cache, everything that must not be read poisoned."""
    seq_lens = lengths(row["lengths"], row["block_size"])
    window, first = row["options"].get("sliding_window"), None
    if window and not row["shared"]:
        asking = queries or [1] * len(seq_lens)
        first = [max(0, n - m - window + 1) for n, m in zip(seq_lens, asking, strict=True)]
    names = ("heads", "head_dim", "block_size", "dtype", "poison")
    shape = {name: row[name] for name in names}
    padding = 0 if queries is None else 5
    case = paged(seq_lens, queries=queries, padding=padding, readable_from=first, **shape)
    return share_first_blocks(case, seq_lens, row["block_size"]) if row["shared"] else case


def share_first_blocks(case, seq_lens, block_size):
    """Sequences with a full first block all read the first such block."""
    full = [s for s, n in enumerate(seq_lens) if n >= block_size]
    tables = case.block_tables
    for s in full:
        tables = tables.at[s, 0].set(tables[full[0], 0])
    return case._replace(block_tables=tables)


def jitted(kernel, chosen):
    op = partial(kernel, settings=chosen, interpret=INTERPRET)
    return jax.jit(op, static_argnames=STATIC, compiler_options=QUICK if INTERPRET else None)


def name(row):
    return "-".join(str(value).replace(" ", "") for value in row.values())


@pytest.mark.parametrize("row", pairwise(DECODE), ids=name)
def test_decode(row):
    op = jitted(decode_attention_triton, DecodeSettings(row["tile_k"], 4, 1, row["splits"]))
    assert_matches_oracle(op, case_of(row), **row["options"])


@pytest.mark.parametrize("row", pairwise(PREFILL), ids=name)
def test_prefill(row):
    queries = lengths(row["lengths"], row["block_size"])
    if row["lengths"] == "idle":
        queries = [n if s % 2 else 0 for s, n in enumerate(queries)]
    if row["queries"] == "few":
        queries = [min(n, 2 + 3 * s) for s, n in enumerate(queries)]
    op = jitted(prefill_attention_triton, PrefillSettings(row["rows"], row["tile_k"], 4, 1))
    assert_matches_oracle(op, case_of(row, queries), **row["options"])


@pytest.mark.parametrize("window", [None, 50])
def test_any_number_of_splits_gives_one_result(window):
    case = paged([0, 1, 130, 300, 17], heads=(6, 2), head_dim=32, block_size=16)

    def run(splits):
        op = jitted(decode_attention_triton, DecodeSettings(16, 4, 1, splits))
        return np.asarray(op(*case[:4], sliding_window=window))

    whole = run(1)
    assert not whole[0].any()
    for splits in (2, 5, 16):
        got = run(splits)
        np.testing.assert_allclose(got, whole, rtol=1e-5, atol=1e-6)
        assert not got[0].any()


@settings(max_examples=3, derandomize=True, deadline=None)
@given(data=st.data())
def test_any_decode(data):
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 17))
    case = paged(
        data.draw(st.lists(st.integers(0, 90), min_size=1, max_size=4)),
        heads=(kv_heads * group, kv_heads),
        head_dim=data.draw(st.integers(1, 70)),
        block_size=data.draw(st.integers(1, 40)),
        dtype=data.draw(st.sampled_from(["float32", "bfloat16"])),
    )
    splits = data.draw(st.integers(1, 6))
    tile_k = data.draw(st.sampled_from([16, 32, 64]))
    op = jitted(decode_attention_triton, DecodeSettings(tile_k, 4, 1, splits))
    assert_matches_oracle(op, case, sliding_window=data.draw(st.none() | st.integers(1, 99)))


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=6, max_size=6),
    tile_q=st.sampled_from([1, 7, 16]),
)
def test_query_tiles_cover_each_token_once(lengths, tile_q):
    num_tokens, cached = 240, 7
    start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    seq_lens = np.asarray(lengths, np.int32) + cached
    owner, position = np.full(num_tokens, -1), np.full(num_tokens, -1)
    tiles = np.asarray(_tiles(seq_lens, start, num_tokens, tile_q))
    for seq, row, tokens, first in tiles:
        assert 0 <= tokens <= tile_q
        assert (owner[row : row + tokens] == -1).all()
        owner[row : row + tokens] = seq
        position[row : row + tokens] = np.arange(first, first + tokens)
    assert (owner >= 0).all()
    for s, length in enumerate(lengths):
        span = slice(start[s], start[s] + length)
        assert (owner[span] == s).all()
        assert position[span].tolist() == list(range(cached, cached + length))
    assert (position[start[-1] :] < 0).all()


_tiles = jax.jit(query_tiles, static_argnums=(2, 3))
