"""From a path to a decoder with its weights on the device, its tokenizer and its defaults."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels import Implementation

from .checkpoint import open_checkpoint
from .config import DecoderConfig
from .generation import GenerationDefaults
from .llama import LlamaDecoder
from .registry import build_decoder, decoder_class
from .tokenizer import Tokenizer
from .weights import decoder_leaves


@dataclass(frozen=True)
class LoadedModel:
    """All that an engine needs of a model."""

    decoder: LlamaDecoder
    config: DecoderConfig
    tokenizer: Tokenizer
    generation: GenerationDefaults


def load_model(
    model: str | os.PathLike[str],
    *,
    dtype: Callable[[str], jnp.dtype],
    implementation: Implementation = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """Load a Hugging Face directory, a .gguf file or a hub id `org/name`.

    dtype: chooses the weights' dtype, given the name of the one that the checkpoint states. implementation:
    of the paged attention. progress: called with (arrays loaded, arrays in all). Raises what open_checkpoint
    and build_decoder raise.
    """
    checkpoint = open_checkpoint(model)
    decoder_class(checkpoint.config.architecture)
    chosen = dtype(checkpoint.config.dtype)
    leaves = decoder_leaves(checkpoint, chosen, progress)
    decoder = build_decoder(checkpoint.config, leaves, dtype=chosen, implementation=implementation)
    return LoadedModel(decoder, checkpoint.config, checkpoint.tokenizer, checkpoint.generation)
