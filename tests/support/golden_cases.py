"""What the golden files answer for: random models of every kind the decoder knows, and two trained ones.

The random weights come from `checkpoints.random_tensors`, so that a test can build them without torch.
"""

import json
from pathlib import Path

import numpy as np

from support.checkpoints import random_tensors, tiny_config, tiny_vocab, write_hf

GOLDENS = Path(__file__).parents[1] / "goldens"
RANDOM_TOKENS, GLASSLLM_TOKENS, DEMO_TOKENS, BATCH_TOKENS = 24, 24, 16, 10
"""Tokens that each answer has at most."""

MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
LLAMA3 = {
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
}
TIED = {"tie_word_embeddings": True}
BATCH_SEED = 200


def heads(num_heads: int, num_kv_heads: int, head_dim: int) -> dict:
    return {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim}


RANDOM = {
    "llama-mha-64": heads(4, 4, 64),
    "llama-gqa-80-linear-tied": heads(4, 2, 80) | LINEAR | TIED,
    "llama-mqa-128-llama3": heads(4, 1, 128) | LLAMA3,
    "llama-gqa-64-llama3-biases-tied": heads(8, 2, 64)
    | LLAMA3
    | TIED
    | {"attention_bias": True, "mlp_bias": True},
    "mistral-gqa-64-window": heads(4, 2, 64) | MISTRAL | {"sliding_window": 9},
    "mistral-mqa-80-tied": heads(4, 1, 80) | MISTRAL | TIED | {"sliding_window": None},
    "qwen2-gqa-128": heads(4, 2, 128) | QWEN2,
    "qwen2-mha-64-window-tied": heads(2, 2, 64)
    | QWEN2
    | TIED
    | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
}


def random_config(name: str) -> dict:
    return tiny_config(**RANDOM[name])


def random_seed(name: str) -> int:
    return 100 + list(RANDOM).index(name)


def random_prompts(name: str) -> list[list[int]]:
    """Three prompts as ids; the longest passes every window and a block of 32."""
    rng = np.random.default_rng(random_seed(name))
    return [rng.integers(0, len(tiny_vocab()), size).tolist() for size in (1, 13, 41)]


def write_random(directory: Path, name: str, **options: object) -> None:
    config = random_config(name)
    write_hf(directory, config, random_tensors(config, random_seed(name)), **options)


def batch_lengths() -> list[int]:
    """Tokens of the prompts of one large batch, shuffled: 208 of them, spread from 1 to 512."""
    return (
        np.random.default_rng(BATCH_SEED).permutation(np.linspace(1, 512, 208).round().astype(int)).tolist()
    )


def batch_prompts() -> list[list[int]]:
    """Random ids of those lengths, for the model of `write_batch_model`."""
    rng = np.random.default_rng(BATCH_SEED + 1)
    return [rng.integers(0, len(tiny_vocab()), length).tolist() for length in batch_lengths()]


def write_batch_model(directory: Path) -> None:
    """A random Llama with room for the longest of those prompts."""
    config = tiny_config(max_position_embeddings=640)
    write_hf(directory, config, random_tensors(config, BATCH_SEED))


def golden(name: str) -> dict:
    """tests/goldens/{name}.json."""
    return json.loads((GOLDENS / f"{name}.json").read_text(encoding="utf-8"))
