"""Stateless ops on arrays over a paged KV cache. Imports jax and nothing of this project."""

from pallas_kernels.block_copy import copy_blocks
from pallas_kernels.decode_attention import paged_decode_attention
from pallas_kernels.kv_write import write_kv
from pallas_kernels.metadata import DecodeMetadata, Metadata, PrefillMetadata, paged_attention
from pallas_kernels.pool import KVPool
from pallas_kernels.prefill_attention import paged_prefill_attention

__all__ = [
    "DecodeMetadata",
    "KVPool",
    "Metadata",
    "PrefillMetadata",
    "copy_blocks",
    "paged_attention",
    "paged_decode_attention",
    "paged_prefill_attention",
    "write_kv",
]
