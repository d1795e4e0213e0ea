"""The files that request traces come in, taken apart into rows; `request_trace` checks their values.

| format | arrival | lengths |
|---|---|---|
| this project's CSV | `arrival_s` | `prompt_tokens`, `output_tokens` |
| Azure LLM inference, CSV | `TIMESTAMP`, a date and time | `ContextTokens`, `GeneratedTokens` |
| BurstGPT, CSV | `Timestamp`, seconds | `Request tokens`, `Response tokens` |
| Mooncake, JSON lines | `timestamp`, milliseconds | `input_length`, `output_length`; `hash_ids` each 512 |
| Qwen-Bailian, JSON lines | `timestamp`, seconds, beside a `chat_id` | the same; `hash_ids` each 16 |
| ShareGPT, JSON | none: all at 0 s | texts of `conversations`, or `messages` as chats have them |

CSV and JSON lines are told apart by how they begin, and the columns by their names, so any of them may come
in either form.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from paged_jax.errors import InvalidArgument

CountTokens = Callable[[str], int]
ANSWERS = frozenset({"gpt", "chatgpt", "assistant", "model", "bing", "bard", "claude"})
"""Who speaks where a conversation has an answer."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Row(NamedTuple):
    """One request as the file has it. place: "line 7"; problem: why there are no values."""

    place: str
    line: int
    arrival: object = 0.0
    prompt: object = None
    output: object = None
    hash_ids: object = None
    problem: str | None = None


@dataclass(frozen=True)
class Layout:
    """The names that a format gives its columns, and how it counts time.

    seconds: of an arrival as it stands there; raises ValueError. from_first: arrivals count from the first
    one. hash_block_size: tokens of a hash id, where the format says so.
    """

    name: str
    arrival: str
    prompt: str
    output: str
    seconds: Callable[[object], float]
    from_first: bool = False
    hash_block_size: int | None = None
    marks: frozenset[str] = field(default=frozenset())
    """Further columns without which it is another format."""

    @property
    def columns(self) -> tuple[str, str, str]:
        """Those that it can not do without."""
        return self.arrival, self.prompt, self.output


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    return float(value)


def _milliseconds(value: object) -> float:
    return _number(value) / 1000


def _date(value: object) -> float:
    """Of `2023-11-16 18:17:03.9799600`, with or without a time zone; UTC where it has none."""
    if not isinstance(value, str):
        raise ValueError
    moment = datetime.fromisoformat(value.strip())
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - _EPOCH) / timedelta(seconds=1)


LAYOUTS = (
    Layout("paged_jax", "arrival_s", "prompt_tokens", "output_tokens", _number),
    Layout("Azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", _date, from_first=True),
    Layout("BurstGPT", "Timestamp", "Request tokens", "Response tokens", _number),
    Layout(
        "Qwen-Bailian",
        "timestamp",
        "input_length",
        "output_length",
        _number,
        hash_block_size=16,
        marks=frozenset({"chat_id"}),
    ),
    Layout("Mooncake", "timestamp", "input_length", "output_length", _milliseconds, hash_block_size=512),
)
CONVERSATIONS = Layout("ShareGPT", "-", "-", "-", _number)


class Source(NamedTuple):
    """A file's rows, in its own order, and the format that they are in."""

    layout: Layout
    rows: Iterator[Row]


def open_trace(path: Path, count_tokens: CountTokens) -> Source:
    """Take a file apart; InvalidArgument where it can not be read or is in no known format.

    count_tokens: of the texts of conversations.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path}: expected a text file in UTF-8: {error}") from error
    start = text.lstrip()[:1]
    if not start:
        raise InvalidArgument(f"{path}: the file is empty; expected a trace, one request a line.")
    if start == "[":
        return _json_list(path, text, count_tokens)
    if start == "{":
        return _json_lines(path, text, count_tokens)
    return _csv(path, text)


def _csv(path: Path, text: str) -> Source:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    lines = _csv_lines(path, reader)
    first = next(lines, None)
    if first is None:
        raise InvalidArgument(f"{path}: nothing but commas; expected column names, then one request a line.")
    number, header = first
    names = [name.strip() for name in header]
    layout = layout_of(path, names, f"line {number}")
    if len(set(names)) < len(names):
        raise InvalidArgument(f"{path}: line {number}: a column is named twice: {', '.join(names)}.")

    def rows() -> Iterator[Row]:
        for number, values in lines:
            if len(values) == len(names):
                yield _row(layout, dict(zip(names, values, strict=True)), number, number)
            else:
                problem = f"{len(values)} values: expected {len(names)}, one for each column"
                yield Row(f"line {number}", number, problem=problem)

    return Source(layout, rows())


def _csv_lines(path: Path, reader: Iterator[list[str]]) -> Iterator[tuple[int, list[str]]]:
    """(line number, values) of the lines that are not blank."""
    try:
        for values in reader:
            if any(value.strip() for value in values):
                yield getattr(reader, "line_num", 0), values
    except csv.Error as error:
        raise InvalidArgument(f"{path}: line {getattr(reader, 'line_num', 0)}: no CSV: {error}.") from error


def _json_lines(path: Path, text: str, count_tokens: CountTokens) -> Source:
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    number, line = lines[0]
    first = _object(line, f"{path}: line {number}: ")
    if _turns(first) is not None:
        entries = ((f"line {number}", number, _value(line)) for number, line in lines)
        return Source(CONVERSATIONS, _conversations(entries, count_tokens))
    layout = layout_of(path, first, f"line {number}")

    def rows() -> Iterator[Row]:
        for number, line in lines:
            try:
                yield _row(layout, _object(line, ""), number, number)
            except InvalidArgument as error:
                yield Row(f"line {number}", number, problem=str(error))

    return Source(layout, rows())


def _value(line: str) -> object:
    """What a line of JSON says; None where it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _object(line: str, place: str) -> dict[str, object]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{place}expected a JSON object on one line: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgument(f"{place}a JSON {type(value).__name__}: expected an object")
    return value


