"""Which decoder runs which architecture, and how one is built around loaded weights."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels import Implementation

from .config import DecoderConfig
from .errors import UnsupportedModel, WeightsError
from .llama import LlamaDecoder

DECODERS: dict[str, type[LlamaDecoder]] = {
    "LlamaForCausalLM": LlamaDecoder,
    "MistralForCausalLM": LlamaDecoder,
    "Qwen2ForCausalLM": LlamaDecoder,
}
"""Decoder classes by the name that config.json gives under `architectures`."""


def decoder_class(architecture: str) -> type[LlamaDecoder]:
    """The class that runs an architecture; UnsupportedModel lists those there are."""
    try:
        return DECODERS[architecture]
    except KeyError:
        raise UnsupportedModel(
            f"architecture {architecture!r} is not implemented: supported are {', '.join(sorted(DECODERS))}."
        ) from None


def build_decoder(
    config: DecoderConfig,
    leaves: Iterable[tuple[str, np.ndarray]],
    *,
    dtype: jnp.dtype,
    implementation: Implementation = "auto",
) -> LlamaDecoder:
    """A decoder that holds the given parameters, on JAX's default device.

    leaves: (flat name such as "layers.0.mlp.down.weight", array), each parameter exactly once, in the
    dtype it shall have. Each is moved to the device as it comes, so that no second copy of the whole model
    exists. implementation: of the paged attention. WeightsError names what is missing, unknown or mis-shaped.
    """
    build = decoder_class(config.architecture)
    abstract = nnx.eval_shape(
        lambda: build(config, dtype=dtype, rngs=nnx.Rngs(0), implementation=implementation)
    )
    graphdef, state = nnx.split(abstract)
    expected = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    for name, array in leaves:
        leaf = expected.pop(name, None)
        if leaf is None:
            raise WeightsError(f"{name}: not a parameter of {config.architecture}, or given twice.")
        if leaf.shape != array.shape:
            raise WeightsError(f"{name}: shape {array.shape} was given, expected {leaf.shape}.")
        leaf.set_value(jax.device_put(array))
    if expected:
        raise WeightsError(f"missing parameters: {', '.join(sorted(expected)[:10])}.")
    return nnx.merge(graphdef, state)
