"""What a beam search did, for people: where the hypotheses split, and which blocks its beams share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from rich.markup import escape
from rich.text import Text
from rich.tree import Tree

from paged_jax.outputs import CompletionOutput

_COLOURS = ("bright_blue", "yellow", "green", "magenta", "cyan", "red", "bright_white", "bright_green")
TextOf = Callable[[Sequence[int]], str]


def hypothesis_tree(title: str, outputs: Sequence[CompletionOutput], text_of: TextOf) -> Tree:
    """The hypotheses as one tree, a branch where they split; the scores stand at its leaves."""
    tree = Tree(escape(title))
    _grow(tree, list(outputs), 0, text_of)
    return tree


def _grow(tree: Tree, outputs: list[CompletionOutput], start: int, text_of: TextOf) -> None:
    """Add what these hypotheses, alike in their first `start` tokens, go on with."""
    groups: dict[int | None, list[CompletionOutput]] = {}
    for output in outputs:
        groups.setdefault(output.token_ids[start] if start < len(output.token_ids) else None, []).append(
            output
        )
    for group in groups.values():
        end = _common(group)
        first = group[0]
        before, piece = text_of(first.token_ids[:start]), text_of(first.token_ids[:end])
        label = escape(repr(piece[len(before) :])[1:-1]) or "[dim](end)[/dim]"
        if len(group) > 1:
            _grow(tree.add(label), group, end, text_of)
        else:
            end_mark = "" if first.finish_reason == "length" else " [dim]■[/dim]"
            tree.add(f"{label}{end_mark}  [bold]{first.score:.3f}[/bold]")


def _common(outputs: Sequence[CompletionOutput]) -> int:
    """How many first tokens all of them have in common; of a single one, all."""
    length = min(len(output.token_ids) for output in outputs)
    first = outputs[0].token_ids
    for place in range(length):
        if any(output.token_ids[place] != first[place] for output in outputs):
            return place
    return length


def beam_blocks(tables: Sequence[Sequence[int]], prompt_blocks: int) -> Text:
    """A line for each beam, a character for each logical block: what is shared, and with how many.

    # is shared by all, a digit is shared by so many (+: ten or more), a letter is that beam's own.
    """
    holders = Counter(block for table in tables for block in table)
    text = Text()
    for row, table in enumerate(tables):
        letter, colour = chr(ord("a") + row % 26), _COLOURS[row % len(_COLOURS)]
        text.append(f"  beam {row:<2} ", colour)
        for place, block in enumerate(table):
            if place == prompt_blocks:
                text.append("|", "dim")
            count = holders[block]
            if count == len(tables):
                text.append("#", "bold")
            elif count > 1:
                text.append(str(count) if count < 10 else "+")
            else:
                text.append(letter, colour)
        text.append("\n")
    return text


def spark(values: Sequence[int]) -> str:
    """A character for each value, taller for larger ones."""
    bars = " ▁▂▃▄▅▆▇█"
    top = max([*values, 1])
    return "".join(bars[-(-value * 8 // top)] for value in values)
