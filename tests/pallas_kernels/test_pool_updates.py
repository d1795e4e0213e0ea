"""write_kv and copy_blocks change what they name, to the bit, and nothing else."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KVPool, copy_blocks, copy_blocks_of_layers

DTYPES = ["float32", "bfloat16"]


def random_pool(dtype, num_blocks=7, heads=3, block_size=4, head_dim=8, seed=1):
    rng = np.random.default_rng(seed)
    k, v = rng.standard_normal((2, num_blocks, heads, block_size, head_dim))
    return KVPool(jnp.asarray(k, dtype).at[0].set(jnp.nan), jnp.asarray(v, dtype).at[0].set(jnp.inf))


def bits(array):
    return np.asarray(array).view(np.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("new_dtype", DTYPES)
def test_write_fills_its_slots_alone(ops, dtype, new_dtype):
    pool = random_pool(dtype)
    rng = np.random.default_rng(2)
    k, v = (jnp.asarray(a, new_dtype) for a in rng.standard_normal((2, 5, 3, 8)))
    slots = [9, 4, 27, 6, 20]
    written = ops.write_kv(pool, k, v, jnp.asarray(slots, jnp.int32))
    for before, new, after in zip(pool, (k, v), written, strict=True):
        want = np.array(before)
        for t, slot in enumerate(slots):
            want[slot // 4, :, slot % 4] = np.asarray(new.astype(dtype))[t]
        np.testing.assert_array_equal(bits(after), bits(want))


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_drops_padding_tokens(ops, dtype):
    pool = random_pool(dtype)
    k = jnp.ones((6, 3, 8), dtype)
    written = ops.write_kv(pool, k, -k, jnp.asarray([28, 5, 29, 30, 10**6, 33], jnp.int32))
    for before, after, value in zip(pool, written, (1, -1), strict=True):
        want = np.array(before)
        want[1, :, 1] = value
        np.testing.assert_array_equal(bits(after), bits(want))


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_are_simultaneous(ops, dtype):
    pool = random_pool(dtype)
    src, dst = [1, 2, 2, 4, 5], [2, 1, 3, 5, 6]
    copied = ops.copy_blocks(pool, jnp.asarray(src, jnp.int32), jnp.asarray(dst, jnp.int32))
    for before, after in zip(pool, copied, strict=True):
        want = np.array(before)
        want[dst] = np.asarray(before)[src]
        np.testing.assert_array_equal(bits(after), bits(want))


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_ignores_padding_pairs(ops, dtype):
    pool = random_pool(dtype)
    src, dst = jnp.asarray([0, 3, 0, 0], jnp.int32), jnp.asarray([7, 1, 8, 12], jnp.int32)
    copied = ops.copy_blocks(pool, src, dst)
    for before, after in zip(pool, copied, strict=True):
        want = np.array(before)
        want[1] = want[3]
        np.testing.assert_array_equal(bits(after), bits(want))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("block_size", [4, 90])
def test_layers_are_copied_as_each_by_itself(dtype, implementation, block_size):
    pools = [random_pool(dtype, block_size=block_size, seed=layer) for layer in range(3)]
    src = jnp.asarray([1, 2, 0, 2, 4, 0], jnp.int32)
    dst = jnp.asarray([2, 1, 7, 3, 5, 12], jnp.int32)
    copied = copy_blocks_of_layers(pools, src, dst, implementation=implementation)
    for pool, after in zip(pools, copied, strict=True):
        for want, got in zip(copy_blocks(pool, src, dst), after, strict=True):
            np.testing.assert_array_equal(bits(got), bits(want))


def test_layers_must_be_alike():
    pools = [random_pool("float32"), random_pool("float32", num_blocks=8)]
    pair = jnp.asarray([1], jnp.int32)
    with pytest.raises(ValueError, match=r"one shape.*\[7, 3, 4, 8\] and float32\[8, 3, 4, 8\]"):
        copy_blocks_of_layers(pools, pair, pair)
