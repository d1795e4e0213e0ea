"""Where a decode step's time goes: each part as a program of its own, at the step's shapes.

attention: the K/V writes and the paged attention of all layers, over donated pools. linear layers: their
projections, one after the other, each fed by the one before it. head: the logits and the argmax. rest of the
program: what the whole program takes beyond those (norms, rotations, the embedding; and whatever the parts
cost less, or more, when compiled alone, so that it can come out near 0 or below). engine: what
`engine.step()` takes beyond the whole program (scheduling, packing, the copy of the ids, detokenizing).
All of them take turns, a median is taken of each, and the differences are those of medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from models.layers import project
from models.loading import load_model
from pallas_kernels import DecodeMetadata, KVPool, paged_attention

BLOCK_SIZE = 16
Cache = tuple[KVPool, ...]


def take_turns(actions: dict[str, Callable[[], None]], rounds: int, steps: int) -> dict[str, float]:
    """The median milliseconds of each action; of the `steps` calls of a turn the first is not counted."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            for step in range(steps):
                start = time.perf_counter()
                action()
                if step:
                    times[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def decode_parts(path: Path, batch: int, context: int, engine_step: Callable[[], None]) -> dict[str, float]:
    """Milliseconds of each part of a float32 step of `batch` rows, each with `context` tokens."""
    decoder = load_model(path, dtype=lambda stated: jnp.dtype(jnp.float32)).decoder
    config = decoder.config
    graphdef, state = nnx.split(decoder)
    leaves, structure = jax.tree.flatten(state)
    blocks = -(-context // BLOCK_SIZE)
    tables = 1 + np.arange(batch * blocks, dtype=np.int32).reshape(batch, blocks)
    position = jnp.full(batch, context - 1, jnp.int32)
    last = (context - 1) % BLOCK_SIZE
    slots = jnp.asarray(tables[:, -1] * BLOCK_SIZE + last)
    metadata = DecodeMetadata(position, slots, jnp.asarray(tables), position + 1)
    shape = (batch * blocks + 1, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    tokens = jnp.arange(1000, 1000 + batch, dtype=jnp.int32)
    q = jnp.ones((batch, config.num_heads, config.head_dim), jnp.float32)
    k = jnp.ones((batch, config.num_kv_heads, config.head_dim), jnp.float32)

    def cache() -> Cache:
        return tuple(KVPool(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(config.num_layers))

    def whole(cache: Cache, leaves: list[Array]) -> tuple[Array, Cache]:
        module: Any = nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))
        hidden, cache = module(tokens, cache, metadata)
        return module.logits(hidden).argmax(-1), cache

    def attention(cache: Cache, leaves: list[Array]) -> tuple[Array, Cache]:
        x, pools = q, list(cache)
        for layer, pool in enumerate(pools):
            x, pools[layer] = paged_attention(x, k, k, pool, metadata)
        return x, tuple(pools)

    def linear(cache: Cache, leaves: list[Array]) -> tuple[Array, Cache]:
        module: Any = nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))
        x = jnp.ones((batch, config.hidden_size))
        for layer in module.layers:
            x = layer.attention.qkv(x)[:, : config.num_heads * config.head_dim]
            x = layer.attention.out(x)
            x = layer.mlp.down(layer.mlp.gate_up(x)[:, : config.intermediate_size])
        return x, cache

    def head(cache: Cache, leaves: list[Array]) -> tuple[Array, Cache]:
        module: Any = nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))
        weight = module.embed.embedding if module.head is None else module.head.weight
        return project(jnp.ones((batch, config.hidden_size)), weight[...]).argmax(-1), cache

    parts = {"program": whole, "attention": attention, "linear layers": linear, "head": head}
    actions = {name: repeated(part, cache(), leaves) for name, part in parts.items()}
    for action in actions.values():
        action()
    times = take_turns({"engine.step()": engine_step} | actions, rounds=4, steps=5)
    program = times.pop("program")
    rest = program - sum(ms for name, ms in times.items() if name != "engine.step()")
    return times | {"rest of the program": rest, "engine": times["engine.step()"] - program}


def repeated(
    part: Callable[[Cache, list[Array]], tuple[Array, Cache]], cache: Cache, leaves: list[Array]
) -> Callable[[], None]:
    """A call of the compiled part, waited for, that hands its donated cache on to the next call."""
    program = jax.jit(part, donate_argnums=0)

    def call() -> None:
        nonlocal cache
        result, cache = program(cache, leaves)
        result.block_until_ready()

    return call
