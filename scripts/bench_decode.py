#!/usr/bin/env python
"""Decode steps of the demo model through the engine, beside transformers on the same threads.

    scripts/bench_decode.py [--threads 2] [--quick] [--json] [--profile]

Ours is what a user gets: `engine.step()`, from the scheduling of rows to the text of their new tokens.
transformers is at its best: calls of the model's forward and an argmax, no `generate()` around them, sdpa
attention, whichever of its dynamic and static caches is faster. All sides decode the same number of rows
from the same random prompts of 240 tokens. They take turns of a few steps, so that other work on the machine
meets all of them; the first step of a turn is not counted (the threads of the side before may still spin),
and of the others the median is. Without transformers installed ours is shown alone.

--profile also says where our step's time goes; scripts/decode_parts.py says how.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Protocol

import numpy as np
import typer
from cpu_threads import take_threads
from decode_parts import decode_parts, take_turns
from demo_model import demo_model
from reference_models import cache_argument, load_reference_models
from rich.console import Console
from rich.table import Table

CONTEXT, PREFILL = 240, 512
"""Tokens of the prompts that are decoded from, and of the one that is prefilled."""
BLOCK_SIZE, MAX_LEN = 16, 576
BATCHES, QUICK_BATCHES = (1, 8, 32), (1, 8)


class Side(Protocol):
    """A model in one dtype, with or without a batch of running rows."""

    name: str

    def start(self, prompts: list[list[int]]) -> None: ...
    def step(self) -> None: ...
    def stop(self) -> None: ...
    def prefill(self, prompt: list[int]) -> None: ...


class Ours:
    """paged_jax through its engine."""

    def __init__(self, model: str, dtype: str, rows: int) -> None:
        from paged_jax import LLM, SamplingParams

        self.name = f"paged_jax {dtype}"
        num_blocks = 1 + rows * (CONTEXT + 80) // BLOCK_SIZE + MAX_LEN // BLOCK_SIZE
        self.llm = LLM(
            model,
            dtype=dtype,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_LEN,
            num_blocks=num_blocks,
            max_num_seqs=rows,
            max_num_batched_tokens=PREFILL,
            use_tqdm=False,
        )
        self.params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        self.running: list[str] = []

    def start(self, prompts: list[list[int]]) -> None:
        engine = self.llm.engine
        for index, prompt in enumerate(prompts):
            self.running.append(f"{index}")
            engine.add(engine.make_request(f"{index}", {"prompt_token_ids": prompt}, self.params))
        while engine.last_step is None or engine.last_step.prefill_tokens or engine.last_step.waiting:
            engine.step()

    def step(self) -> None:
        self.llm.engine.step()

    def stop(self) -> None:
        for request_id in self.running:
            self.llm.engine.abort(request_id)
        self.running = []
        self.llm.engine.last_step = None

    def prefill(self, prompt: list[int]) -> None:
        engine = self.llm.engine
        self.running = ["prefill"]
        engine.add(engine.make_request("prefill", {"prompt_token_ids": prompt}, self.params))
        engine.step()
        self.stop()


class Theirs:
    """transformers' forward in a greedy loop."""

    def __init__(self, model: Any, dtype: str, cache: str) -> None:
        self.name, self.model, self.kind = f"transformers {dtype}, {cache} cache", model, cache
        self.argument = cache_argument(model)
        self.cache: Any = None
        self.tokens: Any = None

    def start(self, prompts: list[list[int]]) -> None:
        import torch
        import transformers

        if self.kind == "dynamic":
            self.cache = transformers.DynamicCache(config=self.model.config)
        else:
            self.cache = transformers.StaticCache(config=self.model.config, max_cache_len=CONTEXT + 80)
        self._forward(torch.tensor(prompts))

    def step(self) -> None:
        self._forward(self.tokens)

    def stop(self) -> None:
        self.cache = self.tokens = None

    def prefill(self, prompt: list[int]) -> None:
        import transformers
        from torch import tensor

        self.cache = transformers.DynamicCache(config=self.model.config)
        self._forward(tensor([prompt]))
        self.stop()

    def _forward(self, tokens: Any) -> None:
        import torch

        with torch.inference_mode():
            out = self.model(tokens, use_cache=True, logits_to_keep=1, **{self.argument: self.cache})
            self.tokens = out.logits[:, -1].argmax(-1, keepdim=True)


