"""Scores without a model: probabilities, the same for the same tokens, as sharp as was measured."""

import numpy as np
import pytest

from paged_jax.block_allocator import BlockAllocator
from paged_jax.block_table import BlockTable
from paged_jax.made_up_scores import TOP, VOCAB_SIZE, made_up_scores
from paged_jax.sequence import Sequence
from paged_jax.sim_request import SimRequest


def sequence_of(name="a", tokens=()):
    request = SimRequest(name, 0.0, 3, 200, beam_width=4).request()
    sequence = Sequence(request, 0, BlockTable(BlockAllocator(100, 4), name))
    request.sequences = [sequence]
    sequence.token_ids.extend(tokens)
    return sequence


def test_all_tokens_together_have_a_probability_of_one():
    scores = made_up_scores([sequence_of(name) for name in "abcdefgh"])
    for row in range(8):
        every = np.asarray(scores.logits(row), np.float64)
        assert len(every) == VOCAB_SIZE
        shift = scores.top_logprobs[row, 0] - every[0]
        np.testing.assert_allclose(every[:TOP] + shift, scores.top_logprobs[row], atol=1e-4)
        assert np.exp(every + shift).sum() == pytest.approx(1, abs=0.01)


def test_the_same_tokens_score_alike_and_others_otherwise():
    same, again, other = (sequence_of(tokens=tokens) for tokens in ((1, 2), (1, 2), (1, 3)))
    first, second, third = made_up_scores([same, again, other]).top_logprobs
    np.testing.assert_array_equal(first, second)
    assert (first != third).any()
    assert (made_up_scores([sequence_of("b", (1, 2))]).top_logprobs[0] != first).any()


def test_what_is_further_back_than_the_longest_memory_is_forgotten():
    tail = list(range(130))
    one, other = sequence_of(tokens=[7, *tail]), sequence_of(tokens=[8, *tail])
    np.testing.assert_array_equal(*made_up_scores([one, other]).top_logprobs)


def test_the_likeliest_token_is_as_likely_as_is_said():
    sequences = [sequence_of(f"{number}") for number in range(3000)]
    likeliest = np.exp(made_up_scores(sequences).top_logprobs[:, 0])
    found = np.percentile(likeliest, [10, 25, 50, 75, 90])
    np.testing.assert_allclose(found, [0.18, 0.31, 0.59, 0.89, 0.99], atol=0.02)
