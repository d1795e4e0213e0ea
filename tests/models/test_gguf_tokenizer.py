import hashlib
import json
import unicodedata
from pathlib import Path

import pytest
from support.checkpoints import demo_gguf, tiny_vocab, write_gguf
from tokenizers import pre_tokenizers

from models.errors import TokenizerError
from models.gguf_header import read_gguf_header
from models.gguf_tokenizer import gguf_tokenizer

GOLDEN = json.loads((Path(__file__).parents[1] / "goldens" / "tokenization.json").read_text(encoding="utf-8"))
PRE = ("default", "gpt-2", "llama-bpe", "qwen2", "smollm", "starcoder", "tekken")


@pytest.fixture(scope="module")
def smollm2():
    return gguf_tokenizer(read_gguf_header(demo_gguf()).metadata, "demo")


def as_recorded(ids):
    return {"num_ids": len(ids), "sha256": hashlib.sha256(json.dumps(ids).encode()).hexdigest()}


def follows_the_models_own(pre, text):
    """Where llama.cpp departs from the tokenizer.json that the pre-tokenizer stands for, and we do not."""
    if pre == "qwen2":  # llama.cpp does not normalise
        return unicodedata.normalize("NFC", text) != text
    if pre == "tekken":  # llama.cpp's pattern knows no combining marks
        return any(unicodedata.category(character).startswith("M") for character in text)
    return False


class TestAgainstTheReference:
    """tests/goldens/tokenization.json; scripts/make_goldens_tokenizer.py says what made it."""

    def test_ids_of_smollm2_agree(self, smollm2):
        assert len(GOLDEN["cases"]) > 50
        for case in GOLDEN["cases"]:
            text = case["text"] * case["times"]
            ids = smollm2.encode(text)
            assert case["smollm2"] in ({"ids": ids}, as_recorded(ids)), text[:40]
            assert smollm2.decode(ids, skip_special_tokens=False) == text

    @pytest.mark.parametrize("pre", PRE)
    def test_every_pre_tokenizer_cuts_as_llama_cpp_does(self, pre):
        merges = GOLDEN["merges"]
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokens = list(dict.fromkeys([*alphabet, *(merge.replace(" ", "") for merge in merges)]))
        metadata = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": merges, "add_bos_token": False}
        tokenizer = gguf_tokenizer({f"tokenizer.ggml.{key}": v for key, v in metadata.items()}, "golden")
        for case in GOLDEN["cases"]:
            text = case["text"] * case["times"]
            if follows_the_models_own(pre, text):
                continue
            ids = tokenizer.encode(text)
            assert case[pre] in ({"ids": ids}, as_recorded(ids)), text[:40]

    def test_the_recorded_ids_tell_the_pre_tokenizers_apart(self):
        rows = {pre: json.dumps([case[pre] for case in GOLDEN["cases"]]) for pre in PRE}
        assert rows["smollm"] == rows["starcoder"]
        assert len(set(rows.values())) == len(PRE) - 1

    def test_chats_agree(self, smollm2):
        assert len(GOLDEN["chats"]) == 4
        for chat in GOLDEN["chats"]:
            arguments = chat["messages"], chat["add_generation_prompt"]
            assert smollm2.apply_chat_template(*arguments) == chat["text"]
            assert smollm2.encode_chat(*arguments) == chat["ids"]


class TestSmolLM2:
    def test_its_special_ids(self, smollm2):
        assert (smollm2.vocab_size, smollm2.bos_id, smollm2.eos_ids) == (49152, 1, (2,))
        assert smollm2.id_to_token(2) == "<|im_end|>"

    def test_it_adds_no_bos(self, smollm2):
        assert smollm2.encode("<|im_start|>") == [1]
        assert smollm2.encode("hi") == smollm2.encode("hi", add_special_tokens=False)

    def test_digits_are_single_even_after_spaces(self, smollm2):
        tokens = [smollm2.id_to_token(token_id) for token_id in smollm2.encode("   12")]
        assert tokens == ["ĠĠĠ", "1", "2"]

    def test_a_lone_surrogate_is_told(self, smollm2):
        with pytest.raises(TokenizerError, match="lone surrogate"):
            smollm2.encode("\udc00")


def tiny_metadata(tmp_path, **changes):
    path = tmp_path / "m.gguf"
    write_gguf(path, metadata={f"tokenizer.{key}": value for key, value in changes.items()})
    return read_gguf_header(path).metadata


def build(tmp_path, **changes):
    names = {key.replace("__", "."): value for key, value in changes.items()}
    return gguf_tokenizer(tiny_metadata(tmp_path, **names), "m.gguf")


