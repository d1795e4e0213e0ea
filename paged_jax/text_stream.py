"""The text of one sequence as it grows: what of it may be shown, and where a stop string ends it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Self

from paged_jax.detokenizer import Decodes, Detokenizer
from paged_jax.stop_strings import StopStrings


class TextStream:
    """Takes a sequence's generated tokens one by one and keeps the text that is settled.

    stop: strings that end the text, which is cut before the one that is completed first; include_stop: after
    it. Where several are completed by the same character, the first of them in `stop` counts. They are
    looked for in the text, so special tokens, which give none, are no part of them.

    The end of the text that begins a stop string is held back, and no more than that, as is a character whose
    last bytes are still to come. The work of a token does not grow with the length of the text.
    """

    def __init__(self, tokenizer: Decodes, stop: Sequence[str], include_stop: bool = False) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = StopStrings(stop)
        self._include_stop = include_stop
        self._state = 0
        self._may_stop = False
        self._shown: list[str] = []
        self._held = ""
        self.num_tokens = 0
        """Tokens taken so far."""
        self.stopped_by: str | None = None
        """The stop string that ended the text."""

    def copy(self) -> Self:
        """Another one, at the same place."""
        twin = copy.copy(self)
        twin._detokenizer = self._detokenizer.copy()
        twin._shown = self._shown.copy()
        return twin

    @property
    def text(self) -> str:
        """The text that may be shown: nothing of it is taken back later."""
        if len(self._shown) > 1:
            self._shown = ["".join(self._shown)]
        return self._shown[0] if self._shown else ""

    def push(self, token: int, *, may_stop: bool = True) -> str | None:
        """Take the next token; returns the stop string that it completed, if it did.

        may_stop: False for the tokens that must come whatever they say (min_tokens). What text has come out
        with them takes no part in a stop string, neither its end nor its beginning. After a stop string
        tokens are counted and change nothing else.
        """
        self.num_tokens += 1
        if self.stopped_by is None:
            self._may_stop = may_stop
            self._take(self._detokenizer.push(token))
        return self.stopped_by

    def finish(self) -> str | None:
        """Give out what was held back, broken characters included; returns the stop string that ended it all.

        It may be one that only the last, broken, characters completed.
        """
        if self.stopped_by is None:
            self._take(self._detokenizer.finish())
        if self.stopped_by is None:
            self._shown, self._held = [self._detokenizer.text], ""
        return self.stopped_by

    def _take(self, piece: str) -> None:
        text, state = self._held + piece, 0
        if self._may_stop and self._stop.strings:
            state = self._state
            for place, char in enumerate(piece, len(self._held) + 1):
                state = self._stop.advance(state, char)
                self.stopped_by = self._stop.found(state)
                if self.stopped_by is not None:
                    text, state = text[: place if self._include_stop else place - len(self.stopped_by)], 0
                    break
        settled = len(text) - self._stop.length(state)
        self._state = state
        self._shown.append(text[:settled])
        self._held = text[settled:]
