"""How long a step takes, for a simulation: a line through what a step computes and what it reads."""

from __future__ import annotations

from dataclasses import dataclass, fields

from paged_jax.errors import InvalidArgument

LONGEST = 1_000_000
"""Seconds that a step, or a token of it, may take."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step = fixed + per_token x tokens computed + per_kv_token x cached tokens read
    + per_swapped_token x tokens copied to or from the host.

    fixed: what a step takes however little it does: the weights are read, programs launched. A cached token
    is read once for each sequence that attends to it; of blocks that are swapped, every slot counts.
    """

    fixed: float = 0.01
    per_token: float = 0.0
    per_kv_token: float = 0.0
    per_swapped_token: float = 0.0

    def __post_init__(self) -> None:
        """InvalidArgument unless time passes and never goes back."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or not 0 <= value <= LONGEST:
                raise InvalidArgument.of(field.name, value, f"a number of seconds, from 0 to {LONGEST:,}")
        if not self.fixed:
            raise InvalidArgument.of("fixed", self.fixed, "more than 0 seconds: every step takes some")

    def seconds(self, num_tokens: float, num_kv_tokens: float, num_swapped_tokens: float = 0) -> float:
        """Of a step that computes so many tokens, reads so many cached ones and moves so many."""
        return (
            self.fixed
            + self.per_token * num_tokens
            + self.per_kv_token * num_kv_tokens
            + self.per_swapped_token * num_swapped_tokens
        )

    @classmethod
    def roofline(
        cls,
        *,
        weight_bytes: float,
        kv_bytes_per_token: float,
        flops_per_token: float,
        bytes_per_second: float,
        flops_per_second: float,
        host_bytes_per_second: float,
    ) -> StepTime:
        """The least that a device's rates allow: the weights read once a step, the tokens computed on top.

        A decode step hides its computing behind its reading or the other way round; here the two add up, so a
        step comes out at up to twice its bound, and never below it.
        """
        return cls(
            fixed=weight_bytes / bytes_per_second,
            per_token=flops_per_token / flops_per_second,
            per_kv_token=kv_bytes_per_token / bytes_per_second,
            per_swapped_token=kv_bytes_per_token / host_bytes_per_second,
        )
