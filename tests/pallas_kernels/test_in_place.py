"""Under donation no op moves the pool: read off the compiled programs.

Full aliasing alone proves little, so temporaries and the HLO are looked at too.
"""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from support.paged_cache import ops_of

from pallas_kernels import KVPool, copy_blocks_of_layers

SHAPE = (1025, 3, 16, 64)
NUM_SEQS, NUM_LAYERS = 4, 4
DTYPES = ["float32", "bfloat16"]
WRITABLE = [
    "float32",
    "float16",
    # Not bfloat16: XLA's CPU backend scatters none, it converts the pool to float32 and back, which is why
    # the engine keeps a float32 pool there.
]


@pytest.fixture
def ops():
    """ "auto" on a CPU must leave XLA's program alone behind; an interpreted kernel is never in place."""
    return ops_of("auto")


MOVES = {"copy", "convert", "broadcast", "transpose", "select", "bitcast-convert"}


def materialised(hlo):
    """(opcode, elements) of each array that a compiled program writes out: of a fusion, only its root."""
    fused = False
    for line in hlo.splitlines():
        if line.endswith("{"):
            fused = "fused_computation" in line.split("(")[0]
        match = re.search(r"(ROOT )?%?\S+ = \w+\[([\d,]*)\]\S* ([\w-]+)\(", line)
        if match and (match[1] or not fused):
            yield match[3], math.prod(int(n) for n in match[2].split(",") if n)


def array(shape, dtype="int32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def pool(dtype):
    return KVPool(array(SHAPE, dtype), array(SHAPE, dtype))


def assert_in_place(step, pools, *args):
    """`step(pools, *args)` aliases every pool and holds nothing of a pool's size beside them."""
    compiled = jax.jit(step, donate_argnums=0).lower(pools, *args).compile()
    leaves = jax.tree.leaves(pools)
    one = leaves[0].size * leaves[0].dtype.itemsize
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == one * len(leaves)
    assert memory.temp_size_in_bytes < one
    for opcode, elements in materialised(compiled.as_text()):
        assert opcode not in MOVES or elements < leaves[0].size, (opcode, elements)


@pytest.mark.parametrize("dtype", WRITABLE)
def test_write_kv(ops, dtype):
    new = array((NUM_SEQS, 3, 64), dtype)
    assert_in_place(ops.write_kv, pool(dtype), new, new, array((NUM_SEQS,)))


@pytest.mark.parametrize("dtype", WRITABLE)
def test_copy_blocks(ops, dtype):
    assert_in_place(ops.copy_blocks, pool(dtype), array((8,)), array((8,)))


@pytest.mark.parametrize("dtype", WRITABLE)
def test_copy_blocks_of_layers(dtype):
    assert_in_place(copy_blocks_of_layers, (pool(dtype),) * NUM_LAYERS, array((8,)), array((8,)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_dtype", DTYPES)
def test_attention(ops, dtype, q_dtype):
    tables, lens = array((NUM_SEQS, 32)), array((NUM_SEQS,))

    def decode(pool, q, tables, lens):
        return ops.decode(q, pool, tables, lens), pool

    def prefill(pool, q, tables, lens, starts):
        return ops.prefill(q, pool, tables, lens, starts), pool

    assert_in_place(decode, pool(dtype), array((NUM_SEQS, 9, 64), q_dtype), tables, lens)
    q = array((64, 9, 64), q_dtype)
    assert_in_place(prefill, pool(dtype), q, tables, lens, array((NUM_SEQS + 1,)))


@pytest.mark.parametrize("dtype", WRITABLE)
def test_a_step_of_several_layers(ops, dtype):
    def step(pools, x, slots, src, dst, tables, lens):
        written = []
        for layer in pools:
            layer = ops.copy_blocks(layer, src, dst)
            layer = ops.write_kv(layer, x[:, ::3], 2 * x[:, ::3], slots)
            x = x + ops.decode(x, layer, tables, lens)
            written.append(layer)
        return x, written

    seqs, pairs = array((NUM_SEQS,)), array((8,))
    x = array((NUM_SEQS, 9, 64), dtype)
    assert_in_place(step, [pool(dtype)] * NUM_LAYERS, x, seqs, pairs, pairs, array((NUM_SEQS, 32)), seqs)
