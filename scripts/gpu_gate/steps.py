"""Whole steps of a Llama-3-8B shape over a large cache, abstract throughout: the engine's own programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from roofline import DecodeShape

from gpu_gate.compiling import abstract
from gpu_gate.targets import Target
from models.config import DecoderConfig
from models.llama import LlamaDecoder
from paged_jax.buckets import Buckets, ProgramKey, Variant
from paged_jax.capacity import KVShape
from paged_jax.host_pool import swap_blocks
from paged_jax.kv_cache import Cache, allocate_cache
from paged_jax.model_runner import ModelRunner
from paged_jax.rows import allocate_rows

GIB = 1 << 30
BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192
NUM_SEQS = 64
PREFILL_TOKENS = 2048
COPY_KERNELS = frozenset({"copy_blocks_gather", "copy_blocks_scatter"})
"""Two launches for all layers together."""


@dataclass(frozen=True)
class StepProgram:
    """One program of a step, and what is known of it beforehand.

    donated_bytes: what must be aliased. writes: scopes whose kernels must do without atomics. attends: our
    attention kernels are in it. most_launches: a layer's kernels and copies, our own, and XLA's with them
    (its choice of GEMMs differs on a device). kernels: every Pallas kernel, where that is known.
    """

    name: str
    trace: Callable[[], jax.stages.Traced]
    donated_bytes: int
    writes: tuple[str, ...] = ()
    attends: bool = False
    most_launches: tuple[float, float] | None = None
    kernels: frozenset[str] | None = None


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
            platform="cuda",
        )
        cache = jax.eval_shape(
            lambda: allocate_cache(kv, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=dtype)
        )
        read = _num_bytes(state)
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
        return _num_bytes(self.cache)

    @property
    def rows_bytes(self) -> int:
        """The state of the rows."""
        buckets = self.runner.buckets
        return _num_bytes(jax.eval_shape(lambda: allocate_rows(NUM_SEQS, buckets.max_blocks)))

    @property
    def tensor_bytes(self) -> int:
        """One layer's K, half of its pool: no temporary and no copy may be this large."""
        return self.cache[0].k.size * self.cache[0].k.dtype.itemsize

    def decode(self, variant: Variant) -> StepProgram:
        """64 sequences, one token each."""
        return StepProgram(
            "decode" if variant == "greedy" else f"decode, {variant}",
            self._trace(ProgramKey("decode", NUM_SEQS, variant)),
            self.cache_bytes + self.rows_bytes,
            writes=("write_kv", "rows"),
            attends=True,
            most_launches=(4, 20) if variant == "greedy" else None,
        )

    def prefill(self) -> StepProgram:
        """2,048 prompt tokens."""
        key = ProgramKey("prefill", PREFILL_TOKENS)
        return StepProgram("prefill", self._trace(key), self.cache_bytes, ("write_kv",), True, (6, 30))

    def moves(self) -> Iterable[StepProgram]:
        """What a step does beside computing: copy-on-write, new rows, blocks that leave and come back."""
        pairs, blocks = self.runner.buckets.copy_pairs, swap_blocks(self.cache)
        copy, place = ProgramKey("copy", pairs), ProgramKey("place", self.runner.buckets.placed_rows)
        yield StepProgram(
            "copy",
            self._trace(copy),
            self.cache_bytes,
            writes=("copy_blocks",),
            most_launches=(0.1, 0.1),
            kernels=COPY_KERNELS,
        )
        yield StepProgram("place", self._trace(place), self.rows_bytes, writes=("rows",))
        yield StepProgram("swap out", self._trace(ProgramKey("swap_out", blocks)), 0)
        swap_in = self._trace(ProgramKey("swap_in", blocks))
        yield StepProgram("swap in", swap_in, self.cache_bytes, writes=("swap_in",))

    def _trace(self, key: ProgramKey) -> Callable[[], jax.stages.Traced]:
        return partial(self.runner.trace, key, self.cache)


def _num_bytes(tree: object) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
