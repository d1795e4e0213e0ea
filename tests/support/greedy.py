"""Greedy answers as records, and what counts as the same answer.

A row is what a reference did with one prompt: `ids` it chose, `gaps` between its two best logits at each
step, `close` the runner-up's id at the steps whose gap is under 1e-3, and `logits` of some steps: the
largest absolute value over the vocabulary (`scale`), and some tokens' (`ids`, `values`).
"""

import warnings
from itertools import zip_longest

import numpy as np

TIE = 1e-4
"""Two logits nearer than this are a tie: which of them is the larger hangs on the order of float32 sums."""
RELATIVE = 1e-4
"""How far a logit may be off, relative to the largest absolute logit of its step."""


class Tie(UserWarning):
    """A greedy answer took the other of two logits that are as good as equal."""


def row(steps: list[np.ndarray], ids: list[int], keep: tuple[int, ...] = (0,)) -> dict:
    """A row of the chosen ids and the logits [vocab_size] each was chosen from; keeps those of `keep`."""
    gaps, close, logits = [], {}, []
    for step, values in enumerate(steps):
        best, second = np.argsort(-values, kind="stable")[:2]
        gap = float(values[best] - values[second])
        gaps.append(float(f"{gap:.4g}"))
        if gap < 1e-3:
            close[str(step)] = int(second)
    for step in keep:
        if step < len(steps):
            logits.append({"step": step} | _some(steps[step]))
    return {"ids": ids, "gaps": gaps, "close": close, "logits": logits}


def _some(values: np.ndarray) -> dict:
    """The five best logits, and five spread over the vocabulary."""
    spread = np.linspace(0, len(values) - 1, 5).astype(int)
    chosen = [*np.argsort(-values, kind="stable")[:5].tolist(), *spread.tolist()]
    return {
        "scale": float(f"{np.abs(values).max():.7g}"),
        "ids": chosen,
        "values": [float(f"{values[i]:.7g}") for i in chosen],
    }


def fork(expected: dict, ids: list[int]) -> str | None:
    """None where ids are those of the row; where they part at a tie, how. Anything else fails.

    After a tie the rest is not compared: it continues another text.
    """
    for step, (want, got) in enumerate(zip_longest(expected["ids"], ids)):
        if want == got:
            continue
        gap = expected["gaps"][step] if step < len(expected["gaps"]) else None
        told = f"step {step}: {got} instead of {want}, whose logit is the best by {gap}"
        assert gap is not None, told
        assert gap < TIE, told
        assert got == expected["close"][str(step)], f"{told}; the tie is with {expected['close'][str(step)]}"
        return told
    return None


def assert_same_answers(expected: list[dict], answers: list[list[int]], name: str) -> None:
    """Every answer equals its row but for ties; these are listed among the warnings of the test run."""
    assert len(expected) == len(answers)
    for index, (want, ids) in enumerate(zip(expected, answers, strict=True)):
        try:
            told = fork(want, list(ids))
        except AssertionError as error:
            raise AssertionError(f"{name}, prompt {index}: {error}") from None
        if told is not None:
            warnings.warn(f"{name}, prompt {index}: {told}", Tie, stacklevel=2)


def assert_close_logits(expected: dict, values: np.ndarray) -> None:
    """The kept logits of one step agree within RELATIVE of the largest absolute one."""
    scale = expected["scale"]
    assert abs(np.abs(values).max() - scale) <= RELATIVE * scale
    got = np.asarray(values)[expected["ids"]]
    np.testing.assert_allclose(got, expected["values"], rtol=0, atol=RELATIVE * scale)


def assert_same_rows(expected: list[dict], rows: list[dict], name: str) -> None:
    """Two runs of the reference agree: the same prompts, ids but for ties, logits and gaps."""
    assert [row["prompt_ids"] for row in expected] == [row["prompt_ids"] for row in rows]
    assert_same_answers(expected, [row["ids"] for row in rows], name)
    for want, got in zip(expected, rows, strict=True):
        same = [a == b for a, b in zip(want["ids"], got["ids"], strict=False)]
        parted = same.index(False) if False in same else len(same)
        # The five best are in order of their values, so that it does not matter which of a tie comes first.
        first, now = want["logits"][0], got["logits"][0]
        off = RELATIVE * first["scale"]
        np.testing.assert_allclose(now["values"], first["values"], rtol=0, atol=off, err_msg=name)
        np.testing.assert_allclose(
            got["gaps"][:parted], want["gaps"][:parted], rtol=1e-3, atol=2 * off, err_msg=name
        )