def transformers_sides(path: Any, threads: int) -> list[Side]:
    """Both dtypes and both caches; none where transformers is not installed."""
    models = load_reference_models(path, threads)
    return [Theirs(m, dtype, cache) for dtype, m in models.items() for cache in ("dynamic", "static")]


def random_prompts(batch: int, length: int = CONTEXT) -> list[list[int]]:
    """The same for every side."""
    return np.random.default_rng(0).integers(1000, 40000, (batch, length)).tolist()


def measure(sides: list[Side], quick: bool) -> dict[str, dict[str, float]]:
    """Milliseconds by workload and side."""
    rounds, steps = (2, 4) if quick else (4, 5)
    results = {}
    for batch in QUICK_BATCHES if quick else BATCHES:
        prompts = random_prompts(batch)
        for side in sides:
            side.start(prompts)
            side.step()
        results[f"decode, batch {batch}"] = take_turns({s.name: s.step for s in sides}, rounds, steps)
        for side in sides:
            side.stop()
    (prompt,) = random_prompts(1, PREFILL)
    prefills: dict[str, Callable[[], None]] = {
        s.name: lambda s=s: s.prefill(prompt)  # type: ignore[misc]  # binds s now
        for s in sides
        if "static" not in s.name
    }
    for action in prefills.values():
        action()
    results[f"prefill, {PREFILL} tokens"] = take_turns(prefills, 2 if quick else 3, 3)
    return results


def ratios(times: dict[str, float]) -> tuple[float, float] | None:
    """transformers' time over ours: the best of each, and both in float32; None without transformers."""
    ours = {name: ms for name, ms in times.items() if name.startswith("paged_jax")}
    theirs = {name: ms for name, ms in times.items() if name not in ours}
    if not theirs:
        return None
    exact = [min(ms for name, ms in group.items() if "float32" in name) for group in (theirs, ours)]
    return min(theirs.values()) / min(ours.values()), exact[0] / exact[1]


def show(results: dict[str, dict[str, float]], threads: int) -> None:
    """Milliseconds and tokens a second, a column for each workload."""
    table = Table("", *results, title=f"SmolLM2-135M on {threads} CPU threads: ms (tokens/s)")
    for column in table.columns[1:]:
        column.justify = "right"
    for name in next(iter(results.values())):
        cells = []
        for workload, times in results.items():
            tokens = int(workload.split()[2 if workload.startswith("decode") else 1])
            cells.append(f"{times[name]:.1f} ({1000 * tokens / times[name]:,.0f})" if name in times else "")
        table.add_row(name, *cells)
    found = [ratios(times) for times in results.values()]
    for index, label in enumerate(("best against best", "float32 against float32")):
        if all(found):
            table.add_row(label, *(f"{pair[index]:.2f}x" for pair in found if pair), style="bold")
    Console(width=max(100, Console().width)).print(table)
    told = "n x: transformers takes n times as long as paged_jax."
    print(told if all(found) else "transformers is not installed: pip install -e '.[reference]' to compare.")


Threads = Annotated[int, typer.Option(help="CPU cores that either side may use.", min=1)]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")]
Quick = Annotated[bool, typer.Option(help="Batches 1 and 8 only, and fewer steps.")]
Profile = Annotated[bool, typer.Option(help="Also show where our step's time goes.")]


def main(
    threads: Threads = 2, as_json: AsJson = False, quick: Quick = False, profile: Profile = False
) -> None:
    """Compare decode steps and a prefill with transformers."""
    threads = take_threads(threads)
    path = demo_model()
    rows = max(QUICK_BATCHES if quick else BATCHES)
    exact, fast = (Ours(str(path), dtype, rows) for dtype in ("float32", "bfloat16"))
    results = measure([exact, fast, *transformers_sides(path, threads)], quick)
    parts = {}
    if profile:
        fast.llm.close()
        for batch in QUICK_BATCHES if quick else BATCHES:
            exact.start(random_prompts(batch))
            parts[f"batch {batch}"] = decode_parts(path, batch, CONTEXT + 16, exact.step)
            exact.stop()
    if as_json:
        found = {workload: ratios(times) for workload, times in results.items()}
        print(json.dumps({"threads": threads, "ms": results, "ratios": found, "parts_ms": parts}))
        return
    show(results, threads)
    if parts:
        table = Table("", *parts, title="where our float32 step's milliseconds go")
        for name in next(iter(parts.values())):
            table.add_row(name, *(f"{times[name]:.1f}" for times in parts.values()))
        Console().print(table)


if __name__ == "__main__":
    typer.run(main)
