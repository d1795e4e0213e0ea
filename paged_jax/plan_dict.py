"""A plan for programs: one dictionary of plain values, with the units in the names."""

from __future__ import annotations

from dataclasses import asdict

from paged_jax.planner import Plan
from paged_jax.request_trace import Trace

SEQUENCE_LENGTHS = (2048, 4096)
"""Tokens of a sequence whose memory is told."""


def plan_dict(plan: Plan) -> dict[str, object]:
    """Everything that `plan_report` shows. What is not known is None."""
    shape, kv, memory, pool = plan.shape, plan.kv, plan.memory, plan.pool
    device, number = plan.options.device, plan.concurrency.num_seqs
    limit = memory.limit_bytes
    return {
        "model": {
            "name": shape.name,
            "architecture": shape.architecture,
            "num_parameters": shape.num_parameters,
            "active_parameters": shape.active_parameters,
            "parameters_estimated": shape.estimated,
            "plan_only": shape.plan_only,
            "notes": list(shape.notes),
            "layers_with_a_window": sum(window is not None for window in shape.layer_windows),
        },
        "dtype": plan.dtype,
        "kv_dtype": plan.kv_dtype,
        "bytes_per_token": kv.bytes_per_token,
        "bytes_per_token_sum": kv.written_out,
        "sequence_bytes": {str(length): length * kv.bytes_per_token for length in SEQUENCE_LENGTHS},
        "concurrency": number,
        "concurrency_source": plan.concurrency.source,
        "concurrent_bytes": {
            "max_model_len": number * plan.max_model_len * kv.bytes_per_token,
            "mean": plan.demand and int(number * plan.demand.mean_tokens * kv.bytes_per_token),
        },
        "weight_bytes": memory.weight_bytes,
        "weights_fit": memory.weights_fit if limit is not None else None,
        "activation_bytes_estimated": memory.activation_bytes,
        "device": device
        and {
            "name": device.name,
            "memory_bytes": device.memory_bytes,
            "limit_bytes": limit,
            "left_for_kv_bytes": memory.left_bytes,
        },
        "max_model_len": plan.max_model_len,
        "block_size": pool.block_size,
        "block_bytes": pool.block_bytes,
        "max_num_blocks": plan.planned.fitting_blocks,
        "num_blocks": pool.num_blocks,
        "null_block_counted": True,
        "usable_blocks": pool.usable_blocks,
        "pool_bytes": pool.num_bytes,
        "pool_tokens": pool.num_tokens,
        "pool_source": plan.planned.source,
        "headroom": plan.planned.headroom,
        "sequences_of_max_model_len_at_once": pool.longest_at_once,
        "ledger": pool.describe(memory.weight_bytes),
        "problems": list(plan.planned.problems),
        "requests": _requests(plan),
        "block_tables": {
            "bytes": plan.table_bytes,
            "l2_bytes": device.rates.l2_bytes if device and device.rates else None,
            "in_l2": plan.table_bytes <= device.rates.l2_bytes if device and device.rates else None,
        },
        "mean_tokens": plan.mean_tokens,
        "mean_tokens_assumed": plan.demand is None,
        "block_sizes": [asdict(choice) for choice in plan.block_sizes],
        "recommended_block_size": plan.recommended_block_size,
        "recommended_because": plan.recommended_because,
        "roofline": {
            "context_tokens": plan.roofline_context,
            "steps": [
                {
                    "batch": step.batch,
                    "bytes": round(step.num_bytes),
                    "flops": step.flops,
                    "ms_per_token": step.seconds * 1e3,
                    "memory_ms": step.memory_seconds * 1e3,
                    "compute_ms": step.compute_seconds * 1e3,
                    "bound": step.bound,
                    "tokens_per_second": step.tokens_per_second,
                    "fits_the_pool": fits,
                }
                for step, fits in zip(plan.roofline, plan.fits, strict=True)
            ],
        }
        if plan.roofline
        else None,
        "contiguous": plan.comparison
        and asdict(plan.comparison) | {"ratio": plan.comparison.ratio, "ratio_99": plan.comparison.ratio_99},
        "verdict": {
            "use_paging": plan.verdict.use_paging,
            "headline": plan.verdict.headline,
            "reason": plan.verdict.reason,
        },
    }


def _requests(plan: Plan) -> dict[str, object] | None:
    demand = plan.demand
    if demand is None:
        return None
    return trace_dict(demand.trace) | {
        "mean_held_tokens": demand.mean_held_tokens,
        "peak_blocks": plan.peak_blocks,
        "recommended_num_blocks": plan.recommended_blocks,
    }


def trace_dict(trace: Trace) -> dict[str, object]:
    """Where requests are from, how many, and how long they are."""
    return {
        "source": trace.source,
        "note": trace.note,
        "count": len(trace),
        "skipped": len(trace.skipped),
        "skipped_first": [f"{one.place}: {one.reason}" for one in trace.skipped[:5]],
        "mean_prompt_tokens": float(trace.prompt_tokens.mean()),
        "mean_output_tokens": float(trace.output_tokens.mean()),
        "mean_tokens": float(trace.total_tokens.mean()),
        "max_tokens": int(trace.total_tokens.max()),
    }
