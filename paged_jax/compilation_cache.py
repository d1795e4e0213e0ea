"""Compiled programs kept on disk, so that a second start does not compile them again."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import jax


def enable_compilation_cache() -> None:
    """Let JAX keep compiled programs under the user's cache folder, unless the user chose a place already.

    A program for the CPU may use any instruction of the machine that compiled it, and home folders are
    shared: each kind of processor has a folder of its own.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home, as in some containers: compile anew each time
        return
    jax.config.update("jax_compilation_cache_dir", str(root / "paged_jax" / f"programs-{_processor()}"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    facts = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    return hashlib.sha256("\n".join([platform.machine(), platform.processor(), *facts]).encode()).hexdigest()[
        :12
    ]
