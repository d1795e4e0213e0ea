"""A comparison for programs: one JSON object, or the lines of a CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields

from paged_jax.comparison import Run, Setting, Variant
from paged_jax.plan_dict import trace_dict
from paged_jax.request_trace import Trace
from paged_jax.sim_summary import Summary
from paged_jax.tail_waste import TailWaste
from paged_jax.workload import Workload


@dataclass(frozen=True)
class Compared:
    """What one reservation of the maximum came to: the requests that all could run, and the runs."""

    work: Workload
    runs: list[Run]


def simulation_dict(
    trace: Trace, setting: Setting, compared: Sequence[Compared], block_sizes: Sequence[int]
) -> dict[str, object]:
    """Everything that the tables show, unrounded; seconds, tokens and shares."""
    return {
        "requests": trace_dict(trace),
        "slots": setting.slots,
        "bytes_per_token": setting.bytes_per_token,
        "max_num_seqs": setting.max_num_seqs,
        "max_num_batched_tokens": setting.max_num_batched_tokens,
        "step_time": asdict(setting.step_time),
        "comparisons": [
            {
                "reservation": one.work.reservation,
                "accepted": len(one.work.requests),
                "dropped": [{"requests": count, "reason": reason} for count, reason in one.work.dropped],
                "runs": [_told(run) for run in one.runs],
                "tail_waste": [asdict(TailWaste.of(one.work.final_tokens, size)) for size in block_sizes],
            }
            for one in compared
        ],
    }


def simulation_csv(compared: Iterable[Compared]) -> str:
    """One line a run, under the names of Variant's and Summary's fields."""
    text = io.StringIO()
    names = dict.fromkeys(field.name for kind in (Variant, Summary) for field in fields(kind))
    writer = csv.DictWriter(text, ["reservation", "accepted", *names], lineterminator="\n")
    writer.writeheader()
    for one in compared:
        shared = {"reservation": one.work.reservation, "accepted": len(one.work.requests)}
        for run in one.runs:
            writer.writerow(shared | _told(run))
    return text.getvalue()


def _told(run: Run) -> dict[str, object]:
    """A variant and its figures; None for what is of another strategy."""
    others = ["fragments"] if run.variant.strategy == "paged" else ["preemption", "free_recompute"]
    return asdict(run.variant) | asdict(run.summary) | dict.fromkeys(others)
