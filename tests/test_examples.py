"""The examples run as they stand, and mean what they say."""

import runpy
from pathlib import Path

import jax.numpy as jnp
from flax import nnx

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_own_model_equals_attention_without_a_cache():
    example = runpy.run_path(str(EXAMPLES / "own_model.py"))
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6, 5], [7]]
    texts = example["generate"](prompts, num_tokens=6)
    model = example["OwnModel"](nnx.Rngs(0))
    for prompt, text in zip(prompts, texts, strict=True):
        expected = list(prompt)
        for _ in range(6):
            x = model.embed(jnp.array(expected))
            q, k, v = (part.reshape(len(expected), 2, 16) for part in jnp.split(model.qkv(x), 3, axis=-1))
            scores = jnp.einsum("hd,khd->hk", q[-1], k) / 4
            out = jnp.einsum("hk,khd->hd", nnx.softmax(scores), v).reshape(-1)
            expected.append(int(jnp.argmax(model.head(x[-1] + out))))
        assert text == expected


def test_own_model_is_forty_lines_of_code():
    source = (EXAMPLES / "own_model.py").read_text()
    assert len([line for line in source.splitlines() if line.strip()]) <= 40
