"""What a beam search gives back beside its tokens: texts up to their stop strings, and log-probabilities."""

import math
import random

import numpy as np
import pytest
from support.naive_beam_search import MadeUpModel, log_softmax

from .made_up_engine import Pieces
from .test_beam_search import assert_found, expected_search, search

# -- stop strings ------------------------------------------------------------------------------------------

SYLLABLES = Pieces(("a", "b", "ab", "ba", "aab", "c", "ca"))
"""Of a vocabulary of 9: the last two ids give no text."""


def naive_text(answer, stop, min_tokens, include):
    """(text, stop string that ended it) by looking at all of it; what min_tokens brought takes no part."""
    before, text = SYLLABLES.decode(answer[:min_tokens]), SYLLABLES.decode(answer[min_tokens:])
    ends = [(text.find(string) + len(string), rank) for rank, string in enumerate(stop) if string in text]
    if not ends:
        return before + text, None
    end, rank = min(ends)
    return before + text[: end if include else end - len(stop[rank])], stop[rank]


@pytest.mark.parametrize("seed", range(60))
def test_stop_strings_end_hypotheses_wherever_the_borders_of_tokens_are(seed):
    rng = random.Random(seed)
    model = MadeUpModel(9, seed=seed, spread=rng.choice([0.3, 1.0]))
    stop = ["".join(rng.choices("abc", k=rng.choice([2, 3, 3, 4]))) for _ in range(rng.randint(1, 3))]
    fields = {
        "beam_width": rng.randint(1, 6),
        "max_tokens": 10,
        "min_tokens": rng.choice([0, 0, 2, 4]),
        "early_stopping": rng.choice([True, False, "never"]),
        "stop": stop,
        "include_stop_str_in_output": rng.random() < 0.5,
    }

    def text_of(answer):
        return naive_text(list(answer), stop, fields["min_tokens"], fields["include_stop_str_in_output"])

    output, _ = search(model, [0, 3, 1], eos_ids=[7], tokenizer=SYLLABLES, **fields)
    ends = {"ends": lambda answer: text_of(answer)[1] is not None}
    assert_found(output, expected_search(model, [0, 3, 1], fields, {7}, **ends))
    assert [(one.text, one.stop_reason) for one in output.outputs] == [
        text_of(one.token_ids) for one in output.outputs
    ]


# -- log-probabilities -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [{}, {"repetition_penalty": 1.5, "bad_words": [[3], [5], [7]]}, {"beam_width": 30, "max_tokens": 1}],
)
def test_logprobs_are_the_models_own_whatever_constraints_made_of_them(fields):
    model = MadeUpModel(40, seed=3)
    fields = {"beam_width": 4, "max_tokens": 6, "logprobs": 2} | fields
    output, _ = search(model, [1, 2], eos_ids=[0], **fields)
    for one in output.outputs:
        assert len(one.logprobs) == len(one.token_ids)
        for place, (token, entry) in enumerate(zip(one.token_ids, one.logprobs, strict=True)):
            values = log_softmax(model([1, 2, *one.token_ids[:place]]))
            best = np.argsort(-values)[:2].tolist()
            assert set(entry) == {*best, token}
            for known, logprob in entry.items():
                assert logprob.logprob == pytest.approx(values[known], rel=1e-9)
                assert logprob.rank == 1 + int((values > values[known]).sum())
        if "repetition_penalty" not in fields:
            total = math.fsum(
                entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs, strict=True)
            )
            assert one.cumulative_logprob == pytest.approx(total, rel=1e-9)
    plain, _ = search(model, [1, 2], eos_ids=[0], **fields | {"logprobs": None})
    assert [one.logprobs for one in plain.outputs] == [None] * len(plain.outputs)
    assert [one.score for one in plain.outputs] == [one.score for one in output.outputs]
