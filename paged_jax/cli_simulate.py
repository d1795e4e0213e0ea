"""`paged-jax simulate`: a trace through the engine's own scheduler and allocator, with nothing computed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from paged_jax.cli_options import KvCacheGib, MaxModelLen, MaxNumBatchedTokens, MaxNumSeqs, SwapSpaceGib
from paged_jax.cli_plan import DeviceName, Dtype, KvDtype, MemoryFraction
from paged_jax.cli_trace import (
    CharactersPerToken,
    Mean,
    SkipInvalid,
    Std,
    Tokenizer,
    TraceFile,
    trace_of,
)
from paged_jax.cli_values import choices_of, numbers_of, refuse_without, whole_numbers_of
from paged_jax.errors import InvalidArgument

if TYPE_CHECKING:
    from paged_jax.comparison import Setting, Variant
    from paged_jax.request_trace import Trace
    from paged_jax.sim_dict import Compared
    from paged_jax.sim_setting import Ground
    from paged_jax.step_time import StepTime
    from paged_jax.workload import Sharing

NUM_REQUESTS, MEMORY_FRACTION, SWAP_SPACE_GIB = 1000, 0.75, 4.0
STEP_TIME = "one to four numbers of seconds: FIXED,PER_TOKEN,PER_CACHED_TOKEN,PER_SWAPPED_TOKEN"

Model = Annotated[
    str | None, typer.Option(help="As in plan: with --device or --kv-cache-gib it says how much memory.")
]
PoolTokens = Annotated[int | None, typer.Option(help="Instead of a model: tokens that the memory holds.")]
BlockSizes = Annotated[str, typer.Option(help="Of the paged strategy: one or more, with commas.")]
Strategies = Annotated[
    str, typer.Option(help="Of: paged, contiguous-max, contiguous-pow2, contiguous-oracle; or all.")
]
Reservations = Annotated[
    str | None,
    typer.Option(
        "--reservation",
        help="Tokens that contiguous-max reserves; several are compared one after the other. Default: the"
        " fewest that are enough for 99 % of the requests.",
    ),
]
Preempts = Annotated[
    str, typer.Option("--preemption", help="Of: recompute, swap, auto, queue (admit what surely fits).")
]
StepTimes = Annotated[
    str | None,
    typer.Option(
        "--step-time",
        help="Seconds of a step: FIXED,PER_TOKEN,PER_CACHED_TOKEN,PER_SWAPPED_TOKEN; the last may be left"
        " out. Default: a model's at the device's full rates.",
    ),
]
Samples = Annotated[int, typer.Option("--n", help="Samples of each prompt.")]
BeamWidth = Annotated[int, typer.Option(help="Beams of each search; 0: no search.")]
Share = Annotated[float, typer.Option("--share", help="Of the requests, that --n or --beam-width is for.")]
Speed = Annotated[float, typer.Option(help="Replay a trace so many times as fast; inf: all come at once.")]
First = Annotated[int | None, typer.Option(help="Only so many requests, the first ones.")]
Rate = Annotated[float | None, typer.Option(help="Of --mean-tokens. Default: all come at once.")]
NumRequests = Annotated[int, typer.Option(help="Of --mean-tokens.")]
Seed = Annotated[int, typer.Option(help="Of --mean-tokens.")]
Caching = Annotated[
    bool, typer.Option("--prefix-caching", help="Share what prompts begin with, by the trace's hash_ids.")
]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw into this directory; needs matplotlib.")]


def simulate(
    *,
    trace: TraceFile = None,
    mean_tokens: Mean = None,
    std_tokens: Std = None,
    num_requests: NumRequests = NUM_REQUESTS,
    requests_per_second: Rate = None,
    seed: Seed = 0,
    tokenizer: Tokenizer = None,
    characters_per_token: CharactersPerToken = 4.0,
    skip_invalid: SkipInvalid = False,
    speed: Speed = 1.0,
    first: First = None,
    model: Model = None,
    dtype: Dtype = "auto",
    kv_dtype: KvDtype = "auto",
    device: DeviceName = None,
    memory_fraction: MemoryFraction = MEMORY_FRACTION,
    max_model_len: MaxModelLen = None,
    kv_cache_gib: KvCacheGib = None,
    pool_tokens: PoolTokens = None,
    block_sizes: BlockSizes = "16",
    strategies: Strategies = "all",
    reservation: Reservations = None,
    preemption: Preempts = "recompute",
    swap_space_gib: SwapSpaceGib = SWAP_SPACE_GIB,
    prefix_caching: Caching = False,
    n: Samples = 1,
    beam_width: BeamWidth = 0,
    share: Share = 1.0,
    max_num_seqs: MaxNumSeqs = 1024,
    max_num_batched_tokens: MaxNumBatchedTokens = 2048,
    step_time: StepTimes = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print a line for each run.")] = False,
    plot: Plot = None,
) -> None:
    """Real request lengths against a memory, without a GPU: concurrency, waste, preemption, waiting."""
    from paged_jax.comparison import PREEMPTS, STRATEGIES, variants
    from paged_jax.engine_options import EngineOptions
    from paged_jax.request_trace import MAX_TOKENS
    from paged_jax.step_time import StepTime
    from paged_jax.workload import Sharing, replayed

    if as_json and as_csv:
        raise InvalidArgument("--json and --csv: give one.")
    if plot is not None:
        from paged_jax.sim_plots import check_can_plot

        check_can_plot(plot)
    sizes = whole_numbers_of("--block-sizes", block_sizes, 1 << 20)
    preempts = choices_of("--preemption", preemption, PREEMPTS)
    chosen = list(variants(choices_of("--strategies", strategies, STRATEGIES), sizes, preempts))
    EngineOptions(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_gib=kv_cache_gib,
        preemption_mode="swap" if "swap" in preempts and model is not None else "auto",
        swap_space_gib=swap_space_gib,
    )
    reserved = whole_numbers_of("--reservation", reservation, MAX_TOKENS) if reservation else [None]
    sharing = Sharing(n, beam_width, share)
    if sharing.width > max_num_seqs:
        raise InvalidArgument.of(
            "--n or --beam-width", sharing.width, f"{max_num_seqs} (--max-num-seqs) at most"
        )
    given_time = (
        StepTime(*numbers_of("--step-time", step_time, (1, 2, 3, 4), STEP_TIME)) if step_time else None
    )
    if mean_tokens is None:
        refuse_without(
            "--mean-tokens beside it, for whose requests it is",
            ("--num-requests", num_requests, NUM_REQUESTS),
            ("--requests-per-second", requests_per_second, None),
            ("--seed", seed, 0),
        )
    requests = trace_of(
        trace,
        mean_tokens,
        std_tokens,
        tokenizer=tokenizer,
        characters_per_token=characters_per_token,
        skip_invalid=skip_invalid,
        num_requests=num_requests,
        requests_per_second=requests_per_second,
        seed=seed,
    )
    if requests is None:
        raise InvalidArgument("how long are the requests? Give --trace FILE, or --mean-tokens PROMPT,ANSWER.")
    ground = _ground(
        model,
        pool_tokens,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
        memory_fraction=memory_fraction,
        max_model_len=max_model_len,
        kv_cache_gib=kv_cache_gib,
        swap_space_gib=swap_space_gib,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prefix_caching=prefix_caching,
        step_time=given_time,
    )
    requests = replayed(requests, speed=speed, first=first)
    lenient = skip_invalid or requests.is_made_up
    if ground.max_model_len is not None:
        requests = requests.within(ground.max_model_len, "what the model can hold", skip_invalid=lenient)
    requests = requests.within(ground.setting.slots + 1, "what the memory can hold", skip_invalid=lenient)
    start = perf_counter()
    compared = list(_compare(requests, ground.setting, chosen, sizes, reserved, sharing))
    seconds = perf_counter() - start
    if as_json:
        from paged_jax.sim_dict import simulation_dict

        print(json.dumps(simulation_dict(requests, ground.setting, compared, sizes), indent=2))
    elif as_csv:
        from paged_jax.sim_dict import simulation_csv

        print(simulation_csv(compared), end="")
    else:
        from paged_jax.sim_report import print_simulation

        print_simulation(requests, ground, compared, sizes, seconds)
    if plot is not None:
        _plot(compared, ground.setting, plot)


def _compare(
    requests: Trace,
    setting: Setting,
    chosen: list[Variant],
    block_sizes: list[int],
    reservations: list[int] | list[None],
    sharing: Sharing,
) -> Iterator[Compared]:
    from paged_jax.comparison import reservation_of, run_all
    from paged_jax.progress import track_simulation
    from paged_jax.sim_dict import Compared
    from paged_jax.workload import make_workload

    kinds = [kind for kind in {reservation_of(one.strategy) for one in chosen} if kind is not None]
    paged_sizes = block_sizes if any(one.strategy == "paged" for one in chosen) else [1]
    works = [
        make_workload(
            requests,
            slots=setting.slots,
            block_sizes=paged_sizes,
            reservations=kinds,
            reservation=reservation,
            sharing=sharing,
            with_token_ids=setting.prefix_caching,
        )
        for reservation in reservations
    ]
    for work in works:
        with track_simulation(len(work.requests), sys.stderr.isatty()) as bar:
            runs = run_all(chosen, work, setting, lambda one, ended: bar(one.name, ended))
            yield Compared(work, list(runs))


def _plot(compared: list[Compared], setting: Setting, folder: Path) -> None:
    from paged_jax.notes import note
    from paged_jax.sim_plots import plot_runs

    for one in compared:
        inner = folder if len(compared) == 1 else folder / f"reservation-{one.work.reservation}"
        for path in plot_runs(one.runs, one.work.final_tokens, setting.slots, inner):
            note(f"drew {path}")


def _ground(
    model: str | None,
    pool_tokens: int | None,
    *,
    dtype: str,
    kv_dtype: str,
    device: str | None,
    memory_fraction: float,
    max_model_len: int | None,
    kv_cache_gib: float | None,
    swap_space_gib: float,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    prefix_caching: bool,
    step_time: StepTime | None,
) -> Ground:
    """The memory and the clock, of a model or as given."""
    from paged_jax.devices import device_of
    from paged_jax.model_lookup import find_shape
    from paged_jax.plan_options import PlanOptions
    from paged_jax.sim_setting import ground_of_model, ground_of_tokens

    if model is None:
        refuse_without(
            "--model beside it, which alone gives it a meaning",
            ("--device", device, None),
            ("--kv-cache-gib", kv_cache_gib, None),
            ("--max-model-len", max_model_len, None),
            ("--dtype", dtype, "auto"),
            ("--kv-dtype", kv_dtype, "auto"),
            ("--memory-fraction", memory_fraction, MEMORY_FRACTION),
            ("--swap-space-gib", swap_space_gib, SWAP_SPACE_GIB),
        )
        if pool_tokens is None:
            raise InvalidArgument("how much memory is there? Give --model and --device, or --pool-tokens.")
        return ground_of_tokens(
            pool_tokens,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prefix_caching=prefix_caching,
            step_time=step_time,
        )
    if pool_tokens is not None:
        raise InvalidArgument("--model and --pool-tokens: both say how large the memory is; give one.")
    options = PlanOptions(
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device_of(device) if device else None,
        memory_fraction=memory_fraction,
        max_model_len=max_model_len,
        concurrency=max_num_seqs,
        kv_cache_gib=kv_cache_gib,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    return ground_of_model(
        find_shape(model),
        options,
        max_num_seqs=max_num_seqs,
        swap_space_gib=swap_space_gib,
        prefix_caching=prefix_caching,
        step_time=step_time,
    )
