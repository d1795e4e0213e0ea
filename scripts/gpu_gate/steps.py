"""Whole steps of a Llama-3-8B shape over a large cache, abstract throughout: the engine's own programs."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from roofline import DecodeShape

from gpu_gate.compiling import abstract
from gpu_gate.targets import Target
from models.config import DecoderConfig
from models.llama import LlamaDecoder
from paged_jax.batch import BatchShape, Variant
from paged_jax.capacity import KVShape
from paged_jax.kv_cache import Cache, allocate_cache
from paged_jax.model_runner import Buckets, ModelRunner

GIB = 1 << 30
BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192
NUM_SEQS = 64
PREFILL_TOKENS = 2048
COPY_PAIRS = 64


def llama_3_8b(num_layers: int = 32) -> DecoderConfig:
    """The published shape, or the same with fewer layers."""
    return DecoderConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "max_position_embeddings": MAX_MODEL_LEN,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }
    )


@dataclass(frozen=True)
class AbstractEngine:
    """A runner without weights and a cache without memory, placed on a target."""

    config: DecoderConfig
    runner: ModelRunner
    cache: Cache
    weight_bytes: int

    @classmethod
    def on(cls, target: Target, *, num_layers: int = 32, kv_gib: float = 40.0) -> AbstractEngine:
        """bfloat16; kv_gib is what 32 layers take: with fewer, a layer's pool stays as large."""
        config, device, dtype = llama_3_8b(num_layers), target.device(), jnp.dtype(jnp.bfloat16)
        kv = KVShape(num_layers, config.num_kv_heads, config.head_dim, dtype.itemsize)
        num_blocks = int(kv_gib * GIB / 32 * num_layers) // (BLOCK_SIZE * kv.bytes_per_token)
        module = nnx.eval_shape(lambda: LlamaDecoder(config, dtype=dtype, rngs=nnx.Rngs(0)))
        graphdef, state = nnx.split(module)
        decoder = nnx.merge(graphdef, abstract(state, device))
        buckets = Buckets(
            max_num_seqs=NUM_SEQS,
            max_num_batched_tokens=PREFILL_TOKENS,
            max_prefill_seqs=16,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
        )
        cache = jax.eval_shape(
            lambda: allocate_cache(kv, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=dtype)
        )
        read = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        read -= config.vocab_size * config.hidden_size * dtype.itemsize  # the embedding: a row a token
        return cls(config, ModelRunner(decoder, buckets), abstract(cache, device), read)

    def decode_bytes(self, context: int) -> int:
        """What a decode step must read: every weight once, and the keys and values of NUM_SEQS sequences."""
        attention = DecodeShape(
            NUM_SEQS, context, self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        )
        return self.weight_bytes + self.config.num_layers * attention.kv_bytes

    @property
    def cache_bytes(self) -> int:
        """All pools."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.cache))

    @property
    def tensor_bytes(self) -> int:
        """One layer's K, half of its pool: no temporary and no copy may be this large."""
        return self.cache[0].k.size * self.cache[0].k.dtype.itemsize

    def decode(self, variant: Variant = "greedy") -> jax.stages.Traced:
        """The step of 64 sequences, one token each."""
        shape = BatchShape("decode", NUM_SEQS, NUM_SEQS, self.runner.buckets.max_blocks)
        return self.runner.trace(self.cache, shape, variant)

    def prefill(self) -> jax.stages.Traced:
        """The step of 2,048 prompt tokens."""
        return self.runner.trace(self.cache, self.runner.buckets.largest_prefill, "greedy")

    def copy(self) -> jax.stages.Traced:
        """The copy-on-write copies of a step, in every layer."""
        return self.runner.trace_copies(self.cache, COPY_PAIRS)
