"""Text as it grows: whole characters only, and in the end exactly what the tokenizer says."""

import random

import pytest
from support.checkpoints import SPECIALS, demo_gguf, glassllm_tokenizer, tiny_tokenizer, tiny_vocab
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from models.checkpoint import open_checkpoint
from models.tokenizer import Tokenizer
from paged_jax.detokenizer import MAX_HELD, REPLACEMENT, Detokenizer

TEXTS = [
    "plain words, and  two  spaces\n\n\tand lines",
    "naïve café — “quoted” …",
    "你好，世界。日本語のテキスト、한국어",
    "👍🏽 👩‍👩‍👧‍👦 🇫🇷 🏴󠁧󠁢󠁥󠁮󠁧󠁿 😀😀",
    "e\u0301 a\u0308 \u0928\u093f ก็",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010ffff\x00\x7f",
    " leading and trailing ",
]


@pytest.fixture(scope="module")
def bytewise():
    """Every byte a token: each character but ASCII is split."""
    return Tokenizer(tiny_tokenizer(bos=False), {})


@pytest.fixture(scope="module")
def demo():
    return open_checkpoint(demo_gguf()).tokenizer


@pytest.fixture(params=["bytewise", "demo"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


def stream(tokenizer, ids):
    """The pieces of a sequence, and the detokenizer that gave them."""
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in ids]
    return [*pieces, detokenizer.finish()], detokenizer


def byte_ids(data):
    """The ids of raw bytes in tiny_vocab, each by itself."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    chars = dict(zip(keep, map(chr, keep), strict=True))
    chars |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in chars)}
    return [tiny_vocab().index(chars[byte]) for byte in data]


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_join_to_the_text_and_none_shows_half_a_character(text, tokenizer):
    ids = tokenizer.encode(text)
    pieces, detokenizer = stream(tokenizer, ids)
    assert "".join(pieces) == detokenizer.text == tokenizer.decode(ids) == text
    assert REPLACEMENT not in "".join(pieces)


def test_a_character_appears_with_its_last_byte(bytewise):
    pieces, _ = stream(bytewise, byte_ids("a😀b".encode()))
    assert pieces == ["a", "", "", "", "😀", "b", ""]


def test_what_was_shown_is_never_taken_back(tokenizer):
    for text in TEXTS:
        detokenizer, shown = Detokenizer(tokenizer), ""
        for token in tokenizer.encode(text):
            shown += detokenizer.push(token)
            assert detokenizer.text == shown


@pytest.mark.parametrize("end", [b"\xf0\x9f\x98", b"\xe4\xbd", b"\xc3", b"\xff", b"\x80", b"\xf0\x9f\x41"])
def test_broken_bytes_at_the_end_come_out_in_the_end(end, bytewise):
    ids = byte_ids("ok é".encode() + end)
    pieces, detokenizer = stream(bytewise, ids)
    assert "".join(pieces) == detokenizer.text == bytewise.decode(ids)
    assert detokenizer.text == ("ok é".encode() + end).decode(errors="replace")


@pytest.mark.parametrize("middle", [b"\xff", b"\x80\x80", b"\xf0\x9f\x41", b"\xe4\xbd" * 3, b"\xc3\xc3\xa9"])
def test_broken_bytes_amid_a_text_do_not_harm_what_follows(middle, bytewise):
    data = b"before " + middle + "nach é 😀".encode()
    pieces, detokenizer = stream(bytewise, byte_ids(data))
    assert "".join(pieces) == detokenizer.text == data.decode(errors="replace")


@pytest.mark.parametrize("seed", range(20))
def test_any_bytes_join_to_what_the_tokenizer_says(seed, bytewise):
    rng = random.Random(seed)
    kinds = [b"a", "é".encode(), "你".encode(), "😀".encode(), b"\xff", b"\x80", b"\xf0\x9f", b"\xe4\xbd"]
    data = b"".join(rng.choices(kinds, k=200))
    ids = byte_ids(data)
    pieces, detokenizer = stream(bytewise, ids)
    assert "".join(pieces) == detokenizer.text == bytewise.decode(ids)


def test_any_ids_of_the_demo_model_join_to_what_its_tokenizer_says(demo):
    rng = random.Random(0)
    for _ in range(20):
        ids = [rng.randrange(demo.vocab_size) for _ in range(100)]
        pieces, detokenizer = stream(demo, ids)
        assert "".join(pieces) == detokenizer.text == demo.decode(ids)


def test_a_genuine_replacement_character_is_text(bytewise):
    text = f"a{REPLACEMENT}b {REPLACEMENT}{REPLACEMENT}"
    pieces, _ = stream(bytewise, byte_ids(text.encode()))
    assert "".join(pieces) == text
    assert pieces[4] == f"{REPLACEMENT}b"  # with the next character, which settles it


def test_special_tokens_give_no_text(bytewise):
    special = [tiny_vocab().index(token) for token in SPECIALS]
    ids = [special[0], *byte_ids("é".encode()), special[1], *byte_ids(b"b"), special[2]]
    assert stream(bytewise, ids)[0] == ["", "", "é", "", "b", "", ""]


def test_ids_beyond_the_vocabulary_give_no_text(bytewise):
    assert stream(bytewise, [10**6, *byte_ids(b"a"), 10**6])[0] == ["", "a", "", ""]


def test_a_tokenizer_that_writes_its_spaces_into_words_keeps_them():
    tokenizer = Tokenizer(glassllm_tokenizer(), {})
    text = "Once upon a time there was"
    assert "".join(stream(tokenizer, tokenizer.encode(text))[0]) == text


def test_a_tokenizer_that_drops_the_first_space_of_what_it_decodes_keeps_the_others():
    """As sentencepiece's do: decoding token by token would give "Helloworld"."""
    vocab = {"▁Hello": 0, "▁world": 1, "!": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5, "<pad>": 6}
    raw = RawTokenizer(models.BPE(vocab, [], byte_fallback=True))
    raw.add_special_tokens(["<pad>"])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(raw, {})
    pieces, detokenizer = stream(tokenizer, [0, 1, 2, 3, 4, 5, 1, *[6] * 20, 1])
    assert "".join(pieces) == detokenizer.text == "Hello world!€ world world"
    assert pieces[:6] == ["Hello", " world", "!", "", "", "€"]


class Counting:
    """A tokenizer that counts the ids it is asked to decode."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.largest = self.total = 0

    def decode(self, ids, skip_special_tokens=True):
        self.largest, self.total = max(self.largest, len(ids)), self.total + len(ids)
        return self.tokenizer.decode(ids, skip_special_tokens)


@pytest.mark.parametrize(
    "ids",
    [
        byte_ids("text and 😀 ".encode()) * 100,
        byte_ids(b"\x80") * 1000,
        byte_ids(b"\xf0\x9f") * 500,
        byte_ids(REPLACEMENT.encode()) * 333,
        [tiny_vocab().index("</s>")] * 1000,
        [10**6] * 1000,
    ],
    ids=["text", "stray bytes", "half characters", "replacement characters", "special tokens", "unknown ids"],
)
def test_the_work_does_not_grow_with_the_length_of_the_text(ids, bytewise):
    counting = Counting(bytewise)
    detokenizer = Detokenizer(counting)
    pieces = [detokenizer.push(token) for token in ids]
    assert counting.largest <= 2 * MAX_HELD + 2
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == bytewise.decode(ids)


def test_stray_bytes_are_shown_while_they_come(bytewise):
    detokenizer = Detokenizer(bytewise)
    for token in byte_ids(b"\x80" * 100):
        detokenizer.push(token)
    assert len(detokenizer.text) > 90


def test_nothing_is_nothing(bytewise):
    assert stream(bytewise, [])[0] == [""]
