"""Requests and their sequences: the token streams that the scheduler moves and the tables hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from paged_jax.block_table import BlockTable
from paged_jax.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort"]
"""stop: an end token; length: max_tokens or the context's end; abort: taken back by its owner."""


@dataclass
class RequestMetrics:
    """When things happened to a request, in seconds of time.monotonic(), and how often it was set back."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass
class Request:
    """What a user asked for."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    max_new_tokens: int
    """max_tokens with the context's end worked in, so always a number."""
    stop_token_ids: frozenset[int]
    """Every id that ends it: the model's own, unless ignored, and the user's."""
    seed: int
    """The user's, or one drawn for this request."""
    metrics: RequestMetrics


@dataclass(eq=False)
class Sequence:
    """One token stream of a request: its tokens so far, and the blocks that hold their keys and values."""

    request: Request
    index: int
    table: BlockTable
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        """Start from the prompt."""
        self.token_ids = list(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens, the one that ended the sequence included."""
        return self.token_ids[len(self.request.prompt_token_ids) :]

    @property
    def num_output_tokens(self) -> int:
        """How many tokens were generated."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Tokens that have no slot yet: one while decoding, more before or amid a prefill."""
        return len(self.token_ids) - self.table.num_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether more than a new token is left to compute, or the prompt's last one."""
        return self.num_uncomputed > 1 or self.table.num_tokens < len(self.request.prompt_token_ids)

    @property
    def is_finished(self) -> bool:
        """Whether it will get no more tokens."""
        return self.finish_reason is not None

    def append(self, token: int, now: float) -> None:
        """Take one sampled token and decide whether it is the last."""
        request = self.request
        self.token_ids.append(token)
        if request.metrics.first_token_time is None:
            request.metrics.first_token_time = now
        if token in request.stop_token_ids:
            self.finish("stop", now)
        elif self.num_output_tokens >= request.max_new_tokens:
            self.finish("length", now)

    def finish(self, reason: FinishReason, now: float) -> None:
        """End the sequence and give its blocks back; the one free path, harmless when repeated."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self.request.metrics.finished_time = now
        self.table.release()
