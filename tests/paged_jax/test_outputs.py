"""What a request gives back: log-probabilities by token, and refused prompts."""

import pytest
from support.checkpoints import SPECIALS, glassllm_tokenizer, tiny_tokenizer, tiny_vocab
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders
from tokenizers import models as raw_models

from models.tokenizer import Tokenizer
from paged_jax.errors import InvalidPrompt
from paged_jax.outputs import CompletionOutput, Logprob, RequestOutput, token_logprobs
from paged_jax.sequence import RequestMetrics, TokenLogprobs


class Letters:
    """A tokenizer whose ids are a = 1, b = 2, ...; it counts what it decodes."""

    def __init__(self):
        self.decoded = 0

    def decode(self, ids, skip_special_tokens=True):
        self.decoded += len(ids)
        return "".join(chr(token + 96) for token in ids)


TOP = [(2, -0.5), (1, -1.0), (3, -2.0)]


def test_the_most_likely_come_best_first_and_the_chosen_one_is_among_them():
    (entries,) = token_logprobs([TokenLogprobs(1, -1.0, 2, TOP)], Letters(), 3)
    assert entries == {2: Logprob(-0.5, 1, "b"), 1: Logprob(-1.0, 2, "a"), 3: Logprob(-2.0, 3, "c")}
    assert list(entries) == [2, 1, 3]


def test_a_chosen_token_that_is_not_among_them_is_added_with_its_own_rank():
    (entries,) = token_logprobs([TokenLogprobs(26, -9.0, 17, TOP)], Letters(), 2)
    assert entries == {2: Logprob(-0.5, 1, "b"), 1: Logprob(-1.0, 2, "a"), 26: Logprob(-9.0, 17, "z")}


@pytest.mark.parametrize("top", [[], TOP])
def test_with_k_0_there_is_the_chosen_one_alone(top):
    (entries,) = token_logprobs([TokenLogprobs(1, -1.0, 2, top)], Letters(), 0)
    assert entries == {1: Logprob(-1.0, 2, "a")}


def test_among_equally_likely_ones_the_chosen_ones_rank_is_the_devices():
    (entries,) = token_logprobs([TokenLogprobs(2, -1.0, 1, [(1, -1.0), (2, -1.0)])], Letters(), 2)
    assert entries == {1: Logprob(-1.0, 1, "a"), 2: Logprob(-1.0, 1, "b")}


def test_there_is_one_for_each_token():
    sampled = [TokenLogprobs(token, -1.0, 1, [(token, -1.0)]) for token in (1, 2, 1)]
    assert [list(entries) for entries in token_logprobs(sampled, Letters(), 1)] == [[1], [2], [1]]
    assert token_logprobs([], Letters(), 1) == []


def test_what_was_made_before_is_taken_over():
    sampled = [TokenLogprobs(token, -1.0, 1, []) for token in (1, 2, 3)]
    before = token_logprobs(sampled[:2], Letters(), 0)
    after = token_logprobs(sampled, Letters(), 0, so_far=before)
    assert after == token_logprobs(sampled, Letters(), 0)
    assert after[1] is before[1]
    assert len(before) == 2


def test_each_token_is_decoded_once_however_long_the_answer():
    letters = Letters()
    sampled = [TokenLogprobs(1 + i % 2, -1.0, 1, TOP) for i in range(500)]
    for _ in range(3):
        token_logprobs(sampled, letters, 3)
    assert letters.decoded == 3 * 3  # alone and after another one


def text_of(tokenizer, token):
    return token_logprobs([TokenLogprobs(token, 0.0, 1, [])], tokenizer, 0)[0][token].decoded_token


def test_a_token_keeps_its_space():
    tokenizer = Tokenizer(glassllm_tokenizer(), {})
    ids = tokenizer.encode("Once upon a time there was")
    assert "".join(text_of(tokenizer, token) for token in ids).lstrip(" ") == "Once upon a time there was"
    raw = RawTokenizer(raw_models.BPE({"▁Hello": 0, "lo": 1}, []))
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    stripping = Tokenizer(raw, {})
    assert stripping.decode([0]) == "Hello"
    assert [text_of(stripping, token) for token in (0, 1)] == [" Hello", "lo"]


def test_a_special_token_has_its_name_and_half_a_character_is_one_broken_one():
    tokenizer = Tokenizer(tiny_tokenizer(bos=False), {})
    assert [text_of(tokenizer, tiny_vocab().index(token)) for token in SPECIALS] == SPECIALS
    assert [text_of(tokenizer, token) for token in tokenizer.encode("é")] == ["\ufffd", "\ufffd"]
    assert text_of(tokenizer, 10**6) == ""


def test_an_output_has_neither_logprobs_nor_an_error_unless_given():
    completion = CompletionOutput(index=0, text="a", token_ids=[1], finish_reason="length")
    assert (completion.logprobs, completion.cumulative_logprob, completion.stop_reason) == (None, None, None)
    metrics = RequestMetrics(arrival_time=0.0, num_cached_tokens=3)
    output = RequestOutput("r", "p", [1], [completion], True, metrics)
    assert (output.error, output.num_cached_tokens) == (None, 3)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("hi", "hi"),
        ({"prompt": "hi"}, "hi"),
        ({"prompt_token_ids": []}, None),
        (None, None),
        ({"prompt": 5}, None),
    ],
)
def test_a_refused_prompt_gives_an_output_without_an_answer(prompt, text):
    error = InvalidPrompt("no")
    output = RequestOutput.refused("r", prompt, error)
    assert (output.request_id, output.prompt, output.outputs) == ("r", text, [])
    assert output.error is error
    assert output.finished
