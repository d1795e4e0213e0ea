"""Blocks that leave the device and come back: the same bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.host_pool import HostPool, block_shape, gather_blocks, pack_ids, scatter_blocks, swap_blocks
from pallas_kernels import KVPool

NUM_BLOCKS, LAYERS = 12, 3


def random_cache(dtype, seed=0):
    keys = jax.random.split(jax.random.key(seed), 2 * LAYERS)
    arrays = [jax.random.normal(key, (NUM_BLOCKS, 2, 4, 8)).astype(dtype) for key in keys]
    return tuple(KVPool(k, v) for k, v in zip(arrays[::2], arrays[1::2], strict=True))


def bits(array):
    return np.asarray(array).view(np.uint16 if array.dtype.itemsize == 2 else np.uint32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_out_and_into_other_blocks_keeps_every_bit_and_touches_no_other_block(dtype):
    cache = random_cache(dtype)
    before = [bits(array).copy() for array in jax.tree.leaves(cache)]
    out, into, host = [7, 2, 9], [3, 11, 7], [5, 0, 4]
    pool = HostPool(6, cache)
    gathered = jax.jit(gather_blocks)(cache, pack_ids(out, size=4, num_blocks=NUM_BLOCKS))
    assert gathered.shape == (4, *block_shape(cache))
    pool.write(host, np.asarray(gathered))
    staged = pool.read(host, 4)
    cache = jax.jit(scatter_blocks)(cache, pack_ids(into, size=4, num_blocks=NUM_BLOCKS), staged)
    for array, old in zip(jax.tree.leaves(cache), before, strict=True):
        expected = old.copy()
        expected[into] = old[out]
        np.testing.assert_array_equal(bits(array), expected)


def test_what_was_read_is_not_what_is_written_afterwards():
    cache = random_cache("float32")
    pool = HostPool(3, cache)
    ones = np.ones((2, *block_shape(cache)), np.float32)
    pool.write([0, 1], ones)
    staged = pool.read([1, 0], 4)
    pool.write([0, 1], 2 * ones)
    assert (staged[:2] == 1).all()


def test_memory_is_taken_at_the_first_use():
    huge = HostPool(1 << 40, random_cache("float32"))
    with pytest.raises((MemoryError, ValueError)):
        huge.read([0], 1)


def test_padding_ids_are_past_the_pool_each_its_own():
    assert pack_ids([3, 1], size=5, num_blocks=12).tolist() == [3, 1, 14, 15, 16]


def test_a_call_swaps_fewer_blocks_where_they_are_large():
    def abstract(block_size):
        pool = jax.ShapeDtypeStruct((9, 8, block_size, 128), jnp.bfloat16)
        return tuple(KVPool(pool, pool) for _ in range(32))

    assert swap_blocks(abstract(16)) == 32  # 2 MiB each
    assert swap_blocks(abstract(128)) == 4
    assert swap_blocks(abstract(8192)) == 1
