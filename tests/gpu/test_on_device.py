"""The operations and the engine for real on a GPU: run by scripts/gpu_check.sh, listed by name elsewhere."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.checkpoints import random_tensors, tiny_config, write_hf
from support.paged_cache import assert_matches_oracle, paged
from support.paged_decoder import PagedDecoder, decoder_of

import pallas_kernels as pk
from paged_jax import LLM, SamplingParams

pytestmark = pytest.mark.gpu

STATIC = ("scale", "soft_cap", "sliding_window")
decode = jax.jit(partial(pk.paged_decode_attention, implementation="triton"), static_argnames=STATIC)
prefill = jax.jit(partial(pk.paged_prefill_attention, implementation="triton"), static_argnames=STATIC)

# heads, head_dim, block_size, dtype, options: each value of one beside several of every other
CASES = [
    ((8, 2), 128, 16, "bfloat16", {}),
    ((4, 4), 64, 8, "bfloat16", {"soft_cap": 5.0}),
    ((8, 1), 80, 32, "float16", {"sliding_window": 70}),
    ((9, 3), 96, 64, "bfloat16", {"scale": 0.2, "soft_cap": 9.0, "sliding_window": 33}),
    ((5, 1), 256, 128, "float16", {}),
    ((8, 2), 64, 128, "float32", {"sliding_window": 70}),
    ((4, 4), 128, 64, "float32", {}),
    ((8, 1), 256, 8, "float32", {"soft_cap": 5.0}),
    ((9, 3), 80, 16, "float32", {"scale": 0.2, "soft_cap": 9.0, "sliding_window": 33}),
    ((5, 1), 96, 8, "float32", {}),
    ((16, 2), 128, 32, "float16", {"soft_cap": 5.0}),
    ((16, 2), 256, 16, "bfloat16", {"sliding_window": 70}),
]
LENGTHS = [0, 1, 7, 8, 64, 129, 700]


@pytest.fixture(scope="module", autouse=True)
def on_a_gpu():
    if jax.default_backend() != "gpu":
        pytest.fail(
            f"JAX runs on {jax.default_backend()}, not on a GPU: install jax[cuda13], and see nvidia-smi"
        )


@pytest.mark.parametrize(("heads", "head_dim", "block_size", "dtype", "options"), CASES)
def test_decode_attention(heads, head_dim, block_size, dtype, options):
    case = paged(LENGTHS, heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
    assert_matches_oracle(decode, case, **options)


@pytest.mark.parametrize(("heads", "head_dim", "block_size", "dtype", "options"), CASES)
def test_prefill_attention(heads, head_dim, block_size, dtype, options):
    case = paged(
        [1, 40, 64, 150, 0, 90],
        queries=[1, 40, 3, 70, 0, 1],
        padding=5,
        heads=heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )
    assert_matches_oracle(prefill, case, **options)


@pytest.mark.parametrize("num_seqs", [1, 2, 40, 300])
def test_every_number_of_splits_agrees_with_the_oracle(num_seqs):
    """Few rows over a wide table are split over the context, many are not."""
    lengths = [3000] + [(37 * s) % 50 for s in range(num_seqs - 1)]
    case = paged(lengths, heads=(8, 2), head_dim=64, block_size=16, dtype="bfloat16", extra_columns=64)
    assert_matches_oracle(decode, case)


def test_prefill_and_decode_agree_on_a_single_token():
    case = paged([400, 33], heads=(8, 2), head_dim=128, block_size=16, dtype="bfloat16", queries=[1, 1])
    ours = prefill(*case)
    np.testing.assert_allclose(
        np.asarray(decode(*case[:4]), np.float32), np.asarray(ours, np.float32), rtol=2e-2, atol=2e-2
    )


def random_pool(dtype, num_blocks=40, block_size=16):
    shape = (num_blocks, 2, block_size, 64)
    keys = jax.random.split(jax.random.key(0))
    return pk.KVPool(*(jax.random.normal(key, shape).astype(dtype) for key in keys))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_writes_land_in_their_slots_and_nowhere_else(dtype):
    pool = random_pool(dtype)
    expected = np.array(pool.k, np.float32)
    new = jax.random.normal(jax.random.key(1), (6, 2, 64)).astype(dtype)
    slots = np.array([3, 17, 639, 200, 640, 641], np.int32)  # the last two are padding
    for token, slot in enumerate(slots[:4]):
        expected[slot // 16, :, slot % 16] = np.asarray(new[token], np.float32)
    written = jax.jit(pk.write_kv, donate_argnums=0)(pool, new, new, jnp.asarray(slots))
    np.testing.assert_array_equal(np.asarray(written.k, np.float32), expected)


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_copies_are_simultaneous(dtype, implementation):
    pools = tuple(random_pool(dtype) for _ in range(3))
    expected = np.array(pools[0].v, np.float32)
    expected[[5, 6, 7]] = expected[[6, 5, 9]]  # a swap among them
    copy = jax.jit(partial(pk.copy_blocks_of_layers, implementation=implementation), donate_argnums=0)
    src, dst = jnp.array([6, 5, 9, 0], jnp.int32), jnp.array([5, 6, 7, 40], jnp.int32)
    for pool in copy(pools, src, dst):
        np.testing.assert_array_equal(np.asarray(pool.v, np.float32), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_donated_pools_stay_where_they_are(dtype):
    def step(pools, x, slots, tables, lens, pairs):
        pools = pk.copy_blocks_of_layers(pools, pairs, pairs + 20)
        written = []
        for layer in pools:
            layer = pk.write_kv(layer, x[:, ::4], x[:, ::4], slots)
            x = pk.paged_decode_attention(x, layer, tables, lens, implementation="triton")
            written.append(layer)
        return x, tuple(written)

    pools = tuple(random_pool(dtype) for _ in range(3))
    before = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(pools)]
    ids = jnp.arange(4, dtype=jnp.int32)
    q = jnp.ones((4, 8, 64), dtype)
    tables = jnp.ones((4, 3), jnp.int32)
    _, after = jax.jit(step, donate_argnums=0)(pools, q, 100 + ids, tables, ids + 1, ids)
    assert [array.unsafe_buffer_pointer() for array in jax.tree.leaves(after)] == before


def test_the_decoder_gives_the_same_ids_as_xla():
    config = tiny_config(hidden_size=128, num_attention_heads=8, num_key_value_heads=2, head_dim=64)
    tensors = random_tensors(config)
    prompts = {"a": [1, 5, 9, 2, 7, 3, 11], "b": [4, 4, 8], "c": list(range(2, 24))}
    answers = []
    for implementation in ("triton", "xla"):
        decoder = decoder_of(config, tensors)
        decoder.implementation = implementation
        paged_decoder = PagedDecoder(decoder, block_size=8)
        tokens = {name: int(row[-1].argmax()) for name, row in paged_decoder.prefill(prompts).items()}
        ids = [tokens]
        for _ in range(20):
            tokens = {name: int(row.argmax()) for name, row in paged_decoder.decode(tokens).items()}
            ids.append(tokens)
        answers.append(ids)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_generating_with_the_kernels(tmp_path, dtype):
    write_hf(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": list(range(3, 30))}]
    options = {"num_blocks": 64, "max_num_batched_tokens": 64, "dtype": dtype}
    ids = {}
    for implementation in ("triton", "xla"):
        with LLM(tmp_path, implementation=implementation, **options) as llm:
            outputs = llm.generate(prompts, params)
            ids[implementation] = [output.outputs[0].token_ids for output in outputs]
            assert llm.engine.allocator.num_free_blocks == 63
    assert [len(row) for row in ids["triton"]] == [24, 24]
    if dtype == "float32":
        assert ids["triton"] == ids["xla"]
