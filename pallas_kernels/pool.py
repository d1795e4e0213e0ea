"""The K and V arrays of one layer's cache. Shapes only: who owns which block is decided by the host."""

from typing import NamedTuple

import jax


class KVPool(NamedTuple):
    """One layer's paged cache.

    k, v: [num_blocks, num_kv_heads, block_size, head_dim], of one floating dtype. Block 0 is the null block:
    padding entries of a block table point at it and no op lets its contents reach a result.
    """

    k: jax.Array
    v: jax.Array

    @property
    def num_blocks(self) -> int:
        """Physical blocks, the null block included."""
        return self.k.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads."""
        return self.k.shape[1]

    @property
    def block_size(self) -> int:
        """Tokens a block holds."""
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        """Elements of one head's key or value."""
        return self.k.shape[3]
