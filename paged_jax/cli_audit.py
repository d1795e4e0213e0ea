"""The command line: `paged-jax audit`."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Annotated

import typer

from paged_jax import audit_story
from paged_jax.audit_lines import fields_of, plain
from paged_jax.audit_reader import AuditReader
from paged_jax.audit_record import AuditRecord
from paged_jax.audit_replay import Replay
from paged_jax.audit_report import Finding, Report
from paged_jax.errors import AuditLogUnreadable
from paged_jax.notes import note

MOST_NAMES = 12
"""So many holders are named."""


def audit(
    file: Annotated[Path, typer.Argument(help="A log that LLM(kv_audit=FILE) has written.")],
    *,
    block: Annotated[int | None, typer.Option(help="Tell the life of this block.")] = None,
    request: Annotated[str | None, typer.Option(help="Tell the life of this request.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay an audit log and name its faults.

    Exit code: 0 if there are none, 1 if there are, 2 if the log can not be read. With --block or --request,
    only the faults of that one count.
    """
    try:
        log = AuditReader(file)
        report, story = _replay(log, block, request)
    except AuditLogUnreadable as error:
        note(f"error: {error}", style="red")
        raise typer.Exit(2) from None
    wants_story = block is not None or request is not None
    if wants_story and not story:
        which = f"block {block}" if block is not None else f"request {request}"
        note(f"error: {file}: it has no record of {which}.", style="red")
        raise typer.Exit(2)
    found = [finding for finding in report.findings if _is_about(finding, block, request)]
    if as_json:
        print(json.dumps(_as_json(log, report, found, story if wants_story else None)))
    else:
        lines = audit_story.lines(story) if wants_story else _summary(log, report)
        print(*lines, sep="\n")
        for number, finding in enumerate(found, 1):
            print(f"\n{number}. {finding}")
    raise typer.Exit(1 if found else 0)


def _replay(log: AuditReader, block: int | None, request: str | None) -> tuple[Report, list[AuditRecord]]:
    """What the replay found, and all records of a block, of a request, or of both."""
    judge = Replay(log.header, log.state)
    story: list[AuditRecord] = []

    def tell(record: AuditRecord) -> None:
        if block is None and request is None:
            return
        if block is not None and not audit_story.is_of_block(record, block):
            return
        if request is not None and not audit_story.is_of_request(record, request, judge.state):
            return
        story.append(record)

    for record in log.carried:
        tell(record)
    for record in log:
        tell(record)
        judge.feed(record)
    return judge.finish(), story


def _is_about(finding: Finding, block: int | None, request: str | None) -> bool:
    if block is not None and finding.block != block:
        return False
    events = (finding.first, finding.second)
    names = {str(finding.request), *(str(event.owner) for event in events if event is not None)}
    return request is None or request in names


def _summary(log: AuditReader, report: Report) -> Iterable[str]:
    size = log.header
    pool = "" if size.num_blocks is None else f", {size.num_blocks - 1:,} blocks of {size.block_size} tokens"
    files = f" in {len(log.parts)} files" if len(log.parts) > 1 else ""
    yield (
        f"{log.path}: {report.num_records:,} records{files}, steps {report.first_step} to {report.last_step}"
        f"{pool}"
    )
    yield f"{report.num_arrived:,} requests arrived, {report.num_ended:,} ended"
    if log.header.part or log.carried:
        yield (
            f"earlier files are gone; at the beginning {len(log.header.live)} requests ran, and the snapshot"
            " there says what they held"
        )
    if not log.header.is_complete:
        yield "older records were dropped: what blocks were held by whom before is unknown, and not judged"
    if log.is_cut:
        yield "its last line was cut off, and is left out"
    if report.failed_steps:
        steps = ", ".join(map(str, report.failed_steps))
        yield f"all blocks were reset after failed steps: {steps}"
    for what, all_ in (("requests still run", report.running), ("others are no request", report.others)):
        if all_:
            held = {name: blocks for name, blocks in all_.items() if blocks}
            each = [f"{name} ({blocks})" for name, blocks in list(held.items())[:MOST_NAMES]]
            more = ", .." if len(held) > MOST_NAMES else ""
            yield (
                f"{len(all_):,} {what}, {len(held):,} of them hold blocks, which is no leak"
                + (f": {', '.join(each)}{more}" if held else "")
            )
    found = len(report.findings)
    yield "no faults" if not found else f"{found} fault{'s' if found > 1 else ''}"


def _as_json(
    log: AuditReader, report: Report, found: list[Finding], story: list[AuditRecord] | None
) -> dict[str, object]:
    answer: dict[str, object] = {
        "files": [str(part.path) for part in log.parts],
        "num_blocks": log.header.num_blocks,
        "block_size": log.header.block_size,
        "records": report.num_records,
        "steps": [report.first_step, report.last_step],
        "requests_arrived": report.num_arrived,
        "requests_ended": report.num_ended,
        "is_complete": report.is_complete and not log.header.part,
        "is_cut": log.is_cut,
        "failed_steps": report.failed_steps,
        "blocks_of_running_requests": _by_name(report.running),
        "blocks_of_others": _by_name(report.others),
        "findings": [
            {
                "kind": finding.kind,
                "block": finding.block,
                "request": plain(finding.request),
                "step": finding.step,
                "message": finding.message,
                "first": None if finding.first is None else fields_of(finding.first),
                "second": fields_of(finding.second),
            }
            for finding in found
        ],
    }
    if story is not None:
        answer["story"] = [fields_of(record) for record in story]
    return answer


def _by_name(held: dict[Hashable, int]) -> dict[str, int]:
    return {str(name): blocks for name, blocks in held.items()}
