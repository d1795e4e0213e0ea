"""LLM answers as transformers does, as far as tests/goldens tells (scripts/make_goldens.py wrote it).

Ids must be equal, except where transformers' own two best logits are closer than 1e-4: such a place is
listed among the warnings, and what follows it there is not compared. Logits agree within 1e-4 of the
largest absolute logit of their step.
"""

import json

import jax.numpy as jnp
import pytest
from support.beam_cases import assert_same_searches
from support.checkpoints import demo_gguf, random_tensors, write_glassllm
from support.golden_cases import (
    BATCH_TOKENS,
    DEMO_TOKENS,
    GLASSLLM_TOKENS,
    RANDOM,
    RANDOM_TOKENS,
    batch_lengths,
    batch_prompts,
    golden,
    random_config,
    random_prompts,
    random_seed,
    write_batch_model,
    write_random,
)
from support.golden_prompts import DEMO, GLASSLLM
from support.greedy import assert_close_logits, assert_same_answers
from support.paged_decoder import PagedDecoder, decoder_of

from models.loading import load_model
from paged_jax import LLM, SamplingParams

BLOCK_SIZES = (1, 8, 16, 32)


def answers(llm, prompts, max_tokens, **params):
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens, **params))
    return outputs, [output.outputs[0].token_ids for output in outputs]


def logits_by_step(paged, row):
    """The prompt, then the row's own ids one by one: logits [vocab_size] that each id was chosen from."""
    prompt, ids = row["prompt_ids"], row["ids"]
    steps = [paged.prefill({"a": prompt})["a"][-1]]
    return steps + [paged.decode({"a": token})["a"] for token in ids[:-1]]


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("name", RANDOM)
def test_random_models_answer_as_transformers(name, block_size, tmp_path):
    rows = golden("random")["rows"][name]
    assert [row["prompt_ids"] for row in rows] == random_prompts(name)
    write_random(tmp_path, name)
    with LLM(
        tmp_path,
        block_size=block_size,
        max_model_len=72,
        num_blocks=4 * 72 // block_size,
        max_num_seqs=3,
        max_num_batched_tokens=64,
        warm_up=False,
    ) as llm:
        prompts = [{"prompt_token_ids": row["prompt_ids"]} for row in rows]
        _, ids = answers(llm, prompts, RANDOM_TOKENS, ignore_eos=True)
    assert_same_answers(rows, ids, f"{name}, block size {block_size}")


@pytest.mark.parametrize("name", RANDOM)
def test_logits_of_random_models_are_those_of_transformers(name):
    config = random_config(name)
    decoder = decoder_of(config, random_tensors(config, random_seed(name)))
    for row in golden("random")["rows"][name]:
        steps = logits_by_step(PagedDecoder(decoder, block_size=16, max_len=80, num_rows=1), row)
        assert [kept["step"] for kept in row["logits"]] == [0, RANDOM_TOKENS - 1]
        for kept in row["logits"]:
            assert_close_logits(kept, steps[kept["step"]])


def test_many_prompts_of_all_lengths_in_one_batch_answer_as_transformers(tmp_path):
    """More sequences than rows, and a pool that holds a part of them: most wait for others to end."""
    rows, lengths = golden("batch")["rows"], batch_lengths()
    assert len(rows) >= 200
    assert (min(lengths), max(lengths)) == (1, 512)
    assert [row["prompt_tokens"] for row in rows] == lengths
    write_batch_model(tmp_path)
    with LLM(tmp_path, num_blocks=600) as llm:
        allocator = llm.engine.allocator
        assert sum(lengths) > 5 * allocator.num_blocks * allocator.block_size
        prompts = [{"prompt_token_ids": ids} for ids in batch_prompts()]
        _, ids = answers(llm, prompts, BATCH_TOKENS, ignore_eos=True)
        assert allocator.num_free_blocks == allocator.num_blocks - 1
    assert_same_answers(rows, ids, "batch")


def test_a_small_trained_model_answers_as_transformers(tmp_path):
    rows = golden("glassllm")["rows"]
    assert [row["prompt"] for row in rows] == GLASSLLM
    write_glassllm(tmp_path)
    with LLM(
        tmp_path, block_size=8, num_blocks=200, max_num_seqs=8, max_num_batched_tokens=128, warm_up=False
    ) as llm:
        outputs, ids = answers(llm, GLASSLLM, GLASSLLM_TOKENS)
    assert [list(output.prompt_token_ids) for output in outputs] == [row["prompt_ids"] for row in rows]
    assert_same_answers(rows, ids, "glassllm")


@pytest.fixture(scope="module")
def demo():
    with LLM(
        demo_gguf(), max_model_len=320, num_blocks=400, max_num_batched_tokens=512, warm_up=False
    ) as llm:
        yield llm


def test_the_demo_model_answers_as_transformers(demo):
    rows = golden("demo")["rows"]
    assert [row["prompt"] for row in rows] == DEMO
    assert len(rows) >= 50
    prompts = [p if isinstance(p, str) else demo.chat_prompt(p) for p in DEMO]
    outputs, ids = answers(demo, prompts, DEMO_TOKENS)
    assert [list(output.prompt_token_ids) for output in outputs] == [row["prompt_ids"] for row in rows]
    assert_same_answers(rows, ids, "demo")
    assert demo.engine.allocator.num_free_blocks == demo.engine.allocator.num_blocks - 1


@pytest.mark.parametrize("block_size", [4, 16])
def test_beam_searches_of_the_small_model_give_what_transformers_gives(block_size, tmp_path):
    rows = golden("beams")["rows"]["glassllm"]
    write_glassllm(tmp_path)
    with LLM(tmp_path, block_size=block_size, num_blocks=1600 // block_size, warm_up=False) as llm:
        assert_same_searches(llm, rows, "glassllm")


def test_beam_searches_of_the_demo_model_give_what_transformers_gives(demo):
    rows = golden("beams")["rows"]["demo"]
    assert len(rows) >= 50
    assert_same_searches(demo, rows, "demo")
    assert demo.engine.allocator.num_free_blocks == demo.engine.allocator.num_blocks - 1


def test_logits_of_the_demo_model_are_those_of_transformers():
    """After each prompt, prefilled in batches of up to 512 tokens."""
    decoder = load_model(demo_gguf(), dtype=lambda stated: jnp.dtype(jnp.float32)).decoder
    paged = PagedDecoder(decoder, block_size=16, max_len=240, num_rows=16, num_tokens=512)
    batch: dict[int, list[int]] = {}
    rows = golden("demo")["rows"]
    for index, row in enumerate(rows):
        batch[index] = row["prompt_ids"]
        following = len(rows[index + 1]["prompt_ids"]) if index + 1 < len(rows) else 512
        if len(batch) == 16 or sum(map(len, batch.values())) + following > 512:
            for done, logits in paged.prefill(batch).items():
                assert_close_logits(rows[done]["logits"][0], logits[-1])
                paged.release(done)
            batch = {}
    assert not batch


def test_the_files_are_small_and_say_what_made_them():
    for name in ("random", "batch", "glassllm", "demo", "beams"):
        data = golden(name)
        assert data["made_by"].startswith("transformers ")
        assert len(json.dumps(data)) < 150_000
