"""The decoder's configuration as a GGUF file's metadata states it.

A new architecture is added to `_ARCHITECTURES`, with whether llama.cpp's converter permutes its q and k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .config import MAX_LAYERS, DecoderConfig, RopeScaling, check_heads
from .errors import UnsupportedModel, WeightsError
from .fields import Fields
from .gguf_file import GGUFFile

__all__ = ["decoder_config", "permuted_heads"]


@dataclass(frozen=True)
class _Architecture:
    hf_name: str
    permutes_rotary: bool
    attention_bias: bool


_ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM", permutes_rotary=True, attention_bias=False),
    "qwen2": _Architecture("Qwen2ForCausalLM", permutes_rotary=False, attention_bias=True),
}
# (low_freq_factor, high_freq_factor, original_max_position_embeddings) of Llama 3.1, 3.2 and 3.3. A file
# stores only the frequencies' divisors, so other values cannot be told apart from damage and are refused.
_LLAMA3 = (1.0, 4.0, 8192)


def decoder_config(file: GGUFFile) -> DecoderConfig:
    """Reads the configuration of a `llama` (Mistral included) or `qwen2` file.

    Raises:
      UnsupportedModel: the architecture or a feature of it is not implemented, or a field is missing or has
        a nonsense value; named.
      WeightsError: the file has no embedding matrix.
    """
    fields = Fields(file.metadata, str(file.path))
    name = fields.text("general.architecture")
    if name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise UnsupportedModel(f"{file.path}: architecture {name!r} is not supported. Supported: {known}.")
    architecture = _ARCHITECTURES[name]
    _refuse_features(fields, name)

    hidden_size = fields.size(f"{name}.embedding_length")
    num_heads = _same_for_all(fields, f"{name}.attention.head_count", None)
    num_kv_heads = _same_for_all(fields, f"{name}.attention.head_count_kv", num_heads)
    num_layers = fields.size(f"{name}.block_count", most=MAX_LAYERS)
    head_dim = fields.size(f"{name}.attention.key_length", max(hidden_size // num_heads, 1))
    _check_head_dims(fields, name, head_dim)
    window = None
    if fields.has(f"{name}.attention.sliding_window"):
        window = fields.size(f"{name}.attention.sliding_window")
    theta = fields.number(f"{name}.rope.freq_base", 10_000.0)
    config = DecoderConfig(
        architecture=architecture.hf_name,
        vocab_size=_vocab_size(file),
        hidden_size=hidden_size,
        intermediate_size=_same_for_all(fields, f"{name}.feed_forward_length", None),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number(f"{name}.attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        rope_scaling=_rope_scaling(file, fields, name, theta, head_dim),
        max_position_embeddings=fields.size(f"{name}.context_length"),
        tie_word_embeddings="output.weight" not in file.infos,
        attention_bias=architecture.attention_bias or "blk.0.attn_q.bias" in file.infos,
        attention_out_bias="blk.0.attn_output.bias" in file.infos,
        mlp_bias="blk.0.ffn_gate.bias" in file.infos,
        sliding_window=window,
        layer_windows=(window,) * num_layers,
        hidden_act="silu",
        dtype=file.stored_dtype(),
    )
    check_heads(config, fields)
    return config


def permuted_heads(file: GGUFFile, config: DecoderConfig) -> dict[str, int]:
    """What `GGUFFile.hf_tensors` needs to know of the rotary layout."""
    if not _ARCHITECTURES[str(file.metadata["general.architecture"])].permutes_rotary:
        return {}
    return {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}


def _refuse_features(fields: Fields, name: str) -> None:
    for feature in ("expert_count", "attention.scale", "logit_scale", "embedding_scale", "residual_scale"):
        value = fields.values.get(f"{name}.{feature}")
        if value not in (None, 0, 0.0):
            raise UnsupportedModel(f"{fields.source}: {name}.{feature}={value!r} is not supported.")


def _same_for_all(fields: Fields, key: str, default: int | None) -> int:
    """A size that may be one number or a list with one for each layer, which must then be equal."""
    value = fields.values.get(key)
    if not isinstance(value, list):
        return fields.size(key, default)
    if not value or any(item != value[0] for item in value):
        raise UnsupportedModel(f"{fields.source}: {key} differs between layers, which is not supported.")
    return Fields({key: value[0]}, fields.source).size(key)


def _check_head_dims(fields: Fields, name: str, head_dim: int) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        value = fields.size(f"{name}.{key}", head_dim)
        if value != head_dim:
            raise UnsupportedModel(f"{fields.source}: {name}.{key}={value}: expected head_dim, {head_dim}.")


def _vocab_size(file: GGUFFile) -> int:
    embedding = file.infos.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise WeightsError(f"{file.path}: token_embd.weight: expected a matrix of [vocabulary, hidden].")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > embedding.shape[0]:
        raise WeightsError(
            f"{file.path}: token_embd.weight has {embedding.shape[0]} rows for {len(tokens)} tokens; "
            "expected as many or more."
        )
    return embedding.shape[0]


def _rope_scaling(
    file: GGUFFile, fields: Fields, name: str, theta: float, head_dim: int
) -> RopeScaling | None:
    kind = fields.text(f"{name}.rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise UnsupportedModel(
            f"{file.path}: RoPE scaling {kind!r} is not supported. Supported: none, linear."
        )
    factor = fields.number(f"{name}.rope.scaling.factor", fields.number(f"{name}.rope.scale_linear", 1.0))
    scaling = RopeScaling("linear", factor) if kind == "linear" and factor != 1.0 else None
    if "rope_freqs.weight" not in file.infos:
        return scaling
    if scaling is not None:
        raise UnsupportedModel(f"{file.path}: linear RoPE scaling together with rope_freqs is not supported.")
    return _llama3_scaling(file, theta, head_dim)


def _llama3_scaling(file: GGUFFile, theta: float, head_dim: int) -> RopeScaling | None:
    """Finds the `llama3` settings whose divisors of the frequencies are those in `rope_freqs.weight`."""
    divisors = file.read("rope_freqs.weight").astype(np.float64)
    if divisors.shape == (head_dim // 2,) and np.all(divisors == 1.0):
        return None
    if divisors.shape == (head_dim // 2,) and np.isfinite(divisors).all():
        low, high, original = _LLAMA3
        factor = float(divisors.max())
        wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
        smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
        if np.allclose(divisors, 1.0 / ((1.0 - smooth) / factor + smooth), rtol=1e-4, atol=0.0):
            return RopeScaling("llama3", factor, low, high, original)
    raise UnsupportedModel(
        f"{file.path}: rope_freqs.weight is not that of Llama 3.1's RoPE scaling; other scalings stored "
        "that way are not supported. Use the Hugging Face checkpoint of this model."
    )
