"""What a compiled program must satisfy. Each check returns complaints: an empty list is a pass."""

from __future__ import annotations

import re

from gpu_gate import hlo, ptx
from gpu_gate.compiling import Program
from gpu_gate.hlo import Op

CAPTURABLE = {
    "kKernel", "kCustomKernel", "kGemm", "kCublasLtMatmul", "kCopy", "kMemset32BitValue", "kMemzero",
    "kSequential", "kDynamicSliceFusion", "kCommandBuffer", "kCuDnn",
}  # fmt: skip
"""Kinds of thunk that XLA records into a CUDA graph."""


def pallas_kernels(program: Program) -> list[str]:
    """Names of the Pallas kernels that a program calls, once for each call."""
    return [name for op in program.ops if (name := _pallas_name(op))]


def _pallas_name(op: Op) -> str | None:
    if "triton" not in op.target:
        return None
    match = re.search(r'op_name="[^"]*?([^"/]+)/pallas_call', op.text)
    return match[1] if match else op.name


def kernels_of(program: Program, op: Op) -> set[str]:
    """Names that the kernel of an instruction may have: alike fusions share one, named after any of them."""
    if name := _pallas_name(op):
        return {name}
    if op.opcode != "fusion" and not op.name.startswith("wrapped"):
        return set()
    family = {other.name for other in program.ops if _shared_name(other) == _shared_name(op)}
    return {re.sub(r"[.\-]", "_", name) for name in (*family, _shared_name(op))}


def _shared_name(op: Op) -> str:
    match = re.search(r'deduplicated_name="([^"]+)"', op.text)
    return match[1] if match else op.name


def in_scope(program: Program, scope: str) -> list[Op]:
    """Instructions under a `jax.named_scope`."""
    return [op for op in program.ops if re.search(rf'op_name="[^"]*\b(?:{scope})\b', op.text)]


def in_place(program: Program, *, tensor_bytes: int, donated_bytes: int) -> list[str]:
    """What is donated is updated where it lies: full aliasing alone would not show it."""
    found = []
    if program.alias < donated_bytes:
        found.append(f"donated, but not aliased: {program.alias:,} of {donated_bytes:,} bytes")
    if program.temporaries >= tensor_bytes:
        found.append(f"temporaries of {program.temporaries:,} bytes: a layer's K takes {tensor_bytes:,}")
    found += [
        f"{op.opcode} {op.name} makes {op.num_bytes:,} bytes, a layer's K or more"
        for op in hlo.pool_sized(program.ops, tensor_bytes)
    ]
    return found


def capturable(program: Program) -> list[str]:
    """Nothing that a CUDA graph does not capture, nothing that talks to the host."""
    found = [f"{op.opcode} {op.name} in {op.computation}" for op in hlo.control_flow(program.ops)]
    found += [f"host transfer: {op.opcode} {op.name} {op.target}" for op in hlo.host_transfers(program.ops)]
    others = {kind: n for kind, n in program.thunks.items() if kind not in CAPTURABLE}
    found += [f"{count} thunks of kind {kind}, which may not be capturable" for kind, count in others.items()]
    if not program.thunks or not program.launches:
        found.append("the compiler dumped no launch sequence: nothing is known about it")
    return found


def no_atomics(program: Program, scope: str) -> list[str]:
    """The kernels of a scope (a KV write, a block copy) use no atomics, and there are such kernels.

    XLA compiles alike fusions once, and launches one's kernel for the other, which then has none by its own
    name: so a fusion without one passes where the scope's kernels are launched as often as it has fusions.
    """
    found: dict[str, None] = {}
    nameless: list[Op] = []
    kernels: dict[str, ptx.Kernel] = {}
    num_ops = 0
    for op in in_scope(program, scope):
        names = kernels_of(program, op)
        own = {name: program.kernels[name] for name in sorted(names & set(program.kernels))}
        kernels |= own
        num_ops += bool(names)
        if names and not own:
            nameless.append(op)
    if sum(launch.kernel in kernels for launch in program.launches) < num_ops:
        for op in nameless:
            found[f"kernel of {op.name} in {scope} is not among the compiler's PTX"] = None
    for kernel in kernels.values():
        if kernel.count["atomics"]:
            found[f"{kernel.name} of {scope} has {kernel.count['atomics']} atomic instructions"] = None
    return list(found) if kernels or found else [f"no kernel was found in the scope {scope}"]


def attention_kernel(program: Program, *, low_precision: bool, most_launches: int) -> list[str]:
    """A Pallas attention kernel: pipelined, on tensor cores where the dtype allows, no TF32, no spills."""
    names = pallas_kernels(program)
    if not names:
        return ["no Pallas kernel in the program"]
    found = []
    if len(program.launches) > most_launches:
        listed = ", ".join(launch.kernel for launch in program.launches)
        found.append(f"{len(program.launches)} launches, {most_launches} allowed: {listed}")
    main = program.kernels.get(names[0])
    if main is None:
        return [*found, f"kernel {names[0]} is not among the compiler's PTX"]
    if program.launch(names[0]) is None:
        found.append(f"no launch of {names[0]} is in the compiler's dump: nothing is known about it")
    if ptx.find_ptxas() and names[0] not in program.resources:
        found.append(f"ptxas says nothing about {names[0]}")
    if low_precision:
        if not main.count["cp_async"]:
            found.append("no cp.async: loads are not pipelined")
        if not main.count["mma"] + main.count["wgmma"]:
            found.append("no mma or wgmma: the tensor cores are idle")
    for name in sorted(set(names)):
        kernel, taken = program.kernels.get(name), program.resources.get(name)
        if not low_precision and kernel and kernel.count["tf32"]:
            found.append(f"{name}: {kernel.count['tf32']} tf32 instructions in a float32 kernel")
        if taken and taken.spilled:
            found.append(f"{name}: spills {taken.spilled} bytes")
    return found
