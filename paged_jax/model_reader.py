"""From a Hugging Face `config.json` to a ModelShape, for many more models than the engine can run.

What the engine can run is read exactly as `models.config` reads it; tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from paged_jax.errors import UnsupportedModel
from paged_jax.model_families import FAMILIES, NESTED_DEFAULTS, Family, refuse_other_caches
from paged_jax.model_shape import ITEMSIZES, Experts, ModelShape

RUNS = {"LlamaForCausalLM": None, "MistralForCausalLM": 8, "Qwen2ForCausalLM": 32}
"""What the engine runs, and the KV heads that transformers assumes where the field is left out."""
_CONTEXT = {"LlamaForCausalLM": 2048, "MistralForCausalLM": 131_072, "Qwen2ForCausalLM": 32_768}
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
_OTHER_NAMES = {
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "intermediate_size": ("n_inner", "ffn_hidden_size", "ffn_dim"),
    "max_position_embeddings": ("n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx"),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("experts_per_token", "num_experts_per_token", "moe_topk"),
    "head_dim": ("kv_channels",),
    "vocab_size": ("padded_vocab_size",),
}
_MOST = 2**31 - 1
_MOST_LAYERS = 4096


def shape_from_config(config: Mapping[str, object], source: str = "config.json") -> ModelShape:
    """Read a parsed `config.json`.

    Raises UnsupportedModel, by name, for a model whose cache is of another kind, and for a field that is
    missing or has a nonsense value.
    """
    values = _text_part(config)
    for part in (config, values):
        refuse_other_caches(part, source)
    fields = _Values(values, source)
    names = config.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else "unknown architecture"
    kind = str(values.get("model_type") or _kind_of(architecture))
    family = FAMILIES.get(kind, Family())
    fields.defaults = dict(family.defaults)
    if values is not config:
        fields.defaults |= NESTED_DEFAULTS.get(kind, {})
    shape = _sizes(fields, architecture, family)
    notes = [] if kind in FAMILIES else [f"parameters reckoned as a Llama's: {kind or 'its'} family unknown"]
    if values is not config:
        notes.append("the text part alone: weights of vision or audio parts are not counted")
    if _Values(config, source).get("quantization_config") or fields.get("quantization_config"):
        notes.append("the checkpoint is quantized; weights are reckoned at the dtype that is shown")
    return replace(
        shape,
        estimated=kind not in FAMILIES,
        plan_only=_why_not(config, shape),
        notes=tuple(notes),
    )


class _Values:
    """Typed look-ups under any of a field's names."""

    def __init__(self, values: Mapping[str, object], source: str) -> None:
        self.values = values
        self.source = source
        self.defaults: dict[str, object] = {}

    def get(self, name: str) -> object:
        """The value, under this name or another; None counts as absent."""
        for alias in (name, *_OTHER_NAMES.get(name, ())):
            if self.values.get(alias) is not None:
                return self.values[alias]
        return self.defaults.get(name)

    def size(self, name: str, default: int | None = None, most: int = _MOST) -> int:
        """An integer from 1 to `most`."""
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise UnsupportedModel(f"{self.source}: the field {name} is missing; a plan needs it.")
        if isinstance(value, list):
            raise UnsupportedModel(f"{self.source}: {name} differs between layers; expected one number.")
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            raise self.wrong(name, value, f"an integer from 1 to {most}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """True or False."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def wrong(self, name: str, value: object, expected: str) -> UnsupportedModel:
        """The usual message about a field."""
        return UnsupportedModel(f"{self.source}: {name}={str(value)[:80]}: expected {expected}.")


def _text_part(config: Mapping[str, object]) -> Mapping[str, object]:
    """The language model's own settings, over those of the whole."""
    for name in _NESTED:
        inner = config.get(name)
        if isinstance(inner, Mapping) and inner:
            outer = {key: value for key, value in config.items() if key not in (name, "model_type")}
            return _text_part({**outer, **inner})
    return config


def _kind_of(architecture: str) -> str:
    """The model_type of an architecture that the engine runs, where the config leaves it out."""
    return architecture.removesuffix("ForCausalLM").lower() if architecture in RUNS else ""


def _sizes(fields: _Values, architecture: str, family: Family) -> ModelShape:
    num_layers = fields.size("num_hidden_layers", most=_MOST_LAYERS)
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if fields.get("head_dim") is None and hidden % heads:
        raise fields.wrong("hidden_size", hidden, f"a multiple of the {heads} heads where head_dim is absent")
    head_dim = fields.size("head_dim", max(hidden // heads, 1))
    if fields.get("v_head_dim") not in (None, head_dim):
        raise fields.wrong("v_head_dim", fields.get("v_head_dim"), f"head_dim, {head_dim}")
    kv_heads = _kv_heads(fields, architecture, heads)
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", kv_heads, f"a divisor of the {heads} attention heads")
    context = _CONTEXT.get(architecture)
    if context is not None or fields.get("max_position_embeddings") is not None:
        context = fields.size("max_position_embeddings", context)
    experts = _experts(fields, num_layers)
    usual_width = None if family.gated else 4 * hidden
    width = fields.size("intermediate_size", experts.width if experts else usual_width)
    bias = family.all_biases or (architecture not in _OWN_BIASES and fields.flag("attention_bias"))
    norm = hidden * (2 if family.layer_norm else 1)
    qk = 2 * head_dim if family.qk_norm else 0
    return ModelShape(
        name=fields.source,
        architecture=architecture,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=width,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=fields.flag("tie_word_embeddings", family.tied),
        layer_windows=_windows(fields, num_layers, architecture, family),
        max_position_embeddings=context,
        dtype=_dtype(fields),
        norm_parameters=num_layers * (family.norms * norm + qk) + norm,
        position_parameters=hidden * (context or 0) if family.learned_positions else 0,
        qkv_bias=family.qkv_bias or bias,
        out_bias=bias,
        mlp_bias=family.all_biases or (architecture not in _OWN_BIASES and fields.flag("mlp_bias")),
        gated=family.gated,
        experts=experts,
    )


_OWN_BIASES = frozenset({"MistralForCausalLM", "Qwen2ForCausalLM"})
"""Whose code says which biases there are, whatever the config has."""


def _kv_heads(fields: _Values, architecture: str, heads: int) -> int:
    stated = "num_key_value_heads" in fields.values
    if fields.flag("multi_query") and not fields.flag("new_decoder_architecture"):
        return 1  # whatever else is stated: Falcon 7B and StarCoder
    default = None if stated else RUNS.get(architecture)
    return fields.size("num_key_value_heads", default or heads)


def _experts(fields: _Values, num_layers: int) -> Experts | None:
    if fields.get("num_experts") in (None, 0, 1):
        return None
    count, active = fields.size("num_experts"), fields.size("num_experts_per_tok")
    if active > count:
        raise fields.wrong("num_experts_per_tok", active, f"{count} at most, which there are")
    width = fields.size("moe_intermediate_size", fields.size("intermediate_size"))
    dense = fields.get("mlp_only_layers")
    first = fields.get("first_k_dense_replace")
    step = fields.size("decoder_sparse_step", fields.size("interleave_moe_layer_step", 1))
    sparse = [
        layer
        for layer in range(num_layers)
        if (layer + 1) % step == 0
        and layer not in (dense if isinstance(dense, list) else [])
        and layer >= (first if isinstance(first, int) else 0)
    ]
    own_width = fields.get("shared_expert_intermediate_size")
    shared = fields.size("shared_expert_intermediate_size") if own_width else 0
    if not own_width and fields.get("n_shared_experts"):
        shared = fields.size("n_shared_experts") * width
    return Experts(count, active, width, len(sparse), shared, shared_gate=bool(own_width))


def _windows(fields: _Values, num_layers: int, architecture: str, family: Family) -> tuple[int | None, ...]:
    """Each layer's window: from layer_types, the family's pattern, or one window for all."""
    everywhere = (None,) * num_layers
    if architecture == "LlamaForCausalLM":
        return everywhere
    if "sliding_window" in fields.values and fields.values["sliding_window"] is None:
        return everywhere
    if architecture == "MistralForCausalLM":
        return (fields.size("sliding_window", 4096),) * num_layers
    by_layer = family.qkv_bias or "max_window_layers" in fields.values
    if not fields.flag("use_sliding_window", not by_layer):
        return everywhere
    types = fields.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != num_layers:
            raise fields.wrong("layer_types", types, f"a list of {num_layers} strings")
        wide: dict[str, int | None] = {"full_attention": None}
        if "sliding_attention" in types:
            wide["sliding_attention"] = fields.size("sliding_window", 4096)
        if "chunked_attention" in types:
            wide["chunked_attention"] = fields.size("attention_chunk_size")
        return tuple(wide[kind] for kind in types)
    if by_layer:
        window, first = fields.size("sliding_window", 4096), fields.values.get("max_window_layers", 28)
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise fields.wrong("max_window_layers", first, "an integer of 0 or more")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if fields.get("sliding_window") is None:
        return everywhere
    window = fields.size("sliding_window")
    every = fields.size("sliding_window_pattern", family.full_every or _MOST)
    return tuple(None if (layer + 1) % every == 0 else window for layer in range(num_layers))


def _dtype(fields: _Values) -> str:
    name = str(fields.get("dtype") or fields.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in ITEMSIZES:
        raise fields.wrong("dtype", name, f"one of {', '.join(ITEMSIZES)}")
    return name


def _why_not(config: Mapping[str, object], shape: ModelShape) -> str | None:
    """Why the engine can not run it; None where it can."""
    names = config.get("architectures")
    if shape.architecture not in RUNS or not isinstance(names, list) or len(names) != 1:
        return f"the engine runs {', '.join(RUNS)}, not {shape.architecture}"
    if config.get("quantization_config") is not None:
        return "the checkpoint is quantized; the engine loads float32, bfloat16, float16 or a GGUF file"
    activation = config.get("hidden_act")
    if activation not in (None, "silu"):
        return f"hidden_act={activation!r}: the engine has silu"
    if shape.head_dim % 2:
        return f"head_dim={shape.head_dim} is odd: rotary embeddings turn pairs"
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        return "rope_parameters that differ between layers"
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        return f"RoPE scaling {kind!r}: the engine has default, linear and llama3"
    partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    if partial not in (None, 1.0):
        return "partial_rotary_factor: the engine rotates whole heads"
    return None
