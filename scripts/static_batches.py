"""transformers with requests in static batches: what an engine without continuous batching can do at best."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from reference_models import cache_argument, load_reference_models

SIZES = (4, 8, 16)
Order = Literal["prompts", "answers"]


class Job(Protocol):
    """A request: its prompt as ids, and how many tokens it generates."""

    @property
    def prompt(self) -> list[int]: ...
    @property
    def num_tokens(self) -> int: ...


class StaticBatches:
    """One model, one batch size, and batches of requests that are alike in one of their lengths."""

    def __init__(self, model: Any, dtype: str, size: int, order: Order) -> None:
        self.name = f"transformers {dtype}, {size} sorted by {order}"
        self.model, self.size, self.order = model, size, order
        self.argument = cache_argument(model)

    def run(self, jobs: Sequence[Job]) -> float:
        """Seconds for all jobs."""
        start = time.perf_counter()
        if self.order == "prompts":
            by_length = sorted(jobs, key=lambda job: (len(job.prompt), job.num_tokens))
        else:
            by_length = sorted(jobs, key=lambda job: (job.num_tokens, len(job.prompt)))
        for at in range(0, len(jobs), self.size):
            self._generate(by_length[at : at + self.size])
        return time.perf_counter() - start

    def _generate(self, jobs: Sequence[Job]) -> list[list[int]]:
        """Greedy ids of each job, until the longest is done."""
        import torch
        import transformers

        longest = max(len(job.prompt) for job in jobs)
        steps = max(job.num_tokens for job in jobs)
        tokens = torch.zeros((len(jobs), longest), dtype=torch.long)
        mask = torch.zeros((len(jobs), longest + steps), dtype=torch.long)
        for row, job in enumerate(jobs):
            tokens[row, longest - len(job.prompt) :] = torch.tensor(job.prompt)
            mask[row, longest - len(job.prompt) :] = 1
        positions = (mask[:, :longest].cumsum(-1) - 1).clamp(min=0)
        padded = bool((mask == 0).any())
        cache: Any = transformers.DynamicCache(config=self.model.config)
        chosen = []
        with torch.inference_mode():
            for step in range(steps):
                out = self.model(
                    tokens,
                    # Without a mask the attention takes its faster, causal way.
                    attention_mask=mask[:, : longest + step] if padded else None,
                    position_ids=positions,
                    use_cache=True,
                    logits_to_keep=1,
                    **{self.argument: cache},
                )
                tokens = out.logits[:, -1].argmax(-1, keepdim=True)
                positions = positions[:, -1:] + 1
                chosen.append(tokens)
            ids = torch.cat(chosen, dim=1).tolist()
        return [row[: job.num_tokens] for row, job in zip(ids, jobs, strict=True)]


def load_static_batches(path: Path, threads: int, orders: Sequence[Order]) -> list[StaticBatches]:
    """Both dtypes and every size and order; none where torch or transformers is not installed."""
    return [
        StaticBatches(model, dtype, size, order)
        for dtype, model in load_reference_models(path, threads).items()
        for size in SIZES
        for order in orders
    ]
