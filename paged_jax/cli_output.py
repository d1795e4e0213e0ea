"""What the command line prints of an output: records for programs, text for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paged_jax.outputs import CompletionOutput, RequestOutput


def records(prompt: str, output: RequestOutput) -> Iterator[dict[str, object]]:
    """One for each answer to a prompt: each sample, or each hypothesis, the best first."""
    for completion in output.outputs:
        yield {
            "prompt": prompt,
            "prompt_tokens": len(output.prompt_token_ids),
            "index": completion.index,
            "text": completion.text,
            "token_ids": list(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        } | _numbers(completion)


def _numbers(completion: CompletionOutput) -> dict[str, object]:
    numbers: dict[str, object] = {}
    if completion.score is not None:
        numbers["score"] = completion.score
    if completion.cumulative_logprob is not None:
        numbers["cumulative_logprob"] = completion.cumulative_logprob
    if completion.logprobs is not None:
        numbers["logprobs"] = [
            [
                {"token_id": token, "logprob": one.logprob, "rank": one.rank, "text": one.decoded_token}
                for token, one in entries.items()
            ]
            for entries in completion.logprobs
        ]
    return numbers


def answers(outputs: Iterable[tuple[str, RequestOutput]]) -> Iterator[str]:
    """Every answer after the text that it continues; a score, where there is one, on a line before it."""
    for text, output in outputs:
        for completion in output.outputs:
            score = "" if completion.score is None else f"[score {completion.score:.4f}]\n"
            yield score + text + completion.text
