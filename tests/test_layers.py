"""The rooms of the house and which may import which; arrows point down only."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HOST = {
    "errors",
    "param_checks",
    "sampling_params",
    "beam_params",
    "beam_constraints",
    "beam_search",
    "forks",
    "intake",
    "sequence",
    "block_allocator",
    "block_table",
    "audit",
    "audit_record",
    "audit_lines",
    "audit_state",
    "audit_file",
    "audit_reader",
    "audit_replay",
    "audit_report",
    "audit_story",
    "capacity",
    "devices",
    "model_shape",
    "model_families",
    "model_reader",
    "known_models",
    "trace_formats",
    "request_trace",
    "tail_waste",
    "demand",
    "decode_roofline",
    "block_sizes",
    "plan_options",
    "plan_memory",
    "plan_verdict",
    "planner",
    "plan_dict",
    "plan_report",
    "step_time",
    "made_up_scores",
    "sim_request",
    "sim_series",
    "decode_window",
    "queue_only",
    "simulator",
    "contiguous",
    "workload",
    "sim_summary",
    "comparison",
    "sim_setting",
    "sim_dict",
    "sim_report",
    "sim_plots",
    "prefix_cache",
    "preemption",
    "queues",
    "schedule",
    "scheduler",
    "step_update",
    "stats",
    "outputs",
    "answer_texts",
    "prompt",
    "detokenizer",
    "stop_strings",
    "text_stream",
    "memory_report",
    "progress",
    "notes",
    "engine_options",
}
DEVICE = {
    "kv_cache",
    "compilation_cache",
    "buckets",
    "rows",
    "batch",
    "sampler",
    "logprobs",
    "host_pool",
    "device_step",
    "packed_step",
    "programs",
    "model_runner",
}
ENGINE = {"loader", "model_lookup", "engine_builder", "engine", "llm_call", "llm"}
DOORS = {
    "cli",
    "cli_options",
    "cli_output",
    "cli_audit",
    "cli_trace",
    "cli_values",
    "cli_plan",
    "cli_simulate",
    "__main__",
}
RANK = {name: rank for rank, room in enumerate((HOST, DEVICE, ENGINE, DOORS)) for name in room}
FILES = sorted(
    p.relative_to(ROOT)
    for room in ("paged_jax", "models", "pallas_kernels")
    for p in ROOT.glob(f"{room}/**/*.py")
)


def imports(path, at_run_time_only=False):
    """Dotted names that a file imports, relative ones made absolute."""
    tree = ast.parse((ROOT / path).read_text())
    skipped = set()
    if at_run_time_only:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
                skipped |= set(ast.walk(node))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(path.parts[:-1]) + "." if node.level else ""
            base = package + (node.module or "")
            yield base
            yield from (f"{base.rstrip('.')}.{alias.name}" for alias in node.names)


def roots(names):
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_rooms_import_downwards_only(path):
    room = path.parts[0]
    used = roots(imports(path, at_run_time_only=True))
    if room == "pallas_kernels":
        assert not used & {"paged_jax", "models", "flax"}, "kernels import jax alone"
    if room == "models":
        assert "paged_jax" not in used, "models know nothing of requests"
        absolute = [name for name in imports(path) if name.split(".")[0] == "models" and "from ." not in name]
        source = (ROOT / path).read_text()
        assert "import models" not in source
        assert "from models" not in source, f"relative imports only: {absolute}"
    if room == "paged_jax":
        assert "models" not in used, "models are reached through loader alone"


@pytest.mark.parametrize("path", [p for p in FILES if p.parts[0] == "paged_jax"], ids=str)
def test_paged_jax_is_layered(path):
    if path.stem == "__init__":
        return  # lazy: it imports nothing at run time, as the next test shows
    assert path.stem in RANK, f"{path}: say in this test which room it is in"
    for name in imports(path, at_run_time_only=True):
        parts = name.split(".")
        if parts[0] == "paged_jax" and len(parts) > 1 and parts[1] in RANK:
            assert RANK[parts[1]] <= RANK[path.stem], f"{path} imports {name}, which lies above it"
    if path.stem in HOST:
        assert not roots(imports(path)) & {"jax", "jaxlib", "flax", "chex", "pallas_kernels", "models"}


def test_the_host_side_imports_no_jax():
    modules = ["paged_jax", *(f"paged_jax.{name}" for name in sorted(HOST)), "paged_jax.cli"]
    program = f"import sys, {', '.join(modules)}; print(*({{'jax', 'flax', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("", "numpy")


def test_the_lists_name_real_files():
    assert set(RANK) == {path.stem for path in FILES if path.parts[0] == "paged_jax"} - {"__init__"}


def test_files_are_about_one_noun():
    lengths = sorted(len((ROOT / path).read_text().splitlines()) for path in FILES)
    assert lengths[-1] <= 320
    assert lengths[len(lengths) // 2] <= 150
