"""Typed look-ups in a parsed JSON object or a GGUF file's metadata; errors name the file and the field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from .errors import ModelError, UnsupportedModel

__all__ = ["Fields", "read_json"]

_MAX_INT = 2**31 - 1  # every size of a decoder, and every token id, fits an int32


class Fields:
    """Reads typed values out of a mapping.

    Args:
      values: the parsed mapping; a value of None counts as absent.
      source: what the mapping was read from, for messages.
      error: the class of the errors that are raised.
    """

    def __init__(
        self, values: Mapping[str, object], source: str, error: type[ModelError] = UnsupportedModel
    ) -> None:
        self.values = values
        self.source = source
        self.error = error

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def size(self, name: str, default: int | None = None, most: int = _MAX_INT) -> int:
        """An integer from 1 to `most`. Raises where it is absent without a default, or is nonsense."""
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            raise self.wrong(name, value, f"an integer from 1 to {most}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number over 0. Raises as `size` does."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, value, "a number over 0")
        if not math.isfinite(value) or value <= 0:
            raise self.wrong(name, value, "a finite number over 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean. Raises where it is anything else."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string. Raises where it is anything else, or absent without a default."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, value, "a string")
        return value

    def wrong(self, name: str, value: object, expected: str) -> ModelError:
        """The usual message about one field."""
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:80] + "..."
        return self.error(f"{self.source}: {name}={shown}: expected {expected}.")

    def _value(self, name: str, default: object) -> object:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(
                f"{self.source}: the field {name} is missing; a decoder cannot be built without it."
            )
        return value


def read_json(path: Path, error: type[ModelError] = UnsupportedModel) -> dict[str, object]:
    """Reads a JSON file that holds one object. Raises `error` where it is unreadable or holds another."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise error(f"{path}: cannot be read as JSON: {cause}. Fetch the file again.") from cause
    if not isinstance(values, dict):
        raise error(f"{path}: holds a {type(values).__name__}; expected a JSON object.")
    return values
