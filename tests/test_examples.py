"""The examples run as they stand, and mean what they say."""

import runpy
from pathlib import Path

import numpy as np
from flax import nnx

EXAMPLES = Path(__file__).parent.parent / "examples"


def greedy_without_a_cache(model, prompt, num_tokens):
    """The same model in float64 numpy, over the whole text for every token."""
    embedding, qkv, head = (
        np.asarray(leaf[...], np.float64)
        for leaf in (model.embed.embedding, model.qkv.kernel, model.head.kernel)
    )
    text = list(prompt)
    for _ in range(num_tokens):
        x = embedding[text]
        q, k, v = (part.reshape(len(text), 2, 16) for part in np.split(x @ qkv, 3, axis=-1))
        weights = np.exp(np.einsum("hd,khd->hk", q[-1], k) / 4)
        out = np.einsum("hk,khd->hd", weights / weights.sum(-1, keepdims=True), v).reshape(-1)
        text.append(int(np.argmax((x[-1] + out) @ head)))
    return text


def test_own_model_equals_attention_without_a_cache():
    example = runpy.run_path(str(EXAMPLES / "own_model.py"))
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6, 5], [7]]
    model = example["OwnModel"](nnx.Rngs(0))
    expected = [greedy_without_a_cache(model, prompt, 6) for prompt in prompts]
    assert example["generate"](prompts, num_tokens=6) == expected


def test_own_model_is_forty_lines_of_code():
    source = (EXAMPLES / "own_model.py").read_text()
    assert len([line for line in source.splitlines() if line.strip()]) <= 40
