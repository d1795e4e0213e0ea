"""Plans: the article's numbers, the engine's own pool, and what each figure means."""

import dataclasses
import io
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.checkpoints import demo_gguf

from paged_jax import engine_builder
from paged_jax.block_sizes import block_size_choices, efficiency_of, expected_waste, recommend
from paged_jax.capacity import GIB, KVShape, PoolSize, blocks_for_tokens, default_kv_bytes
from paged_jax.decode_roofline import DecodeRoofline
from paged_jax.demand import Demand
from paged_jax.devices import DEVICES, device_of
from paged_jax.errors import InvalidArgument, PoolTooSmall
from paged_jax.known_models import known_model
from paged_jax.model_lookup import find_shape
from paged_jax.plan_dict import plan_dict
from paged_jax.plan_memory import activation_bytes, with_headroom
from paged_jax.plan_options import PlanOptions
from paged_jax.plan_report import print_plan
from paged_jax.plan_verdict import judge
from paged_jax.planner import make_plan
from paged_jax.request_trace import Lengths, Trace, made_up_trace

from .conftest import load

LLAMA_2 = known_model("llama-2-7b")


def trace_of(*requests):
    """Requests as (arrival, prompt, answer)."""
    arrivals, prompts, outputs = (np.array(column) for column in zip(*requests, strict=True))
    return Trace(
        "file", arrivals.astype(float), prompts, outputs, tuple(f"line {i + 2}" for i in range(len(prompts)))
    )


def plan(shape=LLAMA_2, **options):
    return make_plan(shape, PlanOptions(**options))


def shown(made):
    console = Console(width=400, file=io.StringIO())
    print_plan(made, console)
    return console.file.getvalue()


# -- the article's numbers ---------------------------------------------------------------------------------


def test_forty_gib_in_blocks_of_32_are_2560_and_a_given_size_gets_no_headroom():
    made = plan(kv_cache_gib=40, block_size=32)
    assert made.kv.bytes_per_token == 512 * 1024
    assert (made.planned.fitting_blocks, made.pool.num_blocks, made.pool.usable_blocks) == (2560, 2560, 2559)
    assert (made.planned.source, made.planned.problems) == ("given", ())
    assert plan_dict(made)["headroom"] == 0
    assert "null block counted: its size was given, so it gets no headroom" in shown(made)


def test_a_sequence_of_2048_takes_a_gib_and_32_requests_of_4096_take_64():
    record = plan_dict(plan(kv_cache_gib=40, concurrency=32))
    assert record["sequence_bytes"] == {"2048": GIB, "4096": 2 * GIB}
    assert record["concurrent_bytes"]["max_model_len"] == 64 * GIB
    assert record["bytes_per_token_sum"] == "32 layers x 2 x 32 heads x 128 x 2 bytes = 512 KiB"


@pytest.mark.parametrize(("block_size", "percent"), [(64, 6), (32, 3), (16, 1.5)])
def test_on_a_mean_of_500_tokens_the_tail_wastes_about_what_the_article_says(block_size, percent):
    assert expected_waste(block_size, 500) * 100 == pytest.approx(percent, abs=0.1)
    row = next(one for one in plan(kv_cache_gib=40).block_sizes if one.block_size == block_size)
    assert row.expected_waste == expected_waste(block_size, 500)
    assert row.rule_of_thumb == block_size / 1000


def test_what_a_device_leaves_is_reckoned_like_the_engines_default():
    made = plan(device=DEVICES["a100-80"])
    limit = int(DEVICES["a100-80"].memory_bytes * 0.75)
    memory = made.memory
    assert memory.limit_bytes == limit
    assert memory.left_bytes == limit - memory.weight_bytes - memory.activation_bytes
    assert made.planned.fitting_blocks == int(memory.left_bytes * 0.8) // (16 * 512 * 1024)
    assert made.pool.num_blocks == made.planned.fitting_blocks


def test_a_share_of_a_named_device_may_be_given_and_a_size_in_bytes_is_taken_whole():
    assert plan(device=DEVICES["h200"], memory_fraction=0.9).memory.limit_bytes == int(
        DEVICES["h200"].memory_bytes * 0.9
    )
    assert plan(device=device_of("24GiB")).memory.limit_bytes == 24 * GIB


def test_a_default_pool_is_no_larger_than_its_sequences_can_use():
    made = plan(device=DEVICES["h200"], concurrency=2, max_model_len=1024)
    assert made.pool.num_blocks == 2 * 64 + 1 < made.planned.fitting_blocks


