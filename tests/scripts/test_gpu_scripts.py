"""The measuring scripts run through on a machine without a GPU, and say so where they need one."""

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from gpu_bench import plan

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "scripts" / "bench_kernels.py"


def run(*command, **environment):
    variables = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def test_every_measurement_runs_on_a_cpu_with_tiny_shapes(tmp_path):
    figures = tmp_path / "figures.json"
    done = run(sys.executable, BENCH, "--tiny", "--json", figures)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    decode, prefill = found["attention"]
    for name in ("paged", "bundled", "dense xla"):
        assert decode["us"][name] > 0, decode["us"]
    for name in ("paged", "dense xla"):
        assert prefill["us"][name] > 0, prefill["us"]
    assert [step["name"] for step in found["steps"]] == ["with command buffers", "without"]
    for step in found["steps"]:
        assert step["ms"] > 0
        assert step["kv_bytes"] == 2 * 16 * (2 * 2 * 2 * 16 * 4)  # seqs, context, bytes a token
    assert "of roofline" in done.stdout


def test_a_variant_that_cannot_run_costs_the_others_nothing(monkeypatch):
    def broken(shape, setting):
        raise RuntimeError("no room\nat all")

    monkeypatch.setattr(plan, "DECODE", {"paged": lambda shape, setting: 2.0, "torch": broken})
    _, shape = next(plan.decode_shapes(1e12, tiny=True))
    row = plan.measure("decode", "GQA 4/2", shape, None)
    assert row.times == {"paged": 2.0, "torch": "RuntimeError: no room at all"}
    assert row.gb_per_s() == shape.num_bytes / 2.0 / 1e3


def test_the_telling_shapes_come_first_and_none_outgrows_the_memory():
    shapes = list(plan.decode_shapes(8e9, tiny=False))
    assert [(s.num_seqs, s.context) for _, s in shapes[:2]] == list(plan.FIRST[:2])
    assert all(s.kv_bytes <= 8e9 for _, s in shapes)
    assert len(shapes) == len(set(shapes)) > 40


def test_without_a_gpu_both_scripts_refuse_and_say_what_to_do(tmp_path):
    bench = run(sys.executable, BENCH)
    assert bench.returncode == 2
    assert "jax[cuda13]" in bench.stderr
    for tool in ("bash", "dirname", "grep"):
        (tmp_path / tool).symlink_to(f"/bin/{tool}" if Path(f"/bin/{tool}").exists() else f"/usr/bin/{tool}")
    check = run("bash", ROOT / "scripts" / "gpu_check.sh", PYTHON=sys.executable, PATH=str(tmp_path))
    assert check.returncode == 2
    assert "No NVIDIA GPU" in check.stderr
