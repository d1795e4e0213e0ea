"""The tensors of a GGUF file, decoded and brought to Hugging Face's names and layout.

Which quantisations can be decoded is the `gguf` package's affair; what a tensor is called and whether its
rows are permuted is this file's.
"""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from .errors import UnsupportedModel, WeightsError
from .gguf_header import map_file, read_gguf_header
from .tensors import LazyTensors

__all__ = ["GGUFFile", "half_split_rows"]

_PLAIN: dict[GGMLQuantizationType, np.dtype] = {
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F16: np.dtype("<f2"),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GGUFFile:
    """A GGUF file whose header is parsed and checked, and whose tensors are decoded when read.

    Raises:
      WeightsError: no GGUF file, truncated or corrupt.
      UnsupportedModel: a tensor has a type that the `gguf` package cannot decode.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_gguf_header(path)
        self.metadata = header.metadata
        self.infos = header.tensors
        self._data = map_file(path)
        for name, info in self.infos.items():
            if not _can_decode(info.kind):
                raise UnsupportedModel(
                    f"{path}: tensor {name!r} has the type {info.kind.name}, which gguf cannot decode. "
                    "Convert the model to another quantisation, such as Q8_0."
                )

    def read(self, name: str) -> np.ndarray:
        """One tensor under llama.cpp's name and in its layout: float32, float16 or bfloat16."""
        info = self.infos[name]
        raw = np.frombuffer(self._data[info.offset : info.offset + info.num_bytes], np.uint8)
        if info.kind in _PLAIN:
            return raw.view(_PLAIN[info.kind]).reshape(info.shape)
        block, block_bytes = GGML_QUANT_SIZES[info.kind]
        return dequantize(raw.reshape(*info.shape[:-1], info.shape[-1] // block * block_bytes), info.kind)

    def stored_dtype(self) -> str:
        """The dtype that all matrices are stored in, or "float32" where they differ or are quantised."""
        kinds = {info.kind for info in self.infos.values() if len(info.shape) > 1}
        return _PLAIN[kinds.pop()].name if len(kinds) == 1 and kinds <= _PLAIN.keys() else "float32"

    def hf_tensors(self, permuted_heads: dict[str, int]) -> LazyTensors:
        """The tensors under Hugging Face's names.

        Args:
          permuted_heads: how many heads the rows of "attn_q" and "attn_k" hold, where llama.cpp's converter
            interleaved them (it does for architecture `llama`, and does not for `qwen2`).
        """
        sources = {_hf_name(name): name for name in self.infos if name != "rope_freqs.weight"}

        def load(name: str) -> np.ndarray:
            source = sources[name]
            tensor = self.read(source)
            match = _LAYER_NAME.fullmatch(source)
            num_heads = permuted_heads.get(match[2]) if match else None
            if num_heads is None:
                return tensor
            if len(tensor) % (2 * num_heads):
                raise WeightsError(
                    f"{self.path}: {source}: {len(tensor)} rows do not divide by {num_heads} heads."
                )
            return half_split_rows(tensor, num_heads)

        shapes = {name: self.infos[source].shape for name, source in sources.items()}
        return LazyTensors(shapes, load, str(self.path))


def half_split_rows(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """Brings interleaved rotary pairs (rows 0 and 1, 2 and 3, ... of a head) to the half-split layout.

    In the half-split layout row i of a head is paired with row i + head_dim / 2.
    tensor: [num_heads * head_dim, ...], weight or bias.
    """
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def _hf_name(name: str) -> str:
    """Hugging Face's name of a tensor; a name that has none stays, and is then reported as unexpected."""
    match = _LAYER_NAME.fullmatch(name)
    if match and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    return _TOP.get(name, name)


def _can_decode(kind: GGMLQuantizationType) -> bool:
    if kind in _PLAIN:
        return True
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
