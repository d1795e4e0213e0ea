"""A paged cache laid out at random for the tests of the ops: what must not be read is poison."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from pallas_kernels import KVPool
from support import attention_oracle


class Ops(NamedTuple):
    """One implementation of the four operations."""

    write_kv: object
    copy_blocks: object
    decode: object
    prefill: object


STATIC = ("scale", "soft_cap", "sliding_window")
INTERPRET = jax.default_backend() != "gpu"
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiler options for interpreted kernels: they are large programs that run once."""


def ops_of(implementation):
    """The operations of one implementation, jitted; off a GPU, "triton" is the kernel interpreted."""
    quick = {"compiler_options": QUICK} if implementation == "triton" and INTERPRET else {}
    chosen = {"implementation": implementation}
    return Ops(
        jax.jit(pk.write_kv),
        jax.jit(pk.copy_blocks),
        jax.jit(partial(pk.paged_decode_attention, **chosen), static_argnames=STATIC, **quick),
        jax.jit(partial(pk.paged_prefill_attention, **chosen), static_argnames=STATIC, **quick),
    )


class Case(NamedTuple):
    """Device arrays of one batch; the query heads are in q, packed or one a sequence."""

    q: object
    pool: KVPool
    block_tables: object
    seq_lens: object
    query_start: object = None


TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 1.5e-2}


def paged(
    seq_lens,
    *,
    queries=None,
    padding=0,
    heads=(4, 2),
    head_dim=16,
    block_size=8,
    dtype="float32",
    q_dtype=None,
    poison=np.nan,
    readable_from=None,
    extra_columns=2,
    seed=0,
):
    """Lays out sequences of `seq_lens` tokens over shuffled blocks and returns a Case.

    queries: how many of each sequence's last tokens ask (prefill), or None (decode: one row a sequence);
    padding: query rows after the last. Every slot that holds no token of a sequence is `poison`, and so are
    the tokens before `readable_from[s]`.
    """
    rng = np.random.default_rng(seed)
    num_heads, num_kv_heads = heads
    needed = [-(-n // block_size) for n in seq_lens]
    num_blocks = sum(needed) + 4
    free = list(rng.permutation(np.arange(1, num_blocks)))
    tables = np.zeros((len(seq_lens), max(needed) + extra_columns), np.int32)
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    k, v = np.full(shape, poison, np.float32), np.full(shape, poison, np.float32)
    for s, length in enumerate(seq_lens):
        for i in range(needed[s]):
            tables[s, i] = free.pop()
        for p in range(readable_from[s] if readable_from else 0, length):
            at = (tables[s, p // block_size], slice(None), p % block_size)
            k[at], v[at] = rng.standard_normal((2, num_kv_heads, head_dim))
    query_start = None
    rows = len(seq_lens)
    if queries is not None:
        query_start = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
        rows = int(query_start[-1]) + padding
    q = rng.standard_normal((rows, num_heads, head_dim)).astype(np.float32)
    return Case(
        jnp.asarray(q, q_dtype or dtype),
        KVPool(jnp.asarray(k, dtype), jnp.asarray(v, dtype)),
        jnp.asarray(tables),
        jnp.asarray(seq_lens, jnp.int32),
        None if query_start is None else jnp.asarray(query_start),
    )


def expected(case, **options):
    """The oracle's answer to a Case, in float64."""
    arrays = [np.asarray(case.q, np.float32), *(np.asarray(a, np.float32) for a in case.pool)]
    arrays += [np.asarray(case.block_tables), np.asarray(case.seq_lens)]
    if case.query_start is None:
        return attention_oracle.decode(*arrays, **options)
    return attention_oracle.prefill(*arrays, np.asarray(case.query_start), **options)


def assert_matches_oracle(op, case, **options):
    """`op` on the Case equals the oracle, within the dtype's rounding, in q's dtype."""
    args = case if case.query_start is not None else case[:4]
    got = op(*args, **options)
    assert got.shape == case.q.shape
    assert got.dtype == case.q.dtype
    tolerance = max(TOLERANCE[case.q.dtype.name], TOLERANCE[case.pool.k.dtype.name])
    np.testing.assert_allclose(
        np.asarray(got, np.float32), expected(case, **options), rtol=tolerance, atol=tolerance
    )
