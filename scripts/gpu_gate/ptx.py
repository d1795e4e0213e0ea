"""Reads PTX: which instructions a kernel is made of, and what ptxas says it takes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_PATTERNS = {
    "cp_async": r"\bcp\.async\.c[ag]\.",
    "mma": r"\bmma\.sync",
    "wgmma": r"\bwgmma\.mma_async",
    "tf32": r"\.tf32\b",
    "atomics": r"\b(?:atom|red)\.(?:\w+\.)*(?:global|relaxed|add|cas|exch|gpu|shared)\b",
    "local": r"\b(?:ld|st)\.local\b",
}


@dataclass(frozen=True)
class Kernel:
    """One entry point of a PTX file: its name, and how often each kind of instruction occurs."""

    name: str
    body: str
    count: dict[str, int]


@dataclass(frozen=True)
class Resources:
    """What ptxas gave a kernel: registers a thread, bytes spilled a thread."""

    registers: int
    spilled: int


def kernels(text: str) -> list[Kernel]:
    """The entry points of a PTX module."""
    parts = re.split(r"^\.visible \.entry ", text, flags=re.MULTILINE)
    found = []
    for part in parts[1:]:
        name = re.match(r"[\w$.]+", part)
        if name is None:
            raise ValueError(f"a PTX entry without a name: {part[:60]!r}")
        code = re.sub(r"//.*", "", part)
        count = {kind: len(re.findall(pattern, code)) for kind, pattern in _PATTERNS.items()}
        found.append(Kernel(name[0], code, count))
    return found


def find_ptxas() -> str | None:
    """ptxas: $PTXAS, one on the PATH, or that of NVIDIA's nvcc wheel."""
    if given := os.environ.get("PTXAS"):
        return given
    if found := shutil.which("ptxas"):
        return found
    spec = find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        for candidate in sorted(Path(root).glob("*/bin/ptxas")):
            if os.access(candidate, os.X_OK):
                return str(candidate)
    return None


def resources(path: Path, arch: str) -> dict[str, Resources]:
    """Assembles a PTX file and reads what each of its kernels takes. Empty where there is no ptxas.

    RuntimeError with ptxas' own words where it refuses the file.
    """
    exe = find_ptxas()
    if exe is None:
        return {}
    with tempfile.NamedTemporaryFile() as out:
        command = [exe, "-v", f"-arch={arch}", str(path), "-o", out.name]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"ptxas refuses {path.name}: {run.stderr.strip()[-300:]}")
    return parse_ptxas(run.stderr)


def parse_ptxas(text: str) -> dict[str, Resources]:
    """The report of `ptxas -v`."""
    found = {}
    for part in re.split(r"Compiling entry function '", text)[1:]:
        name = part.split("'", 1)[0]
        registers = re.search(r"Used (\d+) registers", part)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        if registers and spills:
            found[name] = Resources(int(registers[1]), int(spills[1]) + int(spills[2]))
    return found
