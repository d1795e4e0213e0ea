"""Options of the command line that hold several values, with commas between them."""

from __future__ import annotations

from typing import TypeVar

from paged_jax.errors import InvalidArgument

T = TypeVar("T", bound=str)


def refuse_without(needed: str, *options: tuple[str, object, object]) -> None:
    """Options by (name, value, default), none of which says anything without what is needed.

    InvalidArgument for the first that was given all the same.
    """
    for name, value, default in options:
        if value != default:
            raise InvalidArgument.of(name, value, needed)


def numbers_of(name: str, text: str, counts: tuple[int, ...], expected: str) -> list[float]:
    """Numbers that commas separate, as many as one of the counts; InvalidArgument otherwise."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in counts:
        raise InvalidArgument.of(name, text, expected)
    return numbers


def whole_numbers_of(name: str, text: str, most: int) -> list[int]:
    """Numbers of tokens, each once; InvalidArgument unless they are from 1 to most."""
    parts = [part.strip() for part in text.split(",")]
    longest = len(str(most))
    if not all(
        part.isascii() and part.isdigit() and len(part) <= longest and 0 < int(part) <= most for part in parts
    ):
        raise InvalidArgument.of(name, text, f"whole numbers of tokens from 1 to {most:,}, with commas")
    return list(dict.fromkeys(map(int, parts)))


def choices_of(name: str, text: str, known: tuple[T, ...]) -> list[T]:
    """Names, each once, in the order of those that are known; "all" is every one."""
    if text == "all":
        return list(known)
    asked = [part.strip() for part in text.split(",")]
    for part in asked:
        if part not in known:
            raise InvalidArgument.of(name, part, f"all, or one or more of {', '.join(known)}")
    return [one for one in known if one in asked]