# -- the engine agrees -------------------------------------------------------------------------------------

ENGINES = [
    {"num_blocks": 9},
    {"num_blocks": 65, "max_model_len": 40},
    {"num_blocks": 7, "max_model_len": 24, "block_size": 5},
    {"kv_cache_gib": 0.001},
    {"kv_cache_gib": 0.0000625},
    {"kv_cache_gib": 0.0005, "max_model_len": 33, "block_size": 16},
    {"num_blocks": 40, "max_num_seqs": 2, "max_num_batched_tokens": 64},
]


@pytest.mark.parametrize("options", ENGINES, ids=str)
def test_the_engine_has_the_pool_that_the_plan_says(options, tiny_path):
    given = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32} | options
    with load(tiny_path, **given) as llm:
        runner, allocator = llm.engine.runner, llm.engine.allocator
        given["concurrency"] = given.pop("max_num_seqs")
        made = plan(find_shape(tiny_path), dtype="float32", **given)
        assert made.pool == llm.pool
        assert made.memory.weight_bytes == runner.weight_bytes
        assert made.kv == llm.kv_shape
        assert made.shape.num_parameters == runner.num_parameters
        assert made.pool.num_blocks == allocator.num_blocks
        assert made.pool.usable_blocks == allocator.num_free_blocks
        assert made.pool.block_bytes == runner.block_bytes
        assert made.pool.num_bytes == sum(pool.k.nbytes + pool.v.nbytes for pool in runner.cache)
        assert made.max_model_len == llm.max_model_len == llm.engine.max_model_len
        assert llm.describe().startswith(made.pool.describe(made.memory.weight_bytes) + "; ")
        assert plan_dict(made)["ledger"] in llm.describe()


@pytest.mark.parametrize(
    ("blocks", "max_model_len", "expected", "longest"),
    [(99, None, 65, 64), (50, None, 50, 64), (10, None, 10, 36), (99, 40, 41, 40), (30, 40, 30, 40)],
)
def test_a_default_pool_is_the_plans_where_the_backend_reports_the_same_memory(
    blocks, max_model_len, expected, longest, tiny_path, monkeypatch
):
    shape = find_shape(tiny_path)
    used = shape.weight_bytes(4) + activation_bytes(shape, 4, 32, 4)
    memory = used + int((blocks + 0.5) * 4 * shape.kv(4).bytes_per_token / 0.8)
    made = plan(
        shape,
        dtype="float32",
        device=dataclasses.replace(device_of("1GiB"), memory_bytes=memory),
        block_size=4,
        concurrency=4,
        max_num_batched_tokens=32,
        max_model_len=max_model_len,
    )
    monkeypatch.setattr(
        engine_builder,
        "kv_bytes_by_default",
        lambda temporaries: default_kv_bytes(
            device_limit=memory,
            device_in_use=made.memory.weight_bytes,
            largest_temporaries=made.memory.activation_bytes,
            free_ram=0,
        ),
    )
    with load(tiny_path, max_model_len=max_model_len) as llm:
        assert llm.pool == made.pool
        assert made.planned.source == "device"
        assert made.planned.fitting_blocks == blocks
        assert (made.pool.num_blocks, made.max_model_len) == (expected, longest)


@pytest.mark.parametrize("options", [{"num_blocks": 3, "max_model_len": 40}, {"kv_cache_gib": 1e-9}])
def test_what_the_engine_would_refuse_the_plan_tells_in_the_same_words(options, tiny_path):
    with pytest.raises(PoolTooSmall) as refused:
        load(tiny_path, **options)
    made = plan(find_shape(tiny_path), dtype="float32", block_size=4, **options)
    assert made.planned.problems == (str(refused.value),)
    assert "the engine would refuse this" in shown(made)


def test_the_demo_models_ledger_is_the_engines():
    with load(
        demo_gguf(), num_blocks=33, block_size=16, max_num_seqs=2, max_num_batched_tokens=64, dtype="float32"
    ) as llm:
        made = plan(find_shape(demo_gguf()), dtype="float32", num_blocks=33, concurrency=2)
        assert made.pool == llm.pool
        assert made.memory.weight_bytes == llm.engine.runner.weight_bytes
        assert made.kv.bytes_per_token == 46_080
        assert llm.describe().startswith(plan_dict(made)["ledger"])


