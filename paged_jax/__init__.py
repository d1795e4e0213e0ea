"""Text generation in JAX over a paged KV cache.

The names below load on first use, so that importing the package, or any host-side module, imports no jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paged_jax import errors
    from paged_jax.beam_params import BeamSearchParams
    from paged_jax.block_allocator import BlockAllocator
    from paged_jax.block_table import BlockTable
    from paged_jax.llm import LLM
    from paged_jax.sampling_params import SamplingParams

__version__ = "0.1.0"

_HOME = {
    "BeamSearchParams": "paged_jax.beam_params",
    "BlockAllocator": "paged_jax.block_allocator",
    "BlockTable": "paged_jax.block_table",
    "LLM": "paged_jax.llm",
    "SamplingParams": "paged_jax.sampling_params",
}

__all__ = ["LLM", "BeamSearchParams", "BlockAllocator", "BlockTable", "SamplingParams", "errors"]


def __getattr__(name: str) -> object:
    if name == "errors":
        return importlib.import_module("paged_jax.errors")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
