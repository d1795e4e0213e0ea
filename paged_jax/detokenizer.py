"""Text of a growing sequence, piece by piece, without ever showing half a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "�"


class Decodes(Protocol):
    """The part of a tokenizer that turns ids into text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids."""
        ...


class Detokenizer:
    """The text of one sequence's generated tokens.

    Decoding token by token would be wrong: a character can span tokens, and some tokenizers drop a space at
    the start of what they decode. So a window of the last tokens is decoded twice, with and without the new
    ones, and the difference is the new text; while it ends in a broken character nothing is given out.
    """

    def __init__(self, tokenizer: Decodes) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._window = 0  # decoding starts here
        self._shown = 0  # tokens before this one are in text
        self.text = ""

    def push(self, token: int) -> str:
        """Take the next token; returns the text that is settled by it, often "" amid a character."""
        self._ids.append(token)
        before = self._tokenizer.decode(self._ids[self._window : self._shown])
        after = self._tokenizer.decode(self._ids[self._window :])
        if len(after) <= len(before) or after.endswith(REPLACEMENT):
            return ""
        piece = after[len(before) :]
        self._window, self._shown = self._shown, len(self._ids)
        self.text += piece
        return piece

    def finish(self) -> str:
        """Give out what was held back, broken characters included; returns that piece."""
        whole = self._tokenizer.decode(self._ids)
        piece = whole[len(self.text) :] if whole.startswith(self.text) else ""
        self.text = whole
        return piece
