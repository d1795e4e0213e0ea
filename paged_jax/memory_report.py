"""What paging did to the memory, for people: a ledger and a map of the pool.

A snapshot is taken from live tables; everything else is arithmetic and drawing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from paged_jax.capacity import KVShape, blocks_for_tokens, format_bytes
from paged_jax.scheduler import Scheduler

_COLOURS = ("bright_blue", "yellow", "green", "magenta", "cyan", "red", "bright_white", "bright_green")
_LABELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Holding:
    """The blocks of one sequence at one moment."""

    request_id: str
    blocks: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True)
class MemorySnapshot:
    """Who held which block of a pool at one moment; num_blocks counts the null block."""

    holdings: tuple[Holding, ...]
    num_blocks: int
    block_size: int

    @classmethod
    def of(cls, scheduler: Scheduler) -> MemorySnapshot:
        """The running sequences as they stand."""
        holdings = (
            Holding(sequence.request.request_id, tuple(sequence.table.blocks), sequence.table.num_tokens)
            for sequence in scheduler.queues.running_sequences
        )
        allocator = scheduler.allocator
        return cls(tuple(holdings), allocator.num_blocks, allocator.block_size)

    @property
    def blocks_used(self) -> int:
        """Physical blocks in use, each counted once however many share it."""
        return len({block for holding in self.holdings for block in holding.blocks})

    @property
    def tokens(self) -> int:
        """Tokens that the sequences hold, a shared one counted for each of them."""
        return sum(holding.num_tokens for holding in self.holdings)

    @property
    def stored_tokens(self) -> int:
        """Tokens that the blocks in use hold, a shared block's counted once."""
        filled: dict[int, int] = {}
        for holding in self.holdings:
            for place, block in enumerate(holding.blocks):
                tokens = min(holding.num_tokens - place * self.block_size, self.block_size)
                filled[block] = max(tokens, filled.get(block, 0))
        return sum(filled.values())

    @property
    def block_utilization(self) -> float:
        """Stored tokens / slots of the blocks in use; 1 where nothing is in use."""
        return self.stored_tokens / (self.blocks_used * self.block_size) if self.blocks_used else 1.0

    @property
    def expected_utilization(self) -> float:
        """1 - block_size / (2 x mean length): on average half of a sequence's last block stays empty."""
        if not self.tokens:
            return 1.0
        return 1 - self.block_size * len(self.holdings) / (2 * self.tokens)


def ledger(snapshot: MemorySnapshot, kv: KVShape, *, max_model_len: int) -> Table:
    """The account of a snapshot: what is held, what paging wastes, what reserving the maximum would take."""
    block_bytes = snapshot.block_size * kv.bytes_per_token
    reserved = len(snapshot.holdings) * blocks_for_tokens(max_model_len, snapshot.block_size)
    usable = snapshot.num_blocks - 1
    rows = [
        (
            "bytes per token",
            f"2 x {kv.num_layers} layers x {kv.num_kv_heads} KV heads x {kv.head_dim} x {kv.itemsize} bytes"
            f" = {kv.bytes_per_token:,}",
        ),
        ("pool", f"{usable} blocks of {snapshot.block_size} tokens, {format_bytes(usable * block_bytes)}"),
        ("running", f"{len(snapshot.holdings)} sequences, {snapshot.tokens} tokens"),
        ("in use", f"{snapshot.blocks_used} blocks, {format_bytes(snapshot.blocks_used * block_bytes)}"),
        (
            "block_utilization",
            f"{snapshot.block_utilization:.1%} (1 - block_size / (2 x mean length) = "
            f"{snapshot.expected_utilization:.1%})",
        ),
        (
            f"reserving {max_model_len} tokens each",
            f"{reserved} blocks, {format_bytes(reserved * block_bytes)}: "
            f"{reserved / max(snapshot.blocks_used, 1):.1f} times as much; this pool would hold "
            f"{usable // blocks_for_tokens(max_model_len, snapshot.block_size)} sequences",
        ),
    ]
    table = Table(title="memory at the fullest step", title_justify="left", show_header=False)
    for name, value in rows:
        table.add_row(name, value)
    return table


def block_map(snapshot: MemorySnapshot, *, width: int = 64) -> Text:
    """One character a physical block: a letter for its sequence, `+` where several share it, `.` free."""
    owners: dict[int, list[int]] = {}
    for row, holding in enumerate(snapshot.holdings):
        for block in holding.blocks:
            owners.setdefault(block, []).append(row)
    text = Text()
    last = -(-(max(owners, default=0) + 1) // width) * width  # whole lines, up to the last block in use
    shown = min(last, snapshot.num_blocks)
    for start in range(0, shown, width):
        text.append(f"{start:>6} ", "dim")
        for block in range(start, min(start + width, shown)):
            text.append(*_cell(block, owners.get(block, [])))
        text.append("\n")
    if shown < snapshot.num_blocks:
        text.append(f"       and {snapshot.num_blocks - shown} more free blocks\n", "dim")
    for row, holding in enumerate(snapshot.holdings):
        label, colour = _mark(row)
        text.append(f"     {label} ", colour)
        text.append(f"request {holding.request_id}: {holding.num_tokens} tokens in blocks ")
        text.append(_ranges(holding.blocks) + "\n")
    return text


def _mark(row: int) -> tuple[str, str]:
    return _LABELS[row % len(_LABELS)], _COLOURS[row % len(_COLOURS)]


def _cell(block: int, rows: list[int]) -> tuple[str, str]:
    if block == 0:
        return "0", "dim"  # the null block
    if not rows:
        return ".", "dim"
    return ("+", "bold") if len(rows) > 1 else _mark(rows[0])


def _ranges(blocks: Iterable[int]) -> str:
    """[7, 8, 9, 2] -> "7-9 2", in table order."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][1] + 1:
            runs[-1][1] = block
        else:
            runs.append([block, block])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
