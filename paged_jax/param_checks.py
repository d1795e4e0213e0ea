"""What the records of what a user asks for have in common: how their fields are checked."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, Self, cast

from paged_jax.errors import InvalidSamplingParams


class CheckedFields:
    """Base of the records: unknown fields are named."""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Name unknown fields, which the generated initialiser would answer with a bare TypeError."""
        known = [field.name for field in fields(cast(Any, cls))]
        for name in kwargs:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                raise InvalidSamplingParams(
                    f"{name}={kwargs[name]!r}: no such sampling field."
                    + (f" Did you mean {close[0]}?" if close else "")
                    + f" There are: {', '.join(known)}."
                )
        return super().__new__(cls)


def invalid(name: str, given: object, expected: str) -> InvalidSamplingParams:
    """The usual message about a field."""
    return InvalidSamplingParams(f"{name}={given!r}: expected {expected}.")


def stop_strings(stop: object) -> tuple[str, ...]:
    """Stop strings as a tuple; one str is one of them."""
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(string, str) for string in strings):
        raise invalid("stop", stop, "a str or a sequence of them")
    if "" in strings:
        raise invalid("stop", stop, "no empty string, which would end every answer at once")
    return tuple(map(str, strings))


def number(name: str, value: object, expected: str, ok: Callable[[float], bool]) -> float:
    """The value as a float, if it is a finite number and ok."""
    found = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):  # an int past the largest float is as little of use as infinity
            found = float(value)
    if not math.isfinite(found) or not ok(found):
        raise invalid(name, value, expected)
    return found


def integer(name: str, value: object, expected: str, ok: Callable[[int], bool]) -> int:
    """The value as an int, if it is one, numpy's included, and ok."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not ok(int(value)):
        raise invalid(name, value, expected)
    return int(value)


def token_ids(name: str, value: object, expected: str = "a sequence of token ids >= 0") -> tuple[int, ...]:
    """The ids as a tuple of ints."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise invalid(name, value, expected)
    return tuple(integer(name, token, expected, lambda x: x >= 0) for token in value)


def boolean(name: str, value: object) -> bool:
    """The value, if it is True or False."""
    if not isinstance(value, bool):
        raise invalid(name, value, "True or False")
    return value


def check_token_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Refuse ids that the model does not have."""
    for token in ids:
        if token >= vocab_size:
            raise invalid(name, token, f"ids under {vocab_size}, the vocabulary's size")
