"""What configs leave to the model's code: family by family, how a decoder is built, and which have no such
cache as this engine's at all.

A family is added to `FAMILIES` when its parameter count has been checked against a published one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paged_jax.errors import UnsupportedModel


@dataclass(frozen=True)
class Family:
    """How the layers of a `model_type` are made, where its config does not say.

    norms: of a layer, each of hidden_size; layer_norm: they have offsets beside their scales. qk_norm:
    queries and keys are normed too, over head_dim. full_every: one layer of so many sees everything, the
    others have the window. defaults: fields that configs of this family, nested ones above all, leave out.
    """

    gated: bool = True
    qkv_bias: bool = False
    norms: int = 2
    layer_norm: bool = False
    qk_norm: bool = False
    tied: bool = False
    all_biases: bool = False
    learned_positions: bool = False
    full_every: int | None = None
    defaults: Mapping[str, object] = field(default_factory=dict)


LLAMA_7B = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "mixtral": Family(),
    "phi3": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen2_moe": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True),
    "gemma": Family(tied=True, defaults={"head_dim": 256}),
    "gemma2": Family(norms=4, tied=True, full_every=2, defaults={"head_dim": 256, "sliding_window": 4096}),
    "gemma3_text": Family(
        norms=4,
        qk_norm=True,
        tied=True,
        full_every=6,
        defaults={
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 4096,
            "max_position_embeddings": 131_072,
        },
    ),
    "gpt2": Family(gated=False, layer_norm=True, tied=True, all_biases=True, learned_positions=True),
}
NESTED_DEFAULTS: dict[str, Mapping[str, object]] = {
    "llama": LLAMA_7B | {"max_position_embeddings": 2048},
    "mistral": LLAMA_7B | {"intermediate_size": 14336, "num_key_value_heads": 8},
}
"""What transformers fills in where a model of several parts states little of its text part."""

_STATE_SPACE = {
    "mamba": "Mamba",
    "mamba2": "Mamba-2",
    "falcon_mamba": "Mamba",
    "rwkv": "RWKV",
    "rwkv5": "RWKV",
    "rwkv6": "RWKV",
    "retnet": "RetNet",
    "xlstm": "xLSTM",
    "recurrent_gemma": "RG-LRU",
}
_HYBRID = {
    "jamba": "Mamba",
    "zamba": "Mamba",
    "zamba2": "Mamba-2",
    "bamba": "Mamba-2",
    "nemotron_h": "Mamba-2",
    "falcon_h1": "Mamba-2",
    "granitemoehybrid": "Mamba-2",
    "plamo2": "Mamba",
    "qwen3_next": "gated delta net",
    "minimax": "lightning attention",
    "lfm2": "short convolution",
    "lfm2_moe": "short convolution",
    "kimi_linear": "Kimi delta attention",
}
_STATE_FIELDS = (
    "ssm_cfg",
    "ssm_state_size",
    "state_size",
    "mamba_d_state",
    "mamba_d_ssm",
    "attn_layer_period",
    "layers_block_type",
    "hybrid_override_pattern",
    "attn_type_list",
    "linear_attn_config",
    "linear_num_value_heads",
    "conv_L_cache",
)
_NO_GENERATORS = (
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForImageClassification",
)
ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")


def refuse_other_caches(values: Mapping[str, object], source: str) -> None:
    """UnsupportedModel, by name, where 2 x layers x kv_heads x head_dim is not what a token takes."""

    def has(name: str) -> bool:
        return values.get(name) not in (None, False, 0, [], {})

    def refuse(what: str, why: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{source}: {what}: {why}; the plan's formula, 2 x layers x KV heads x head_dim a token, does not"
            " fit it. Expected a decoder whose every layer keeps keys and values of its own."
        )

    kind = str(values.get("model_type", ""))
    if has("kv_lora_rank"):
        raise refuse(
            f"latent attention (MLA, kv_lora_rank={values['kv_lora_rank']})",
            "a token keeps one compressed vector a layer, not keys and values",
        )
    if kind in _STATE_SPACE:
        raise refuse(
            f"model_type {kind!r}: state-space layers ({_STATE_SPACE[kind]})",
            "a sequence keeps a state of fixed size, however long it is",
        )
    if kind in _HYBRID:
        raise refuse(
            f"model_type {kind!r}: hybrid of attention and {_HYBRID[kind]} layers",
            "only some layers keep keys and values, the others a state of fixed size",
        )
    for name in _STATE_FIELDS:
        if has(name):
            raise refuse(
                f"state-space or linear-attention layers ({name})", "they keep a state of fixed size"
            )
    types = values.get("layer_types")
    if isinstance(types, list):
        other = sorted({str(one) for one in types} - set(ATTENTION))
        if other:
            raise refuse(
                f"layer_types: {', '.join(other)}", "such layers do not keep keys and values token by token"
            )
    if has("is_encoder_decoder"):
        raise refuse("encoder-decoder", "its cross-attention keeps the encoder's keys and values too")
    if has("cross_attention_layers"):
        raise refuse("cross_attention_layers", "those layers keep the keys and values of an image")
    if has("num_kv_shared_layers") or has("use_cla"):
        raise refuse("layers that share keys and values", "they keep fewer than one set a layer")
    if has("block_configs"):
        raise refuse("block_configs", "its layers differ from each other")
    names = values.get("architectures")
    if isinstance(names, list) and names and str(names[0]).endswith(_NO_GENERATORS):
        raise refuse(f"architecture {names[0]!r}", "it is no text generator, and keeps no cache")
