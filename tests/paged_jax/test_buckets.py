"""The static shapes that steps are padded to, and how many programs they come to."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_jax.buckets import Buckets, ProgramKey
from paged_jax.schedule import Chunk


def buckets(**options):
    defaults = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "max_prefill_seqs": 16,
        "max_model_len": 100,
        "block_size": 16,
        "platform": "cpu",
    }
    return Buckets(**defaults | options)


def chunks(*sizes):
    return [Chunk(None, 0, size) for size in sizes]


def calls(sizes, **options):
    return [[chunk.num_tokens for chunk in call] for call in buckets(**options).prefill_calls(chunks(*sizes))]


def test_the_default_shapes():
    sizes = buckets()
    assert sizes.decode == [1, 8, 16, 32, 64]
    assert sizes.prefill == [32, 64, 128, 256, 512, 1024, 2048]
    assert (sizes.prefill_seqs, sizes.max_blocks) == (16, 7)
    on_gpu = buckets(platform="cuda")
    assert on_gpu.decode == [1, 8, 64]
    assert on_gpu.prefill == [32, 256, 2048]


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_by_default_there_are_sixteen_programs_swapping_included(platform):
    keys = buckets(platform=platform).program_keys(swap_blocks=32)
    assert len(keys) == len(set(keys)) == 16
    assert len(buckets(platform=platform).program_keys()) == 14


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("max_num_seqs", "more_on_a_gpu"), [(1, 0), (7, 0), (256, 0), (257, 3), (1000, 3), (1024, 3), (5000, 9)]
)
def test_there_are_no_more_for_any_limits_but_sizes_past_a_gpus_free_rows(
    platform, max_num_seqs, more_on_a_gpu
):
    sizes = buckets(platform=platform, max_num_seqs=max_num_seqs, max_num_batched_tokens=100_000)
    assert len(sizes.program_keys(swap_blocks=1)) <= 16 + (more_on_a_gpu if platform == "cuda" else 0)
    assert sizes.decode[0] == 1
    assert sizes.decode[-1] == max_num_seqs


@pytest.mark.parametrize("max_num_seqs", [64, 100, 256, 1000, 1024])
def test_a_cpu_pads_no_decode_step_to_five_times_its_rows_and_a_third(max_num_seqs):
    sizes = buckets(max_num_seqs=max_num_seqs)
    assert max(sizes.decode_size(rows) / rows for rows in range(1, max_num_seqs + 1)) < 16 / 3


@pytest.mark.parametrize("max_num_seqs", [257, 700, 1000, 1024, 1025, 5000, 65_536])
def test_a_gpu_pads_no_decode_step_past_its_free_rows_to_over_four_times_its_rows(max_num_seqs):
    sizes = buckets(platform="cuda", max_num_seqs=max_num_seqs)
    assert sizes.decode[:3] == [1, 32, 256]
    assert all(sizes.decode_size(rows) <= 4.1 * rows for rows in range(257, max_num_seqs + 1))


def test_a_cpu_has_one_sampling_variant_and_a_gpu_three():
    assert {key.variant for key in buckets().program_keys()} == {"full"}
    decode = [key for key in buckets(platform="cuda").program_keys() if key.kind == "decode"]
    assert {key.variant for key in decode} == {"greedy", "temperature", "full"}
    assert buckets(platform="cuda").capturable
    assert not buckets().capturable


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_batch_invariant_runner_has_one_program_of_a_kind(platform):
    keys = buckets(platform=platform, batch_invariant=True, prefill_chunk=96).program_keys()
    assert keys[:2] == [ProgramKey("prefill", 96), ProgramKey("decode", 64, "full")]
    assert [key.kind for key in keys[2:]] == ["place", "copy"]


def test_a_batch_invariant_prefill_holds_one_sequence():
    assert calls([5, 6, 96], batch_invariant=True, prefill_chunk=96) == [[5], [6], [96]]


@pytest.mark.parametrize(("rows", "padded"), [(1, 1), (2, 8), (8, 8), (9, 16), (32, 32), (33, 64), (64, 64)])
def test_a_decode_step_gets_the_smallest_shape_that_holds_it(rows, padded):
    assert buckets().decode_size(rows) == padded


@pytest.mark.parametrize(("tokens", "padded"), [(1, 32), (32, 32), (33, 64), (2048, 2048)])
def test_a_prefill_gets_the_smallest_shape_that_holds_its_tokens(tokens, padded):
    assert buckets().prefill_size(tokens) == padded


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([2048], [[2048]]),
        ([128] * 16, [[128] * 16]),
        ([1] * 17, [[1] * 16, [1]]),  # more sequences than a call has rows
        ([2000, 40, 9], [[2000, 40], [9]]),  # more tokens than it has
        ([1045], [[1024], [21]]),  # 2,048 for a call, 1,024 + 32 for two
        ([1000, 45], [[1000, 24], [21]]),
        ([1000, 10, 20, 15], [[1000, 10, 14], [6, 15]]),
        ([1024, 21], [[1024], [21]]),
        ([1024 + 512 + 1], [[1024 + 512 + 1]]),  # 1,024 + 1,024 with the rest's padding: nothing saved
        ([1024 + 300], [[1024], [256], [44]]),
        ([129], [[128], [1]]),
        ([65], [[65]]),  # 64 + 32 for two calls, 128 for one, but the second call costs 64 itself
    ],
)
def test_chunks_go_in_as_few_calls_as_hold_them_in_order(sizes, expected):
    assert calls(sizes) == expected


def test_a_call_is_not_cut_where_reading_the_weights_again_costs_more():
    assert calls([300], platform="cuda") == [[256], [44]]
    assert calls([1800], platform="cuda") == [[1800]]
    assert calls([33], platform="cuda") == [[33]]


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 400), max_size=40), st.integers(1, 20), st.sampled_from(["cpu", "cuda"]))
def test_cut_calls_compute_every_token_once_in_order(sizes, prefill_seqs, platform):
    shapes = buckets(max_prefill_seqs=prefill_seqs, max_num_batched_tokens=400, platform=platform)
    given_chunks = [Chunk(index, 10 * index, size) for index, size in enumerate(sizes)]
    computed = []
    for call in shapes.prefill_calls(given_chunks):
        assert 0 < len(call) <= prefill_seqs
        assert sum(chunk.num_tokens for chunk in call) <= 400
        for chunk in call:
            assert chunk.num_tokens > 0
            computed += [(chunk.sequence, chunk.start + i) for i in range(chunk.num_tokens)]
    assert computed == [(c.sequence, c.start + i) for c in given_chunks for i in range(c.num_tokens)]


def test_a_chunk_that_no_call_holds_is_refused():
    with pytest.raises(ValueError, match="2049 tokens; prefills hold 2048"):
        calls([2049])


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("min_rows", [1, 8])
@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 100_000), st.data())
def test_every_step_that_the_limits_allow_has_a_shape(platform, min_rows, num_seqs, num_tokens, data):
    sizes = buckets(
        platform=platform, max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens, min_rows=min_rows
    )
    rows = data.draw(st.integers(1, num_seqs))
    tokens = data.draw(st.integers(1, num_tokens))
    assert sizes.decode_size(rows) >= max(rows, min_rows)
    assert sizes.prefill_size(tokens) >= max(tokens, min_rows)
    assert sizes.decode == sorted(set(sizes.decode))
    assert sizes.prefill == sorted(set(sizes.prefill))
    more = 3 * max(0, math.ceil(math.log(num_seqs / 256, 4))) if platform == "cuda" else 0
    assert len(sizes.program_keys(swap_blocks=32)) <= 16 + more
