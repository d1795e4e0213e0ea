"""The comparison with transformers itself, in this process: scripts/test --all runs it.

Three answers must be one: what the golden files say, what transformers gives now, and what LLM gives.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from support import reference
from support.beam_cases import SCORES, assert_same_searches
from support.checkpoints import (
    demo_gguf,
    glassllm_tokenizer,
    random_tensors,
    tiny_tokenizer,
    write_glassllm,
    write_hf,
)
from support.golden_cases import (
    BATCH_TOKENS,
    DEMO_TOKENS,
    GLASSLLM_TOKENS,
    GOLDENS,
    RANDOM,
    RANDOM_TOKENS,
    batch_lengths,
    batch_prompts,
    golden,
    random_config,
    random_seed,
    write_batch_model,
)
from support.golden_prompts import CODE, DEMO, GLASSLLM, LETTER, REPORT
from support.greedy import assert_same_answers, assert_same_rows

from paged_jax import LLM, SamplingParams

pytestmark = pytest.mark.reference


def answers(llm, prompts, max_tokens, **params):
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens, **params))
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("name", RANDOM)
def test_random_models_saved_by_transformers(name, tmp_path):
    """Weights in one file for every other model, in shards for the rest, as save_pretrained writes them."""
    config = random_config(name)
    write_hf(tmp_path / "ours", config, random_tensors(config, random_seed(name)))
    model = reference.load_model(tmp_path / "ours")
    saved = tmp_path / "saved"
    sharded = list(RANDOM).index(name) % 2 == 1
    model.save_pretrained(saved, max_shard_size="100KB" if sharded else "1GB")
    tiny_tokenizer().save(str(saved / "tokenizer.json"))
    assert (len(list(saved.glob("*.safetensors"))) > 1) == sharded

    rows = reference.random_rows(model, name)
    assert_same_rows(golden("random")["rows"][name], rows, name)
    with LLM(
        saved, max_model_len=72, num_blocks=20, max_num_seqs=3, max_num_batched_tokens=64, warm_up=False
    ) as llm:
        prompts = [{"prompt_token_ids": row["prompt_ids"]} for row in rows]
        assert_same_answers(rows, answers(llm, prompts, RANDOM_TOKENS, ignore_eos=True), name)


def test_many_prompts_of_all_lengths_in_one_batch(tmp_path):
    write_batch_model(tmp_path)
    rows = reference.batch_rows(reference.load_model(tmp_path))
    expected = golden("batch")["rows"]
    assert [row["prompt_tokens"] for row in expected] == [row["prompt_tokens"] for row in rows]
    assert_same_answers(expected, [row["ids"] for row in rows], "batch")
    with LLM(tmp_path, num_blocks=600) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in batch_prompts()]
        assert_same_answers(rows, answers(llm, prompts, BATCH_TOKENS, ignore_eos=True), "batch")


@pytest.mark.full
def test_many_texts_of_all_lengths_in_one_batch_of_the_demo_model():
    """Pieces of text of 1 to 512 tokens, each from a place of its own; the pool holds a part of them."""
    model = reference.load_demo_model()
    text = reference.demo_tokenizer().encode("\n\n".join([LETTER, REPORT, CODE]), add_special_tokens=False)
    prompts = []
    for index, length in enumerate(batch_lengths()):
        prompts.append([text[(37 * index + place) % len(text)] for place in range(length)])
    rows = [reference.answer(model, prompt, 4, use_cache=True) for prompt in prompts]
    with LLM(demo_gguf(), max_model_len=640, num_blocks=600) as llm:
        token_ids = [{"prompt_token_ids": prompt} for prompt in prompts]
        assert_same_answers(rows, answers(llm, token_ids, 4, ignore_eos=True), "demo, batch")


def test_a_small_trained_model(tmp_path):
    write_glassllm(tmp_path)
    rows = reference.glassllm_rows(reference.load_model(tmp_path), glassllm_tokenizer())
    assert_same_rows(golden("glassllm")["rows"], rows, "glassllm")
    with LLM(tmp_path, num_blocks=100, max_num_seqs=8, max_num_batched_tokens=128, warm_up=False) as llm:
        assert_same_answers(rows, answers(llm, GLASSLLM, GLASSLLM_TOKENS), "glassllm")


def test_the_demo_model():
    expected = golden("demo")["rows"]
    assert len(expected) >= 50
    tokenizer = reference.demo_tokenizer()
    assert [row["prompt_ids"] for row in expected] == [reference.demo_prompt_ids(tokenizer, p) for p in DEMO]
    model = reference.load_demo_model()
    rows = [reference.confirm(model, row, DEMO_TOKENS, (2,)) for row in expected]
    assert_same_rows(expected, rows, "demo")
    with LLM(
        demo_gguf(), max_model_len=320, num_blocks=400, max_num_batched_tokens=512, warm_up=False
    ) as llm:
        prompts = [p if isinstance(p, str) else llm.chat_prompt(p) for p in DEMO]
        assert_same_answers(rows, answers(llm, prompts, DEMO_TOKENS), "demo")


def same_beam_rows(expected, rows):
    """Two runs of the reference agree."""
    for want, got in zip(expected, rows, strict=True):
        assert (want["prompt_ids"], want["ids"]) == (got["prompt_ids"], got["ids"])
        assert np.allclose(want["scores"], got["scores"], rtol=SCORES, atol=SCORES)


def test_beam_searches_of_the_small_model(tmp_path):
    write_glassllm(tmp_path)
    rows = reference.beam_rows(reference.load_model(tmp_path), "glassllm")
    same_beam_rows(golden("beams")["rows"]["glassllm"], rows)
    with LLM(tmp_path, num_blocks=200, warm_up=False) as llm:
        assert_same_searches(llm, rows, "glassllm")


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.full)])
def test_beam_searches_of_the_demo_model(every):
    rows = reference.beam_rows(reference.load_demo_model(), "demo", every)
    same_beam_rows(golden("beams")["rows"]["demo"][::every], rows)
    with LLM(demo_gguf(), max_model_len=320, num_blocks=400, warm_up=False) as llm:
        assert_same_searches(llm, rows, "demo", every)


def test_the_tokenization_goldens():
    """Token ids of texts of many scripts, and chats through the model's own template."""
    tokenizer = reference.demo_tokenizer()
    data = json.loads(Path(GOLDENS / "tokenization.json").read_text(encoding="utf-8"))
    compared = 0
    for case in data["cases"]:
        ids = tokenizer.encode(case["text"] * case["times"], add_special_tokens=False)
        if "ids" in case["smollm2"]:
            compared += 1
            assert ids == case["smollm2"]["ids"], case["text"]
        else:
            assert len(ids) == case["smollm2"]["num_ids"], case["text"]
    assert compared > 40
    for chat in data["chats"]:
        text = tokenizer.apply_chat_template(
            chat["messages"], tokenize=False, add_generation_prompt=chat["add_generation_prompt"]
        )
        assert text == chat["text"]
        assert tokenizer.encode(text) == chat["ids"]
