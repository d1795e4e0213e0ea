"""Real requests by their lengths: a trace read from a file, or made up from a mean and a spread.

Nothing of a request is here but when it came, how long its prompt was and how long its answer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged_jax.errors import InvalidArgument
from paged_jax.trace_formats import CONVERSATIONS, CountTokens, Layout, Row, open_trace

MAX_TOKENS = 2**24
"""Of a prompt, and of an answer: a simulation has each token of a prompt in a list."""
MAX_SECONDS = 1e11
"""Of an arrival: a clock of seconds since 1970 fits, and a float tells its microseconds apart."""
MAX_REQUESTS = 10_000_000
SLOWEST = 1e-9
"""Of requests a second, and of a trace's own pace; as far above 1 is the quickest."""
CHARACTERS_PER_TOKEN = 4.0
"""Of English text, about, where no tokenizer counts."""
MADE_UP = "made up"
"""The source of a trace that no file holds."""
_HASH_BLOCK_SIZES = frozenset(1 << power for power in range(17))


class Skipped(NamedTuple):
    """A row that was left out. place: "line 7"."""

    place: str
    reason: str


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order in which they arrive.

    arrival_s: float64 [n], seconds, ascending. prompt_tokens, output_tokens: int64 [n], 1 or more.
    places: where each of them stands in the file. hash_ids: of each prompt, one id for every hash_block_size
    tokens of it, the last ones included; equal ids are equal beginnings. skipped: what was left out, only
    ever at the caller's wish. note: how the lengths were found, where that is an estimate.
    """

    source: str
    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    places: tuple[str, ...]
    hash_ids: tuple[tuple[int, ...], ...] | None = None
    hash_block_size: int | None = None
    skipped: tuple[Skipped, ...] = ()
    note: str = ""

    def __len__(self) -> int:
        """Requests."""
        return len(self.arrival_s)

    @property
    def is_made_up(self) -> bool:
        """Whether it comes from a distribution and not from real requests."""
        return self.source == MADE_UP

    @property
    def total_tokens(self) -> NDArray[np.int64]:
        """int64 [n]: prompt and answer."""
        return self.prompt_tokens + self.output_tokens

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.arrival_s[-1] - self.arrival_s[0])

    def within(self, max_tokens: int, what: str, *, skip_invalid: bool = False) -> Trace:
        """The trace without requests of more than max_tokens tokens, prompt and answer together.

        what: the limit's name, for the message. InvalidArgument names the first such request unless
        skip_invalid, and always if none is left.
        """
        fits = self.total_tokens <= max_tokens
        if fits.all():
            return self
        skipped = []
        for index in np.flatnonzero(~fits).tolist():
            prompt, output = int(self.prompt_tokens[index]), int(self.output_tokens[index])
            skipped.append(
                Skipped(
                    self.places[index],
                    f"prompt {prompt} + answer {output} = {prompt + output} tokens: expected {max_tokens}"
                    f" at most, {what}",
                )
            )
        _check_skips(self.source, skipped, int(fits.sum()), skip_invalid)
        kept = np.flatnonzero(fits).tolist()
        return replace(
            self,
            arrival_s=self.arrival_s[fits],
            prompt_tokens=self.prompt_tokens[fits],
            output_tokens=self.output_tokens[fits],
            places=tuple(self.places[index] for index in kept),
            hash_ids=self.hash_ids and tuple(self.hash_ids[index] for index in kept),
            skipped=(*self.skipped, *skipped),
        )


def read_trace(
    path: str | os.PathLike[str],
    *,
    skip_invalid: bool = False,
    count_tokens: CountTokens | None = None,
    characters_per_token: float = CHARACTERS_PER_TOKEN,
) -> Trace:
    """Read a trace in any of the formats that `trace_formats` lists.

    skip_invalid: leave bad rows out and keep why in .skipped; otherwise the first one raises InvalidArgument,
    which names its line. count_tokens: a tokenizer's, for files of texts; without one, a token is reckoned as
    characters_per_token characters.
    """
    file = Path(path)
    layout, rows = open_trace(file, count_tokens or _by_characters(characters_per_token))
    reader = _Reader(layout)
    skipped: list[Skipped] = []
    for row in rows:
        try:
            reader.add(row)
        except ValueError as error:
            skipped.append(Skipped(row.place, str(error)))
            if not skip_invalid:
                break
    _check_skips(str(file), skipped, len(reader.places), skip_invalid)
    if not reader.places:
        raise InvalidArgument(f"{file}: there are column names but no requests.")
    estimated = layout is CONVERSATIONS and count_tokens is None
    return reader.trace(
        str(file),
        tuple(skipped),
        f"lengths estimated at {characters_per_token:g} characters a token" if estimated else "",
    )


class _Reader:
    """The good rows so far."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.arrivals: list[float] = []
        self.prompts: list[int] = []
        self.outputs: list[int] = []
        self.places: list[str] = []
        self.hash_ids: list[tuple[int, ...]] = []
        self.hash_block_sizes = _HASH_BLOCK_SIZES
        self.origin = 0.0

    def add(self, row: Row) -> None:
        """Check a row and keep it; ValueError says what is wrong with it."""
        if row.problem is not None:
            raise ValueError(row.problem)
        prompt = _tokens(self.layout.prompt, row.prompt)
        output = _tokens(self.layout.output, row.output)
        arrival = self._arrival(row.arrival)
        sizes = self.hash_block_sizes
        ids: tuple[int, ...] = ()
        if self.hash_ids or (row.hash_ids is not None and not self.places):
            ids = _hash_ids(row.hash_ids)
            sizes = frozenset(size for size in sizes if -(-prompt // size) == len(ids))
            if not sizes:
                raise ValueError(
                    f"{len(ids)} hash_ids for {self.layout.prompt}={prompt}: expected one for every so many"
                    " tokens, as in the rows before"
                )
        self.hash_block_sizes = sizes
        self.arrivals.append(arrival)
        self.prompts.append(prompt)
        self.outputs.append(output)
        self.places.append(row.place)
        if ids:
            self.hash_ids.append(ids)

    def trace(self, source: str, skipped: tuple[Skipped, ...], note: str) -> Trace:
        """What was kept."""
        stated = self.layout.hash_block_size
        sizes = self.hash_block_sizes
        arrivals = np.array(self.arrivals)
        return Trace(
            source,
            arrivals - arrivals[0] if self.layout.from_first else arrivals,
            np.array(self.prompts, np.int64),
            np.array(self.outputs, np.int64),
            tuple(self.places),
            hash_ids=tuple(self.hash_ids) or None,
            hash_block_size=(stated if stated in sizes else min(sizes)) if self.hash_ids else None,
            skipped=skipped,
            note=note,
        )

    def _arrival(self, value: object) -> float:
        name = self.layout.arrival
        try:
            seconds = self.layout.seconds(value)
        except (ValueError, OverflowError):
            seconds = math.nan
        if not 0 <= seconds <= MAX_SECONDS:
            expected = "a date" if self.layout.from_first else f"a time of {MAX_SECONDS:g} seconds at most"
            raise ValueError(f"{name}={value!r}: expected {expected}")
        if self.arrivals and seconds < self.arrivals[-1]:
            raise ValueError(f"{name}={value!r}: earlier than the request before; expected arrivals in order")
        return seconds


def _tokens(name: str, value: object) -> int:
    number = math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
    if not 1 <= number <= MAX_TOKENS or number != int(number):
        raise ValueError(f"{name}={value!r}: expected a whole number of tokens, from 1 to {MAX_TOKENS:,}")
    return int(number)


def _hash_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ValueError(
            f"hash_ids={str(value)[:40]!r}: expected a list of whole numbers, as in the first row"
        )
    return tuple(value)


def _by_characters(characters_per_token: float) -> CountTokens:
    if not 0 < characters_per_token < math.inf:
        raise InvalidArgument.of("characters_per_token", characters_per_token, "a number above 0")
    return lambda text: math.ceil(len(text) / characters_per_token)


def _check_skips(source: str, skipped: Sequence[Skipped], kept: int, skip_invalid: bool) -> None:
    if not skipped:
        return
    first = f"{source}: {skipped[0].place}: {skipped[0].reason}."
    if not skip_invalid:
        raise InvalidArgument(f"{first} Correct it, or have such requests skipped (--skip-invalid).")
    if not kept:
        raise InvalidArgument(f"{first} All {len(skipped)} requests had to be skipped.")


# -- made up -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lengths:
    """Log-normal numbers of tokens. mean and std: of the numbers themselves, not of their logarithms."""

    mean: float
    std: float = 0.0

    def __post_init__(self) -> None:
        """InvalidArgument unless there is such a distribution."""
        for name, value, least in (("mean", self.mean, 1), ("std", self.std, 0)):
            if not least <= value <= MAX_TOKENS:
                expected = f"a number of tokens, from {least} to {MAX_TOKENS:,}"
                raise InvalidArgument.of(name, value, expected)

    def sample(self, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """One from each of `count` equally likely ranges, in random order: few are as good as many."""
        sigma = math.sqrt(math.log1p((self.std / self.mean) ** 2))
        normal = NormalDist()
        values = np.exp([sigma * normal.inv_cdf((rank + 0.5) / count) for rank in range(count)])
        tokens = np.rint(values * (self.mean / values.mean())).clip(1, MAX_TOKENS)
        return rng.permutation(tokens.astype(np.int64))


def made_up_trace(
    num_requests: int,
    *,
    prompt: Lengths,
    output: Lengths,
    requests_per_second: float | None = None,
    seed: int = 0,
) -> Trace:
    """A trace of such lengths; arrivals are a Poisson process, or all at 0 s where no rate is given."""
    if not 1 <= num_requests <= MAX_REQUESTS:
        raise InvalidArgument.of("num_requests", num_requests, f"from 1 to {MAX_REQUESTS:,}")
    if seed < 0:
        raise InvalidArgument.of("seed", seed, "0 or more")
    rng = np.random.default_rng(seed)
    arrivals = np.zeros(num_requests)
    if requests_per_second is not None:
        if not SLOWEST <= requests_per_second <= 1 / SLOWEST:
            expected = f"a number from {SLOWEST:g} to {1 / SLOWEST:g}"
            raise InvalidArgument.of("requests_per_second", requests_per_second, expected)
        arrivals = rng.exponential(1 / requests_per_second, num_requests).cumsum()
    return Trace(
        MADE_UP,
        arrivals,
        prompt.sample(num_requests, rng),
        output.sample(num_requests, rng),
        tuple(f"request {index}" for index in range(num_requests)),
        note=f"made up: log-normal, prompt {prompt.mean:g} ± {prompt.std:g}, answer {output.mean:g} ±"
        f" {output.std:g} tokens, seed {seed}",
    )