def _json_list(path: Path, text: str, count_tokens: CountTokens) -> Source:
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path}: expected a JSON list: {error}") from error
    if not entries:
        raise InvalidArgument(f"{path}: the list is empty; expected conversations or requests.")
    first = entries[0] if isinstance(entries[0], dict) else {}
    if _turns(first) is not None:
        named = ((f"entry {number}", number, entry) for number, entry in enumerate(entries, start=1))
        return Source(CONVERSATIONS, _conversations(named, count_tokens))
    layout = layout_of(path, first, "entry 1")

    def rows() -> Iterator[Row]:
        for number, entry in enumerate(entries, start=1):
            place = f"entry {number}"
            if isinstance(entry, dict):
                yield _row(layout, entry, number, place=place)
            else:
                yield Row(place, number, problem=f"a JSON {type(entry).__name__}: expected an object")

    return Source(layout, rows())


def _turns(entry: object) -> list[object] | None:
    """The turns of a conversation, None where it is none."""
    if not isinstance(entry, Mapping):
        return None
    turns = entry.get("conversations", entry.get("messages"))
    return turns if isinstance(turns, list) else None


def _conversations(entries: Iterable[tuple[str, int, object]], count_tokens: CountTokens) -> Iterator[Row]:
    """Every answer is a request, whose prompt is all that was said before. entries: (place, number, it)."""
    for name, number, entry in entries:
        turns, said, answers = _turns(entry), 0, 0
        if turns is None:
            problem = "expected an object with a list under conversations or messages"
            yield Row(name, number, problem=problem)
            continue
        for index, turn in enumerate(turns, start=1):
            place = f"{name}, turn {index}"
            speaker, text = _said(turn)
            if text is None:
                answers += 1
                yield Row(place, number, problem="expected a turn with from and value, or role and content")
                break  # what follows has a prompt that nobody knows
            tokens = count_tokens(text)
            if speaker in ANSWERS:
                answers += 1
                lacking = "nothing comes before this answer" if not said else "this answer is empty"
                yield Row(place, number, 0.0, said, tokens, problem=None if said and tokens else lacking)
            said += tokens
        if not answers:
            yield Row(name, number, problem="no turn of it is an answer")


def _said(turn: object) -> tuple[object, str | None]:
    if not isinstance(turn, Mapping):
        return None, None
    text = turn.get("value", turn.get("content"))
    return turn.get("from", turn.get("role")), text if isinstance(text, str) else None


def _row(
    layout: Layout, values: Mapping[str, object], number: int, line: int = 0, place: str | None = None
) -> Row:
    place = place or f"line {number}"
    missing = [name for name in layout.columns if values.get(name) in (None, "")]
    if missing:
        return Row(place, number, problem=f"{', '.join(missing)} missing")
    arrival, prompt, output = (values[name] for name in layout.columns)
    return Row(place, number, arrival, prompt, output, values.get("hash_ids"))


def layout_of(path: Path, columns: Collection[str], place: str) -> Layout:
    """The format whose columns these are; InvalidArgument says what is missing to the likeliest one."""
    present = set(columns)
    for layout in LAYOUTS:
        if present >= {*layout.columns, *layout.marks}:
            return layout
    likeliest = max(LAYOUTS, key=lambda layout: len(present & set(layout.columns)))
    known = "; ".join(
        f"{', '.join(layout.columns)} ({layout.name})" for layout in LAYOUTS if not layout.marks
    )
    found = ", ".join(map(str, columns))
    if len(found) > 200:
        found = found[:200] + "..."
    missing = [name for name in likeliest.columns if name not in present]
    told = f"{', '.join(missing)} missing" if len(missing) < 3 else "no column that a trace has"
    raise InvalidArgument(f"{path}: {place}: {told} (found: {found}); expected {known}, or conversations.")
