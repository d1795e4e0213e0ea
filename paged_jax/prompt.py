"""What may be given as a prompt, checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import NamedTuple, NotRequired, Protocol, TypedDict

from paged_jax.errors import InvalidPrompt, PromptTooLong


class TextPrompt(TypedDict):
    """A prompt as text; only prompts of the same cache_salt share cached blocks."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids, taken as they are; cache_salt as in TextPrompt."""

    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str]


Prompt = str | TextPrompt | TokensPrompt
EXPECTED = 'a str, {"prompt": str} or {"prompt_token_ids": [...]}'


class CheckedPrompt(NamedTuple):
    """A usable prompt: its text, if it was one, its ids, and its cache salt ("" where none was given)."""

    text: str | None
    ids: list[int]
    cache_salt: str


class Encodes(Protocol):
    """The part of a tokenizer that turns text into ids."""

    def encode(self, text: str) -> list[int]:
        """Ids of the text, with a BOS if the model wants one."""
        ...


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list."""
    if isinstance(prompts, str | dict):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise InvalidPrompt(f"prompts={prompts!r}: expected {EXPECTED}, or a list of them.")
    if prompts and all(isinstance(prompt, Integral) for prompt in prompts):
        raise InvalidPrompt(
            f'a list of {len(prompts)} integers: pass token ids as {{"prompt_token_ids": [...]}}.'
        )
    return list(prompts)


def prompt_ids(prompt: object, tokenizer: Encodes, vocab_size: int) -> CheckedPrompt:
    """What a prompt comes to; InvalidPrompt unless it is a usable one."""
    fields = dict(prompt) if isinstance(prompt, dict) else {"prompt": prompt}
    salt = _checked_salt(fields.pop("cache_salt", None))
    text: str | None = None
    match fields:
        case {"prompt": str(text), **rest} if not rest:
            ids = _encoded(text, tokenizer)
        case {"prompt_token_ids": given, **rest} if not rest:
            ids = _checked_ids(given, vocab_size)
        case _:
            raise InvalidPrompt(
                f'prompt={prompt!r}: expected {EXPECTED}, a dict with "cache_salt" or without.'
            )
    if not ids or text == "":  # a BOS alone is no prompt: whether there is one depends on the model
        raise InvalidPrompt(f"prompt={prompt!r}: it holds no token; a prompt needs one at least.")
    return CheckedPrompt(text, ids, salt)


def _checked_salt(salt: object) -> str:
    """The salt, or "" for None; InvalidPrompt unless it is text, which no half of a surrogate pair is."""
    if salt is None:
        return ""
    if not isinstance(salt, str) or not salt or any("\ud800" <= char <= "\udfff" for char in salt):
        raise InvalidPrompt(f"cache_salt={salt!r}: expected a str that is not empty; leave it out for none.")
    return salt


def _encoded(text: str, tokenizer: Encodes) -> list[int]:
    try:
        return tokenizer.encode(text)
    except ValueError as error:  # such as a lone surrogate, which is no character
        raise InvalidPrompt(f"prompt={text!r}: {error}") from error


def _checked_ids(ids: object, vocab_size: int) -> list[int]:
    if isinstance(ids, bytes | bytearray | Mapping):
        raise InvalidPrompt(f"prompt_token_ids={ids!r}: expected a sequence of integers.")
    try:
        checked = [_plain_int(token) for token in ids]  # type: ignore[attr-defined]  # a TypeError says it
    except TypeError:
        raise InvalidPrompt(f"prompt_token_ids={ids!r}: expected a sequence of integers.") from None
    for place, token in enumerate(checked):
        if not 0 <= token < vocab_size:
            raise InvalidPrompt(
                f"prompt_token_ids[{place}]={token}: expected 0 <= id < {vocab_size}, the vocabulary's size."
            )
    return checked


def _plain_int(token: object) -> int:
    if isinstance(token, bool) or not hasattr(token, "__index__"):
        raise TypeError(token)
    return token.__index__()


def check_length(num_tokens: int, max_model_len: int) -> None:
    """PromptTooLong unless the prompt leaves room for one generated token."""
    if num_tokens >= max_model_len:
        raise PromptTooLong(
            f"the prompt has {num_tokens} tokens, expected {max_model_len - 1} at most: max_model_len="
            f"{max_model_len} holds the prompt and one generated token at least. Shorten the prompt, or raise"
            " max_model_len (and the pool with it: num_blocks or kv_cache_gib)."
        )
