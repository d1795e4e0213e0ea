"""The pools on the device, and the size they have where nobody said."""

import jax
import jax.numpy as jnp
import pytest

from paged_jax import kv_cache
from paged_jax.capacity import GIB, KVShape
from paged_jax.kv_cache import allocate_cache, free_ram, kv_bytes_by_default, kv_dtype

KV = KVShape(num_layers=3, num_kv_heads=2, head_dim=8, itemsize=2)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_pool_pair_a_layer_of_zeros(dtype):
    cache = allocate_cache(KV, num_blocks=5, block_size=4, dtype=jnp.dtype(dtype))
    assert len(cache) == 3
    for pool in cache:
        for array in (pool.k, pool.v):
            assert (array.shape, array.dtype) == ((5, 2, 4, 8), dtype)
            assert not array.any()


def test_no_two_pools_share_a_buffer():
    """They are donated, each by itself."""
    arrays = jax.tree.leaves(allocate_cache(KV, num_blocks=5, block_size=4, dtype=jnp.dtype(jnp.float32)))
    assert len({array.unsafe_buffer_pointer() for array in arrays}) == 6


def test_the_pool_has_the_bytes_that_the_arithmetic_says():
    cache = allocate_cache(KV, num_blocks=5, block_size=4, dtype=jnp.dtype(jnp.bfloat16))
    assert sum(array.nbytes for array in jax.tree.leaves(cache)) == 5 * 4 * KV.bytes_per_token


@pytest.mark.parametrize(
    ("backend", "dtype", "kept"),
    [
        ("cpu", jnp.bfloat16, jnp.float32),
        ("cpu", jnp.float16, jnp.float32),
        ("cpu", jnp.float32, jnp.float32),
        ("gpu", jnp.bfloat16, jnp.bfloat16),
        ("gpu", jnp.float32, jnp.float32),
    ],
)
def test_keys_and_values_have_the_weights_dtype_but_on_a_cpu(backend, dtype, kept, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert kv_dtype(jnp.dtype(dtype)) == kept


class Device:
    def __init__(self, stats):
        self.stats = stats

    def memory_stats(self):
        return self.stats


def test_the_default_is_taken_of_the_backends_own_figures(monkeypatch):
    device = Device({"bytes_limit": 100 * GIB, "bytes_in_use": 15 * GIB, "largest_alloc_size": 1})
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert kv_bytes_by_default(5 * GIB) == 64 * GIB


@pytest.mark.parametrize("stats", [None, {}])
def test_a_backend_that_reports_nothing_gets_the_rule_for_free_ram(stats, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [Device(stats)])
    monkeypatch.setattr(kv_cache, "free_ram", lambda: 2 * GIB)
    assert kv_bytes_by_default(0) == GIB // 2


def test_free_ram_is_a_plausible_number_of_bytes():
    assert 1 << 24 < free_ram() < 1 << 50
