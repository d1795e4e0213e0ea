"""Alike layers of a step share one trace and one lowering, and the compiled program is none the worse."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.checkpoints import random_tensors, tiny_config
from support.golden_cases import QWEN2
from support.paged_decoder import decoder_of, split

from models import llama
from pallas_kernels import DecodeMetadata, KVPool, PrefillMetadata

NUM_LAYERS, NUM_SEQS, NUM_TOKENS, MAX_BLOCKS, BLOCK_SIZE, NUM_BLOCKS = 4, 3, 16, 2, 8, 1024
ALIKE = {"num_hidden_layers": NUM_LAYERS}
WINDOWS = ALIKE | QWEN2 | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}


def step_of(changes=ALIKE, *, decode=True, dtype=jnp.float32, num_blocks=NUM_BLOCKS):
    """(step, its arguments): a decode step after two tokens a sequence, or a prefill from the start."""
    config = tiny_config(**changes)
    decoder = decoder_of(config, random_tensors(config), dtype)
    (graphdef, structure), leaves = split(decoder)

    def step(cache, leaves, tokens, metadata):
        module = nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))
        return module(tokens, cache, metadata)

    rng = np.random.default_rng(0)
    shape = (num_blocks, decoder.config.num_kv_heads, BLOCK_SIZE, decoder.config.head_dim)
    pools = [[jnp.array(rng.normal(size=shape), jnp.float32) for _ in "kv"] for _ in range(NUM_LAYERS)]
    tables = 1 + np.arange(NUM_SEQS * MAX_BLOCKS, dtype=np.int32).reshape(NUM_SEQS, MAX_BLOCKS)
    num_tokens = NUM_SEQS if decode else NUM_TOKENS
    each = num_tokens // NUM_SEQS
    seqs, places = np.divmod(np.arange(num_tokens), each)
    positions = places + (2 if decode else 0)
    slots = np.where(seqs < NUM_SEQS, tables[seqs % NUM_SEQS, 0] * BLOCK_SIZE + positions, 10**6 + places)
    arrays = [positions, slots, tables, np.full(NUM_SEQS, 3 if decode else each)]
    kind = DecodeMetadata if decode else PrefillMetadata
    if not decode:
        arrays.append(np.arange(NUM_SEQS + 1) * each)
    metadata = kind(*(jnp.asarray(array, jnp.int32) for array in arrays))
    tokens = jnp.asarray(rng.integers(0, decoder.config.vocab_size, num_tokens), jnp.int32)
    return step, (tuple(KVPool(k, v) for k, v in pools), leaves, tokens, metadata)


def layer_calls(step, args):
    """The inner programs that a step calls for its layers, in order."""
    equations = jax.jit(step).trace(*args).jaxpr.eqns
    return [e.params["jaxpr"] for e in equations if e.params.get("name") == "_paged_layer"]


@pytest.mark.parametrize("decode", [True, False])
def test_every_layer_calls_the_same_trace(decode):
    calls = layer_calls(*step_of(decode=decode))
    assert len(calls) == NUM_LAYERS
    assert len({id(call) for call in calls}) == 1


def test_layers_with_another_window_have_a_trace_of_their_own():
    calls = layer_calls(*step_of(WINDOWS))
    assert [call is calls[0] for call in calls] == [True, True, False, False]
    assert calls[2] is calls[3]


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_layers_are_lowered_once(platform, decode):
    step, args = step_of(decode=decode)
    text = jax.jit(step, donate_argnums=0).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    assert len(re.findall(r"func\.func private @_paged_layer", text)) == 1
    assert len(re.findall(r"call @_paged_layer", text)) == NUM_LAYERS
    if platform == "cuda":
        # What "auto" leaves: a choice by a constant, which XLA folds, and one branch, the kernel.
        indices = re.findall(r'"stablehlo\.case"\((%\w+)\)', text)
        assert len(indices) == 2
        assert re.search(rf"{indices[0]} = stablehlo.constant dense<\d> : tensor<i32>", text)
        assert "stablehlo.while" not in text
        assert "triton" in text


@pytest.mark.parametrize("decode", [True, False])
def test_the_pools_are_updated_in_place_through_the_calls(decode):
    step, args = step_of(decode=decode)
    memory = jax.jit(step, donate_argnums=0).lower(*args).compile().memory_analysis()
    sizes = [array.nbytes for array in jax.tree.leaves(args[0])]
    assert memory.alias_size_in_bytes == sum(sizes)
    assert memory.temp_size_in_bytes < min(sizes)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("decode", [True, False])
def test_a_call_changes_no_bit(monkeypatch, decode, dtype):
    """Against the same layers traced one by one."""
    step, args = step_of(decode=decode, dtype=dtype, num_blocks=16)
    called = jax.jit(step)(*args)
    inner = llama._paged_layer.__wrapped__
    monkeypatch.setattr(llama, "_paged_layer", inner)
    step, args = step_of(decode=decode, dtype=dtype, num_blocks=16)
    assert not layer_calls(step, args)
    traced = jax.jit(step)(*args)
    for got, want in zip(jax.tree.leaves(called), jax.tree.leaves(traced), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
