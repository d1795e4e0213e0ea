"""The text of a sequence with stop strings: what shows when, and where it ends."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.checkpoints import glassllm_tokenizer, tiny_tokenizer

from models.tokenizer import Tokenizer
from paged_jax.detokenizer import MAX_HELD, Detokenizer
from paged_jax.stop_strings import StopStrings
from paged_jax.text_stream import TextStream


class Chunks:
    """A tokenizer whose tokens are any bytes."""

    def __init__(self, chunks):
        self.chunks = chunks
        self.largest = 0

    def decode(self, ids, skip_special_tokens=True):
        self.largest = max(self.largest, len(ids))
        return b"".join(self.chunks[token] for token in ids).decode(errors="replace")


def cut(data, at):
    ends = sorted({0, len(data), *(place % (len(data) + 1) for place in at)})
    return [data[a:b] for a, b in pairwise(ends)]


ALPHABET = "ab\n é你😀\ufffd"
words = st.text(ALPHABET, max_size=40) | st.text("ab", max_size=40)
stops = st.lists(
    st.text("ab", min_size=1, max_size=4) | st.text(ALPHABET, min_size=1, max_size=4), max_size=4
)
cuts = st.lists(st.integers(0, 200), max_size=40)
broken = st.sampled_from([b"", b"\xf0\x9f\x98", b"\xe4\xbd", b"\xff"])


def first_match(text, stop, start=0):
    """(place where it begins, where it ends, the string) of the stop string that is completed first."""
    for end in range(start + 1, len(text) + 1):
        for string in stop:
            if text[start:end].endswith(string):
                return end - len(string), end, string
    return None


def held_back(text, stop, start=0):
    """Characters at the end of text, none before start, that begin a stop string."""
    lengths = range(len(text) - start, 0, -1)
    return next((n for n in lengths if any(s.startswith(text[-n:]) for s in stop)), 0)


def run(chunks, stop=(), *, include=False, min_tokens=0):
    """(the text after each token and after finish, the stop string)."""
    stream, shown = TextStream(Chunks(chunks), stop, include), []
    for token in range(len(chunks)):
        found = stream.push(token, may_stop=token >= min_tokens)
        shown.append(stream.text)
        if found is not None:
            return shown, found
    found = stream.finish()
    return [*shown, stream.text], found


@given(words, stops, cuts, broken, st.booleans(), st.integers(0, 6))
@example("aab", ["ab", "aab"], [1, 2], b"", False, 0)
@example("abab", ["ab"], [1, 2, 3], b"", False, 1)
@example("😀", ["😀"], [1, 2, 3], b"", True, 0)
@example("a", ["\ufffd"], [1], b"\xe4\xbd", False, 0)
def test_it_is_as_if_the_whole_text_were_looked_at_after_each_token(
    text, stop, at, tail, include, min_tokens
):
    chunks = cut(text.encode() + tail, at)
    plain, texts = Detokenizer(Chunks(chunks)), [""]
    for token in range(len(chunks)):
        plain.push(token)
        texts.append(plain.text)
    plain.finish()
    texts.append(plain.text)
    if len(chunks) <= min_tokens:
        stop = []
    start = len(texts[min(min_tokens, len(chunks))])
    expected, found = [], None
    for whole in texts[1:]:
        match = first_match(whole, stop, start)
        if match:
            begin, end, found = match
            expected.append(whole[: end if include else begin])
            break
        expected.append(whole[: len(whole) - held_back(whole, stop, start)])
    else:
        expected[-1] = texts[-1]
    assert run(chunks, stop, include=include, min_tokens=min_tokens) == (expected, found)
    for before, after in pairwise(expected):
        assert after.startswith(before)


# -- what that comes to ------------------------------------------------------------------------------------


def split(text):
    return [bytes([byte]) for byte in text.encode()]


def test_the_text_is_cut_before_the_stop_string_or_after_it():
    chunks = [b"one ", b"EN", b"D two"]
    assert run(chunks, ["END"]) == (["one ", "one ", "one "], "END")
    assert run(chunks, ["END"], include=True) == (["one ", "one ", "one END"], "END")


def test_what_might_become_a_stop_string_is_held_back_and_shown_when_it_does_not():
    assert run(split("a ENTER"), ["END"])[0] == [
        "a",
        "a ",
        "a ",
        "a ",
        "a ENT",
        "a ENT",
        "a ENTER",
        "a ENTER",
    ]


def test_only_the_longest_beginning_is_held_back():
    assert run([b"ababa"], ["abac"])[0] == ["ab", "ababa"]
    assert run([b"aaaa"], ["aab"])[0] == ["aa", "aaaa"]


def test_the_one_that_is_completed_first_counts_and_in_a_tie_the_first_given():
    assert run([b"x abcd"], ["abcd", "bc"]) == (["x a"], "bc")
    assert run([b"x abcd"], ["bcd", "abcd"]) == (["x a"], "bcd")
    assert run([b"x abcd"], ["abcd", "bcd"]) == (["x "], "abcd")
    assert run([b"x abcd"], ["abcd", "ab"]) == (["x "], "ab")


def test_a_stop_string_of_split_characters_is_found():
    assert run(split("ja 😀!"), ["😀"])[1] == "😀"
    assert run(split("ja 😁!"), ["😀"]) == (
        [*["j", "ja", "ja ", "ja ", "ja ", "ja "], "ja 😁", "ja 😁!", "ja 😁!"],
        None,
    )


def test_broken_characters_at_the_end_can_complete_one():
    assert run([b"a ", b"\xf0\x9f"], [" \ufffd"]) == (["a", "a", "a"], " \ufffd")


def test_the_held_text_is_shown_in_the_end():
    assert run([b"a E", b"N"], ["END"]) == (["a ", "a ", "a EN"], None)


@pytest.mark.parametrize(("min_tokens", "text"), [(0, ""), (1, "ab"), (2, "abab"), (3, "ababab")])
def test_the_text_of_min_tokens_is_neither_the_end_nor_the_beginning_of_a_stop_string(min_tokens, text):
    shown, found = run([b"ab"] * 3, ["ab"], min_tokens=min_tokens)
    assert (shown[-1], found) == (text, "ab" if min_tokens < 3 else None)
    assert run([b"a", b"b", b"ab"], ["ab"], min_tokens=1)[0][-1] == "ab"


def test_text_of_min_tokens_is_shown_at_once():
    assert run([b"a E", b"N", b"D"], ["END"], min_tokens=1)[0] == ["a E", "a EN", "a END", "a END"]


def test_after_a_stop_string_nothing_changes():
    stream = TextStream(Chunks([b"a END", b" b"]), ["END"])
    assert [stream.push(0), stream.push(1), stream.finish()] == ["END"] * 3
    assert (stream.text, stream.stopped_by, stream.num_tokens) == ("a ", "END", 2)


def test_it_counts_the_tokens_it_took():
    stream = TextStream(Chunks([b"a"]), [])
    assert stream.num_tokens == 0
    for _ in range(3):
        stream.push(0)
    assert stream.num_tokens == 3


@pytest.mark.parametrize("text", ["Once upon a time there was a king. He", "the end"])
def test_with_a_real_tokenizer_it_is_the_tokenizers_text(text):
    for raw in (glassllm_tokenizer(), tiny_tokenizer(bos=False)):
        tokenizer = Tokenizer(raw, {})
        ids = tokenizer.encode(text)
        stream = TextStream(tokenizer, ["king."])
        for token in ids:
            if stream.push(token):
                break
        stream.finish()
        assert stream.text == text.split("king.")[0]


def test_the_work_does_not_grow_with_the_length_of_the_text(monkeypatch):
    """Each character is looked at once, and few tokens are decoded at a time."""
    looked = []
    advance = StopStrings.advance
    monkeypatch.setattr(
        StopStrings, "advance", lambda self, state, char: looked.append(char) or advance(self, state, char)
    )
    tokenizer = Chunks([b"ab", "é".encode()[:1], "é".encode()[1:]])
    stream = TextStream(tokenizer, ["abc", "bé!"])
    looked.clear()  # making it looks too
    for token in [0, 1, 2] * 500:
        stream.push(token)
    assert "".join(looked) == "abé" * 500
    assert tokenizer.largest <= 2 * MAX_HELD + 2
