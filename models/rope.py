"""Rotary position embeddings (Su et al., RoFormer, arXiv:2104.09864), half-split as Hugging Face lays them.

Kinds: plain, linear (position interpolation, arXiv:2306.15595) and llama3 (the frequency-dependent scaling
of Llama 3.1).
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from .config import DecoderConfig


def inverse_frequencies(config: DecoderConfig) -> np.ndarray:
    """Radians a position for each pair of dimensions, after scaling: [head_dim / 2] float32."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies.astype(np.float32)
    if scaling.kind == "linear":
        return (frequencies / scaling.factor).astype(np.float32)
    # llama3: long wavelengths are interpolated, short ones kept, those between blended.
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings / wavelengths
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return ((1 - keep) * frequencies / scaling.factor + keep * frequencies).astype(np.float32)


def rotation(positions: Array, frequencies: np.ndarray) -> tuple[Array, Array]:
    """Cosines and sines of each position's angles: two [..., head_dim / 2] float32 arrays."""
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Turn the pairs (x[i], x[i + head_dim / 2]); x: [..., num_heads, head_dim], any float dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
