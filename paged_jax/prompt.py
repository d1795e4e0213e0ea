"""What may be given as a prompt, checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Protocol, TypedDict

from paged_jax.errors import InvalidPrompt, PromptTooLong


class TokensPrompt(TypedDict):
    """A prompt as token ids, taken as they are."""

    prompt_token_ids: Sequence[int]


Prompt = str | TokensPrompt
EXPECTED = 'a str or {"prompt_token_ids": [...]}'


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


def prompt_ids(prompt: object, tokenizer: Encodes, vocab_size: int) -> tuple[str | None, list[int]]:
    """The text, if there is one, and the ids of a prompt; InvalidPrompt unless it is a usable one."""
    if isinstance(prompt, str):
        text, ids = prompt, _encoded(prompt, tokenizer)
    elif isinstance(prompt, dict) and set(prompt) == {"prompt_token_ids"}:
        text, ids = None, _checked_ids(prompt["prompt_token_ids"], vocab_size)
    else:
        raise InvalidPrompt(f"prompt={prompt!r}: expected {EXPECTED}.")
    if not ids or text == "":  # a BOS alone is no prompt: whether there is one depends on the model
        raise InvalidPrompt(f"prompt={prompt!r}: it holds no token; a prompt needs one at least.")
    return text, ids


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
