"""Lines for people on standard error, beside what a program prints."""

from __future__ import annotations

from rich.console import Console


def note(line: str, style: str = "dim") -> None:
    """Print a line to standard error: in a style on a terminal, plain where there is none."""
    Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True).print(line, style=style)
