"""The options of an engine, checked before a model is loaded for them."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal

from paged_jax.audit import AuditLog
from paged_jax.errors import InvalidArgument

DTYPES = ("auto", "float32", "bfloat16", "float16")
IMPLEMENTATIONS = ("auto", "triton", "xla")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What LLM takes beside the model; each option is described there.

    Raises InvalidArgument for a value of the wrong type or range.
    """

    dtype: str = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_gib: float | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    implementation: Literal["auto", "triton", "xla"] = "auto"
    kv_audit: AuditLog | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        """Check each option by itself; what depends on the model is checked when it is loaded."""
        if self.dtype not in DTYPES:
            raise InvalidArgument.of("dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        if self.implementation not in IMPLEMENTATIONS:
            expected = f"one of {', '.join(IMPLEMENTATIONS)}"
            raise InvalidArgument.of("implementation", self.implementation, expected)
        self._integer("block_size", 1, "16 and 32 suit chat.")
        self._integer("max_num_seqs", 1)
        self._integer("max_num_batched_tokens", 1)
        if self.max_model_len is not None:
            self._integer("max_model_len", 2, "It holds the prompt and the answer.")
        if self.num_blocks is not None:
            self._integer("num_blocks", 2, "One of them is the null block.")
        if self.seed is not None:
            self._integer("seed", 0)
        if self.kv_audit is not None and not isinstance(self.kv_audit, AuditLog):
            raise InvalidArgument.of("kv_audit", self.kv_audit, "a paged_jax.audit.AuditLog, or None")
        size = self.kv_cache_gib
        if size is not None:
            if isinstance(size, bool) or not isinstance(size, Real) or not 0 < size < float("inf"):
                raise InvalidArgument.of("kv_cache_gib", size, "a number of GiB above 0, or None")
            if self.num_blocks is not None:
                raise InvalidArgument(
                    f"num_blocks={self.num_blocks} and kv_cache_gib={size}: both size the pool; give one."
                )

    def _integer(self, name: str, smallest: int, hint: str = "") -> None:
        """Keep the option as a plain int; numpy's integers are welcome."""
        value = getattr(self, name)
        if not isinstance(value, Integral) or isinstance(value, bool) or value < smallest:
            raise InvalidArgument.of(name, value, f"an integer >= {smallest}", hint)
        object.__setattr__(self, name, int(value))
