"""Stop strings, found in a text that comes in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """An automaton over a text's characters that knows the stop strings (Aho and Corasick's).

    A state stands for the longest end of the text so far that begins a stop string; 0 is the empty one. So
    each character is looked at once, however many strings there are.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self._next: list[dict[str, int]] = [{}]
        self._length = [0]
        self._found: list[int | None] = [None]
        self._shorter = [0]  # the state of the next shorter end of the text that begins a stop string
        for place, string in enumerate(self.strings):
            state = 0
            for char in string:
                state = self._next[state].get(char) or self._add(state, char)
            if self._found[state] is None:
                self._found[state] = place
        self._link()

    def _add(self, state: int, char: str) -> int:
        added = self._next[state][char] = len(self._next)
        self._next.append({})
        self._length.append(self._length[state] + 1)
        self._found.append(None)
        self._shorter.append(0)
        return added

    def _link(self) -> None:
        """Find each state's next shorter one, the shortest first, and with it what ends there too."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, longer in self._next[state].items():
                shorter = self._shorter[longer] = self.advance(self._shorter[state], char)
                ends = [place for place in (self._found[longer], self._found[shorter]) if place is not None]
                self._found[longer] = min(ends, default=None)
                queue.append(longer)

    def advance(self, state: int, char: str) -> int:
        """The state after one more character."""
        while state and char not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(char, 0)

    def length(self, state: int) -> int:
        """Characters at the end of the text that begin a stop string: the most that do."""
        return self._length[state]

    def found(self, state: int) -> str | None:
        """The stop string that the last character completed; of several the first that was given."""
        place = self._found[state]
        return None if place is None else self.strings[place]
