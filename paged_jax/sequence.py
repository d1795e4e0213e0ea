"""Requests and their sequences: the token streams that the scheduler moves and the tables hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from paged_jax.block_table import BlockTable
from paged_jax.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort"]
"""stop: an end token or a stop string; length: max_tokens, or the end of the context or of the pool;
abort: taken back by its owner."""


@dataclass
class RequestMetrics:
    """When things happened to a request, in seconds of time.monotonic(), and what it met on its way.

    num_cached_tokens: tokens of the prompt whose keys and values came from the prefix cache, at the first
    admission. num_preemptions: how often it was set back.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first step that worked on it."""
        return _between(self.arrival_time, self.first_scheduled_time)

    @property
    def prefill_time(self) -> float | None:
        """Seconds from there to the first token."""
        return _between(self.first_scheduled_time, self.first_token_time)

    @property
    def decode_time(self) -> float | None:
        """Seconds from the first token to the last."""
        return _between(self.first_token_time, self.last_token_time)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token (TTFT)."""
        return _between(self.arrival_time, self.first_token_time)

    @property
    def inter_token_latency(self) -> float | None:
        """Mean seconds between two tokens (ITL); None before there are two."""
        if self.decode_time is None or self.num_output_tokens < 2:
            return None
        return self.decode_time / (self.num_output_tokens - 1)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


@dataclass
class SwappedBlocks:
    """Where a request's blocks lie in the host's swap space while it is swapped out.

    tables: for each of its sequences, in order, (host blocks in table order, tokens with a slot). A block
    that several sequences share occurs in each of them and lies in the swap space once.
    """

    tables: list[tuple[list[int], int]]

    @property
    def host_blocks(self) -> list[int]:
        """Each host block once, in order of first use."""
        return list(dict.fromkeys(block for blocks, _ in self.tables for block in blocks))


@dataclass(eq=False)
class Request:
    """What a user asked for: one sequence, or several that are admitted, set back and resumed together."""

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
    priority: int = 0
    """Lower goes first; equal ones go in order of arrival."""
    cache_salt: str = ""
    """Requests of different salts share no cached prefix."""
    streams: bool = False
    """Whether the engine puts out every token, and not the finished request alone."""
    arrival: int = 0
    """Its number in order of arrival, given when it is queued."""
    sequences: list[Sequence] = field(default_factory=list)
    swapped: SwappedBlocks | None = None
    """Set while its keys and values lie in the swap space."""

    @property
    def order(self) -> tuple[int, int]:
        """What it is sorted by, first come first: priority, then arrival."""
        return self.priority, self.arrival

    @property
    def is_finished(self) -> bool:
        """Whether none of its sequences will get more tokens."""
        return all(sequence.finish_reason is not None for sequence in self.sequences)


@dataclass(eq=False)
class Sequence:
    """One token stream of a request: its tokens so far, and the blocks that hold their keys and values.

    row: its place in the device-side state while it runs, else None. shared_with: for a sequence that is
    set back together with siblings, (an earlier sibling's index, tokens in full blocks that they share).
    """

    request: Request
    index: int
    table: BlockTable
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The token id or the stop string that ended it; None for the model's own end tokens."""
    row: int | None = None
    shared_with: tuple[int, int] | None = None
    block_keys: list[bytes] = field(default_factory=list)
    """Prefix-cache keys of its first full blocks, as far as they were needed."""
    num_registered: int = 0
    """Leading blocks that were offered to the prefix cache."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One for each generated token, where the request wants them."""

    def __post_init__(self) -> None:
        """Start from the prompt."""
        if not self.token_ids:
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
    def num_to_prefill(self) -> int:
        """Tokens that lack keys and values, but for the last one, which a decode step computes."""
        return len(self.token_ids) - 1 - self.table.num_tokens

    @property
    def is_finished(self) -> bool:
        """Whether it will get no more tokens."""
        return self.finish_reason is not None

    def append(self, token: int, now: float) -> None:
        """Take one sampled token and decide whether it is the last."""
        request = self.request
        self.token_ids.append(token)
        metrics = request.metrics
        if metrics.first_token_time is None:
            metrics.first_token_time = now
        metrics.last_token_time = now
        metrics.num_output_tokens += 1
        if token in request.stop_token_ids and self.num_output_tokens > request.params.min_tokens:
            if token in request.params.stop_token_ids:
                self.stop_reason = token
            self.finish("stop", now)
        elif self.num_output_tokens >= request.max_new_tokens:
            self.finish("length", now)

    def finish(self, reason: FinishReason, now: float) -> None:
        """End the sequence and give its blocks back; the one free path, harmless when repeated."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self.request.metrics.finished_time = now
        self.table.release()


@dataclass(frozen=True)
class TokenLogprobs:
    """What the device says about one generated token.

    logprob and rank: the chosen token's (rank 1 is the most likely). top: (token id, logprob) of the most
    likely ones, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]
