"""Which tensors a decoder needs, and how they are fused into its parameters.

`_leaves` and `_fused` alone say which tensors make up which parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from .checkpoint import Checkpoint
from .config import DecoderConfig
from .errors import WeightsError
from .tensors import LazyTensors

__all__ = ["check_tensors", "decoder_leaves", "expected_shapes", "num_leaves"]

_MAX_NAMED = 8
_IGNORED_ENDINGS = (".rotary_emb.inv_freq",)  # buffers that old checkpoints stored


@dataclass(frozen=True)
class _Leaf:
    """One parameter of the decoder, and the tensors that are joined to make it.

    They are joined along the first axis: rows of `[out, in]` matrices, or elements of vectors.
    """

    path: str
    tensors: tuple[str, ...]
    is_scale: bool = False
    """Kept in float32."""


def expected_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that a checkpoint of this configuration holds, by Hugging Face's names."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = {
        "self_attn.q_proj": (q_size, hidden, config.attention_bias),
        "self_attn.k_proj": (kv_size, hidden, config.attention_bias),
        "self_attn.v_proj": (kv_size, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, q_size, config.attention_out_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        for name, (rows, columns, has_bias) in projections.items():
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def check_tensors(config: DecoderConfig, shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Raises one WeightsError that names the missing, unexpected and mis-shaped tensors, if there are any."""
    expected = expected_shapes(config)
    extra = [name for name in shapes if name not in expected and not name.endswith(_IGNORED_ENDINGS)]
    if config.tie_word_embeddings:
        extra = [name for name in extra if name != "lm_head.weight"]
    wrong = [
        f"{name} {list(shapes[name])} (expected {list(shape)})"
        for name, shape in expected.items()
        if name in shapes and tuple(shapes[name]) != shape
    ]
    findings = {
        "missing": [name for name in expected if name not in shapes],
        "unexpected": extra,
        "of a wrong shape": wrong,
    }
    told = [f"{_listed(names)} {what}" for what, names in findings.items() if names]
    if told:
        raise WeightsError(f"{source}: the tensors do not fit the configuration: {'; '.join(told)}.")


def num_leaves(config: DecoderConfig) -> int:
    """How many arrays `decoder_leaves` yields."""
    return len(_leaves(config))


def decoder_leaves(
    checkpoint: Checkpoint, dtype: DTypeLike, progress: Callable[[int, int], None] | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the decoder's parameters one by one, so that the host holds one of them at a time.

    Args:
      dtype: of everything but the norms' scales, which stay float32.
      progress: called with (done, total) after each array was taken.

    Yields:
      (path, array): weights are `[out, in]`; `layers.{i}.attention.qkv.weight` is q, then k, then v;
      `layers.{i}.mlp.gate_up.weight` is gate, then up; `head.weight` is there where embeddings are untied.

    Raises:
      WeightsError: tensors are missing, unexpected, mis-shaped, unreadable, or hold NaN or infinity.
    """
    tensors = checkpoint.tensors
    check_tensors(checkpoint.config, tensors.shapes, tensors.source)
    leaves = _leaves(checkpoint.config)
    for done, leaf in enumerate(leaves, start=1):
        yield leaf.path, _fused(leaf, tensors, np.dtype(dtype))
        if progress is not None:
            progress(done, len(leaves))


def _leaves(config: DecoderConfig) -> list[_Leaf]:
    def linear(path: str, has_bias: bool, *names: str) -> list[_Leaf]:
        leaves = [_Leaf(f"{path}.weight", tuple(f"{name}.weight" for name in names))]
        if has_bias:
            leaves.append(_Leaf(f"{path}.bias", tuple(f"{name}.bias" for name in names)))
        return leaves

    def norm(path: str, name: str) -> _Leaf:
        return _Leaf(f"{path}.scale", (f"{name}.weight",), is_scale=True)

    leaves = [_Leaf("embed.embedding", ("model.embed_tokens.weight",))]
    for i in range(config.num_layers):
        path, name = f"layers.{i}", f"model.layers.{i}"
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        qkv = [f"{attention}.{part}_proj" for part in "qkv"]
        leaves += [
            norm(f"{path}.input_norm", f"{name}.input_layernorm"),
            *linear(f"{path}.attention.qkv", config.attention_bias, *qkv),
            *linear(f"{path}.attention.out", config.attention_out_bias, f"{attention}.o_proj"),
            norm(f"{path}.post_attention_norm", f"{name}.post_attention_layernorm"),
            *linear(f"{path}.mlp.gate_up", config.mlp_bias, f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            *linear(f"{path}.mlp.down", config.mlp_bias, f"{mlp}.down_proj"),
        ]
    leaves.append(norm("norm", "model.norm"))
    if not config.tie_word_embeddings:
        leaves += linear("head", False, "lm_head")
    return leaves


def _fused(leaf: _Leaf, tensors: LazyTensors, dtype: np.dtype) -> np.ndarray:
    parts = [tensors.shapes[name] for name in leaf.tensors]
    rows = sum(shape[0] for shape in parts)
    fused = np.empty((rows, *parts[0][1:]), np.dtype(np.float32) if leaf.is_scale else dtype)
    start = 0
    for name in leaf.tensors:
        tensor = tensors[name]
        part = fused[start : start + len(tensor)]
        with np.errstate(over="ignore", invalid="ignore"):
            part[...] = tensor
            finite = np.isfinite(np.sum(part, dtype=np.float32))
        if not finite:
            raise WeightsError(
                f"{tensors.source}: tensor {name!r} holds NaN or infinity in {fused.dtype.name}. The file is "
                "damaged, or its values do not fit that dtype (then load it as bfloat16 or float32)."
            )
        start += len(tensor)
    return fused


def _listed(names: list[str]) -> str:
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