def test_the_estimate_of_activations_is_near_what_was_compiled_for_gpus():
    """277 MB on an A100 and 228 MB on an H200: Llama 3 8B, 2,048 tokens a step, 64 rows."""
    assert 228e6 < activation_bytes(known_model("llama-3-8b"), 2, 2048, 64) < 277e6


# -- what requests ask of a pool ---------------------------------------------------------------------------

LENGTHS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=20)


@settings(deadline=None)
@given(lengths=LENGTHS, block_size=st.integers(1, 20), concurrency=st.integers(1, 25))
def test_the_sums_over_requests_are_those_of_counting_token_by_token(lengths, block_size, concurrency):
    demand = Demand(trace_of(*((0, prompt, output) for prompt, output in lengths)))
    held = [prompt + step for prompt, output in lengths for step in range(output)]
    blocks = [math.ceil(tokens / block_size) for tokens in held]
    assert demand.mean_held_tokens == pytest.approx(sum(held) / len(held))
    assert demand.mean_held_blocks(block_size) == pytest.approx(sum(blocks) / len(blocks))
    final = [math.ceil((prompt + output - 1) / block_size) for prompt, output in lengths]
    tokens = sum(prompt + output - 1 for prompt, output in lengths)
    assert demand.tail_waste(block_size) == pytest.approx(1 - tokens / (sum(final) * block_size))
    peak = demand.peak_blocks(concurrency, block_size)
    if concurrency <= len(final):
        windows = [sum(final[i : i + concurrency]) for i in range(len(final) - concurrency + 1)]
        assert peak == max(windows)
    else:
        assert peak == math.ceil(sum(final) * concurrency / len(final))


def test_the_expected_waste_describes_the_aggregate_better_than_the_rule_of_thumb():
    trace = made_up_trace(20_000, prompt=Lengths(200, 150), output=Lengths(50, 40))
    measured = Demand(trace).tail_waste(64)
    by_formula = expected_waste(64, float(trace.total_tokens.mean()))
    assert measured == pytest.approx(by_formula, rel=0.02)
    assert abs(measured - by_formula) < abs(measured - 64 / 500)


def test_the_least_reservation_for_99_percent_admits_as_many_and_one_token_less_does_not():
    totals = np.arange(2, 1002)
    demand = Demand(trace_of(*((0, 1, int(total) - 1) for total in totals)))
    enough = demand.reservation()
    assert (totals <= enough).mean() >= 0.99 > (totals <= enough - 1).mean()


def test_requests_in_flight_are_counted_at_the_fullest_moment():
    demand = Demand(trace_of((0, 1, 10), (5, 1, 10), (9, 1, 10), (30, 1, 10)))
    assert demand.at_once(lambda batch: 1.0, busy_share=0, most=9) == 3
    assert demand.at_once(lambda batch: 0.5, busy_share=0, most=9) == 2  # one ends just as the next comes
    assert demand.at_once(lambda batch: 0.5, busy_share=0.5, most=9) == 3
    assert demand.at_once(lambda batch: 0.1 * batch, busy_share=0, most=9) == 1
    assert demand.at_once(lambda batch: 1.0, busy_share=0, most=2) is None
    assert demand.at_once(lambda batch: 1.0, busy_share=1.0, most=9) is None


def test_concurrency_comes_from_arrivals_where_a_device_tells_how_fast_they_are_served():
    slow = made_up_trace(300, prompt=Lengths(200), output=Lengths(100), requests_per_second=1)
    made = plan(device=DEVICES["h100"], trace=slow)
    assert 1 <= made.concurrency.num_seqs < 20
    assert "roofline's speed: at least" in made.concurrency.source
    fast = dataclasses.replace(slow, arrival_s=slow.arrival_s / 1000)
    queues = plan(device=DEVICES["h100"], trace=fast)
    assert "has to queue" in queues.concurrency.source
    assert queues.concurrency.num_seqs * queues.demand.mean_held_tokens <= queues.memory.pool_bytes / (
        queues.kv.bytes_per_token
    )
    assert plan(trace=slow).concurrency.num_seqs == 64
    assert plan(device=DEVICES["h100"], trace=slow, concurrency=7).concurrency.num_seqs == 7
    at_once = made_up_trace(300, prompt=Lengths(200), output=Lengths(100))
    assert plan(device=DEVICES["h100"], trace=at_once).concurrency.num_seqs == 64


