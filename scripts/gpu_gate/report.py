"""What the gate found: a line as each program is done, and a summary that a program may read."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


@dataclass(frozen=True)
class Result:
    """One program on one target. No complaints is a pass; `figures` are for people to read."""

    section: str
    name: str
    target: str
    seconds: float
    complaints: list[str]
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether there is nothing to complain about."""
        return not self.complaints


class Report:
    """Collects results and shows each at once; silent as JSON."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.results: list[Result] = []
        self._section = ""

    def add(self, result: Result) -> None:
        """Takes a result and prints its line."""
        self.results.append(result)
        if result.section != self._section:
            self._section = result.section
            self.console.print(f"\n[bold]{result.section}[/]")
        mark = "[green]PASS[/]" if result.passed else "[red]FAIL[/]"
        figures = "  ".join(f"{name} {value}" for name, value in result.figures.items())
        line = f"{result.target:<5} {escape(result.name):<46} {figures}  [dim]{result.seconds:.1f} s[/]"
        self.console.print(f"{mark} {line}", soft_wrap=True, highlight=False)
        for complaint in result.complaints[:8]:
            self.console.print(f"     {escape(complaint)}", style="red", soft_wrap=True, highlight=False)

    @property
    def failures(self) -> list[Result]:
        """Results that did not pass."""
        return [result for result in self.results if not result.passed]

    def summary(self) -> Table:
        """Passes and failures, section by section."""
        table = Table("checks", "passed", "failed", title="The GPU programs")
        for section in dict.fromkeys(result.section for result in self.results):
            mine = [result for result in self.results if result.section == section]
            failed = sum(not result.passed for result in mine)
            table.add_row(section, str(len(mine) - failed), f"[red]{failed}[/]" if failed else "0")
        return table

    def as_dict(self) -> dict[str, Any]:
        """All of it."""
        results = [asdict(result) | {"passed": result.passed} for result in self.results]
        return {"passed": not self.failures, "results": results}
