"""Text of a growing sequence, piece by piece, without ever showing half a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

REPLACEMENT = "�"
MAX_HELD = 8
"""Tokens without settled text that are held before a closer look: more than any character has."""


class Decodes(Protocol):
    """The part of a tokenizer that turns ids into text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids."""
        ...


class Detokenizer:
    """The text of one sequence's generated tokens.

    Decoding token by token would be wrong: a character can span tokens, and some tokenizers drop a space at
    the start of what they decode. So the new tokens are decoded after the last ones that gave text, and the
    difference is the new text; while it ends in a broken character nothing is given out. Few tokens are ever
    held, whatever they are, so the work grows with the number of tokens and no faster.
    """

    def __init__(self, tokenizer: Decodes) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context: list[int] = []  # the last tokens that gave text
        self._held: list[int] = []  # tokens after them, not in the text yet
        self._pieces: list[str] = []

    def copy(self) -> Self:
        """Another one, at the same place."""
        twin = type(self)(self._tokenizer)
        twin._ids, twin._context = self._ids.copy(), self._context
        twin._held, twin._pieces = self._held.copy(), self._pieces.copy()
        return twin

    @property
    def text(self) -> str:
        """All text that was given out."""
        if (
            len(self._pieces) > 1
        ):  # joined when asked for: a string that grows by each token is copied by each
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def push(self, token: int) -> str:
        """Take the next token; returns the text that is settled by it, often "" amid a character."""
        self._ids.append(token)
        self._held.append(token)
        before = self._tokenizer.decode(self._context)
        after = self._tokenizer.decode([*self._context, *self._held])
        settled = len(self._held)
        if len(after) <= len(before):
            if len(self._held) > MAX_HELD:
                self._held.clear()  # special tokens and the like: they give no text
            return ""
        if after.endswith(REPLACEMENT):
            if len(self._held) <= MAX_HELD:
                return ""
            settled = self._settled(after)
            after = self._tokenizer.decode([*self._context, *self._held[:settled]])
        piece = after[len(before) :]
        if settled:
            self._context, self._held = self._held[:settled], self._held[settled:]
            self._pieces.append(piece)
        return piece

    def _settled(self, text: str) -> int:
        """How many of the held tokens no later one can change, when text is that of context and all of them.

        A character has 4 bytes at most, so none that the last 4 tokens leave open begins before them. Where
        both sides of a cut decode to the same text apart as together, it goes through no character.
        """
        for cut in range(len(self._held) - 4, 0, -1):
            head, tail = [*self._context, *self._held[:cut]], self._held[cut:]
            if self._tokenizer.decode(head) + self._tokenizer.decode(tail) == text:
                return cut
        return 0

    def finish(self) -> str:
        """Give out what was held back, broken characters included; returns that piece."""
        whole = self._tokenizer.decode(self._ids)
        piece = whole[len(self.text) :] if whole.startswith(self.text) else ""
        self._pieces = [whole]
        return piece
