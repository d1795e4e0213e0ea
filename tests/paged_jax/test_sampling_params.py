"""SamplingParams: every field is checked where it is written, and the record is as plain as a tuple."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest

from paged_jax import SamplingParams
from paged_jax.errors import InvalidArgument, InvalidSamplingParams
from paged_jax.sampling_params import MAX_LOGPROBS, MAX_SUPPRESSED_IDS, UNSET

NAN, INF = float("nan"), float("inf")


def test_the_defaults_sample_from_the_whole_distribution():
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (1.0, 0, 1.0, None)
    assert (params.max_tokens, params.stop_token_ids, params.ignore_eos) == (UNSET, (), False)
    assert (params.min_tokens, params.stop, params.include_stop_str_in_output) == (0, (), False)
    assert params.logprobs is None
    assert not params.is_greedy
    assert not params.filters


@pytest.mark.parametrize(
    ("unknown", "meant"),
    [
        ("temprature", "temperature"),
        ("maxtokens", "max_tokens"),
        ("topk", "top_k"),
        ("stop_token_id", "stop_token_ids"),
        ("logprob", "logprobs"),
        ("mintokens", "min_tokens"),
    ],
)
def test_an_unknown_field_is_named_with_the_likely_one(unknown, meant):
    with pytest.raises(InvalidSamplingParams, match=rf"{unknown}=3: no such .* Did you mean {meant}\?"):
        SamplingParams(**{unknown: 3})


def test_an_unknown_field_like_no_other_gets_the_list_of_fields():
    with pytest.raises(InvalidSamplingParams) as caught:
        SamplingParams(zzz=1)
    assert "Did you mean" not in str(caught.value)
    for field in dataclasses.fields(SamplingParams):
        assert field.name in str(caught.value)


WRONG = {
    "temperature": [-0.1, -1e-9, NAN, INF, -INF, True, "1", None, [1.0], 1j, 10**400],
    "top_p": [0, -0.1, 1.0001, 2, NAN, INF, True, "1", None],
    "top_k": [-2, 1.0, 1.5, True, "5", None, NAN],
    "seed": [-1, 2**64, 1.0, True, "1"],
    "max_tokens": [0, -1, 1.0, 1.5, True, "16", NAN],
    "stop_token_ids": [5, None, "12", b"12", [1.0], [-1], [True], ["a"], [[1]], [None]],
    "ignore_eos": [0, 1, None, "yes"],
    "min_tokens": [-1, 1.0, True, "1", None, NAN],
    "stop": [
        None,
        5,
        b"x",
        [b"x"],
        {"a"},
        {"a": 1},
        iter("ab"),
        "",
        [""],
        ["a", ""],
        [None],
        ["a", 5],
        [["a"]],
    ],
    "include_stop_str_in_output": [0, 1, None, "yes"],
    "logprobs": [-1, 21, 1.0, True, False, "5", NAN],
}


@pytest.mark.parametrize(("field", "value"), [(name, value) for name in WRONG for value in WRONG[name]])
def test_a_wrong_value_is_refused_and_the_field_named(field, value):
    with pytest.raises(InvalidSamplingParams, match=f"^{field}=.*: expected "):
        SamplingParams(**{field: value})
    with pytest.raises(InvalidArgument, match=f"^{field}="):
        dataclasses.replace(SamplingParams(), **{field: value})


RIGHT = {
    "temperature": [0, 0.0, 1e-30, 1, 2.5, 1e30],
    "top_p": [1e-30, 0.5, 1, 1.0],
    "top_k": [-1, 0, 1, 10**9, 2**40],
    "seed": [None, 0, 2**64 - 1],
    "max_tokens": [None, UNSET, 1, 10**12],
    "stop_token_ids": [(), [], [0, 7], (10**9,), {3}, range(3)],
    "ignore_eos": [True, False],
    "min_tokens": [0, 1, 10**12],
    "stop": [(), [], ["a"], ("a", "b"), [" "], ["\n\n", "\n"], ["a", "a"]],
    "include_stop_str_in_output": [True, False],
    "logprobs": [None, 0, 1, MAX_LOGPROBS],
}


@pytest.mark.parametrize(("field", "value"), [(name, value) for name in RIGHT for value in RIGHT[name]])
def test_a_value_on_the_boundary_is_accepted(field, value):
    kept = getattr(SamplingParams(**{field: value}), field)
    assert kept == (tuple(value) if field in ("stop_token_ids", "stop") else value)


def test_one_string_is_one_stop_string():
    assert SamplingParams(stop="END").stop == ("END",)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (1, 1), (5, 5), (5, None), (5, UNSET)])
def test_min_tokens_up_to_max_tokens_are_accepted(low, high):
    assert SamplingParams(min_tokens=low, max_tokens=high).min_tokens == low


def test_min_tokens_above_max_tokens_are_refused_and_both_named():
    with pytest.raises(InvalidSamplingParams, match=r"^min_tokens=6: expected 5 at most.* max_tokens=5"):
        SamplingParams(min_tokens=6, max_tokens=5)


@pytest.mark.parametrize(
    ("given", "default", "limit"),
    [(UNSET, 16, 16), (UNSET, None, None), (None, 16, None), (3, 16, 3), (30, 16, 30), (30, None, 30)],
)
def test_a_default_stands_in_for_max_tokens_only_where_none_was_given(given, default, limit):
    assert SamplingParams(max_tokens=given).max_tokens_or(default) == limit


def test_min_tokens_above_the_default_max_tokens_are_refused():
    params = SamplingParams(min_tokens=17)
    with pytest.raises(InvalidSamplingParams, match=r"min_tokens=17: .* the default max_tokens=16"):
        params.max_tokens_or(16)
    assert params.max_tokens_or(None) is None
    assert SamplingParams(min_tokens=16).max_tokens_or(16) == 16


def test_the_end_ids_are_the_models_own_unless_ignored_and_the_users():
    assert SamplingParams(stop_token_ids=[1, 2]).end_ids([2, 3]) == {1, 2, 3}
    assert SamplingParams(stop_token_ids=[1], ignore_eos=True).end_ids([2, 3]) == {1}
    assert SamplingParams().end_ids([]) == frozenset()


def test_min_tokens_hold_back_so_many_end_ids_and_no_more():
    for extra in (0, 1):
        params = SamplingParams(min_tokens=1, stop_token_ids=range(MAX_SUPPRESSED_IDS - 1 + extra))
        if extra:
            with pytest.raises(InvalidSamplingParams, match=r"min_tokens=1 with 65 end ids .* 64 at most"):
                params.end_ids([99])
        else:
            assert len(params.end_ids([99])) == MAX_SUPPRESSED_IDS
        assert len(params.end_ids([0])) == MAX_SUPPRESSED_IDS - 1 + extra  # one in both counts once
    assert len(SamplingParams(stop_token_ids=range(100)).end_ids([])) == 100


@pytest.mark.parametrize(
    ("field", "value", "kept"),
    [
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", np.float64(0.5), 0.5),
        ("temperature", np.int64(0), 0.0),
        ("top_p", np.float16(0.5), 0.5),
        ("top_k", np.int32(5), 5),
        ("seed", np.uint64(2**64 - 1), 2**64 - 1),
        ("max_tokens", np.int64(3), 3),
        ("stop_token_ids", np.array([1, 2]), (1, 2)),
        ("min_tokens", np.int8(3), 3),
        ("logprobs", np.uint8(5), 5),
        ("stop", [np.str_("a")], ("a",)),
    ],
)
def test_numbers_of_numpy_are_kept_as_plain_ones(field, value, kept):
    params = SamplingParams(**{field: value})
    got = getattr(params, field)
    assert got == kept
    assert type(got) is type(kept)
    assert hash(params) == hash(SamplingParams(**{field: kept}))


@pytest.mark.parametrize("value", [np.float32("nan"), np.bool_(True), np.array(1.0), np.float32("inf")])
def test_what_is_no_number_in_numpy_is_none_here(value):
    with pytest.raises(InvalidSamplingParams, match=r"^temperature="):
        SamplingParams(temperature=value)


def test_it_is_frozen_hashable_and_compares_by_value():
    params = SamplingParams(temperature=0, stop_token_ids=[1, 2])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0
    assert {params: 1}[SamplingParams(temperature=0.0, stop_token_ids=(1, 2))] == 1
    assert params != SamplingParams(temperature=0)


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(0.5, 3, 0.9, 7, None, (1,), True, 2, "a", True, 3)]
)
def test_copies_and_pickles_are_equal(params):
    for again in (copy.copy(params), copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert again == params
    assert pickle.loads(pickle.dumps(SamplingParams())).max_tokens is UNSET


@pytest.mark.parametrize(
    ("fields", "filters"),
    [
        ({}, False),
        ({"top_k": 5}, True),
        ({"top_p": 0.9}, True),
        ({"top_k": -1}, False),
        ({"temperature": 0, "top_k": 5, "top_p": 0.5}, False),
    ],
)
def test_only_a_row_that_removes_tokens_pays_for_it(fields, filters):
    assert SamplingParams(**fields).filters == filters
