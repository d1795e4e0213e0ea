"""Which shapes are measured, the most telling first, and what a row of figures says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from roofline import DecodeShape, PrefillShape

from gpu_bench.variants import DECODE, PREFILL, Setting

HEADS = {"GQA 32/8": (32, 8), "MHA 32/32": (32, 32), "MQA 32/1": (32, 1)}
HEAD_DIM = 128
CONTEXTS = (1024, 4096, 16384, 32768)
BATCHES = (1, 8, 32, 64, 128, 256)
FIRST = ((64, 4096), (16, 1024), (1, 16384), (256, 1024), (8, 32768), (1, 1024))
PREFILLS = ((1, 2048), (16, 512), (1, 8192), (64, 128), (4, 4096))

Figure = float | str
"""Microseconds, or why there are none."""


@dataclass(frozen=True)
class Row:
    """One shape: what each variant took."""

    kind: str
    heads: str
    shape: DecodeShape | PrefillShape
    times: dict[str, Figure]

    def microseconds(self, variant: str) -> float | None:
        """A variant's time, where there is one."""
        figure = self.times.get(variant)
        return figure if isinstance(figure, float) else None

    def gb_per_s(self) -> float | None:
        """What this project's op reaches."""
        took = self.microseconds("paged")
        return None if took is None else self.shape.num_bytes / took / 1e3

    def fastest_dense(self) -> float | None:
        """The faster of jax.nn.dot_product_attention's implementations."""
        return min(filter(None, (self.microseconds(n) for n in ("dense cudnn", "dense xla"))), default=None)

    def as_dict(self, copy_bandwidth: float) -> dict[str, Any]:
        """All of it; share_of_copy is of the device's measured copy bandwidth."""
        speed = self.gb_per_s()
        share = None if speed is None else speed * 1e9 / copy_bandwidth
        return {"kind": self.kind, "heads": self.heads, **asdict(self.shape), "bytes": self.shape.num_bytes,
                "us": self.times, "gb_per_s": speed, "share_of_copy": share}  # fmt: skip


def decode_shapes(most_bytes: float, *, tiny: bool) -> Iterator[tuple[str, DecodeShape]]:
    """Decode shapes whose keys and values fit into `most_bytes`."""
    if tiny:
        yield "GQA 4/2", DecodeShape(2, 32, 4, 2, 16)
        return
    rest = [(batch, context) for context in CONTEXTS for batch in BATCHES if (batch, context) not in FIRST]
    for pairs in (FIRST, rest):
        for name, heads in HEADS.items():
            for batch, context in pairs:
                shape = DecodeShape(batch, context, *heads, HEAD_DIM)
                if shape.kv_bytes <= most_bytes:
                    yield name, shape


def prefill_shapes(*, tiny: bool) -> Iterator[tuple[str, PrefillShape]]:
    """Whole prompts."""
    if tiny:
        yield "GQA 4/2", PrefillShape(2, 16, 4, 2, 16)
        return
    for batch, context in PREFILLS:
        yield "GQA 32/8", PrefillShape(batch, context, 32, 8, HEAD_DIM)


def measure(
    kind: str,
    heads: str,
    shape: DecodeShape | PrefillShape,
    setting: Setting,
    until: float = float("inf"),
) -> Row:
    """Every variant in turn; one that cannot run says why and costs the others nothing."""
    variants: dict[str, Callable[[Any, Setting], float]] = (
        {**PREFILL} if isinstance(shape, PrefillShape) else {**DECODE}
    )
    times: dict[str, Figure] = {}
    for name, variant in variants.items():
        if time.perf_counter() > until and name != "paged":
            times[name] = "out of time"
            continue
        if name == "dense xla" and isinstance(times.get("dense cudnn"), float):
            continue
        try:
            times[name] = variant(shape, setting)
        except Exception as error:  # out of memory, not built for this GPU, not installed: all are answers
            times[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return Row(kind, heads, shape, times)
