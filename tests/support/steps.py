"""A runner with sequences that a test moves by hand: what a scheduler decides, written out."""

import jax.numpy as jnp

from paged_jax import BlockAllocator, BlockTable, SamplingParams
from paged_jax.buckets import Buckets
from paged_jax.capacity import KVShape
from paged_jax.compilation_cache import enable_compilation_cache
from paged_jax.kv_cache import allocate_cache
from paged_jax.model_runner import ModelRunner
from paged_jax.schedule import Chunk, Schedule
from paged_jax.sequence import Request, RequestMetrics, Sequence


def make_sequence(allocator, tokens, row=None, *, prompt=None, seed=0, index=0, stop=(), **params):
    """A sequence without blocks. prompt: how many of the tokens are the prompt's, all unless told."""
    params = {"temperature": 0} | params
    request = Request(
        request_id=f"row {row}",
        prompt=None,
        prompt_token_ids=list(tokens[:prompt]),
        params=SamplingParams(**params),
        max_new_tokens=100,
        stop_token_ids=frozenset(stop),
        seed=seed,
        metrics=RequestMetrics(arrival_time=0.0),
    )
    table = BlockTable(allocator, request.request_id)
    return Sequence(request, index, table, token_ids=list(tokens), row=row)


class Steps:
    """Few program shapes: decodes of one row and of four, one prefill of 32 tokens."""

    def __init__(
        self,
        decoder,
        *,
        num_blocks=64,
        block_size=4,
        num_host_blocks=0,
        dtype=jnp.float32,
        logprobs_mode="raw",
        **buckets,
    ):
        enable_compilation_cache()
        config, dtype = decoder.config, jnp.dtype(dtype)
        defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_prefill_seqs": 4}
        limits = {"max_model_len": 64, "block_size": block_size}
        self.buckets = Buckets(**defaults | limits | buckets)
        self.runner = ModelRunner(decoder, self.buckets, logprobs_mode=logprobs_mode)
        self.allocator = BlockAllocator(num_blocks, block_size)
        kv = KVShape(config.num_layers, config.num_kv_heads, config.head_dim, dtype.itemsize)
        cache = allocate_cache(kv, num_blocks=num_blocks, block_size=block_size, dtype=dtype)
        self.runner.allocate(cache, num_host_blocks)

    def sequence(self, tokens, row, **options):
        return make_sequence(self.allocator, tokens, row, **options)

    def chunk(self, sequence, num_tokens=None):
        """The sequence's next part to prefill: all that it lacks, or so many tokens."""
        start = sequence.table.num_tokens
        num_tokens = sequence.num_to_prefill if num_tokens is None else num_tokens
        sequence.table.append(num_tokens)
        return Chunk(sequence, start, num_tokens)

    def start(self, *sequences, **schedule):
        """Place, prefill and decode in one step; the tokens are appended."""
        chunks = [self.chunk(s) for s in sequences if s.num_to_prefill]
        return self.decode(*sequences, prefill=chunks, placed=list(sequences), **schedule)

    def decode(self, *sequences, **schedule):
        """One token each, appended."""
        copies = [pair for sequence in sequences for pair in sequence.table.append(1).copies]
        sampled = self.runner.execute(Schedule(decode=list(sequences), copies=copies, **schedule))
        for sequence, token in zip(sequences, sampled.tokens, strict=True):
            sequence.token_ids.append(token)
        return sampled

    def finish(self, *sequences):
        for sequence in sequences:
            sequence.table.release()

    def forget(self):
        """All blocks are free again, whoever held them."""
        self.allocator = BlockAllocator(self.allocator.num_blocks, self.allocator.block_size)
