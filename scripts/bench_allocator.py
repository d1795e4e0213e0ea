#!/usr/bin/env python
"""Operations a second of the block allocator, for pools of 1,000 to 1,000,000 blocks.

    scripts/bench_allocator.py [--json]

Half of each pool is filled with sequences whose blocks lie scattered over it, and 15 of them (all that the
smallest pool has) are timed. Each cell also shows the cost relative to the smallest pool. What a larger pool
can still cost is cache misses: forks spread over all sequences of a million blocks, most of them in memory
and not in a cache, took 2.6 times as long as here.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from paged_jax.block_allocator import BlockAllocator
from paged_jax.block_table import BlockTable

BLOCK_SIZE = 16
BLOCKS_PER_SEQUENCE = 32
SIZES = (10**3, 10**4, 10**5, 10**6)
NUM_RUNNING = 15
ROUNDS = 15
NAMES = ("append(1)", "append(16)", "fork", "release")


def scattered_half(pool: BlockAllocator) -> list[BlockTable]:
    """Sequences over half of the pool, in blocks that many short lives have shuffled."""
    rng = random.Random(0)
    blocks = pool.allocate(pool.num_free_blocks, owner="shuffle")
    rng.shuffle(blocks)
    pool.free(blocks, owner="shuffle")
    tables = [BlockTable(pool, i) for i in range(pool.num_blocks // 2 // BLOCKS_PER_SEQUENCE)]
    for table in tables:
        table.append(BLOCKS_PER_SEQUENCE * BLOCK_SIZE)
    return tables


def seconds_each(operation: Callable[[BlockTable], object], tables: list[BlockTable]) -> float:
    start = time.perf_counter()
    for table in tables:
        operation(table)
    return (time.perf_counter() - start) / len(tables)


def one_round(tables: list[BlockTable], rng: random.Random) -> dict[str, float]:
    """The time of each operation; the tables are afterwards what they were before."""
    twins: list[BlockTable] = []
    fork = seconds_each(
        lambda parent: twins.append(parent.fork("twin")), rng.choices(tables[:NUM_RUNNING], k=400)
    )
    growing = twins[:200]
    by_one = seconds_each(lambda table: table.append(1), growing * BLOCK_SIZE)
    by_sixteen = seconds_each(lambda table: table.append(16), growing)
    release = seconds_each(BlockTable.release, twins)
    return dict(zip(NAMES, (by_one, by_sixteen, fork, release), strict=True))


def measure(num_blocks: int) -> dict[str, float]:
    """Operations a second: the best of all rounds, which other programs on the machine disturbed least."""
    pool = BlockAllocator(num_blocks, BLOCK_SIZE)
    tables = scattered_half(pool)
    rng = random.Random(1)
    rounds = [one_round(tables, rng) for _ in range(ROUNDS)]
    pool.check(tables)
    return {name: 1 / min(times[name] for times in rounds) for name in NAMES}


AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")]


def main(as_json: AsJson = False) -> None:
    """Print operations a second for each size of the pool."""
    results = {size: measure(size) for size in SIZES}
    if as_json:
        setting = {"block_size": BLOCK_SIZE, "blocks_per_sequence": BLOCKS_PER_SEQUENCE}
        print(json.dumps(setting | {"ops_per_s": results}))
        return
    title = f"thousands of operations a second, and cost relative to {SIZES[0]:,} blocks"
    caption = f"fork and release: sequences of {BLOCKS_PER_SEQUENCE} blocks; block_size {BLOCK_SIZE}"
    table = Table("blocks", *NAMES, title=title, caption=caption)
    for column in table.columns:
        column.justify = "right"
    for size, result in results.items():
        cells = [
            f"{result[name] / 1000:,.0f}  {results[SIZES[0]][name] / result[name]:.2f}x" for name in NAMES
        ]
        table.add_row(f"{size:,}", *cells)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
