"""Public models by name: the few fields of their published configs that a plan reads."""

from __future__ import annotations

import difflib
from typing import NamedTuple

from paged_jax.errors import ModelNotFound
from paged_jax.model_reader import shape_from_config
from paged_jax.model_shape import ModelShape


class _Sizes(NamedTuple):
    architecture: str
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    dtype: str = "bfloat16"
    tie_word_embeddings: bool = False
    head_dim: int | None = None


_LLAMA, _MISTRAL, _QWEN2 = "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"
_SIZES = {
    "llama-2-7b": _Sizes(_LLAMA, 32, 4096, 32, 32, 11008, 32000, 4096, "float16"),
    "llama-2-13b": _Sizes(_LLAMA, 40, 5120, 40, 40, 13824, 32000, 4096, "float16"),
    "llama-2-70b": _Sizes(_LLAMA, 80, 8192, 64, 8, 28672, 32000, 4096, "float16"),
    "llama-3-8b": _Sizes(_LLAMA, 32, 4096, 32, 8, 14336, 128_256, 8192),
    "llama-3.1-8b": _Sizes(_LLAMA, 32, 4096, 32, 8, 14336, 128_256, 131_072),
    "llama-3.1-70b": _Sizes(_LLAMA, 80, 8192, 64, 8, 28672, 128_256, 131_072),
    "llama-3.2-1b": _Sizes(_LLAMA, 16, 2048, 32, 8, 8192, 128_256, 131_072, "bfloat16", True, 64),
    "llama-3.2-3b": _Sizes(_LLAMA, 28, 3072, 24, 8, 8192, 128_256, 131_072, "bfloat16", True, 128),
    "mistral-7b": _Sizes(_MISTRAL, 32, 4096, 32, 8, 14336, 32768, 32768),
    "mixtral-8x7b": _Sizes("MixtralForCausalLM", 32, 4096, 32, 8, 14336, 32000, 32768),
    "qwen2.5-0.5b": _Sizes(_QWEN2, 24, 896, 14, 2, 4864, 151_936, 32768, "bfloat16", True),
    "qwen2.5-7b": _Sizes(_QWEN2, 28, 3584, 28, 4, 18944, 152_064, 131_072),
    "qwen2.5-72b": _Sizes(_QWEN2, 80, 8192, 64, 8, 29568, 152_064, 131_072),
    "qwen3-8b": _Sizes("Qwen3ForCausalLM", 36, 4096, 32, 8, 12288, 151_936, 40960, "bfloat16", False, 128),
    "smollm2-135m": _Sizes(_LLAMA, 30, 576, 9, 3, 1536, 49152, 8192, "bfloat16", True),
    "smollm2-1.7b": _Sizes(_LLAMA, 24, 2048, 32, 32, 8192, 49152, 8192, "bfloat16", True),
    "tinyllama-1.1b": _Sizes(_LLAMA, 22, 2048, 32, 4, 5632, 32000, 2048),
}
_MORE: dict[str, dict[str, object]] = {
    "llama-3.1-8b": {"rope_scaling": {"rope_type": "llama3"}},
    "llama-3.1-70b": {"rope_scaling": {"rope_type": "llama3"}},
    "llama-3.2-1b": {"rope_scaling": {"rope_type": "llama3"}},
    "llama-3.2-3b": {"rope_scaling": {"rope_type": "llama3"}},
    "mistral-7b": {"sliding_window": None},  # v0.3; v0.1 has a window of 4,096 and 768 tokens fewer
    "mixtral-8x7b": {"num_local_experts": 8, "num_experts_per_tok": 2},
}
KNOWN_MODELS = tuple(_SIZES)


def known_model(name: str) -> ModelShape | None:
    """The shape of a model that is known by this name, or None."""
    key = name.strip().lower()
    if key not in _SIZES:
        return None
    sizes = _SIZES[key]
    config = {field: value for field, value in sizes._asdict().items() if value is not None}
    kind = sizes.architecture.removesuffix("ForCausalLM").lower()
    config |= {"architectures": [sizes.architecture], "model_type": kind} | _MORE.get(key, {})
    return shape_from_config(config, key)


def unknown_model(name: str) -> ModelNotFound:
    """The error that says which names are known."""
    close = difflib.get_close_matches(name.strip().lower(), KNOWN_MODELS, n=1)
    return ModelNotFound(
        f"model={name!r}: no such file or directory, and no name that is known here."
        + (f" Did you mean {close[0]}?" if close else "")
        + f" Expected a directory, a config.json, a .gguf file, or one of {', '.join(KNOWN_MODELS)}."
    )
