"""What the gate compiles in each of its modes, and what it holds against the result."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

from roofline import DecodeShape, microseconds

from gpu_gate import checks
from gpu_gate.addresses import AddressCase
from gpu_gate.compiling import Program, compile_for
from gpu_gate.faults import Fault
from gpu_gate.kernel_cases import KernelCase
from gpu_gate.report import Report, Result
from gpu_gate.steps import AbstractEngine, StepProgram
from gpu_gate.targets import NoGpuCompiler, Target
from gpu_gate.updates import UpdateCase

OURS = "paged_decode_attention|paged_prefill_attention|write_kv|copy_blocks"


def guarded(work: Callable[[], tuple[Program, list[str]]]) -> tuple[Program | None, list[str], float]:
    """Runs a check; a compiler's refusal (a spill, too much shared memory) is a complaint."""
    start = time.perf_counter()
    try:
        program, found = work()
    except NoGpuCompiler:
        raise
    except Exception as error:  # whatever the compiler or the tracer says is what the report must show
        text = " ".join(str(error).split())
        return None, [f"{type(error).__name__}: {text[:400]}"], time.perf_counter() - start
    return program, found, time.perf_counter() - start


def check_kernels(report: Report, cases: Iterable[KernelCase], target: Target) -> None:
    """Attention kernels, one at a time."""
    for case in cases:
        program, found, seconds = guarded(lambda case=case: case.complaints(target))  # type: ignore[misc]  # binds it now
        if program is None and "register spilling" in found[0]:
            found += spilled(case, target)
        figures: dict[str, object] = {}
        if program and (names := checks.pallas_kernels(program)):
            figures = kernel_figures(program, names[0])
            if case.op != "prefill":
                figures["roofline us"] = f"{microseconds(case.roofline.num_bytes, target.bandwidth):.0f}"
        report.add(Result("attention kernels", str(case), target.name, seconds, found, figures))


def spilled(case: KernelCase, target: Target) -> list[str]:
    """How much a kernel that the compiler refused spills, where there is a ptxas to ask."""
    allowed = {"xla_gpu_fail_ptx_compilation_on_register_spilling": False}
    program = compile_for(target, lambda: case.trace(target), options=allowed)
    return [
        f"{name}: {taken.registers} registers, {taken.spilled} bytes spilled"
        for name, taken in program.resources.items()
        if taken.spilled
    ]


def kernel_figures(program: Program, name: str) -> dict[str, object]:
    """What a kernel takes of the machine, and what it is made of."""
    launch, taken, kernel = program.launch(name), program.resources.get(name), program.kernels.get(name)
    figures: dict[str, object] = {"regs": taken.registers if taken else "(no ptxas)"}
    if launch:
        figures |= {"smem": launch.shared_memory, "grid": "x".join(map(str, launch.grid))}
        figures["threads"] = launch.threads
    if kernel:
        figures |= {"cp.async": kernel.count["cp_async"], "mma": kernel.count["mma"] + kernel.count["wgmma"]}
    return figures


def check_updates(report: Report, cases: Iterable[UpdateCase], target: Target) -> None:
    """KV writes and block copies, one layer at a time."""
    for case in cases:
        program, found, seconds = guarded(lambda case=case: case.complaints(target))  # type: ignore[misc]  # binds it now
        figures: dict[str, object] = {}
        if program:
            figures = {"launches": len(program.launches), "temporaries": program.temporaries}
        report.add(Result("KV writes and block copies", str(case), target.name, seconds, found, figures))


def check_addresses(report: Report, cases: Iterable[AddressCase], target: Target) -> None:
    """The products that make addresses of block ids."""
    for case in cases:
        _, found, seconds = guarded(lambda case=case: case.complaints(target))  # type: ignore[misc]  # binds it now
        report.add(Result("addresses in large pools", str(case), target.name, seconds, found))


def check_step(report: Report, step: StepProgram, engine: AbstractEngine, target: Target) -> None:
    """A program of a whole step."""
    layers = engine.config.num_layers

    def work() -> tuple[Program, list[str]]:
        program = compile_for(target, step.trace)
        found = checks.in_place(program, tensor_bytes=engine.tensor_bytes, donated_bytes=step.donated_bytes)
        found += checks.capturable(program)
        for scope in step.writes:
            found += checks.no_atomics(program, scope)
        if step.most_launches:
            most_own, most = step.most_launches
            own, every = own_launches(program) / layers, len(program.launches) / layers
            if own > most_own:
                found.append(f"{own:.1f} launches a layer are ours; {most_own} allowed")
            if every > most and layers > 4:
                found.append(f"{every:.1f} launches a layer; {most} allowed")
        ours = set(checks.pallas_kernels(program))
        if step.attends and not ours:
            found.append("no Pallas kernel in the step: the attention is XLA's")
        if step.kernels is not None and ours != step.kernels:
            found.append(f"it is done by {sorted(ours)}, expected {sorted(step.kernels)}")
        return program, found

    program, found, seconds = guarded(work)
    figures: dict[str, object] = {}
    if program:
        own = own_launches(program)
        figures = {
            "launches": len(program.launches),
            "a layer": f"{len(program.launches) / layers:.1f} ({own / layers:.1f} ours)",
            "thunks": dict(program.thunks),
            "temporaries MB": f"{program.temporaries / 1e6:.1f}",
            "aliased GiB": f"{program.alias / 2**30:.2f}",
            "atomics": atomics(program) or "none",
        }
        if step.name.startswith("decode"):
            least = microseconds(engine.decode_bytes(4096), target.bandwidth) / 1e3
            figures["roofline at 4k"] = f"{least:.1f} ms"
    label = f"{step.name}, {layers} layers"
    report.add(Result("steps of Llama-3-8B", label, target.name, seconds, found, figures))


def own_launches(program: Program) -> int:
    """Kernels and copies under our operations' scopes."""
    return sum(op.opcode in ("fusion", "custom-call", "copy") for op in checks.in_scope(program, OURS))


def atomics(program: Program) -> dict[str, int]:
    """Launched kernels that use atomics, XLA's own too, and how often each is launched."""
    started = Counter(launch.kernel for launch in program.launches)
    return {
        name: started[name]
        for name, kernel in program.kernels.items()
        if kernel.count["atomics"] and started[name]
    }


def check_faults(report: Report, faults: Iterable[Fault], target: Target) -> None:
    """Programs that must be found wanting, and a clean one that must not."""
    for fault in faults:
        program, found, seconds = guarded(lambda fault=fault: fault.complaints(target))  # type: ignore[misc]  # binds it now
        caught = [complaint for complaint in found if fault.expected and fault.expected in complaint]
        if fault.expected is None:
            complaints = found
        elif program is None or not caught:
            complaints = [f"NOT CAUGHT: no complaint says {fault.expected!r}", *found]
        else:
            complaints = []
        figures = {"caught by": caught[0]} if caught else {}
        report.add(Result("planted faults", fault.name, target.name, seconds, complaints, figures))


def rooflines(targets: Iterable[Target]) -> list[dict[str, float]]:
    """What a layer's decode attention of the Llama-3-8B shape takes at least, microseconds by target."""
    rows: list[dict[str, float]] = []
    for context in (1024, 4096, 16384, 32768):
        for num_seqs in (1, 8, 64, 256):
            shape = DecodeShape(num_seqs, context, 32, 8, 128)
            times = {t.name: round(microseconds(shape.num_bytes, t.bandwidth), 1) for t in targets}
            rows.append({"context": context, "num_seqs": num_seqs, "bytes": shape.num_bytes} | times)
    return rows
