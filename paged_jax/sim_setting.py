"""What a simulation runs on: the memory and the clock of a model on a device, or as they are given."""

from __future__ import annotations

from dataclasses import dataclass

from paged_jax.capacity import GIB, format_bytes
from paged_jax.comparison import Setting
from paged_jax.errors import InvalidArgument
from paged_jax.model_shape import ITEMSIZES, ModelShape
from paged_jax.plan_options import PlanOptions
from paged_jax.planner import Plan, make_plan
from paged_jax.preemption import PreemptionCosts
from paged_jax.step_time import StepTime

HOST_BYTES_PER_SECOND = 2e10
"""Between device and host: the nominal rate that the engine reckons with too."""
MAX_SLOTS = 1 << 40
USUAL_STEP = StepTime(fixed=0.01)


@dataclass(frozen=True)
class Ground:
    """A setting and where its numbers are from. max_model_len: tokens of a request at most, if known."""

    setting: Setting
    notes: tuple[str, ...]
    max_model_len: int | None = None


def ground_of_model(
    shape: ModelShape,
    options: PlanOptions,
    *,
    max_num_seqs: int,
    swap_space_gib: float,
    prefix_caching: bool,
    step_time: StepTime | None,
) -> Ground:
    """The pool that the engine would have, without its cap at what max_num_seqs sequences can use, and the
    time of a step by the device's rates. InvalidArgument where there is no room for a pool.
    """
    if options.device is None and options.kv_cache_gib is None and options.num_blocks is None:
        raise InvalidArgument("--model: how much memory there is for it? Give --device or --kv-cache-gib.")
    plan = make_plan(shape, options)
    slots = (plan.planned.fitting_blocks - 1) * plan.pool.block_size
    if slots < 1:
        raise InvalidArgument(f"no room for a pool: {' '.join(plan.planned.problems)}")
    token_bytes = plan.kv.bytes_per_token
    notes = [f"memory: {slots:,} tokens of {token_bytes:,} bytes, {format_bytes(slots * token_bytes)}"]
    rates = options.device.rates if options.device else None
    if step_time is not None:
        notes.append(_told(step_time, "as given"))
    elif rates is not None:
        step_time = _roofline(plan, rates.bytes_per_second, rates.flops(ITEMSIZES[plan.dtype]))
        notes.append(_told(step_time, f"{shape.name} at the full rates of {_device(options)}"))
    else:
        step_time = USUAL_STEP
        notes.append(_told(step_time, "no device's rates are known: give --step-time"))
    compute = step_time.per_token or USUAL_STEP.fixed
    setting = Setting(
        slots,
        step_time,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        host_tokens=int(swap_space_gib * GIB) // token_bytes,
        token_costs=PreemptionCosts(compute, token_bytes / HOST_BYTES_PER_SECOND),
        prefix_caching=prefix_caching,
        bytes_per_token=token_bytes,
    )
    return Ground(setting, tuple(notes), plan.longest)


def ground_of_tokens(
    slots: int,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    prefix_caching: bool,
    step_time: StepTime | None,
) -> Ground:
    """A memory of so many tokens, whatever they take; the swap space is as large."""
    if not 1 <= slots <= MAX_SLOTS:
        raise InvalidArgument.of("pool_tokens", slots, f"from 1 to {MAX_SLOTS:,}")
    told = "as given" if step_time else "no model and device are given, nor --step-time"
    step_time = step_time or USUAL_STEP
    setting = Setting(
        slots,
        step_time,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        host_tokens=slots,
        prefix_caching=prefix_caching,
    )
    return Ground(setting, (f"memory: {slots:,} tokens, and a swap space of as many", _told(step_time, told)))


def _roofline(plan: Plan, bytes_per_second: float, flops_per_second: float) -> StepTime:
    shape = plan.shape
    return StepTime.roofline(
        weight_bytes=shape.weight_bytes(ITEMSIZES[plan.dtype]),
        kv_bytes_per_token=plan.kv.bytes_per_token,
        flops_per_token=shape.step_flops(0),
        bytes_per_second=bytes_per_second,
        flops_per_second=flops_per_second,
        host_bytes_per_second=HOST_BYTES_PER_SECOND,
    )


def _device(options: PlanOptions) -> str:
    return options.device.name if options.device else ""


def _told(time: StepTime, source: str) -> str:
    return (
        f"a step: {time.fixed * 1e3:.3g} ms + {time.per_token * 1e6:.3g} µs a token computed"
        f" + {time.per_kv_token * 1e9:.3g} ns a cached token read"
        f" + {time.per_swapped_token * 1e6:.3g} µs a token swapped ({source})"
    )
