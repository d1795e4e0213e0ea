"""The decoder through a paged cache computes what it computes over whole sequences.

Every pool starts full of NaN: whatever reads a slot that no token was written to shows.
"""

from functools import cache

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.checkpoints import random_tensors, tiny_config, tiny_vocab
from support.golden_cases import LINEAR, LLAMA3, MISTRAL, QWEN2, TIED, heads
from support.paged_decoder import PagedDecoder, decoder_of
from support.paged_decoder import full_logits as full

VOCAB = len(tiny_vocab())
KINDS = {
    "mha": heads(4, 4, 16),
    "gqa": heads(4, 2, 16),
    "mqa-tied": heads(4, 1, 16) | TIED,
    "wide-heads": heads(4, 2, 32),
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear": LINEAR,
    "llama3": LLAMA3,
    "mistral-window": MISTRAL | {"sliding_window": 5},
    "qwen2": QWEN2,
    "qwen2-half-windows": QWEN2 | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
}
TOLERANCE = 1e-5
"""Of float32 logits, relative to the largest: the order of sums, and nothing else."""


def sequence(length, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


@cache
def make(kind="gqa", dtype=jnp.float32, implementation="auto"):
    config = tiny_config(**KINDS[kind])
    return decoder_of(config, random_tensors(config), dtype, implementation)


def assert_close(got, want, tolerance=TOLERANCE):
    chex.assert_equal_shape([got, want])
    chex.assert_tree_all_finite(got)
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


def steps(paged, tokens, *, prefill, name="a"):
    """Logits at every position: the first `prefill` tokens at once, the others one by one."""
    rows = [*paged.prefill({name: tokens[:prefill]})[name]]
    rows += [paged.decode({name: token})[name] for token in tokens[prefill:]]
    return np.stack(rows)


@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_then_decode_equals_the_whole_sequence_at_every_position(kind, block_size):
    decoder, tokens = make(kind), sequence(45)
    paged = PagedDecoder(decoder, block_size=block_size)
    assert_close(steps(paged, tokens, prefill=33), full(decoder, tokens))


@pytest.mark.parametrize("kind", ["gqa", "mistral-window"])
def test_a_prompt_may_come_in_chunks_of_any_size(kind):
    decoder, tokens = make(kind), sequence(45)
    paged = PagedDecoder(decoder, block_size=8)
    rows, start = [], 0
    for size in (1, 7, 8, 9, 3, 17):
        rows += [*paged.prefill({"a": tokens[start : start + size]})["a"]]
        start += size
    assert_close(np.stack(rows), full(decoder, tokens))


def test_decoding_may_start_from_the_first_token():
    decoder, tokens = make(), sequence(20)
    assert_close(steps(PagedDecoder(decoder, block_size=8), tokens, prefill=1), full(decoder, tokens))


@pytest.mark.parametrize("kind", ["mha", "qwen2-half-windows"])
def test_a_ragged_batch_computes_each_sequence_as_if_alone(kind):
    decoder = make(kind)
    tokens = {name: sequence(length, seed=length) for name, length in (("a", 9), ("b", 24), ("c", 16))}
    prompts = {name: ids[:-6] for name, ids in tokens.items()}
    paged = PagedDecoder(decoder, block_size=8)
    rows = {name: [*logits] for name, logits in paged.prefill(prompts).items()}
    for step in range(-6, 0):
        for name, logits in paged.decode({name: ids[step] for name, ids in tokens.items()}).items():
            rows[name].append(logits)
    for name, ids in tokens.items():
        alone = steps(PagedDecoder(decoder, block_size=8), ids, prefill=len(ids) - 6)
        assert_close(np.stack(rows[name]), alone)
        assert_close(np.stack(rows[name]), full(decoder, ids))


def test_sequences_may_pause_join_and_change_rows():
    decoder = make()
    a, b, c = (sequence(14, seed) for seed in (1, 2, 3))
    paged = PagedDecoder(decoder, block_size=4)
    paged.prefill({"a": a[:10]})
    paged.prefill({"b": b[:10]})
    paged.decode({"b": b[10]})  # a pauses
    paged.decode({"b": b[11], "a": a[10]})
    paged.prefill({"c": c[:13], "a": a[11:13]})  # c joins, a takes two tokens at once
    got = paged.decode({"c": c[13], "b": b[12], "a": a[13]})
    for name, ids in (("a", a), ("b", b[:13]), ("c", c)):
        assert_close(got[name], full(decoder, ids)[-1])


def test_blocks_of_a_released_sequence_serve_the_next_one():
    decoder, old, new = make("mistral-window"), sequence(60, 1), sequence(45, 2)
    paged = PagedDecoder(decoder, block_size=8, num_rows=1)
    paged.prefill({"old": old})
    paged.release("old")
    assert_close(steps(paged, new, prefill=30, name="new"), full(decoder, new))


def test_padding_tokens_and_rows_change_nothing():
    decoder, tokens = make(), sequence(24)
    bare = PagedDecoder(decoder, block_size=8, num_rows=1, num_tokens=20)
    padded = PagedDecoder(decoder, block_size=8, num_rows=7, num_tokens=48)
    assert_close(steps(padded, tokens, prefill=20), steps(bare, tokens, prefill=20))


def test_padding_writes_nothing_to_the_cache():
    paged = PagedDecoder(make(), block_size=8)
    paged.prefill({"a": sequence(9)})
    paged.decode({"a": 1})
    written = np.zeros(paged.cache[0].k.shape, bool)
    first, second = paged.tables["a"].blocks
    written[first], written[second, :, :2] = True, True
    for array in jax.tree.leaves(paged.cache):
        np.testing.assert_array_equal(np.isfinite(np.asarray(array)), written)


def test_what_unused_slots_hold_changes_no_bit():
    decoder, tokens = make(), sequence(24)
    clean, poisoned = (
        steps(PagedDecoder(decoder, block_size=8, poison=value), tokens, prefill=17)
        for value in (0.0, np.nan)
    )
    np.testing.assert_array_equal(clean, poisoned)


def test_a_window_hides_what_lies_behind_it():
    decoder = make("mistral-window")
    tokens = sequence(30)
    reach = 2 * (5 - 1)  # two layers, each of which sees four tokens back
    changed = [(token + 1) % VOCAB for token in tokens[: -reach - 1]] + tokens[-reach - 1 :]
    last = [steps(PagedDecoder(decoder, block_size=8), ids, prefill=20)[-1] for ids in (tokens, changed)]
    assert_close(*last)
    assert np.abs(full(make("gqa"), tokens)[-1] - full(make("gqa"), changed)[-1]).max() > 1e-2


@pytest.mark.parametrize("pool", [jnp.float32, jnp.bfloat16])
def test_bfloat16_weights_agree_within_their_rounding(pool):
    """bfloat16 keeps 8 bits: 0.4 % a rounding, some of them in each of two layers. 4 % of the largest."""
    exact, rounded, tokens = make(), make(dtype=jnp.bfloat16), sequence(45)
    paged = PagedDecoder(rounded, block_size=8, dtype=pool)
    got = steps(paged, tokens, prefill=33)
    assert got.dtype == np.float32
    assert_close(got, full(rounded, tokens), tolerance=0.04)
    assert_close(got, full(exact, tokens), tolerance=0.04)


def test_shapes_and_dtypes():
    decoder = make(dtype=jnp.bfloat16)
    logits = jax.eval_shape(decoder.full_logits, jnp.zeros((2, 5), jnp.int32))
    chex.assert_shape(logits, (2, 5, VOCAB))
    chex.assert_type(logits, jnp.float32)
    chex.assert_shape(jax.eval_shape(decoder.embed, jnp.zeros((2, 3), jnp.int32)), (2, 3, 64))
    chex.assert_shape(jax.eval_shape(decoder.logits, jnp.zeros((7, 64), jnp.bfloat16)), (7, VOCAB))


def test_tied_embeddings_are_the_head_and_untied_ones_are_not():
    tied, untied = make("mqa-tied"), make("gqa")
    assert tied.head is None
    hidden = jnp.eye(64)[:3]
    np.testing.assert_allclose(tied.logits(hidden), tied.embed.embedding[...].T[:3], rtol=1e-6)
    np.testing.assert_allclose(untied.logits(hidden), untied.head.weight[...].T[:3], rtol=1e-6)


def test_one_program_serves_every_step_of_a_shape():
    chex.clear_trace_counter()

    @chex.assert_max_traces(n=2)  # one for prefill, one for decode
    def traced():
        pass

    paged = PagedDecoder(make(), block_size=8, on_trace=traced)
    paged.prefill({"a": sequence(9), "b": sequence(20)})
    paged.prefill({"c": sequence(30)})
    for step in range(5):
        paged.decode({"a": step} if step % 2 else {"a": step, "b": step, "c": step})
    chex.clear_trace_counter()
