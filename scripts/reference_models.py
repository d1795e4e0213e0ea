"""The demo model in transformers, in both dtypes, for benchmarks beside it."""

from __future__ import annotations

import inspect
from copy import deepcopy
from pathlib import Path
from typing import Any


def load_reference_models(path: Path, threads: int) -> dict[str, Any]:
    """A GGUF file's model by dtype, with sdpa attention; none without torch and transformers."""
    try:
        import torch
        import transformers
    except ImportError:
        return {}
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    auto: Any = transformers.AutoModelForCausalLM
    exact = auto.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    return {"float32": exact, "bfloat16": deepcopy(exact).to(torch.bfloat16)}


def cache_argument(model: Any) -> str:
    """What this version of transformers calls the cache that a model's forward takes."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
