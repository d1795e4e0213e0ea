"""The GPUs that the gate compiles for: descriptions of hardware, one file of facts each."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.experimental import topologies

HERE = Path(__file__).parent / "targets"

INSTRUCTIONS = """\
The GPU compiler of this JAX ({version}) could not be loaded: {error}
It comes in two wheels and needs neither a GPU nor a driver:
    {python} -m pip install --no-deps jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version}
or let scripts/test --all do it, in an environment of its own (.venv/gpu-gate)."""


class NoGpuCompiler(RuntimeError):
    """The CUDA plugin of this JAX is not installed, or does not load; the message says what to do."""


@dataclass(frozen=True)
class Target:
    """One GPU. arch is ptxas' name for it, compute capability 9.0 with its own instructions being sm_90a."""

    name: str
    arch: str
    device_kind: str

    @property
    def description(self) -> str:
        """The facts, as a GpuTargetConfigProto in text format."""
        return (HERE / f"{self.name}.txtpb").read_text(encoding="utf-8")

    def fact(self, field: str) -> int:
        """A number out of the description."""
        match = re.search(rf"^\s*{field}: (\d+)$", self.description, re.MULTILINE)
        if match is None:
            raise ValueError(f"{self.name}.txtpb states no {field}")
        return int(match[1])

    @property
    def bandwidth(self) -> int:
        """Bytes a second between the GPU and its memory."""
        return self.fact("memory_bandwidth")

    def device(self) -> jax.Device:
        """The GPU as something to compile for. NoGpuCompiler where the plugin is missing."""
        try:
            topology = topologies.get_topology_desc(
                topology_name=self.name,
                platform="cuda",
                target_config=self.description,
                topology="1x1x1",
            )
        except Exception as error:  # the plugin's own errors have no common type
            raise NoGpuCompiler(
                INSTRUCTIONS.format(python=sys.executable, version=jax.__version__, error=error)
            ) from error
        return topology.devices[0]


A100 = Target("a100", "sm_80", "NVIDIA A100-SXM4-80GB")
H200 = Target("h200", "sm_90a", "NVIDIA H200")
TARGETS = {target.name: target for target in (A100, H200)}
