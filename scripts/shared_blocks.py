"""What sharing saves of the blocks of samples and beams: made-up ones, and the demo model's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from made_up_searches import Saving, run_made_up
from request_lengths import LogNormal, cut_prompt, read_lengths
from rich.table import Table

if TYPE_CHECKING:
    from paged_jax import LLM

WIDTHS = (2, 4, 6)
KINDS = ("samples", "beams")


class Lengths(NamedTuple):
    """Requests' lengths, and the percentages that the paper gives for such, by kind: one for each width,
    or a range over them.
    """

    name: str
    tokens: np.ndarray
    published: dict[str, tuple[str, str, str] | str]


class Saved(NamedTuple):
    """A row of the first table."""

    lengths: Lengths
    kind: str
    savings: list[Saving]


def made_up_lengths(count: int) -> list[Lengths]:
    """As long as Alpaca's and as ShareGPT's."""
    rng = np.random.default_rng(0)

    def sample(prompt: LogNormal, answer: LogNormal) -> np.ndarray:
        return np.stack([prompt.sample(count, rng), answer.sample(count, rng)], axis=1)

    return [
        Lengths(
            "Alpaca-like",
            sample(LogNormal(19.3, 0.7), LogNormal(58.5, 0.85)),
            {"samples": ("6.1", "8.5", "9.8"), "beams": ("37.6", "53.1", "55.2")},
        ),
        Lengths(
            "ShareGPT-like",
            sample(LogNormal(161.3, 1.3), LogNormal(338.0, 0.9)),
            {"samples": "16 to 31", "beams": "44 to 66"},
        ),
    ]


def measure_memory(count: int, trace: Path | None) -> list[Saved]:
    """Shares saved, without a model."""
    workloads = made_up_lengths(count)
    if trace is not None:
        workloads.append(Lengths(trace.stem, read_lengths(trace, count), {}))
    rows = []
    for lengths in workloads:
        for kind in KINDS:
            rows.append(Saved(lengths, kind, [run_made_up(lengths.tokens, kind, width) for width in WIDTHS]))
            shares = ", ".join(f"{100 * saving.share:.1f}" for saving in rows[-1].savings)
            print(f"{lengths.name}, {kind}: {shares} %", file=sys.stderr, flush=True)
    return rows


def memory_table(rows: list[Saved], count: int) -> Table:
    """A row for each workload and kind."""
    title = f"blocks that sharing saves / blocks without it, in %; {count} requests"
    table = Table("mean tokens: prompt, answer", "", *(f"{width}" for width in WIDTHS), title=title)
    table.add_column("published, OPT-13B")
    table.add_column("copies a request")
    for lengths, kind, savings in rows:
        prompt, answer = lengths.tokens.mean(axis=0)
        published = lengths.published.get(kind, "")
        table.add_row(
            f"{lengths.name}: {prompt:.0f}, {answer:.0f}",
            kind,
            *(f"{100 * saving.share:.1f}" for saving in savings),
            published if isinstance(published, str) else " ".join(published),
            " ".join(f"{saving.copies / count:.0f}" for saving in savings),
            end_section=kind == KINDS[-1],
        )
    return table


def measure_model(llm: LLM, text: list[int], quick: bool) -> dict[int, list[tuple[float, float]]]:
    """By tokens of the answers: for each width the shares saved by the demo model and by made-up scores.

    The prompts are conversations, and beginnings of a text.
    """
    from support.golden_prompts import DEMO

    from paged_jax import BeamSearchParams

    prompts = [llm.tokenizer.encode_chat(turns) for turns in DEMO if not isinstance(turns, str)][:6]
    prompts += [cut_prompt(text, length, index) for index, length in enumerate((19, 24, 40, 160, 200))]
    prompts = prompts[:: 3 if quick else 1]
    found = {}
    for answer in (58,) if quick else (58, 338):
        lengths = np.array([(len(prompt), answer) for prompt in prompts])
        pairs = []
        for width in WIDTHS:
            outputs = llm.beam_search(
                [{"prompt_token_ids": prompt} for prompt in prompts],
                BeamSearchParams(beam_width=width, max_tokens=answer, ignore_eos=True),
                use_tqdm=False,
            )
            real = Saving.of([output.metrics for output in outputs]).share
            pairs.append((real, run_made_up(np.repeat(lengths, 8, axis=0), "beams", width).share))
            print(f"{answer} tokens, width {width}: {100 * real:.1f} %", file=sys.stderr, flush=True)
        found[answer] = pairs
    return found


def model_table(found: dict[int, list[tuple[float, float]]]) -> Table:
    """Two rows for each length of the answers."""
    table = Table("answers of", "scores", *(f"{width}" for width in WIDTHS), title="beams: the same, in %")
    for answer, pairs in found.items():
        for at, name in enumerate(("demo model", "made up")):
            cells = (f"{100 * pair[at]:.1f}" for pair in pairs)
            table.add_row(f"{answer} tokens", name, *cells, end_section=at == 1)
    return table
