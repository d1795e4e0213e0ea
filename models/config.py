"""What a decoder is made of: the sizes and switches that `config.json` or a GGUF file states.

A new architecture is added to `_READERS`; a new kind of RoPE scaling to `RopeScaling`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from .errors import UnsupportedModel
from .fields import Fields

__all__ = ["SUPPORTED_ARCHITECTURES", "DecoderConfig", "RopeScaling"]

MAX_LAYERS = 4096  # far beyond any model; what a damaged field says may be 2 billion


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context of pre-training.

    `linear` divides every frequency by `factor`. `llama3` divides those whose wavelength is over
    `original_max_position_embeddings / low_freq_factor` by `factor`, keeps those under
    `original_max_position_embeddings / high_freq_factor`, and interpolates in between. `linear` ignores the
    last three fields.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder of the Llama family: pre-norm, RMSNorm, rotary positions, GQA, SwiGLU.

    Attributes:
      architecture: the class name as Hugging Face writes it.
      head_dim: dimensions of one head; `num_heads * head_dim` need not be `hidden_size`.
      attention_bias: whether q, k and v have biases; `attention_out_bias`: whether o has one.
      sliding_window: how many of the latest positions, its own among them, a token sees; None for all.
      layer_windows: the same, layer by layer; `sliding_window` is that of the layers which have one.
      dtype: of the stored weights: "float32", "bfloat16" or "float16".
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    sliding_window: int | None
    layer_windows: tuple[int | None, ...]
    hidden_act: Literal["silu"]
    dtype: str

    @classmethod
    def from_hf(cls, values: Mapping[str, object], source: str = "config.json") -> DecoderConfig:
        """Reads a parsed `config.json`, with the defaults of transformers 5 for what it leaves out.

        Raises:
          UnsupportedModel: the architecture or a feature of it is not implemented, or a field is missing
            or has a nonsense value; named.
        """
        fields = Fields(values, source)
        architecture = _architecture(fields)
        if fields.has("quantization_config"):
            settings = values["quantization_config"]
            method = settings.get("quant_method") if isinstance(settings, Mapping) else settings
            raise UnsupportedModel(
                f"{source}: the weights are quantized ({method}); expected float32, bfloat16 or float16. "
                "Use the unquantized checkpoint, or a GGUF file of this model."
            )
        activation = fields.text("hidden_act", "silu")
        if activation != "silu":
            raise UnsupportedModel(f"{source}: hidden_act={activation!r}: expected 'silu'.")
        config = _READERS[architecture](fields, _common(architecture, fields))
        check_heads(config, fields)
        return config


def check_heads(config: DecoderConfig, fields: Fields) -> None:
    """Raises UnsupportedModel unless the head counts divide and head_dim suits rotary embeddings."""
    if config.num_heads % config.num_kv_heads:
        raise fields.wrong(
            "num_key_value_heads", config.num_kv_heads, f"a divisor of the {config.num_heads} attention heads"
        )
    if config.head_dim % 2:
        raise fields.wrong("head_dim", config.head_dim, "an even number (rotary embeddings turn pairs)")


def read_rope_scaling(fields: Fields, max_position_embeddings: int) -> RopeScaling | None:
    """Reads one RoPE settings object, as `rope_parameters` and `rope_scaling` hold it."""
    kind = fields.text("rope_type", fields.text("type", "default"))
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(
            f"{fields.source}: partial_rotary_factor: expected all of a head to be rotated."
        )
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", fields.number("factor"))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            fields.number("factor"),
            fields.number("low_freq_factor"),
            fields.number("high_freq_factor"),
            fields.size("original_max_position_embeddings", max_position_embeddings),
        )
    raise UnsupportedModel(
        f"{fields.source}: RoPE scaling {kind!r}: expected 'default', 'linear' or 'llama3'."
    )


def _architecture(fields: Fields) -> str:
    names = fields.values.get("architectures")
    known = ", ".join(SUPPORTED_ARCHITECTURES)
    if not isinstance(names, list | tuple) or len(names) != 1:
        raise UnsupportedModel(
            f"{fields.source}: architectures={names!r}: expected a list of one of {known}."
        )
    if names[0] not in SUPPORTED_ARCHITECTURES:
        raise UnsupportedModel(
            f"{fields.source}: architecture {names[0]!r} is not supported. Supported: {known}."
        )
    return str(names[0])


def _rope(fields: Fields, max_position_embeddings: int) -> tuple[float, RopeScaling | None]:
    settings = fields.values.get("rope_scaling") or fields.values.get("rope_parameters") or {}
    if not isinstance(settings, Mapping):
        raise fields.wrong("rope_parameters", settings, "an object")
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise UnsupportedModel(
            f"{fields.source}: rope_parameters differ between layers, which is not supported."
        )
    rope = Fields({**_partial(fields), **settings}, f"{fields.source}: rope_parameters")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    return theta, read_rope_scaling(rope, max_position_embeddings)


def _partial(fields: Fields) -> dict[str, object]:
    factor = fields.values.get("partial_rotary_factor")
    return {} if factor is None else {"partial_rotary_factor": factor}


def _dtype(fields: Fields) -> str:
    name = fields.text("dtype", fields.text("torch_dtype", "float32")).removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise UnsupportedModel(
            f"{fields.source}: dtype={name!r}: expected 'float32', 'bfloat16' or 'float16'."
        )
    return name


def _common(architecture: str, fields: Fields) -> DecoderConfig:
    defaults = _DEFAULTS[architecture]
    num_heads = fields.size("num_attention_heads")
    num_layers = fields.size("num_hidden_layers", most=MAX_LAYERS)
    hidden_size = fields.size("hidden_size")
    max_position_embeddings = fields.size("max_position_embeddings", defaults.max_position_embeddings)
    if not fields.has("head_dim") and hidden_size % num_heads:
        raise fields.wrong(
            "hidden_size", hidden_size, f"a multiple of the {num_heads} heads where head_dim is absent"
        )
    kv_default = defaults.num_kv_heads
    if kv_default is None or "num_key_value_heads" in fields.values:
        kv_default = num_heads
    theta, scaling = _rope(fields, max_position_embeddings)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.size("num_key_value_heads", kv_default),
        head_dim=fields.size("head_dim", max(hidden_size // num_heads, 1)),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        sliding_window=None,
        layer_windows=(None,) * num_layers,
        hidden_act="silu",
        dtype=_dtype(fields),
    )


def _llama(fields: Fields, common: DecoderConfig) -> DecoderConfig:
    bias = fields.flag("attention_bias", False)
    return replace(
        common, attention_bias=bias, attention_out_bias=bias, mlp_bias=fields.flag("mlp_bias", False)
    )


def _mistral(fields: Fields, common: DecoderConfig) -> DecoderConfig:
    if "sliding_window" in fields.values and fields.values["sliding_window"] is None:
        return common
    window = fields.size("sliding_window", 4096)
    return replace(common, sliding_window=window, layer_windows=(window,) * common.num_layers)


def _qwen2(fields: Fields, common: DecoderConfig) -> DecoderConfig:
    common = replace(common, attention_bias=True)
    no_window = "sliding_window" in fields.values and fields.values["sliding_window"] is None
    if not fields.flag("use_sliding_window", False) or no_window:
        return common
    window = fields.size("sliding_window", 4096)
    kinds = fields.values.get("layer_types")
    if kinds is None:
        first = fields.values.get("max_window_layers", 28)
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise fields.wrong("max_window_layers", first, "an integer of 0 or more")
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(common.num_layers)]
    if not isinstance(kinds, list) or len(kinds) != common.num_layers:
        raise fields.wrong("layer_types", kinds, f"a list of {common.num_layers} strings")
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise UnsupportedModel(
                f"{fields.source}: layer type {kind!r}: expected 'full_attention' or 'sliding_attention'."
            )
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return replace(common, sliding_window=window if any(windows) else None, layer_windows=windows)


@dataclass(frozen=True)
class _Defaults:
    """What transformers assumes for a field that `config.json` leaves out."""

    max_position_embeddings: int
    num_kv_heads: int | None  # None: as many as query heads


_DEFAULTS = {
    "LlamaForCausalLM": _Defaults(2048, None),
    "MistralForCausalLM": _Defaults(131_072, 8),
    "Qwen2ForCausalLM": _Defaults(32_768, 32),
}
_READERS: dict[str, Callable[[Fields, DecoderConfig], DecoderConfig]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
}
SUPPORTED_ARCHITECTURES = tuple(_READERS)
