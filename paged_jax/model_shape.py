"""What of a model decides memory and work: its sizes, and the sums over them. `model_reader` fills it in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paged_jax.capacity import KVShape

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Bytes of a number."""


@dataclass(frozen=True)
class Experts:
    """The feed-forward of a mixture: a token goes through `active` of `count` experts, and all shared ones.

    width: of one expert; shared_width: of the shared ones together; num_layers: how many layers have experts.
    """

    count: int
    active: int
    width: int
    num_layers: int
    shared_width: int = 0
    shared_gate: bool = False


@dataclass(frozen=True)
class ModelShape:
    """A decoder as its config states it.

    layer_windows: how many of the latest positions a layer sees, None for all. gated: the feed-forward has
    three matrices (SwiGLU), not two. norm_parameters: scales, which this engine keeps in float32.
    position_parameters: of learned positions. dtype: of the stored weights. estimated: the family is not
    known, so that parameters are reckoned as a Llama's of these sizes. plan_only: why the engine can not run
    it, or None where it can. notes: what a reader of the figures should know.
    """

    name: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tie_word_embeddings: bool
    layer_windows: tuple[int | None, ...]
    max_position_embeddings: int | None
    dtype: str
    norm_parameters: int
    position_parameters: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    gated: bool = True
    experts: Experts | None = None
    estimated: bool = False
    plan_only: str | None = None
    notes: tuple[str, ...] = ()

    def kv(self, itemsize: int) -> KVShape:
        """What a token's keys and values take, with numbers of so many bytes."""
        return KVShape(self.num_layers, self.num_kv_heads, self.head_dim, itemsize)

    @property
    def num_parameters(self) -> int:
        """All of them, shared embeddings counted once."""
        experts = self.experts
        return self._dense + (experts.num_layers * experts.count * self._expert if experts else 0)

    @property
    def active_parameters(self) -> int:
        """Those that one token goes through."""
        experts = self.experts
        return self._dense + (experts.num_layers * experts.active * self._expert if experts else 0)

    def weight_bytes(self, itemsize: int) -> int:
        """Of all parameters on the device: itemsize bytes each, the norms' scales four."""
        return self.num_parameters * itemsize + self.norm_parameters * (4 - itemsize)

    def step_weight_bytes(self, itemsize: int, batch: int) -> float:
        """Bytes of weights that a decode step reads: each matrix once, however many sequences share it.

        Of an embedding that is not the head too, a few rows are read, which do not count. Of experts, those
        that at least one of the tokens chooses, if all choose alike often: 1 - (1 - active / count)^batch.
        """
        read = self.weight_bytes(itemsize)
        if not self.tie_word_embeddings:
            read -= self.embedding_parameters * itemsize
        if self.experts is None:
            return read
        experts = self.experts
        untouched = (1 - experts.active / experts.count) ** batch
        return read - untouched * experts.num_layers * experts.count * self._expert * itemsize

    def step_flops(self, context: int) -> int:
        """FLOPs of one token: 2 for each parameter that it is multiplied with, and its attention.

        context: tokens that it attends to, in each layer as many as the window shows. Attention takes two
        products of head_dim for each of them and each head.
        """
        multiplied = self.active_parameters - self.norm_parameters - self.position_parameters
        if not self.tie_word_embeddings:
            multiplied -= self.embedding_parameters
        return 2 * multiplied + 4 * self.num_heads * self.head_dim * self.attended(context)

    def step_kv_bytes(self, itemsize: int, context: int) -> int:
        """Keys and values that one token's attention reads, over all layers."""
        return 2 * self.num_kv_heads * self.head_dim * itemsize * self.attended(context)

    def attended(self, context: int) -> int:
        """Tokens that the layers see of so many, summed over them."""
        return sum(context if window is None else min(window, context) for window in self.layer_windows)

    @property
    def embedding_parameters(self) -> int:
        """Of the input embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def widest_layer(self) -> int:
        """The feed-forward's width that a token goes through."""
        if self.experts is None:
            return self.intermediate_size
        return max(
            self.intermediate_size, self.experts.active * self.experts.width + self.experts.shared_width
        )

    @property
    def _dense(self) -> int:
        """Everything but the experts that are chosen among."""
        embeddings = self.embedding_parameters * (1 if self.tie_word_embeddings else 2)
        return sum((embeddings, self.norm_parameters, self.position_parameters, *self._layers()))

    @property
    def _expert(self) -> int:
        return self._feed_forward(self.experts.width) if self.experts else 0

    def _layers(self) -> Iterable[int]:
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 2 * self.hidden_size * (width + kv_width)
        attention += (width + 2 * kv_width) * self.qkv_bias + self.hidden_size * self.out_bias
        yield self.num_layers * attention
        sparse = self.experts.num_layers if self.experts else 0
        yield (self.num_layers - sparse) * self._feed_forward(self.intermediate_size)
        if self.experts:
            router = self.hidden_size * (self.experts.count + self.experts.shared_gate)
            yield sparse * (router + self._feed_forward(self.experts.shared_width))

    def _feed_forward(self, width: int) -> int:
        matrices = 3 if self.gated else 2
        biases = ((matrices - 1) * width + self.hidden_size) * self.mlp_bias if width else 0
        return matrices * self.hidden_size * width + biases
