"""Naive attention over a paged cache in numpy float64: one query, one head, one key at a time.

Written from the definition, not from the ops: it reads nothing but the slots a query may see.
"""

import numpy as np


def attend(query, keys, values, scale=None, soft_cap=None):
    """query [head_dim]; keys, values [num_keys, head_dim]; returns [head_dim] in float64."""
    scale = query.shape[0] ** -0.5 if scale is None else scale
    s = scale * (keys @ query)
    if soft_cap is not None:
        s = soft_cap * np.tanh(s / soft_cap)
    weights = np.exp(s - s.max())
    return weights @ values / weights.sum()


def read_tokens(pool_array, block_table, head, positions):
    """Rows of one head at the logical `positions` of one sequence."""
    block_size = pool_array.shape[2]
    rows = [pool_array[block_table[p // block_size], head, p % block_size] for p in positions]
    return np.asarray(rows, np.float64)


def attend_at(q, k, v, block_table, position, scale=None, soft_cap=None, sliding_window=None):
    """q [num_heads, head_dim] of the token at `position`; k, v: a pool's arrays."""
    first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
    positions = range(first, position + 1)
    group = q.shape[0] // k.shape[1]
    out = np.zeros(q.shape, np.float64)
    for h in range(q.shape[0]):
        keys = read_tokens(k, block_table, h // group, positions)
        values = read_tokens(v, block_table, h // group, positions)
        out[h] = attend(np.asarray(q[h], np.float64), keys, values, scale, soft_cap)
    return out


def decode(q, k, v, block_tables, seq_lens, **options):
    """As paged_decode_attention, in float64."""
    out = np.zeros(q.shape, np.float64)
    for s, length in enumerate(seq_lens):
        if length > 0:
            out[s] = attend_at(q[s], k, v, block_tables[s], length - 1, **options)
    return out


def prefill(q, k, v, block_tables, seq_lens, query_start, **options):
    """As paged_prefill_attention, in float64."""
    out = np.zeros(q.shape, np.float64)
    for s, length in enumerate(seq_lens):
        begin, end = query_start[s], query_start[s + 1]
        for t in range(begin, end):
            out[t] = attend_at(q[t], k, v, block_tables[s], length - (end - t), **options)
    return out
