"""A request of a simulated workload: its lengths, and the request that the engine would have made of it."""

from __future__ import annotations

import random
from dataclasses import dataclass

from paged_jax.beam_params import BeamSearchParams
from paged_jax.beam_search import BeamSearch
from paged_jax.made_up_scores import VOCAB_SIZE
from paged_jax.sampling_params import SamplingParams
from paged_jax.sequence import Request, RequestMetrics


@dataclass(frozen=True)
class SimRequest:
    """One request of a workload. token_ids: of the prompt, where it matters which they are; samples: n;
    beam_width: over 0 for a beam search.
    """

    name: str
    arrival: float
    prompt_tokens: int
    output_tokens: int
    token_ids: tuple[int, ...] | None = None
    samples: int = 1
    beam_width: int = 0

    def request(self) -> Request:
        """What is queued: it ends after output_tokens, whatever they are."""
        request = Request(
            request_id=self.name,
            prompt=None,
            prompt_token_ids=list(self.token_ids or [0] * self.prompt_tokens),
            params=SamplingParams(n=self.samples, max_tokens=self.output_tokens),
            max_new_tokens=self.output_tokens,
            stop_token_ids=frozenset(),
            seed=random.Random(self.name).getrandbits(64),
            metrics=RequestMetrics(arrival_time=0.0),
        )
        if self.beam_width:
            request.beams = BeamSearch(
                BeamSearchParams(beam_width=self.beam_width, max_tokens=self.output_tokens, ignore_eos=True),
                end_ids=frozenset(),
                max_new_tokens=self.output_tokens,
                tokenizer=_NoText(),
                vocab_size=VOCAB_SIZE,
            )
        return request


class _NoText:
    """The tokenizer of a model whose tokens are numbers."""

    def encode(self, text: str) -> list[int]:
        """Nothing is asked."""
        return []

    def decode(self, ids: object, skip_special_tokens: bool = True) -> str:
        """Nothing is shown."""
        return ""
