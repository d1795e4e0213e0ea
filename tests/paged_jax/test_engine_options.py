"""The options of an engine: each is checked by itself, and those that need each other together."""

import dataclasses

import numpy as np
import pytest

from paged_jax.audit import AuditLog
from paged_jax.engine_options import EngineOptions
from paged_jax.errors import InvalidArgument

NAN, INF = float("nan"), float("inf")


def test_the_defaults():
    options = EngineOptions()
    assert (options.block_size, options.max_num_seqs, options.max_num_batched_tokens) == (16, 64, 2048)
    assert (options.enable_prefix_caching, options.warm_up, options.batch_invariant) == (True, True, False)
    assert (options.preemption_mode, options.swap_space_gib) == ("auto", 4.0)
    assert options.logprobs_mode == "raw"


WRONG = {
    "dtype": ["int3", None, 32, ["float32"]],
    "implementation": ["cuda", None, True],
    "preemption_mode": ["swop", None, True, ["swap"]],
    "logprobs_mode": ["cooked", None, 1],
    "block_size": [0, 1.0, True, "16", None],
    "max_num_seqs": [0, -1, 1.5, None, 2**16 + 1],
    "max_num_batched_tokens": [2**20 + 1, 0, "2048", None],
    "max_model_len": [1, 2.5, "64"],
    "num_blocks": [1, 2.0],
    "kv_cache_gib": [0, 0.0, -1, NAN, INF, True, "4", 10**400],
    "swap_space_gib": [-1, -0.1, NAN, INF, True, "4", None, 10**400],
    "kv_audit": [True, []],
    "seed": [-1, 1.0, True],
    "enable_prefix_caching": [0, 1, None, "yes"],
    "batch_invariant": [0, 1, None, "yes"],
    "warm_up": [0, 1, None, "yes"],
}


@pytest.mark.parametrize(("field", "value"), [(name, value) for name in WRONG for value in WRONG[name]])
def test_a_wrong_value_is_refused_and_the_option_named(field, value):
    with pytest.raises(InvalidArgument, match=f"^{field}=.*: expected "):
        EngineOptions(**{field: value})


def test_every_option_is_tried_above():
    assert {field.name for field in dataclasses.fields(EngineOptions)} == set(WRONG)


RIGHT = {
    "dtype": ["auto", "float32", "bfloat16", "float16"],
    "implementation": ["auto", "triton", "xla"],
    "preemption_mode": ["auto", "recompute", "swap"],
    "logprobs_mode": ["raw", "processed"],
    "block_size": [1, np.int32(32)],
    "max_num_seqs": [1, 2**16],
    "max_model_len": [None, 2],
    "num_blocks": [None, 2],
    "kv_cache_gib": [None, 1e-9, 1, np.float32(0.5)],
    "swap_space_gib": [0, 0.0, 1e-9, 64, np.float32(0.5)],
    "kv_audit": [None, AuditLog()],
    "seed": [None, 0],
    "enable_prefix_caching": [True, False],
    "batch_invariant": [True, False],
    "warm_up": [True, False],
}


@pytest.mark.parametrize(("field", "value"), [(name, value) for name in RIGHT for value in RIGHT[name]])
def test_a_value_on_the_boundary_is_accepted(field, value):
    assert getattr(EngineOptions(**{field: value}), field) == value


def test_numbers_of_numpy_are_kept_as_plain_ones():
    options = EngineOptions(block_size=np.int64(8), swap_space_gib=np.float32(0.5))
    assert (type(options.block_size), type(options.swap_space_gib)) == (int, float)
    assert type(EngineOptions(swap_space_gib=1).swap_space_gib) is float


def test_the_pool_is_sized_once():
    with pytest.raises(InvalidArgument, match=r"num_blocks=9 and kv_cache_gib=1: .*give one"):
        EngineOptions(num_blocks=9, kv_cache_gib=1)


def test_swapping_needs_a_place_to_swap_to():
    with pytest.raises(InvalidArgument, match=r"preemption_mode='swap' and swap_space_gib=0: .* above 0"):
        EngineOptions(preemption_mode="swap", swap_space_gib=0)
    for mode in ("auto", "recompute"):
        assert EngineOptions(preemption_mode=mode, swap_space_gib=0).preemption_mode == mode


def test_batch_invariance_swaps():
    assert EngineOptions(batch_invariant=True).preemption_mode == "swap"
    assert EngineOptions(batch_invariant=True, preemption_mode="swap").preemption_mode == "swap"
    with pytest.raises(InvalidArgument, match="batch_invariant=True and preemption_mode='recompute'"):
        EngineOptions(batch_invariant=True, preemption_mode="recompute")
    with pytest.raises(InvalidArgument, match="batch_invariant=True and swap_space_gib=0"):
        EngineOptions(batch_invariant=True, swap_space_gib=0)
