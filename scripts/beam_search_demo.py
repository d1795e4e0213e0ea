#!/usr/bin/env python3
"""Beam search on a real model: hypotheses as trees, the blocks that beams share, memory, and speed.

Several prompts, each with two widths, run in one batch. Beside transformers' num_beams where that is
installed (scripts/test --all installs it).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from time import monotonic

from in_venv import ensure_environment

if __name__ == "__main__":
    ensure_environment()

from beam_pictures import beam_blocks, hypothesis_tree, spark
from demo_model import demo_model
from reference_models import load_reference_models
from rich.console import Console
from rich.table import Table

from paged_jax import LLM, BeamSearchParams
from paged_jax.capacity import format_bytes
from paged_jax.outputs import RequestOutput
from paged_jax.sequence import Request

PROMPTS = [
    "The old lighthouse keeper climbed the stairs every evening, lit the lamp, and wrote down in his book"
    " what he had seen of the ships and the weather. One night, when the fog was so thick that he could not"
    " see the railing of his own balcony, he heard",
    "Translate to French: The library is open on Sundays.\nFrench:",
    "Question: Why is the sky blue?\nAnswer: The sky is blue because",
]
WIDTHS = (4, 8)
MAX_TOKENS = 32
BLOCK_SIZE = 8


@dataclass
class Watch:
    """What the steps of the searches did to the memory."""

    peak_blocks: int = 0
    peak_logical: int = 0
    copies: list[int] = field(default_factory=list)
    tables: dict[str, list[list[int]]] = field(default_factory=dict)
    """Of each request, when its beams held most blocks."""

    def look(self, llm: LLM, requests: dict[str, Request]) -> None:
        """After a step."""
        step = llm.engine.last_step
        assert step is not None
        self.peak_blocks = max(self.peak_blocks, step.blocks.used)
        self.peak_logical = max(self.peak_logical, step.blocks.logical)
        self.copies.append(step.cow_copies)
        for name, request in requests.items():
            now = [list(sequence.table.blocks) for sequence in request.sequences]
            if sum(map(len, now)) > sum(map(len, self.tables.get(name, []))):
                self.tables[name] = now


def main() -> None:
    console = Console()
    start = monotonic()
    llm = LLM(
        demo_model(),
        max_model_len=512,
        block_size=BLOCK_SIZE,
        num_blocks=1025,
        max_num_seqs=sum(WIDTHS) * len(PROMPTS),
        warm_up=False,
    )
    console.print(f"model loaded in {monotonic() - start:.1f} s")
    search(llm)  # compiles what is needed
    llm.reset_prefix_cache()
    start = monotonic()
    outputs, requests, watch = search(llm)
    seconds = monotonic() - start
    show_hypotheses(console, llm, outputs)
    show_blocks(console, requests, watch)
    show_memory(console, llm, outputs, requests, watch)
    tokens = sum(request.metrics.num_output_tokens for request in requests.values())
    console.print(f"\n{tokens} beam tokens in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s")
    compare(console, outputs, seconds)
    llm.close()


def search(llm: LLM) -> tuple[dict[str, RequestOutput], dict[str, Request], Watch]:
    """Every prompt with every width, all in one batch, step by step."""
    engine, watch = llm.engine, Watch()
    requests = {}
    for width in WIDTHS:
        for index, prompt in enumerate(PROMPTS):
            name = f"{index}x{width}"
            params = BeamSearchParams(beam_width=width, max_tokens=MAX_TOKENS)
            requests[name] = engine.make_request(name, prompt, params)
            engine.add(requests[name])
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
        watch.look(llm, requests)
    return outputs, requests, watch


def show_hypotheses(console: Console, llm: LLM, outputs: dict[str, RequestOutput]) -> None:
    for width in WIDTHS:
        for index, prompt in enumerate(PROMPTS):
            title = f"width {width}: {prompt if len(prompt) < 60 else '... ' + prompt[-56:]!r}"
            console.print(hypothesis_tree(title, outputs[f"{index}x{width}"].outputs, llm.tokenizer.decode))
            console.print()
    console.print(
        "■ marks a hypothesis that ended by itself; the figures are sums of log-probabilities / length\n"
    )


def show_blocks(console: Console, requests: dict[str, Request], watch: Watch) -> None:
    console.print(
        f"blocks of {BLOCK_SIZE} tokens when a search held most: # shared by all its beams, a digit by so"
        " many, a letter that beam's own; | ends the prompt's full blocks"
    )
    for name in (f"0x{width}" for width in WIDTHS):
        console.print(f"first prompt, width {name[2:]}:")
        prompt_blocks = len(requests[name].prompt_token_ids) // BLOCK_SIZE
        console.print(beam_blocks(watch.tables[name], prompt_blocks), end="")
    console.print(
        f"\ncopies of partly filled blocks, step by step: {spark(watch.copies)} (at most"
        f" {max(watch.copies)} of {sum(WIDTHS) * len(PROMPTS)} beams)\n"
    )


def show_memory(
    console: Console,
    llm: LLM,
    outputs: dict[str, RequestOutput],
    requests: dict[str, Request],
    watch: Watch,
) -> None:
    """Beside dense beam search, where each beam has all of its tokens to itself and is copied as it moves."""
    block_bytes = llm.engine.runner.block_bytes
    token_bytes = block_bytes // BLOCK_SIZE
    dense = moved = 0
    for request in requests.values():
        width, prompt = request.max_sequences, len(request.prompt_token_ids)
        dense += width * (prompt + request.max_new_tokens)
        moved += width * sum(prompt + step for step in range(request.metrics.num_token_steps))
    table = Table(title="memory of all six searches", title_justify="left", show_header=False)
    table.add_row(
        "peak, shared blocks", f"{watch.peak_blocks} blocks, {format_bytes(watch.peak_blocks * block_bytes)}"
    )
    table.add_row(
        "peak, each beam its own blocks",
        f"{watch.peak_logical} blocks, {format_bytes(watch.peak_logical * block_bytes)}",
    )
    table.add_row(
        "dense, reserved to max_tokens",
        f"{format_bytes(dense * token_bytes)}: {dense / BLOCK_SIZE / watch.peak_blocks:.1f} times as much",
    )
    copied = sum(watch.copies)
    table.add_row("copied in all steps", f"{copied} blocks, {format_bytes(copied * block_bytes)}")
    table.add_row("dense, beams reordered every step", format_bytes(moved * token_bytes))
    console.print(table)
    saved = Table(title="saved by sharing, over a search's steps", title_justify="left")
    for column in ("search", "blocks at most", "unshared", "saved", "copies"):
        saved.add_column(column, justify="left" if column == "search" else "right")
    for name in outputs:
        index, _, own_width = name.partition("x")
        metrics = requests[name].metrics
        saved.add_row(
            f"prompt {int(index) + 1}, width {own_width}",
            str(metrics.peak_blocks),
            str(metrics.peak_logical_blocks),
            f"{metrics.saved_share:.0%}",
            str(metrics.num_cow_copies),
        )
    console.print(saved)


def compare(console: Console, outputs: dict[str, RequestOutput], seconds: float) -> None:
    """The same searches by transformers in this process, in float32 as ours: how long, and what they find."""
    models = load_reference_models(demo_model(), os.cpu_count() or 1)
    if not models:
        console.print("transformers is not installed: no comparison (scripts/test --all installs it)")
        return
    import torch

    model = models["float32"]
    model.generation_config.eos_token_id = 2
    total, same, farthest = 0.0, 0, 0.0
    for width in WIDTHS:  # the prompts of a width in one call, padded on the left: its fastest way
        searches = [outputs[f"{index}x{width}"] for index in range(len(PROMPTS))]
        longest = max(len(output.prompt_token_ids) for output in searches)
        padding = [longest - len(output.prompt_token_ids) for output in searches]
        rows = [[0] * pad + o.prompt_token_ids for pad, o in zip(padding, searches, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
        start = monotonic()
        with torch.inference_mode():
            found = model.generate(
                torch.tensor(rows),
                attention_mask=torch.tensor(mask),
                do_sample=False,
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=MAX_TOKENS,
                pad_token_id=0,
                output_scores=True,
                return_dict_in_generate=True,
            )
        total += monotonic() - start
        console.print(f"[dim]transformers: searches of width {width} done[/dim]")
        ours = [one for output in searches for one in output.outputs]
        theirs = zip(found.sequences[:, longest:].tolist(), found.sequences_scores.tolist(), strict=True)
        for one, (ids, score) in zip(ours, theirs, strict=True):
            same += list(one.token_ids) == ids[: len(one.token_ids)]
            farthest = max(farthest, abs((one.score or 0.0) - score))
    count = sum(len(output.outputs) for output in outputs.values())
    console.print(
        f"transformers, num_beams, the prompts of each width in one call: {total:.2f} s,"
        f" {total / seconds:.1f} times as long; {same} of {count} hypotheses are the same,"
        f" scores differ by {farthest:.1e} at most"
    )


if __name__ == "__main__":
    main()