def test_a_trace_says_how_many_blocks_its_peak_needs_with_a_fifth_to_spare():
    trace = trace_of((0, 30, 3), (1, 60, 5), (2, 1, 1))
    made = plan(kv_cache_gib=1, trace=trace, concurrency=2)
    assert made.peak_blocks == 2 + 4
    assert made.recommended_blocks == with_headroom(6) == 8 + 1
    assert with_headroom(0) == 1
    assert with_headroom(4) == 6
    told = shown(made)
    assert "peak, measured" in told
    assert "6 blocks: the most that 2 requests, one after the other in the trace, hold when they end" in told


def test_without_a_device_or_a_size_the_pool_is_what_the_requests_need():
    made = plan(trace=trace_of((0, 30, 3), (1, 60, 5)), concurrency=2)
    assert (made.planned.source, made.pool.num_blocks, made.planned.headroom) == ("demand", 9, 0.2)
    most = plan(concurrency=3, max_model_len=100)
    assert (most.pool.num_blocks, most.planned.headroom) == (3 * 7 + 1, 0)


def test_a_request_that_no_sequence_can_be_is_refused_by_line_or_skipped():
    trace = trace_of((0, 10, 10), (1, 4000, 97))
    with pytest.raises(
        InvalidArgument, match=r"line 3: prompt 4000 \+ answer 97 = 4097 tokens.*max_model_len"
    ):
        plan(kv_cache_gib=40, trace=trace)
    made = plan(kv_cache_gib=40, trace=trace, skip_invalid=True)
    assert len(made.demand.trace.skipped) == 1
    assert "1 requests skipped, the first: line 3" in shown(made)


def test_a_request_larger_than_the_pool_is_refused_by_line_or_skipped():
    trace = trace_of((0, 10, 10), (1, 100, 100))
    options = {"num_blocks": 9, "trace": trace}
    with pytest.raises(InvalidArgument, match=r"line 3: .*expected 128 at most"):
        plan(**options)
    assert len(plan(**options, skip_invalid=True).demand.trace) == 1
    options = {"kv_cache_gib": 9 * 8 / 1024, "trace": trace}
    with pytest.raises(InvalidArgument, match=r"line 3: .*expected 128 at most, what the pool holds"):
        plan(**options)
    assert plan_dict(plan(**options, skip_invalid=True))["requests"]["skipped"] == 1


# -- block sizes -------------------------------------------------------------------------------------------


def choices(mean, kv=None, measured=None):
    return block_size_choices(
        kv or KVShape(32, 8, 128, 2),
        max_num_seqs=64,
        max_model_len=4096,
        mean_tokens=mean,
        measured_waste=measured,
    )


@pytest.mark.parametrize(
    ("mean", "expected"), [(20, 8), (250, 16), (500, 32), (1000, 64), (2000, 128), (50_000, 128)]
)
def test_the_largest_block_that_wastes_little_is_recommended(mean, expected):
    size, reason = recommend(choices(mean))
    assert size == expected
    assert "% of the slots stay empty" in reason


def test_what_was_measured_counts_more_than_the_formula():
    size, _ = recommend(choices(500, measured=lambda size: 0.0 if size <= 64 else 0.5))
    assert size == 64


