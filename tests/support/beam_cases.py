"""The beam searches that transformers was asked for, and when an answer counts as the same."""

import itertools
import warnings

from paged_jax import BeamSearchParams
from support.golden_prompts import DEMO, GLASSLLM
from support.greedy import Tie

SCORES = 1e-4
"""How far a score may be off; closer ones are a tie, and either order of them is right."""

OPTIONS = [
    {"beam_width": 4},
    {"beam_width": 2, "early_stopping": True},
    {"beam_width": 3, "length_penalty": 2.0, "early_stopping": "never"},
    {"beam_width": 8, "length_penalty": 0.0},
    {"beam_width": 5, "length_penalty": -1.0, "early_stopping": "never"},
    {"beam_width": 4, "min_tokens": 8, "n": 2},
    {"beam_width": 3, "no_repeat_ngram_size": 2},
    {"beam_width": 4, "repetition_penalty": 1.3},
    {"beam_width": 6, "length_penalty": 0.6, "early_stopping": True},
    {"beam_width": 1},
]
"""Of the searches, over and over along the prompts."""
EXTRA = {
    "glassllm": [
        {"beam_width": 4, "bad_words": [[1], [20, 5]]},
        {"beam_width": 3, "stop_token_ids": (30, 31), "max_tokens": 60},
        {"beam_width": 4, "max_tokens": 80},
        {"beam_width": 4, "early_stopping": True, "stop_token_ids": (5, 6, 7), "length_penalty": -0.5},
    ],
    "demo": [],
}
TOKENS = {"glassllm": 24, "demo": 12}


def cases(model: str) -> list[tuple[object, dict]]:
    """(prompt, fields of BeamSearchParams) of each search."""
    prompts = {"glassllm": GLASSLLM, "demo": DEMO}[model]
    common = {"max_tokens": TOKENS[model]}
    found = [(p, common | o) for p, o in zip(prompts, itertools.cycle(OPTIONS), strict=False)]
    return found + [(prompts[1 + at], common | o) for at, o in enumerate(EXTRA[model])]


def params_of(options: dict) -> BeamSearchParams:
    return BeamSearchParams(**options)


def assert_same_searches(llm, rows: list[dict], name: str, every: int = 1) -> None:
    """All of them in one call."""
    params = [params_of(options) for _, options in cases(name)[::every]]
    prompts = [{"prompt_token_ids": row["prompt_ids"]} for row in rows]
    for index, (row, output) in enumerate(zip(rows, llm.beam_search(prompts, params), strict=True)):
        assert_same_hypotheses(row, output.outputs, f"{name}, search {index}")


def assert_same_hypotheses(row: dict, outputs: list, name: str) -> None:
    """The same sequences with the same scores, best first; ties are listed among the warnings."""
    ids, scores = [list(one.token_ids) for one in outputs], [one.score for one in outputs]
    assert len(scores) == len(row["scores"]), name
    for rank, (want, got) in enumerate(zip(row["scores"], scores, strict=True)):
        assert abs(want - got) <= SCORES * max(1, abs(want)), f"{name}, rank {rank}: {got}, not {want}"
    for rank, (want, got) in enumerate(zip(row["ids"], ids, strict=True)):
        if want != got:
            near = [other for other in (rank - 1, rank + 1) if 0 <= other < len(scores)]
            gap = min(abs(row["scores"][rank] - row["scores"][other]) for other in near)
            assert gap <= SCORES, f"{name}, rank {rank}: {got} instead of {want}"
            warnings.warn(f"{name}, rank {rank}: {got} instead of {want}, a tie", Tie, stacklevel=2)
