"""The least time that a decode step can take: what it must read and compute, over the device's rates.

Williams, Waterman, Patterson, "Roofline" (CACM 2009). No step is that fast: kernels launch, and neither
memory nor tensor cores ever run at their full rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paged_jax.devices import Rates
from paged_jax.model_shape import ModelShape

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class DecodeStep:
    """One step of a batch: every sequence gets one token. num_bytes: weights, and keys and values."""

    batch: int
    num_bytes: float
    flops: float
    memory_seconds: float
    compute_seconds: float

    @property
    def seconds(self) -> float:
        """The lower bound: reading and computing may overlap entirely."""
        return max(self.memory_seconds, self.compute_seconds)

    @property
    def bound(self) -> Literal["bandwidth", "compute"]:
        """Which of them it is."""
        return "bandwidth" if self.memory_seconds >= self.compute_seconds else "compute"

    @property
    def tokens_per_second(self) -> float:
        """Over the batch, at most."""
        return self.batch / self.seconds


@dataclass(frozen=True)
class DecodeRoofline:
    """A model on a device. itemsize: bytes of a weight; kv_itemsize: of a number in the cache."""

    shape: ModelShape
    rates: Rates
    itemsize: int
    kv_itemsize: int

    def step(self, batch: int, context: int) -> DecodeStep:
        """Of so many sequences that each attend to `context` tokens."""
        weights = self.shape.step_weight_bytes(self.itemsize, batch)
        written = batch * self.shape.kv(self.kv_itemsize).bytes_per_token
        num_bytes = weights + batch * self.shape.step_kv_bytes(self.kv_itemsize, context) + written
        flops = batch * self.shape.step_flops(context)
        return DecodeStep(
            batch,
            num_bytes,
            flops,
            num_bytes / self.rates.bytes_per_second,
            flops / self.rates.flops(self.itemsize),
        )

    def prefill_seconds(self, num_tokens: int) -> float:
        """The least that computing a prompt takes; its tokens attend to half of it on average."""
        return num_tokens * self.shape.step_flops(num_tokens // 2) / self.rates.flops(self.itemsize)
