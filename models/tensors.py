"""A checkpoint's tensors, read only when asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

__all__ = ["LazyTensors"]


class LazyTensors(Mapping[str, np.ndarray]):
    """Maps Hugging Face's canonical names to arrays; each look-up reads the file again and keeps nothing.

    Names are those of `LlamaForCausalLM.state_dict()`, such as `model.layers.0.self_attn.q_proj.weight`;
    matrices are `[out, in]`; q and k are in the half-split RoPE layout. Arrays are float32, float16 or
    bfloat16, and may be read-only views of the mapped file.

    Args:
      shapes: the shape of every tensor, by name.
      load: reads one tensor; it may raise WeightsError.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], load: Callable[[str], np.ndarray], source: str
    ) -> None:
        self.shapes = dict(shapes)
        self.source = source
        self._load = load

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.shapes:
            raise KeyError(name)
        return self._load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)