def test_tables_and_reads_are_sized_for_every_block_size():
    rows = choices(500)
    assert [row.block_size for row in rows] == [8, 16, 32, 64, 128]
    assert [row.table_bytes for row in rows] == [4 * 64 * 4096 // row.block_size for row in rows]
    assert [row.run_bytes for row in rows] == [row.block_size * 128 * 2 for row in rows]
    assert [row.efficiency for row in rows] == ["fair", "good", "good", "good", "good"]
    assert [efficiency_of(size) for size in (0, 2047, 2048, 4095, 4096)] == [
        *("poor", "poor", "fair", "fair", "good")
    ]


def test_whether_the_tables_sit_in_the_l2_cache_is_told_where_the_device_is_known():
    assert plan_dict(plan(device=DEVICES["h100"]))["block_tables"] == {
        "bytes": 64 * 256 * 4,
        "l2_bytes": 50 << 20,
        "in_l2": True,
    }
    large = plan(
        known_model("llama-3.1-8b"), device=DEVICES["l4"], block_size=1, concurrency=200, num_blocks=99
    )
    assert large.table_bytes == 4 * 200 * 98
    wide = plan(known_model("llama-3.1-8b"), device=DEVICES["h100"], block_size=1, concurrency=999)
    assert plan_dict(wide)["block_tables"]["in_l2"] == (wide.table_bytes <= 50 << 20)
    assert plan_dict(plan(kv_cache_gib=1))["block_tables"]["in_l2"] is None


# -- the roofline ------------------------------------------------------------------------------------------


def test_a_decode_step_takes_at_least_its_bytes_over_the_bandwidth():
    step = DecodeRoofline(LLAMA_2, DEVICES["a100-80"].rates, 2, 2).step(1, 2048)
    read = 2 * (LLAMA_2.num_parameters - 32000 * 4096) + 2 * LLAMA_2.norm_parameters + 2049 * 524_288
    assert step.num_bytes == read
    assert step.seconds == step.memory_seconds == read / 2.039e12
    assert step.bound == "bandwidth"


def test_large_batches_of_short_contexts_are_bound_by_compute_and_long_ones_by_bandwidth():
    roofline = DecodeRoofline(known_model("llama-3-8b"), DEVICES["h100"].rates, 2, 2)
    assert roofline.step(512, 64).bound == "compute"
    assert roofline.step(512, 8192).bound == "bandwidth"
    slow = DecodeRoofline(known_model("llama-3-8b"), DEVICES["a100-80"].rates, 4, 4)
    assert slow.step(64, 64).compute_seconds == pytest.approx(64 * slow.shape.step_flops(64) / 19.5e12)


@given(
    batch=st.integers(1, 256),
    context=st.integers(1, 10_000),
    name=st.sampled_from(["llama-3-8b", "mixtral-8x7b", "mistral-7b"]),
)
def test_more_sequences_and_longer_ones_never_take_less(batch, context, name):
    roofline = DecodeRoofline(known_model(name), DEVICES["l4"].rates, 2, 2)
    step = roofline.step(batch, context)
    assert step.seconds <= roofline.step(batch + 1, context).seconds
    assert step.seconds <= roofline.step(batch, context + 1).seconds


def test_the_plan_shows_batches_up_to_256_and_which_of_them_there_is_room_for():
    made = plan(device=DEVICES["a100-80"])
    assert [step.batch for step in made.roofline] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    each = blocks_for_tokens(2048, 16)
    assert made.fits == tuple(step.batch * each <= made.planned.fitting_blocks - 1 for step in made.roofline)
    assert plan_dict(plan(device=device_of("24GiB")))["roofline"] is None


# -- contiguous, and the verdict ---------------------------------------------------------------------------


def test_paging_holds_as_many_more_as_requests_are_shorter_than_what_is_reserved():
    trace = trace_of(*[(0, 99, 1)] * 100)
    made = plan(num_blocks=1 + 4096 // 16 * 10, max_model_len=4000, trace=trace)
    found = made.comparison
    assert (found.reserved, found.paged, found.paged_full) == (10, 2560 / 7, 2560 / 7)
    assert found.ratio == pytest.approx(36.6, abs=0.1)
    assert (found.reservation_99, found.reserved_99) == (100, 409)
    assert found.ratio_99 == pytest.approx(0.89, abs=0.01)


def verdict(**changes):
    return judge(
        **{
            "weights_fit": True,
            "bytes_per_token": 512 * 1024,
            "concurrency": 64,
            "max_model_len": 4096,
            "room_bytes": 40 * GIB,
            "held_tokens": 500.0,
        }
        | changes
    )


def test_gigabytes_of_keys_and_values_are_worth_paging():
    found = verdict()
    assert (found.use_paging, found.headline) == (True, "use paging")
    assert "15.62 GiB" in found.reason
    assert "8.2 times" in found.reason


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"concurrency": 1, "max_model_len": 1000},
            "reserving every sequence's maximum takes only 1 x 1,000",
        ),
        ({"concurrency": 2, "held_tokens": 400.0}, "even reserving every maximum, 2 x 4,096 tokens"),
        ({"held_tokens": 4000.0}, "1.02 times as much: such requests are all about as long as they may be"),
    ],
)
def test_a_few_hundred_megabytes_or_stable_lengths_are_kept_simple(changes, why):
    found = verdict(**changes)
    assert (found.use_paging, found.headline) == (False, "keep it simple")
    assert why in found.reason


def test_little_live_memory_is_paged_where_reserving_would_not_fit():
    assert verdict(concurrency=2, held_tokens=400.0, room_bytes=GIB).use_paging


def test_without_lengths_the_verdict_asks_for_them():
    found = verdict(held_tokens=None)
    assert found.use_paging
    assert "give --trace or --mean-tokens" in found.reason


