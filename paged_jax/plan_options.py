"""What a plan is made for: the options, checked."""

from __future__ import annotations

from dataclasses import dataclass

from paged_jax.capacity import GIB, KVShape, max_tokens_of_pool
from paged_jax.devices import Device
from paged_jax.engine_options import MOST_SEQS, EngineOptions
from paged_jax.errors import InvalidArgument
from paged_jax.model_shape import ITEMSIZES
from paged_jax.request_trace import Trace

MEMORY_FRACTION = 0.75
"""Of a GPU's memory that JAX gives a process, unless XLA_CLIENT_MEM_FRACTION says otherwise."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The names and meanings are LLM's where LLM has them.

    concurrency: sequences at once, LLM's max_num_seqs; None: what the trace's arrivals come to on the device,
    else LLM's own default. kv_dtype: of the cache; "auto" is that of the weights, as the engine has it.
    memory_fraction: of a named device's memory; a size in bytes is taken whole. skip_invalid: leave out
    requests that are too long, rather than refuse the trace.
    """

    dtype: str = "auto"
    kv_dtype: str = "auto"
    device: Device | None = None
    memory_fraction: float = MEMORY_FRACTION
    max_model_len: int | None = None
    concurrency: int | None = None
    trace: Trace | None = None
    skip_invalid: bool = False
    kv_cache_gib: float | None = None
    num_blocks: int | None = None
    block_size: int = 16
    max_num_batched_tokens: int = 2048

    def __post_init__(self) -> None:
        """InvalidArgument for what LLM would refuse, and for nonsense in what it does not have."""
        EngineOptions(
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            kv_cache_gib=self.kv_cache_gib,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )
        if self.concurrency is not None and not 1 <= self.concurrency <= MOST_SEQS:
            raise InvalidArgument.of("concurrency", self.concurrency, f"from 1 to {MOST_SEQS:,}")
        if self.kv_dtype != "auto" and self.kv_dtype not in ITEMSIZES:
            raise InvalidArgument.of("kv_dtype", self.kv_dtype, f"auto or one of {', '.join(ITEMSIZES)}")
        if not 0 < self.memory_fraction <= 1:
            raise InvalidArgument.of("memory_fraction", self.memory_fraction, "a number over 0, 1 at most")

    @property
    def limit_bytes(self) -> int | None:
        """What the process may have of the device; None where no device was given."""
        if self.device is None:
            return None
        return int(self.device.memory_bytes * (self.memory_fraction if self.device.rates else 1.0))

    def given_tokens(self, kv: KVShape) -> int | None:
        """Tokens of a pool whose size was given; None where none was."""
        if self.num_blocks is not None:
            return max_tokens_of_pool(self.num_blocks, self.block_size)
        return None if self.kv_cache_gib is None else int(self.kv_cache_gib * GIB) // kv.bytes_per_token

    def weights_dtype(self, stated: str) -> str:
        """The dtype that weights are loaded in on a GPU: as asked, or what "auto" means for a checkpoint."""
        if self.dtype != "auto":
            return self.dtype
        return "float16" if stated == "float16" else "bfloat16"
