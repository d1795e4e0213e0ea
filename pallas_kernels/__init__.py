"""Stateless ops on arrays over a paged KV cache. Imports jax and nothing of this project."""

import warnings

from pallas_kernels.block_copy import copy_blocks, copy_blocks_of_layers
from pallas_kernels.decode_attention import paged_decode_attention
from pallas_kernels.dispatch import Implementation, supports_triton
from pallas_kernels.kv_write import write_kv
from pallas_kernels.metadata import DecodeMetadata, Metadata, PrefillMetadata, paged_attention
from pallas_kernels.pool import KVPool
from pallas_kernels.prefill_attention import paged_prefill_attention

__all__ = [
    "DecodeMetadata",
    "Implementation",
    "KVPool",
    "Metadata",
    "PrefillMetadata",
    "copy_blocks",
    "copy_blocks_of_layers",
    "paged_attention",
    "paged_decode_attention",
    "paged_prefill_attention",
    "supports_triton",
    "write_kv",
]

# From jax 0.11 on each lowering of a kernel warns; the supported versions of jax all have the backend.
warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
