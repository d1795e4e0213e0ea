"""What a request gives back."""

from __future__ import annotations

from dataclasses import dataclass

from paged_jax.sequence import FinishReason, RequestMetrics


@dataclass(frozen=True)
class CompletionOutput:
    """One generated continuation.

    text leaves out special tokens; token_ids holds every generated id, the one that ended it included.
    finish_reason: "stop" (an end token), "length" (max_tokens or the context's end), "abort", or None while
    it goes on.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class RequestOutput:
    """A request with its continuations so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
