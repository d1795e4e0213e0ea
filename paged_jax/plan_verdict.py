"""Whether paging is worth it: what it lets run at once beside reserving, and a plain verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from paged_jax.capacity import PoolSize, format_bytes
from paged_jax.demand import Demand

LITTLE_BYTES = 512 << 20
"""Keys and values below which paging hardly pays: a few hundred megabytes."""
LITTLE_GAIN = 1.2
"""Times as many requests below which it hardly pays either."""


@dataclass(frozen=True)
class Comparison:
    """Requests at once in one pool, by how their memory is given out.

    paged: by what running requests hold on average over their lives; paged_full: if all were at their full
    lengths. reserved: if each has max_model_len tokens reserved, and reserved_99 if each has the least that
    is enough for 99 % of the requests, reservation_99 tokens, while the others are dropped. Contiguous
    memory is reckoned without the holes that it gets.
    """

    max_model_len: int
    paged: float
    paged_full: float
    reserved: int
    reservation_99: int
    reserved_99: int

    @classmethod
    def of(cls, pool: PoolSize, demand: Demand) -> Self:
        """Of a pool and the requests that it is for."""
        enough = demand.reservation()
        return cls(
            pool.max_model_len,
            pool.usable_blocks / demand.mean_held_blocks(pool.block_size),
            pool.usable_blocks / float(demand.final_blocks(pool.block_size).mean()),
            pool.num_tokens // pool.max_model_len,
            enough,
            pool.num_tokens // enough,
        )

    @property
    def ratio(self) -> float | None:
        """Paged over reserved; None where not even one can be reserved."""
        return self.paged / self.reserved if self.reserved else None

    @property
    def ratio_99(self) -> float | None:
        """Paged over reserved for 99 %."""
        return self.paged / self.reserved_99 if self.reserved_99 else None


@dataclass(frozen=True)
class Verdict:
    """use_paging: None where the model does not fit at all."""

    use_paging: bool | None
    reason: str

    @property
    def headline(self) -> str:
        """In three words."""
        if self.use_paging is None:
            return "does not fit"
        return "use paging" if self.use_paging else "keep it simple"


def judge(
    *,
    weights_fit: bool,
    bytes_per_token: int,
    concurrency: int,
    max_model_len: int,
    room_bytes: int | None,
    held_tokens: float | None,
) -> Verdict:
    """Weigh concurrency x length: gigabytes are worth it, a few hundred megabytes hardly.

    room_bytes: that there are for keys and values; None: not known. held_tokens: slots of a running
    request on average, whole blocks; None where no lengths are known.
    """
    if not weights_fit:
        return Verdict(None, "the weights alone are larger than the device's memory")
    reserved = concurrency * max_model_len * bytes_per_token
    told = f"{concurrency:,} x {max_model_len:,} tokens = {format_bytes(reserved)}"
    if reserved <= LITTLE_BYTES:
        return Verdict(False, f"reserving every sequence's maximum takes only {told}")
    fits = room_bytes is None or reserved <= room_bytes
    if held_tokens is None:
        return Verdict(
            True,
            f"reserving every sequence's maximum would take {told}"
            + ("" if fits else f" where there is room for {format_bytes(room_bytes or 0)}")
            + "; how much of it stays empty depends on the lengths: give --trace or --mean-tokens",
        )
    held = int(concurrency * held_tokens * bytes_per_token)
    live = f"{concurrency:,} requests of {held_tokens:,.0f} tokens hold {format_bytes(held)} on average"
    if held <= LITTLE_BYTES and fits:
        return Verdict(False, f"{live}; even reserving every maximum, {told}, fits")
    gain = reserved / max(held, 1)
    if gain < LITTLE_GAIN:
        return Verdict(
            False,
            f"{live}, and reserving the maximum takes {told}, {gain:.2f} times as much: such requests are all"
            " about as long as they may be. Paging would still share prefixes, samples and beams",
        )
    return Verdict(True, f"{live}; reserving every maximum would take {told}, {gain:.1f} times as much")
