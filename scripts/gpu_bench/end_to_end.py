"""Whole decode steps on random weights: packing, transfer, program and the tokens back on the host."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
from flax import nnx

from models.config import DecoderConfig
from models.llama import LlamaDecoder
from paged_jax.block_allocator import BlockAllocator
from paged_jax.block_table import BlockTable
from paged_jax.buckets import Buckets
from paged_jax.capacity import KVShape
from paged_jax.kv_cache import allocate_cache
from paged_jax.model_runner import ModelRunner
from paged_jax.sampling_params import SamplingParams
from paged_jax.schedule import Schedule
from paged_jax.sequence import Request, RequestMetrics, Sequence

BLOCK_SIZE = 16


def config_of(*, tiny: bool) -> DecoderConfig:
    """The shape of Llama-3.2-1B, or one that a CPU can interpret."""
    hidden, width, layers, heads, kv_heads, vocab = (
        (64, 128, 2, 4, 2, 256) if tiny else (2048, 8192, 16, 32, 8, 128256)
    )
    return DecoderConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        }
    )


def decode_step(*, tiny: bool, num_seqs: int, context: int, steps: int) -> dict[str, float]:
    """Milliseconds a step (the median), and the bytes that a step must read."""
    config, dtype = config_of(tiny=tiny), jnp.dtype(jnp.float32 if tiny else jnp.bfloat16)
    decoder = LlamaDecoder(config, dtype=dtype, rngs=nnx.Rngs(0), implementation="triton")
    max_len = context + steps + 2
    buckets = Buckets(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs,
        max_prefill_seqs=1,
        max_model_len=max_len,
        block_size=BLOCK_SIZE,
    )
    runner = ModelRunner(decoder, buckets)
    kv = KVShape(config.num_layers, config.num_kv_heads, config.head_dim, dtype.itemsize)
    allocator = BlockAllocator(num_seqs * buckets.max_blocks + 1, BLOCK_SIZE)
    runner.allocate(allocate_cache(kv, num_blocks=allocator.num_blocks, block_size=BLOCK_SIZE, dtype=dtype))
    sequences = [_sequence(allocator, i, context) for i in range(num_seqs)]
    times = []
    for step in range(steps + 1):
        start = time.perf_counter()
        for sequence in sequences:
            sequence.table.append(1)
        schedule = Schedule(decode=sequences, placed=[] if step else sequences)
        tokens = runner.execute(schedule).tokens
        times.append(time.perf_counter() - start)
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.token_ids.append(token)
    weights = runner.weight_bytes
    runner.close()
    median = sorted(times[1:])[steps // 2]
    return {
        "ms": 1e3 * median,
        "weight_bytes": weights,
        "kv_bytes": num_seqs * context * kv.bytes_per_token,
        "num_seqs": num_seqs,
        "context": context,
        "on_gpu": jax.default_backend() == "gpu",
    }


def _sequence(allocator: BlockAllocator, index: int, context: int) -> Sequence:
    """A sequence whose context counts as computed: the cache's zeros do for a measurement."""
    metrics = RequestMetrics(0.0)
    params = SamplingParams(temperature=0.0)
    request = Request(str(index), None, [1] * context, params, 1 << 20, frozenset(), 0, metrics)
    sequence = Sequence(request, 0, BlockTable(allocator, index), row=index)
    sequence.table.append(context - 1)
    return sequence
