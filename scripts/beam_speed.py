"""Beam searches on the demo model: ours, and transformers' generate(num_beams=...), case by case."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from paged_jax import LLM

NEW_TOKENS = 32


class Case(NamedTuple):
    """So many prompts of a length, each searched with so many beams."""

    prompts: int
    tokens: int
    width: int

    def __str__(self) -> str:
        return f"{self.prompts} x {self.tokens:,} tokens, width {self.width}"


class Parts(NamedTuple):
    """Seconds of ours: of the device in steps that prefill and in those that only decode, of the host in all.

    saved: share of the blocks that sharing saves.
    """

    prefill: float
    decode: float
    host: float
    saved: float


@dataclass(frozen=True)
class Run:
    """One run of a case. hypotheses: ids by prompt, the best first."""

    seconds: float
    hypotheses: list[list[list[int]]]
    parts: Parts | None = None


class Side(Protocol):
    """Something that searches."""

    @property
    def name(self) -> str: ...
    def run(self, prompts: Sequence[list[int]], width: int) -> Run: ...
    def takes(self, case: Case) -> bool: ...


class OurSearches:
    """paged_jax, driven step by step, as LLM.beam_search does."""

    def __init__(self, llm: LLM, dtype: str) -> None:
        self.llm = llm
        self.name = f"paged_jax {dtype}"

    def takes(self, case: Case) -> bool:
        """Any."""
        return True

    def run(self, prompts: Sequence[list[int]], width: int) -> Run:
        """Search from an empty prefix cache."""
        from paged_jax import BeamSearchParams

        engine = self.llm.engine
        engine.allocator.forget_cached()
        params = BeamSearchParams(beam_width=width, max_tokens=NEW_TOKENS, ignore_eos=True)
        steps, outputs = [], []
        start = time.perf_counter()
        for index, prompt in enumerate(prompts):
            engine.add(engine.make_request(f"{index}", {"prompt_token_ids": prompt}, params))
        while engine.has_unfinished:
            outputs += engine.step()
            steps.append(engine.last_step)
        seconds = time.perf_counter() - start
        outputs.sort(key=lambda output: int(output.request_id))
        done = [step for step in steps if step is not None]
        parts = Parts(
            prefill=sum(step.device_seconds for step in done if step.prefill_tokens),
            decode=sum(step.device_seconds for step in done if not step.prefill_tokens),
            host=sum(step.schedule_seconds + step.update_seconds for step in done),
            saved=1 - sum(step.blocks.used for step in done) / sum(step.blocks.logical for step in done),
        )
        return Run(seconds, [[list(one.token_ids) for one in o.outputs] for o in outputs], parts)


class TheirSearches:
    """transformers' generate. at_once: prompts of a call; None: all."""

    def __init__(self, model: Any, dtype: str, at_once: int | None) -> None:
        self.name = f"transformers {dtype}, {'all' if at_once is None else at_once} at a time"
        self.model, self.at_once = model, at_once
        model.generation_config.eos_token_id = None  # as ignore_eos

    def takes(self, case: Case) -> bool:
        """Whether it would not do the same as the one that takes all at once."""
        return self.at_once is None or self.at_once < case.prompts

    def run(self, prompts: Sequence[list[int]], width: int) -> Run:
        """Prompts of one length: nothing is padded, so the attention takes its faster, causal way."""
        size = self.at_once or len(prompts)
        start = time.perf_counter()
        found: list[list[list[int]]] = []
        for at in range(0, len(prompts), size):
            found += self._generate(prompts[at : at + size], width)
        return Run(time.perf_counter() - start, found)

    def _generate(self, prompts: Sequence[list[int]], width: int) -> list[list[list[int]]]:
        import torch

        tokens = torch.tensor(prompts)
        with torch.inference_mode():
            out = self.model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                use_cache=True,
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=NEW_TOKENS,
                pad_token_id=0,
            )
        rows = out[:, tokens.shape[1] :].tolist()
        return [rows[at : at + width] for at in range(0, len(rows), width)]


class Comparison(NamedTuple):
    """The fastest run of each side, by name, and what comes of them."""

    case: Case
    runs: dict[str, Run]

    def fastest(self, side: str, dtype: str = "") -> Run | None:
        """Of a side's runs, such as "paged_jax", in one dtype or in all; None if there is none."""
        runs = [run for name, run in self.runs.items() if name.startswith(f"{side} {dtype}")]
        return min(runs, key=lambda run: run.seconds, default=None)

    def ratio(self, dtype: str = "") -> float | None:
        """transformers' time over ours, of one dtype or the best of each; None without transformers."""
        ours, theirs = self.fastest("paged_jax", dtype), self.fastest("transformers", dtype)
        return None if ours is None or theirs is None else theirs.seconds / ours.seconds

    @property
    def same(self) -> tuple[int, int] | None:
        """In float32: how many hypotheses are transformers', rank for rank, and of how many."""
        ours, theirs = self.fastest("paged_jax", "float32"), self.fastest("transformers", "float32")
        if ours is None or theirs is None:
            return None
        pairs = [
            one == other
            for mine, their in zip(ours.hypotheses, theirs.hypotheses, strict=True)
            for one, other in zip(mine, their, strict=True)
        ]
        return sum(pairs), len(pairs)


def compare(
    cases: Iterable[tuple[Case, Sequence[list[int]]]],
    ours: Sequence[OurSearches],
    theirs: Sequence[TheirSearches],
    rounds: int,
) -> Iterator[Comparison]:
    """Each case's runs, when they are done. Ours run once untimed before: programs may be compiled then.

    A run that got fewer cores than it may use was kept waiting by other work.
    """
    sides: list[Side] = [*ours, *theirs]
    for case, prompts in cases:
        for mine in ours:
            mine.run(prompts, case.width)
        best: dict[str, Run] = {}
        for _ in range(rounds):
            for side in sides:
                if not side.takes(case):
                    continue
                before = time.process_time()
                run = side.run(prompts, case.width)
                cores = (time.process_time() - before) / run.seconds
                told = f"{run.seconds:7.2f} s on {cores:.1f} cores  {case}: {side.name}"
                print(told, file=sys.stderr, flush=True)
                if side.name not in best or run.seconds < best[side.name].seconds:
                    best[side.name] = run
        yield Comparison(case, best)
