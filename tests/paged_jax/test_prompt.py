"""What may be given as a prompt."""

from types import SimpleNamespace

import numpy as np
import pytest

from paged_jax.errors import InvalidPrompt, PromptTooLong
from paged_jax.prompt import check_length, prompt_ids, prompt_list

VOCAB = 100


class Letters:
    """A tokenizer with an id a character."""

    def encode(self, text):
        if "!" in text:
            raise ValueError("no such character")
        return [ord(char) % VOCAB for char in text]


def checked(prompt):
    return prompt_ids(prompt, Letters(), VOCAB)


@pytest.mark.parametrize("prompt", ["hi", "", {"prompt_token_ids": [1]}, {"prompt": "hi"}])
def test_one_prompt_is_a_list_of_one(prompt):
    assert prompt_list(prompt) == [prompt]


@pytest.mark.parametrize("make", [list, tuple])
def test_many_prompts_may_be_of_both_kinds(make):
    prompts = ["hi", {"prompt_token_ids": [1]}]
    assert prompt_list(make(prompts)) == prompts


def test_no_prompts_are_no_prompts():
    assert prompt_list([]) == []


@pytest.mark.parametrize("prompts", [None, 5, 1.5, b"hi", b"", bytearray(b"hi"), {"hi"}, iter(["hi"])])
def test_what_is_no_prompt_and_no_list_is_refused(prompts):
    with pytest.raises(InvalidPrompt, match=r'expected a str, {"prompt": str} or'):
        prompt_list(prompts)


@pytest.mark.parametrize("ids", [[1, 2, 3], (1,), [np.int64(1)], [True]])
def test_a_bare_list_of_ids_is_told_how_to_be_a_prompt(ids):
    with pytest.raises(InvalidPrompt, match=r'pass token ids as {"prompt_token_ids": \[...\]}'):
        prompt_list(ids)


def test_a_text_is_kept_beside_its_ids():
    assert checked("ab") == checked({"prompt": "ab"}) == ("ab", [97, 98], "")


@pytest.mark.parametrize(
    "ids", [[0, 99], (0, 99), np.array([0, 99]), np.array([0, 99], np.uint8), [np.int32(0), 99]]
)
def test_ids_are_taken_as_they_are_and_kept_as_plain_ints(ids):
    text, kept, salt = checked({"prompt_token_ids": ids})
    assert (text, kept, salt) == (None, [0, 99], "")
    assert {type(token) for token in kept} == {int}


@pytest.mark.parametrize(
    "prompt", ["", {"prompt": ""}, {"prompt_token_ids": []}, {"prompt_token_ids": np.array([], int)}]
)
def test_an_empty_prompt_is_refused(prompt):
    with pytest.raises(InvalidPrompt, match="needs one at least"):
        checked(prompt)


def test_an_empty_text_is_refused_also_where_the_model_would_begin_it_with_a_bos():
    beginning = SimpleNamespace(encode=lambda text: [1, *map(ord, text)])
    with pytest.raises(InvalidPrompt, match="needs one at least"):
        prompt_ids("", beginning, VOCAB)


@pytest.mark.parametrize(
    "prompt",
    [
        *(None, 5, b"hi", ["hi"], [1, 2], {}, {1: 2}, {"prompt_token_ids": [1], "prompt": "hi"}),
        *({"prompt": None}, {"prompt": b"hi"}, {"prompt": ["hi"]}, {"prompt": {"prompt": "hi"}}),
        *({"cache_salt": "s"}, {"prompt": "hi", "salt": "s"}, {"prompt_token_ids": [1], "x": 1}),
    ],
)
def test_anything_else_is_no_prompt(prompt):
    with pytest.raises(InvalidPrompt, match="expected a str, "):
        checked(prompt)


@pytest.mark.parametrize("prompt", [{"prompt": "a"}, {"prompt_token_ids": [97]}])
def test_either_dict_may_have_a_cache_salt(prompt):
    given = prompt | {"cache_salt": "tenant é"}
    assert checked(given).cache_salt == "tenant é"
    assert checked(given)[:2] == checked(prompt)[:2]
    assert set(given) == {*prompt, "cache_salt"}  # it is the caller's and stays as it was


@pytest.mark.parametrize("salt", ["", 5, b"x", ["x"], True, "\ud83d"])
def test_a_cache_salt_that_is_no_text_is_refused(salt):
    with pytest.raises(InvalidPrompt, match=r"cache_salt=.*: expected a str that is not empty"):
        checked({"prompt": "a", "cache_salt": salt})


@pytest.mark.parametrize(
    "ids",
    [
        *(None, 5, "12", b"12", {1: 2}, [1.0], [1, None], ["1"], [True], [[1]]),
        *(np.array([[1, 2]]), np.array([1.0]), np.array([True])),
    ],
)
def test_ids_that_are_no_integers_are_refused(ids):
    with pytest.raises(InvalidPrompt, match="expected a sequence of integers"):
        checked({"prompt_token_ids": ids})


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**31, 2**63, -(2**40)])
def test_an_id_outside_the_vocabulary_is_named_with_its_place(bad):
    with pytest.raises(InvalidPrompt, match=rf"prompt_token_ids\[2\]={bad}: expected 0 <= id < 100"):
        checked({"prompt_token_ids": [0, 99, bad]})


def test_a_text_that_the_tokenizer_refuses_is_an_invalid_prompt():
    with pytest.raises(InvalidPrompt, match=r"prompt='oh!': no such character"):
        checked("oh!")


def test_a_salt_of_none_is_none():
    assert checked({"prompt": "a", "cache_salt": None}).cache_salt == ""


def test_a_prompt_leaves_room_for_one_token():
    for length in (1, 8, 9):
        check_length(length, 10)
    for length in (10, 11):
        with pytest.raises(PromptTooLong, match=f"has {length} tokens, expected 9 at most: max_model_len=10"):
            check_length(length, 10)
