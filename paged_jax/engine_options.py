"""The options of an engine, checked before a model is loaded for them."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal

from paged_jax.audit import AuditLog
from paged_jax.errors import InvalidArgument

DTYPES = ("auto", "float32", "bfloat16", "float16")
IMPLEMENTATIONS = ("auto", "triton", "xla")
PREEMPTION_MODES = ("auto", "recompute", "swap")
LOGPROBS_MODES = ("raw", "processed")
MOST_GIB = 1 << 30
MOST_SEQS = 1 << 16


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
    enable_prefix_caching: bool = True
    preemption_mode: Literal["auto", "recompute", "swap"] = "auto"
    swap_space_gib: float = 4.0
    batch_invariant: bool = False
    logprobs_mode: Literal["raw", "processed"] = "raw"
    warm_up: bool = True

    def __post_init__(self) -> None:
        """Check each option by itself; what depends on the model is checked when it is loaded."""
        self._choice("dtype", DTYPES)
        self._choice("implementation", IMPLEMENTATIONS)
        self._choice("preemption_mode", PREEMPTION_MODES)
        self._choice("logprobs_mode", LOGPROBS_MODES)
        for name in ("enable_prefix_caching", "batch_invariant", "warm_up"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgument.of(name, getattr(self, name), "True or False")
        self._integer("block_size", 1, "16 and 32 suit chat.")
        self._integer("max_num_seqs", 1, largest=MOST_SEQS)
        self._integer("max_num_batched_tokens", 1, largest=2**20)
        if self.max_model_len is not None:
            self._integer("max_model_len", 2, "It holds the prompt and the answer.")
        if self.num_blocks is not None:
            self._integer("num_blocks", 2, "One of them is the null block.")
        if self.seed is not None:
            self._integer("seed", 0)
        if self.kv_audit is not None and not isinstance(self.kv_audit, AuditLog):
            raise InvalidArgument.of("kv_audit", self.kv_audit, "a path, an AuditLog or None")
        size = self.kv_cache_gib
        if size is not None:
            if not _is_size(size) or size == 0:
                raise InvalidArgument.of(
                    "kv_cache_gib", size, f"a number of GiB above 0, {MOST_GIB:,} at most, or None"
                )
            if self.num_blocks is not None:
                raise InvalidArgument(
                    f"num_blocks={self.num_blocks} and kv_cache_gib={size}: both size the pool; give one."
                )
        self._preemption()

    def _preemption(self) -> None:
        """Check swap space and preemption mode together; batch_invariant turns "auto" into "swap"."""
        size = self.swap_space_gib
        if not _is_size(size):
            raise InvalidArgument.of("swap_space_gib", size, f"a number of GiB from 0 to {MOST_GIB:,}")
        object.__setattr__(self, "swap_space_gib", float(size))
        if self.batch_invariant:
            if self.preemption_mode == "recompute":
                raise InvalidArgument(
                    "batch_invariant=True and preemption_mode='recompute': keys and values that are computed"
                    ' again come out of other shapes; leave preemption_mode to "auto", which means swap here.'
                )
            object.__setattr__(self, "preemption_mode", "swap")
        if self.preemption_mode == "swap" and size == 0:
            which = "batch_invariant=True" if self.batch_invariant else "preemption_mode='swap'"
            raise InvalidArgument(
                f"{which} and swap_space_gib=0: there is nowhere to swap to; give a swap_space_gib above 0."
            )

    def _choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if not isinstance(value, str) or value not in choices:
            raise InvalidArgument.of(name, value, f"one of {', '.join(choices)}")

    def _integer(self, name: str, smallest: int, hint: str = "", largest: int | None = None) -> None:
        """Keep the option as a plain int; numpy's integers are welcome."""
        value = getattr(self, name)
        if not isinstance(value, Integral) or isinstance(value, bool) or value < smallest:
            raise InvalidArgument.of(name, value, f"an integer >= {smallest}", hint)
        if largest is not None and int(value) > largest:
            raise InvalidArgument.of(name, value, f"{largest} at most", hint)
        object.__setattr__(self, name, int(value))


def _is_size(value: object) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return 0 <= float(value) <= MOST_GIB
    except OverflowError:  # an int past the largest float
        return False
