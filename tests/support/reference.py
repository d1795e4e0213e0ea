"""transformers as the reference: models in float32, answers chosen one token at a time.

torch and transformers are imported when a function needs them, so that the module can be imported without.
"""

import inspect
from pathlib import Path

import numpy as np
from tokenizers import pre_tokenizers

from paged_jax import BeamSearchParams
from support import greedy
from support.beam_cases import cases, params_of
from support.checkpoints import demo_gguf, glassllm_tokenizer
from support.golden_cases import (
    BATCH_TOKENS,
    DEMO_TOKENS,
    GLASSLLM_TOKENS,
    RANDOM_TOKENS,
    batch_prompts,
    random_prompts,
)
from support.golden_prompts import DEMO, GLASSLLM

NEEDED = (
    "the live comparison needs torch and transformers: pip install -e '.[reference]'"
    " (or leave it out: scripts/test without --all)"
)


def modules():
    """(torch, transformers), quiet and on one thread.

    Two threads that wait for each other on a machine with other work took five times as long as one.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise RuntimeError(f"{NEEDED}; {error}") from error
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return torch, transformers


def load_model(directory: Path, **options):
    """A causal language model in float32, with attention written out (no fused kernel)."""
    torch, transformers = modules()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", **options
    )
    return model.eval()


def load_demo_model():
    path = demo_gguf()
    return load_model(path.parent, gguf_file=path.name)


def demo_tokenizer():
    """The demo model's tokenizer, with the pre-tokenizer of the model's own tokenizer.json.

    transformers does not know `smollm`, the GGUF file's name of it: left to itself it would not cut numbers
    into digits.
    """
    _, transformers = modules()
    path = demo_gguf()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), byte_level]
    )
    return tokenizer


def cache_argument(model) -> str:
    """What the model's forward calls its cache: transformers is renaming it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def answer(model, prompt_ids, max_tokens, *, eos_ids=(), use_cache, keep=(0,)) -> dict:
    """The row of a greedy answer. Without use_cache each step computes the whole sequence anew."""
    torch, transformers = modules()
    ids, steps = [], []
    cache = transformers.DynamicCache(config=model.config) if use_cache else None
    options = {"use_cache": use_cache} | ({cache_argument(model): cache} if use_cache else {})
    with torch.inference_mode():
        new = list(prompt_ids)
        while len(ids) < max_tokens and not (ids and ids[-1] in eos_ids):
            tokens = new if use_cache else [*prompt_ids, *ids]
            out = model(torch.tensor([tokens]), **options)
            steps.append(out.logits[0, -1].numpy().astype(np.float32))
            ids.append(int(steps[-1].argmax()))
            new = ids[-1:]
    return {"prompt_ids": list(prompt_ids)} | greedy.row(steps, ids, keep)


def confirm(model, row, max_tokens, eos_ids) -> dict:
    """The row as this model gives it now, at the price of one call.

    The whole of a row is read at once, and each of its ids is compared with the best one after the ids before
    it. Where all are the best, they are the greedy answer: the first one is, so the second one is, and on.
    """
    torch, _ = modules()
    ids = row["ids"]
    assert len(ids) == max_tokens or ids[-1] in eos_ids, "the answer neither ends nor is of full length"
    with torch.inference_mode():
        tokens = torch.tensor([[*row["prompt_ids"], *ids[:-1]]])
        logits = model(tokens, use_cache=False, logits_to_keep=len(ids)).logits[0].numpy()
    return {"prompt_ids": row["prompt_ids"]} | greedy.row([*logits], logits.argmax(-1).tolist())


def random_rows(model, name: str) -> list[dict]:
    last = RANDOM_TOKENS - 1
    return [
        answer(model, prompt, RANDOM_TOKENS, use_cache=False, keep=(0, last))
        for prompt in random_prompts(name)
    ]


def batch_rows(model) -> list[dict]:
    """Without the prompts, which are long and made by `batch_prompts`, and without logits."""
    rows = []
    for prompt in batch_prompts():
        row = answer(model, prompt, BATCH_TOKENS, use_cache=True)
        rows.append({"prompt_tokens": len(prompt)} | {name: row[name] for name in ("ids", "gaps", "close")})
    return rows


def glassllm_rows(model, tokenizer) -> list[dict]:
    """tokenizer: of the tokenizers package, as the directory's tokenizer.json holds it."""
    rows = []
    for text in GLASSLLM:
        ids = tokenizer.encode(text).ids
        row = answer(model, ids, GLASSLLM_TOKENS, eos_ids=(3,), use_cache=False)
        rows.append({"prompt": text} | row)
    return rows


def demo_prompt_ids(tokenizer, prompt) -> list[int]:
    text = prompt
    if not isinstance(prompt, str):
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def demo_rows(model, tokenizer) -> list[dict]:
    rows = []
    for prompt in DEMO:
        ids = demo_prompt_ids(tokenizer, prompt)
        rows.append({"prompt": prompt} | answer(model, ids, DEMO_TOKENS, eos_ids=(2,), use_cache=True))
    return rows


def beam_row(model, prompt_ids: list[int], params: BeamSearchParams, eos_ids: tuple[int, ...]) -> dict:
    """The hypotheses of generate(num_beams=...) and their scores, best first."""
    torch, _ = modules()
    width = params.beam_width
    options = {
        "num_beams": width,
        "num_return_sequences": params.num_returned,
        "max_new_tokens": params.max_tokens,
        "min_new_tokens": params.min_tokens or None,
        "no_repeat_ngram_size": params.no_repeat_ngram_size or None,
        "repetition_penalty": params.repetition_penalty,
        "bad_words_ids": [list(word) for word in params.bad_words] or None,
        "eos_token_id": [*eos_ids, *params.stop_token_ids],
    }
    if width > 1:
        options |= {"length_penalty": params.length_penalty, "early_stopping": params.early_stopping}
    tokens = torch.tensor([prompt_ids])
    with torch.inference_mode():
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )
    ended = {*eos_ids, *params.stop_token_ids}
    ids = [_until(row[len(prompt_ids) :].tolist(), ended) for row in out.sequences]
    if width == 1:  # greedy: there is no score but what the steps' scores come to
        steps = [torch.log_softmax(step[0], -1) for step in out.scores]
        scores = [sum(float(step[token]) for step, token in zip(steps, ids[0], strict=True)) / len(ids[0])]
    else:
        scores = out.sequences_scores.tolist()
    return {"ids": ids, "scores": [float(f"{score:.7g}") for score in scores]}


def _until(ids: list[int], ended: set[int]) -> list[int]:
    """Without the padding after an end token."""
    for place, token in enumerate(ids):
        if token in ended:
            return ids[: place + 1]
    return ids


def beam_rows(model, name: str, every: int = 1) -> list[dict]:
    """Of every so-manieth of the cases of a model."""
    if name == "demo":
        tokenizer, eos_ids = demo_tokenizer(), (2,)
    else:
        tokenizer, eos_ids = glassllm_tokenizer(), (3,)
    rows = []
    for prompt, options in cases(name)[::every]:
        ids = demo_prompt_ids(tokenizer, prompt) if name == "demo" else tokenizer.encode(prompt).ids
        rows.append({"prompt_ids": ids} | beam_row(model, ids, params_of(options), eos_ids))
    return rows