def test_weights_that_are_larger_than_the_device_are_said_so():
    made = plan(known_model("llama-3.1-70b"), device=DEVICES["h100"])
    assert (made.pool.num_blocks, made.verdict.use_paging, made.memory.weights_fit) == (0, None, False)
    (problem,) = made.planned.problems
    assert "the weights take 131.42 GiB, larger than the device's 59.32 GiB" in problem
    assert "3 such devices" in problem
    assert "does not fit: the weights alone are larger than the device's memory" in shown(made)
    assert plan_dict(made)["weights_fit"] is False


def test_a_given_pool_that_does_not_fit_beside_the_weights_is_told():
    (problem,) = plan(device=device_of("24GiB"), kv_cache_gib=20).planned.problems
    assert "together more than the device's 24.00 GiB" in problem


# -- options and labels ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dtype": "int3"}, "dtype='int3'"),
        ({"kv_dtype": "int3"}, "kv_dtype='int3'"),
        ({"block_size": 0}, "block_size=0"),
        ({"num_blocks": 1}, "num_blocks=1"),
        ({"num_blocks": 9, "kv_cache_gib": 1}, "give one"),
        ({"concurrency": 0}, "concurrency=0"),
        ({"memory_fraction": 1.5}, "memory_fraction=1.5"),
        ({"max_model_len": 5000}, "max_model_len=5000: expected 4096 at most"),
    ],
)
def test_options_that_llm_would_refuse_are_refused(options, told):
    with pytest.raises(InvalidArgument, match=told):
        plan(**options)


def test_a_model_that_states_no_context_needs_a_max_model_len():
    shape = dataclasses.replace(LLAMA_2, max_position_embeddings=None)
    with pytest.raises(InvalidArgument, match="give a max_model_len"):
        plan(shape, kv_cache_gib=1)
    assert plan(shape, kv_cache_gib=1, max_model_len=512).max_model_len == 512


@pytest.mark.parametrize(
    ("stated", "asked", "expected"),
    [
        ("float16", "auto", "float16"),
        ("bfloat16", "auto", "bfloat16"),
        ("float32", "auto", "bfloat16"),
        ("float16", "float32", "float32"),
    ],
)
def test_auto_means_what_it_means_to_the_engine_on_a_gpu(stated, asked, expected, monkeypatch):
    monkeypatch.setattr(engine_builder.jax, "default_backend", lambda: "gpu")
    assert PlanOptions(dtype=asked).weights_dtype(stated) == expected
    assert engine_builder.weights_dtype(asked, stated).name == expected


def test_what_the_engine_can_not_run_is_labelled():
    assert "plan only: the engine runs LlamaForCausalLM" in shown(plan(known_model("mixtral-8x7b")))
    made = plan(kv_dtype="float8_e4m3fn", kv_cache_gib=1)
    assert made.kv.bytes_per_token == 256 * 1024
    assert "plan only: the engine keeps keys and values in the weights' dtype" in shown(made)
    assert plan_dict(plan(kv_cache_gib=1))["model"]["plan_only"] is None


def test_windows_are_told_with_what_the_cache_does_about_them():
    shape = dataclasses.replace(LLAMA_2, layer_windows=(1024, None) * 16)
    assert "16 of 32 layers see the last 1,024 tokens alone; the cache keeps them all" in shown(plan(shape))


def test_a_pool_describes_itself_and_an_empty_one_too():
    kv = KVShape(32, 32, 128, 2)
    assert "0 blocks of 16 tokens = 0 tokens" in PoolSize(0, 16, kv, 0).describe(0)
    assert "2,559 blocks of 32 tokens = 81,888 tokens, 39.98 GiB: 20.0 sequences of" in PoolSize(
        2560, 32, kv, 4096
    ).describe(GIB)


@pytest.mark.parametrize("name", ["llama-2-7b", "mixtral-8x7b", "smollm2-135m", "llama-3.1-70b"])
@pytest.mark.parametrize("device", [None, "l4", "80GB"])
@pytest.mark.parametrize("lengths", [False, True])
def test_any_plan_can_be_shown_and_agrees_with_its_record(name, device, lengths):
    trace = made_up_trace(500, prompt=Lengths(100, 80), output=Lengths(50, 20)) if lengths else None
    made = plan(known_model(name), device=device and device_of(device), trace=trace)
    told, record = shown(made), plan_dict(made)
    assert made.verdict.headline in told
    assert f"num_blocks={record['num_blocks']:,}" in told
    assert record["bytes_per_token_sum"] in told
    assert (record["contiguous"] is not None) == (lengths and record["usable_blocks"] > 0)
    assert (record["requests"] is not None) == lengths
