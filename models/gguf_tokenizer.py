"""Rebuilds a byte-level BPE tokenizer from a GGUF file's metadata.

A GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`) but does not describe it. Where llama.cpp and the
tokenizer that a model was trained with disagree, the latter is followed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from .errors import TokenizerError
from .fields import Fields
from .tokenizer import Tokenizer

__all__ = ["gguf_tokenizer"]

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

# The patterns are those of the models' own tokenizer.json files.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# llama.cpp's own cascade for a vocabulary that its converter did not recognise.
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


def _split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    stages = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*stages, _bytes(use_regex=False)])


def _bytes(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _bytes(use_regex=True)])


@dataclass(frozen=True)
class _Pre:
    """What a value of `tokenizer.ggml.pre` stands for."""

    pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    nfc: bool = False
    ignore_merges: bool = False  # a piece that is a token as a whole needs no merges
    add_bos: bool = False  # where the file does not say


_PRE: dict[str, _Pre] = {
    "default": _Pre(lambda: _split(*_DEFAULT)),
    "gpt-2": _Pre(lambda: _bytes(use_regex=True)),
    "smollm": _Pre(_digits_then_gpt2),
    "starcoder": _Pre(_digits_then_gpt2),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3"), _Pre(lambda: _split(_LLAMA3), ignore_merges=True, add_bos=True)
    ),
    "qwen2": _Pre(lambda: _split(_QWEN2), nfc=True),
    "tekken": _Pre(lambda: _split(_TEKKEN), ignore_merges=True, add_bos=True),
}


def gguf_tokenizer(metadata: Mapping[str, object], source: str) -> Tokenizer:
    """Builds the tokenizer that a GGUF file's metadata describes.

    Raises:
      TokenizerError: the tokenizer's kind or pre-tokenizer is not supported (named), or a field is missing,
        malformed or inconsistent.
    """
    fields = Fields(metadata, source, TokenizerError)
    kind = fields.text("tokenizer.ggml.model")
    if kind != "gpt2":
        raise TokenizerError(
            f"{source}: tokenizer kind {kind!r} is not supported. Supported: 'gpt2' (byte-level BPE). "
            "Use the Hugging Face checkpoint of this model."
        )
    name = fields.text("tokenizer.ggml.pre")
    if name not in _PRE:
        raise TokenizerError(
            f"{source}: pre-tokenizer {name!r} is not supported. Supported: {', '.join(sorted(_PRE))}. "
            "Use the Hugging Face checkpoint of this model."
        )
    pre = _PRE[name]
    tokens = _strings(fields, "tokenizer.ggml.tokens")
    raw = _bpe(tokens, fields, pre)
    ids = {
        token: f"tokenizer.ggml.{key}_token_id"
        for token, key in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        )
    }
    special = {token: tokens[_token_id(fields, key, tokens)] for token, key in ids.items() if fields.has(key)}
    ends = [f"tokenizer.ggml.{key}_token_id" for key in ("eot", "eom")]
    return Tokenizer(
        raw,
        special,
        add_bos=fields.flag("tokenizer.ggml.add_bos_token", pre.add_bos),
        chat_template=fields.text("tokenizer.chat_template")
        if fields.has("tokenizer.chat_template")
        else None,
        eos_tokens=[tokens[_token_id(fields, key, tokens)] for key in ends if fields.has(key)],
    )


def _bpe(tokens: list[str], fields: Fields, pre: _Pre) -> tokenizers.Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for token_id, token in enumerate(tokens) if vocab[token] != token_id)
        raise TokenizerError(f"{fields.source}: the token {twice!r} occurs twice in the vocabulary.")
    merges = [_merge(merge, fields) for merge in _strings(fields, "tokenizer.ggml.merges")]
    try:
        model = models.BPE(vocab, merges, ignore_merges=pre.ignore_merges)
    except Exception as error:  # tokenizers raises nothing more specific
        raise TokenizerError(
            f"{fields.source}: the vocabulary and the merges do not fit: {error}."
        ) from error
    raw = tokenizers.Tokenizer(model)
    if pre.nfc:
        raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = pre.pre_tokenizer()
    raw.decoder = decoders.ByteLevel()
    kinds = fields.values.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise fields.wrong("tokenizer.ggml.token_type", kinds, f"a list of {len(tokens)} numbers")
    raw.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == _CONTROL)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    return raw


def _merge(text: str, fields: Fields) -> tuple[str, str]:
    left, _, right = text.partition(" ")
    if not left or not right or " " in right:
        raise fields.wrong("tokenizer.ggml.merges", text, "two tokens with one space between them")
    return left, right


def _strings(fields: Fields, key: str) -> list[str]:
    value = fields.values.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise fields.wrong(key, value, "a list of strings")
    return value


def _token_id(fields: Fields, key: str, tokens: list[str]) -> int:
    token_id = fields.values[key]
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise fields.wrong(key, token_id, f"a token id under {len(tokens)}")
    return token_id