class TestMetadata:
    def test_bos_is_added_where_the_file_says_so(self, tmp_path):
        bos = tiny_vocab().index("<s>")
        assert build(tmp_path, ggml__add_bos_token=True).encode("ab")[0] == bos
        assert build(tmp_path, ggml__add_bos_token=False).encode("ab")[0] != bos

    @pytest.mark.parametrize(("pre", "adds"), [("gpt-2", False), ("llama-bpe", True), ("tekken", True)])
    def test_where_it_does_not_say_the_pre_tokenizer_decides(self, tmp_path, pre, adds):
        assert build(tmp_path, ggml__pre=pre, ggml__add_bos_token=None).adds_bos == adds

    def test_end_of_turn_and_end_of_message_end_a_text_too(self, tmp_path):
        vocab = tiny_vocab()
        ids = vocab.index("</s>"), vocab.index("<|im_end|>"), vocab.index("<|im_start|>")
        tokenizer = build(tmp_path, ggml__eot_token_id=ids[1], ggml__eom_token_id=ids[2])
        assert tokenizer.eos_ids == ids

    def test_control_tokens_are_special_and_user_defined_ones_are_not(self, tmp_path):
        vocab = tiny_vocab()
        kinds = [1] * len(vocab)
        kinds[vocab.index("<|im_start|>")], kinds[vocab.index("<|im_end|>")] = 3, 4
        tokenizer = build(tmp_path, ggml__token_type=kinds)
        ids = tokenizer.encode("a<|im_start|>b<|im_end|>c<s>")
        assert [vocab[token_id] for token_id in ids] == [
            "a",
            "<|im_start|>",
            "b",
            "<|im_end|>",
            "c",
            "<",
            "s",
            ">",
        ]
        assert tokenizer.decode(ids) == "ab<|im_end|>c<s>"

    def test_a_user_defined_token_may_hold_any_character(self, tmp_path):
        vocab = [*tiny_vocab(), "  é\n"]
        kinds = [1] * (len(vocab) - 1) + [4]
        tokenizer = build(tmp_path, ggml__tokens=vocab, ggml__token_type=kinds)
        assert tokenizer.encode("a  é\nb")[1] == len(vocab) - 1
        assert tokenizer.decode(tokenizer.encode("a  é\nb")) == "a  é\nb"

    def test_llama3_takes_a_whole_piece_that_is_a_token_without_merges(self, tmp_path):
        vocab = [*tiny_vocab(), "zq"]
        changes = {"ggml__tokens": vocab, "ggml__token_type": [1] * len(vocab), "ggml__add_bos_token": False}
        assert build(tmp_path, ggml__pre="llama-bpe", **changes).encode("zq") == [len(vocab) - 1]
        assert len(build(tmp_path, ggml__pre="gpt-2", **changes).encode("zq")) == 2

    def test_tekken_keeps_combining_marks_with_their_letters(self, tmp_path):
        vocab = [*tiny_vocab(), "eÌ", "eÌģ"]
        merges = ["e Ì", "eÌ ģ"]
        kinds = [1] * len(vocab)
        tokenizer = build(
            tmp_path, ggml__pre="tekken", ggml__tokens=vocab, ggml__merges=merges, ggml__token_type=kinds
        )
        assert tokenizer.encode("e\u0301", add_special_tokens=False) == [len(vocab) - 1]

    def test_qwen2_normalises(self, tmp_path):
        tokenizer = build(tmp_path, ggml__pre="qwen2")
        assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")

    def test_no_template(self, tmp_path):
        assert build(tmp_path, chat_template=None).chat_template is None

    @pytest.mark.parametrize("kind", ["llama", "bert", "t5", "rwkv"])
    def test_other_kinds_are_refused_by_name(self, tmp_path, kind):
        with pytest.raises(TokenizerError, match=f"{kind!r} is not supported. Supported: 'gpt2'"):
            build(tmp_path, ggml__model=kind)

    def test_an_unknown_pre_tokenizer_is_refused_by_name(self, tmp_path):
        with pytest.raises(TokenizerError, match=r"'mpt' is not supported\. Supported: default, gpt-2"):
            build(tmp_path, ggml__pre="mpt")

    @pytest.mark.parametrize(
        ("changes", "told"),
        [
            ({"ggml__pre": None}, "tokenizer.ggml.pre is missing"),
            ({"ggml__model": None}, "tokenizer.ggml.model is missing"),
            ({"ggml__tokens": None}, "tokenizer.ggml.tokens=None"),
            ({"ggml__merges": None}, "tokenizer.ggml.merges=None"),
            ({"ggml__merges": [1, 2]}, r"tokenizer.ggml.merges=\[1, 2\]"),
            ({"ggml__merges": ["ab"]}, "merges='ab'"),
            ({"ggml__merges": ["a b c"]}, "merges='a b c'"),
            ({"ggml__merges": ["q x"]}, "do not fit"),
            ({"ggml__token_type": [1, 2]}, "token_type.*a list of 268 numbers"),
            ({"ggml__tokens": ["a", "b", "a"], "ggml__token_type": [1, 1, 1]}, "'a' occurs twice"),
            ({"ggml__bos_token_id": 268}, "bos_token_id=268: expected a token id under 268"),
            ({"ggml__eos_token_id": "</s>"}, "eos_token_id='</s>'"),
            ({"ggml__add_bos_token": 1}, "add_bos_token=1: expected true or false"),
            ({"chat_template": "{% for %}"}, "does not compile"),
        ],
    )
    def test_what_is_missing_or_inconsistent_is_named(self, tmp_path, changes, told):
        with pytest.raises(TokenizerError, match=told):
            build(tmp_path, **changes)
