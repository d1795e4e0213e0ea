"""Compiles a traced program for a target and gathers all that the gate looks at."""

from __future__ import annotations

import contextlib
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, SingleDeviceSharding
from jax.typing import DTypeLike

from gpu_gate import ptx
from gpu_gate.hlo import Op, scheduled_ops
from gpu_gate.targets import Target
from gpu_gate.thunks import Launch, launches, thunk_kinds
from pallas_kernels import KVPool

Tree = TypeVar("Tree")

SPILLS_ARE_ERRORS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}


@dataclass
class Program:
    """What the compiler made of a function: sizes in bytes, kernels by name."""

    alias: int
    temporaries: int
    ops: list[Op]
    thunks: Counter[str]
    launches: list[Launch]
    kernels: dict[str, ptx.Kernel] = field(default_factory=dict)
    resources: dict[str, ptx.Resources] = field(default_factory=dict)
    seconds: float = 0.0

    def launch(self, kernel: str) -> Launch | None:
        """The first launch of a kernel."""
        return next((launch for launch in self.launches if launch.kernel == kernel), None)


def abstract(tree: Tree, device: jax.Device) -> Tree:
    """The same tree of shapes and dtypes, placed on the device."""
    place = SingleDeviceSharding(device)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)


def abstract_pool(shape: tuple[int, int, int, int], dtype: DTypeLike) -> KVPool:
    """A layer's pool without memory."""
    return jax.eval_shape(lambda: KVPool(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)))


@contextlib.contextmanager
def lowering_for(target: Target) -> Iterator[None]:
    """From jax 0.11 on Pallas takes the architecture from the abstract mesh; before, always sm_90."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings(
            "ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning
        )
        if jax.__version_info__ >= (0, 11):
            kind: Any = jax.sharding
            device = kind.AbstractDevice(device_kind=target.device_kind, num_cores=None, platform="gpu")
            mesh = AbstractMesh((1,), ("x",), abstract_device=device)
            stack.enter_context(kind.use_abstract_mesh(mesh))
        yield


def compile_for(
    target: Target, trace: Callable[[], jax.stages.Traced], *, options: dict[str, Any] | None = None
) -> Program:
    """Compile what `trace` returns, with every spill an error, and read the compiler's dump."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gpu-gate-") as folder:
        settings = {"xla_dump_to": folder, **SPILLS_ARE_ERRORS, **(options or {})}
        if jax.__version_info__ >= (
            0,
            11,
        ):  # ".*" would dump every GEMM candidate: a minute
            settings["xla_dump_emitter_re"] = "ptx"
        with lowering_for(target):
            lowered = trace().lower(lowering_platforms=("cuda",))
        compiled = lowered.compile(compiler_options=settings)
        memory = compiled.memory_analysis()
        if memory is None:
            raise RuntimeError("the compiler gives no memory analysis")
        dumped = Path(folder)
        sequence = "".join(path.read_text() for path in sorted(dumped.glob("*.thunk_sequence.txt")))
        program = Program(
            alias=memory.alias_size_in_bytes,
            temporaries=memory.temp_size_in_bytes,
            ops=list(scheduled_ops(compiled.as_text())),
            thunks=thunk_kinds(sequence),
            launches=launches(sequence),
        )
        started = {launch.kernel for launch in program.launches}
        for path in sorted(dumped.glob("*.ptx")):
            found = {kernel.name: kernel for kernel in ptx.kernels(path.read_text())}
            program.kernels |= found
            if started & set(found):
                program.resources |= ptx.resources(path, target.arch)
    program.seconds = time.perf_counter() - start
    return program
