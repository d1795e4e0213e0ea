"""What a GPU has, as far as a plan needs it.

Sources: NVIDIA's data sheets and architecture white papers of A100, H100, H200 (SXM modules) and L4, and of
Ada for the GeForce RTX 4090. Rates are dense: the headline figures of H100, H200 and L4 are twice as high,
with sparsity. The RTX 4090's 16-bit rate is the one with float32 sums. memory_bytes is what CUDA reports as
the device's total (cudaMemGetInfo): a little under the number in the name, and different by a percent from
driver to driver. L2 is cudaDeviceProp.l2CacheSize.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from paged_jax.capacity import GIB
from paged_jax.errors import InvalidArgument

_MIB = 1 << 20


@dataclass(frozen=True)
class Rates:
    """How fast it is.

    bytes_per_second: between GPU and memory. flops_16, flops_32: FLOP/s of matrix products whose operands
    have 16 bits (tensor cores) or are float32 (without TF32, as this engine computes it). l2_bytes: cache.
    """

    bytes_per_second: float
    flops_16: float
    flops_32: float
    l2_bytes: int

    def flops(self, itemsize: int) -> float:
        """FLOP/s over operands of so many bytes."""
        return self.flops_32 if itemsize == 4 else self.flops_16


@dataclass(frozen=True)
class Device:
    """A GPU by name, or just so many bytes; rates are None where nothing but the size is known."""

    name: str
    memory_bytes: int
    rates: Rates | None = None


def _gib(gib: float) -> int:
    return int(gib * GIB)


_A100 = (312e12, 19.5e12, 40 * _MIB)
_HOPPER = (989e12, 67e12, 50 * _MIB)
DEVICES = {
    device.name: device
    for device in (
        Device("h100", _gib(79.1), Rates(3.35e12, *_HOPPER)),
        Device("h200", _gib(139.8), Rates(4.8e12, *_HOPPER)),
        Device("a100-40", _gib(39.39), Rates(1.555e12, *_A100)),
        Device("a100-80", _gib(79.25), Rates(2.039e12, *_A100)),
        Device("l4", _gib(22.0), Rates(0.3e12, 121e12, 30.3e12, 48 * _MIB)),
        Device("rtx4090", _gib(23.64), Rates(1.008e12, 165.2e12, 82.6e12, 72 * _MIB)),
    )
}
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{kind}": (1024 if kind == "IB" else 1000) ** power
    for power, prefix in enumerate("KMGT", start=1)
    for kind in ("B", "IB")
}


def device_of(text: str) -> Device:
    """A device by its name, or of a size such as 24GiB, 80GB or 25769803776; InvalidArgument otherwise."""
    known = DEVICES.get(text.strip().lower())
    if known is not None:
        return known
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?B|B)?", text.strip(), re.IGNORECASE | re.ASCII)
    size = float(match[1]) * _UNITS[(match[2] or "").upper()] if match else 0.0
    if not _MIB <= size < 1 << 60:
        raise InvalidArgument.of(
            "device", text, f"one of {', '.join(DEVICES)}, or its memory, such as 24GiB or 80GB"
        )
    return Device(text.strip(), int(size))
