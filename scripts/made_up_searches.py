"""Samples and beam searches without a model: the real engine with a runner that computes nothing.

What they share is counted as it is with a model, in every step; only the scores are made up.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from paged_jax.beam_params import BeamSearchParams
from paged_jax.block_allocator import BlockAllocator
from paged_jax.capacity import blocks_for_tokens
from paged_jax.engine import Engine
from paged_jax.made_up_scores import VOCAB_SIZE, made_up_scores
from paged_jax.sampling_params import SamplingParams
from paged_jax.schedule import Sampled, Schedule
from paged_jax.scheduler import Scheduler
from paged_jax.sequence import RequestMetrics

BLOCK_SIZE = 16
ROWS_OF_REQUESTS = 64
"""Requests that run at once."""


@dataclass(frozen=True)
class Saving:
    """What sharing came to over a run. block_steps: physical blocks, summed over the steps; logical ones:
    what there would be if no two sequences shared any; copies: blocks that were copied on writing.
    """

    block_steps: int
    logical_block_steps: int
    copies: int

    @property
    def share(self) -> float:
        """Blocks that sharing saves / blocks without it."""
        return 1 - self.block_steps / self.logical_block_steps

    @classmethod
    def of(cls, requests: list[RequestMetrics]) -> Saving:
        """Of all requests together."""
        return cls(
            sum(metrics.block_steps for metrics in requests),
            sum(metrics.logical_block_steps for metrics in requests),
            sum(metrics.num_cow_copies for metrics in requests),
        )


class MadeUpRunner:
    """Scores of every next token, without a model.

    With these scores beams share as much as the demo model's, within 5 points, for widths of 2, 4 and 6 and
    answers of 58 and 338 tokens (`bench_sharing.py --only model` measures both).
    """

    weight_bytes = block_bytes = 0

    def execute(self, schedule: Schedule) -> Sampled:
        tokens = [0] * len(schedule.decode)  # which tokens samples draw makes no difference
        if not any(sequence.request.beams for sequence in schedule.decode):
            return Sampled(tokens)
        return Sampled(tokens, None, made_up_scores(schedule.decode))

    def close(self) -> None:
        """There is nothing to give back."""


class _NoText:
    """The tokenizer of a model whose tokens are numbers."""

    def encode(self, text: str) -> list[int]:
        return []

    def decode(self, ids: object, skip_special_tokens: bool = True) -> str:
        return ""


def params_of(kind: str, width: int, num_tokens: int) -> SamplingParams | BeamSearchParams:
    """kind: "samples", of which a prompt gets `width`, or "beams". Each ends after num_tokens."""
    if kind == "samples":
        return SamplingParams(n=width, max_tokens=num_tokens, ignore_eos=True)
    return BeamSearchParams(beam_width=width, max_tokens=num_tokens, ignore_eos=True)


def run_made_up(lengths: np.ndarray, kind: str, width: int) -> Saving:
    """Answer made-up requests, of int [count, 2] prompt and answer tokens, in a pool that never runs full."""
    longest = int(lengths.sum(axis=1).max())
    rows = min(len(lengths), ROWS_OF_REQUESTS) * width
    allocator = BlockAllocator(rows * blocks_for_tokens(longest, BLOCK_SIZE) + 1, BLOCK_SIZE)
    scheduler = Scheduler(
        allocator,
        max_num_seqs=rows,
        max_num_batched_tokens=int(lengths.sum()),
        max_prefill_seqs=rows,
    )
    engine = Engine(
        MadeUpRunner(),
        scheduler,
        _NoText(),
        vocab_size=VOCAB_SIZE,
        max_model_len=longest,
        eos_ids=(),
        seed=0,
    )
    for index, (prompt, answer) in enumerate(lengths.tolist()):
        params = params_of(kind, width, answer)
        engine.add(engine.make_request(f"{index}", {"prompt_token_ids": [0] * prompt}, params))
    finished = []
    while engine.has_unfinished:
        finished += [output.metrics for output in engine.step()]
    assert len(finished) == len(lengths)
    assert engine.totals.preempted == 0
    return Saving.of(finished)
