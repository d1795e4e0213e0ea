"""One's own Flax module over the paged cache: block tables on the host, a jitted step, a donated pool."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paged_jax import BlockAllocator, BlockTable
from pallas_kernels import DecodeMetadata, KVPool, paged_attention

BLOCK_SIZE, NUM_BLOCKS, MAX_BLOCKS, HEADS, HEAD_DIM, VOCAB = 4, 32, 8, 2, 16, 50


class OwnModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, HEADS * HEAD_DIM, rngs=rngs)
        self.qkv = nnx.Linear(HEADS * HEAD_DIM, 3 * HEADS * HEAD_DIM, rngs=rngs)
        self.head = nnx.Linear(HEADS * HEAD_DIM, VOCAB, rngs=rngs)

    def __call__(self, tokens, pool, metadata):
        x = self.embed(tokens)
        q, k, v = (part.reshape(-1, HEADS, HEAD_DIM) for part in jnp.split(self.qkv(x), 3, axis=-1))
        out, pool = paged_attention(q, k, v, pool, metadata)
        return jnp.argmax(self.head(x + out.reshape(x.shape)), axis=-1), pool


def generate(prompts, num_tokens):
    graph, weights = nnx.split(OwnModel(nnx.Rngs(0)))
    step = jax.jit(lambda weights, *inputs: nnx.merge(graph, weights)(*inputs), donate_argnums=2)
    shape = (NUM_BLOCKS, HEADS, BLOCK_SIZE, HEAD_DIM)
    pool = KVPool(jnp.zeros(shape), jnp.zeros(shape))
    allocator = BlockAllocator(NUM_BLOCKS, BLOCK_SIZE)
    tables = [BlockTable(allocator, owner=row) for row in range(len(prompts))]
    texts = [list(prompt) for prompt in prompts]
    for i in range(max(map(len, texts)) + num_tokens - 1):  # prompts go in token by token, for brevity
        slots = np.array([table.append(1).slots[0] for table in tables], np.int32)
        rows = np.array([(table.blocks + [0] * MAX_BLOCKS)[:MAX_BLOCKS] for table in tables], np.int32)
        positions = np.full(len(tables), i, np.int32)
        metadata = DecodeMetadata(positions, slots, block_tables=rows, seq_lens=positions + 1)
        tokens, pool = step(weights, jnp.array([text[i] for text in texts]), pool, metadata)
        for text, token in zip(texts, tokens.tolist(), strict=True):
            if len(text) == i + 1:
                text.append(token)
    return [text[: len(prompt) + num_tokens] for text, prompt in zip(texts, prompts, strict=True)]


if __name__ == "__main__":
    print(generate([[3, 1, 4], [1, 5, 9, 2, 6, 5]], num_tokens=6))
