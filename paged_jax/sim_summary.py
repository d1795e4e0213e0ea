"""What a simulated run comes to: the figures of its table, from the columns of its steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paged_jax.simulator import Outcome


@dataclass(frozen=True)
class Summary:
    """One strategy's figures. Shares are of the slots that it kept from others, weighted by time.

    name: of its row; block_size: None for a contiguous one. concurrency_mean, _peak: sequences that held
    memory. utilization: share of the slots that held a token; reservation_waste: to be written later by their
    holder; internal_waste: never to be written; external_waste: free, but in no hole that was large enough
    for who waited first. tokens_per_second: generated, under the step-time model. queue_delay_p50, _p99:
    seconds. seconds: from the first step to the last token. expected_utilization: 1 - block size / (2 x mean
    length), of a paged one. swapped_bytes: None where no model says how many a token has.
    """

    name: str
    block_size: int | None
    requests: int
    prompt_tokens: int
    generated_tokens: int
    concurrency_mean: float
    concurrency_peak: int
    utilization: float
    expected_utilization: float | None
    reservation_waste: float
    internal_waste: float
    external_waste: float
    preemptions: int
    recomputed_tokens: int
    swapped_blocks: int
    swapped_bytes: int | None
    cow_copies: int
    prefix_hit_rate: float
    queue_delay_p50: float
    queue_delay_p99: float
    tokens_per_second: float
    seconds: float

    @classmethod
    def of(
        cls,
        name: str,
        block_size: int | None,
        outcome: Outcome,
        *,
        mean_length: float,
        bytes_per_token: int | None = None,
    ) -> Summary:
        """Of a run that has ended. mean_length: tokens that a request has stored when it ends."""
        series = outcome.series
        reserved, written = series.mean("reserved"), series.mean("written")
        ahead, stranded = series.mean("ahead"), series.mean("stranded")
        kept = reserved + stranded or 1.0
        delays = outcome.queue_delays or [0.0]
        return cls(
            name=name,
            block_size=block_size,
            requests=len(outcome.latencies),
            prompt_tokens=outcome.prompt_tokens,
            generated_tokens=outcome.generated_tokens,
            concurrency_mean=series.mean("running"),
            concurrency_peak=int(series.peak("running")),
            utilization=written / kept,
            expected_utilization=None if block_size is None else 1 - block_size / (2 * mean_length),
            reservation_waste=ahead / kept,
            internal_waste=series.mean_of(series.reserved - series.written - series.ahead) / kept,
            external_waste=stranded / kept,
            preemptions=outcome.preemptions,
            recomputed_tokens=outcome.recomputed_tokens,
            swapped_blocks=outcome.swapped_blocks,
            swapped_bytes=bytes_per_token and outcome.swapped_blocks * (block_size or 0) * bytes_per_token,
            cow_copies=outcome.cow_copies,
            prefix_hit_rate=outcome.prefix_hit_tokens / max(outcome.prefix_queried_tokens, 1),
            queue_delay_p50=float(np.percentile(delays, 50)),
            queue_delay_p99=float(np.percentile(delays, 99)),
            tokens_per_second=outcome.generated_tokens / (series.total_seconds or 1.0),
            seconds=series.total_seconds,
        )
