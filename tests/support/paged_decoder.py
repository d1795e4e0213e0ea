"""A decoder with a paged cache of its own, driven sequence by sequence: the smallest engine there can be."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.checkpoint import Checkpoint
from models.config import DecoderConfig
from models.registry import build_decoder
from models.tensors import LazyTensors
from models.weights import decoder_leaves
from paged_jax.block_allocator import BlockAllocator
from paged_jax.block_table import BlockTable
from paged_jax.compilation_cache import enable_compilation_cache
from pallas_kernels import DecodeMetadata, KVPool, PrefillMetadata


def decoder_of(config: dict, tensors: dict[str, np.ndarray], dtype=jnp.float32, implementation="auto"):
    """A decoder with the given tensors, through the same fusing as a checkpoint's."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    lazy = LazyTensors(shapes, tensors.__getitem__, "tensors of a test")
    checkpoint = Checkpoint(Path(), DecoderConfig.from_hf(config), None, None, lazy)
    leaves = decoder_leaves(checkpoint, dtype)
    return build_decoder(checkpoint.config, leaves, dtype=dtype, implementation=implementation)


def split(decoder):
    """(what is static of a decoder, its arrays), so that equal decoders share their programs."""
    graphdef, state = nnx.split(decoder)
    leaves, structure = jax.tree.flatten(state)
    return (graphdef, structure), leaves


UNOPTIMISED = {"xla_backend_optimization_level": 0}  # compiles in under half the time


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3, compiler_options=UNOPTIMISED)
def _step(static, on_trace, leaves, cache, tokens, metadata):
    on_trace()
    graphdef, structure = static
    decoder = nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))
    hidden, cache = decoder(tokens, cache, metadata)
    return decoder.logits(hidden), cache


@partial(jax.jit, static_argnums=0, compiler_options=UNOPTIMISED)
def _full_logits(static, leaves, tokens):
    graphdef, structure = static
    return nnx.merge(graphdef, jax.tree.unflatten(structure, leaves)).full_logits(tokens)


def full_logits(decoder, tokens: list[int], length: int = 64) -> np.ndarray:
    """Logits [len(tokens), vocab_size] of a whole sequence, padded at its end so that one program serves."""
    padded = jnp.asarray([tokens + [0] * (length - len(tokens))])
    return np.asarray(_full_logits(*split(decoder), padded)[0, : len(tokens)])


def _untraced():
    pass


class PagedDecoder:
    """Sequences have names; a step gives the logits of the tokens it computed.

    Every slot of the pools starts as `poison`. Blocks are handed out in a shuffled order, so that no table
    is ascending. A step is padded to `num_rows` sequences, a prefill to `num_tokens` tokens.
    """

    def __init__(
        self,
        decoder,
        *,
        block_size,
        max_len=64,
        num_rows=4,
        num_tokens=64,
        dtype=jnp.float32,
        poison=np.nan,
        on_trace=_untraced,
    ):
        enable_compilation_cache()
        config = decoder.config
        self.max_blocks = -(-max_len // block_size)
        num_blocks = 1 + num_rows * self.max_blocks
        shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
        full = np.full(shape, poison, np.float32)
        pools = [[jnp.array(full, dtype) for _ in "kv"] for _ in range(config.num_layers)]
        self.cache = tuple(KVPool(k, v) for k, v in pools)
        self.allocator = BlockAllocator(num_blocks, block_size)
        blocks = self.allocator.allocate(num_blocks - 1, owner="shuffle")
        self.allocator.free(np.random.default_rng(0).permutation(blocks).tolist(), owner="shuffle")
        self.tables, self.num_rows, self.num_tokens = {}, num_rows, num_tokens
        static, leaves = split(decoder)
        self._step = partial(_step, static, on_trace, leaves)

    def prefill(self, chunks: dict[object, list[int]]) -> dict[object, np.ndarray]:
        """Appends tokens to each sequence; logits [len(chunk), vocab_size] of each."""
        logits, starts = self._run(chunks, self.num_tokens, decode=False)
        return {name: logits[s : s + len(chunks[name])] for name, s in starts.items()}

    def decode(self, tokens: dict[object, int]) -> dict[object, np.ndarray]:
        """Appends one token to each sequence; logits [vocab_size] of each."""
        logits, starts = self._run({name: [t] for name, t in tokens.items()}, self.num_rows, decode=True)
        return {name: logits[s] for name, s in starts.items()}

    def release(self, name: object) -> None:
        """Gives a sequence's blocks back, and poisons nothing: what they hold stays there."""
        self.tables.pop(name).release()

    def _run(self, chunks, num_tokens, decode):
        total = sum(map(len, chunks.values()))
        assert total <= num_tokens, f"{total} tokens; the harness was built for {num_tokens}"
        num_slots = self.allocator.num_blocks * self.allocator.block_size
        tokens, positions = np.zeros((2, num_tokens), np.int32)
        slots = num_slots + np.arange(num_tokens, dtype=np.int32)
        tables = np.zeros((self.num_rows, self.max_blocks), np.int32)
        seq_lens = np.zeros(self.num_rows, np.int32)
        query_start = np.full(self.num_rows + 1, total, np.int32)
        starts, start = {}, 0
        for row, (name, chunk) in enumerate(chunks.items()):
            table = self.tables.setdefault(name, BlockTable(self.allocator, name))
            span = slice(start, start + len(chunk))
            tokens[span] = chunk
            positions[span] = np.arange(table.num_tokens, table.num_tokens + len(chunk))
            slots[span] = table.append(len(chunk)).slots
            tables[row, : len(table.blocks)] = table.blocks
            seq_lens[row] = table.num_tokens
            query_start[row] = starts[name] = start
            start += len(chunk)
        arrays = [jnp.asarray(a) for a in (positions, slots, tables, seq_lens, query_start)]
        metadata = DecodeMetadata(*arrays[:4]) if decode else PrefillMetadata(*arrays)
        logits, self.cache = self._step(self.cache, jnp.asarray(tokens), metadata)
        return np.asarray(logits), starts
