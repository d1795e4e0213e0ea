"""Rotary embeddings against the formulas, written out pair by pair in float64."""

import cmath
import math

import jax.numpy as jnp
import numpy as np
import pytest
from support.checkpoints import tiny_config
from support.golden_cases import LINEAR, LLAMA3

from models.config import DecoderConfig
from models.rope import inverse_frequencies, rotate, rotation


def config(head_dim=64, theta=10_000.0, **changes):
    return DecoderConfig.from_hf(tiny_config(head_dim=head_dim, rope_theta=theta, **changes))


def plain(pair, head_dim, theta):
    return theta ** (-2 * pair / head_dim)


def llama3(frequency, factor=8.0, low=1.0, high=4.0, original=64):
    """Llama 3.1: by how many turns the original context makes, interpolate, blend or keep."""
    turns = original * frequency / (2 * math.pi)
    if turns < low:
        return frequency / factor
    if turns > high:
        return frequency
    share = (turns - low) / (high - low)
    return frequency * (share + (1 - share) / factor)


@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize(
    ("scaling", "expected"),
    [({}, lambda f: f), (LINEAR, lambda f: f / 4), (LLAMA3, llama3)],
    ids=["plain", "linear", "llama3"],
)
def test_frequencies(head_dim, theta, scaling, expected):
    got = inverse_frequencies(config(head_dim, theta, **scaling))
    want = [expected(plain(pair, head_dim, theta)) for pair in range(head_dim // 2)]
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_llama3_uses_all_three_of_its_ranges():
    plain_ones = inverse_frequencies(config())
    ratios = np.round(inverse_frequencies(config(**LLAMA3)) / plain_ones, 6)
    assert ratios[0] == 1
    assert ratios[-1] == 0.125
    assert any(0.125 < ratio < 1 for ratio in ratios)


@pytest.mark.parametrize("position", [0, 1, 7, 255, 8191])
def test_pairs_turn_by_position_times_frequency(position):
    """As complex numbers. A float32 frequency and product leave an angle exact to 2^-23 of the position."""
    x = np.random.default_rng(position).standard_normal((3, 64))
    frequencies = inverse_frequencies(config())
    got = rotate(jnp.asarray(x, jnp.float32), *rotation(jnp.asarray(position), frequencies))
    want = np.empty_like(x)
    for head in range(3):
        for pair in range(32):
            turn = cmath.exp(1j * position * plain(pair, 64, 10_000.0))
            turned = complex(x[head, pair], x[head, pair + 32]) * turn
            want[head, pair], want[head, pair + 32] = turned.real, turned.imag
    tolerance = 2e-6 + position * 2.0**-23 * np.abs(x).max() * 2**0.5
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)


def test_a_product_depends_on_the_distance_alone():
    q, k = np.random.default_rng(0).standard_normal((2, 1, 64)).astype(np.float32)
    frequencies = inverse_frequencies(config(**LLAMA3))

    def product(at, to):
        turned = [rotate(x, *rotation(jnp.asarray(p), frequencies)) for x, p in ((q, at), (k, to))]
        return float(jnp.vdot(*turned))

    assert product(12, 5) == pytest.approx(product(107, 100), abs=1e-4)
    assert product(12, 5) != pytest.approx(product(12, 6), abs=1e-2)


def test_each_token_turns_by_its_own_position_and_keeps_its_dtype():
    x = jnp.ones((4, 2, 64), jnp.bfloat16)
    frequencies = inverse_frequencies(config())
    positions = jnp.asarray([5, 0, 2, 5])
    turned = rotate(x, *rotation(positions, frequencies))
    assert turned.dtype == jnp.bfloat16
    assert turned.shape == x.shape
    np.testing.assert_array_equal(turned[0], turned[3])
    np.testing.assert_array_equal(turned[1], x[1])
    assert np.abs(np.asarray(turned[2] - turned[0], np.float32)).max() > 0.5


def test_rotation_keeps_lengths():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((16, 2, 80)), jnp.float32)
    turned = rotate(x, *rotation(jnp.arange(16), inverse_frequencies(config(80))))
    np.testing.assert_allclose(jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5)
