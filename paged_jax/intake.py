"""How what a user asks for becomes a request: everything is checked here, and nothing queued or allocated."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from time import monotonic

from paged_jax.beam_params import BeamSearchParams
from paged_jax.beam_search import BeamSearch, Tokenizer
from paged_jax.errors import InvalidArgument, InvalidSamplingParams
from paged_jax.param_checks import check_token_ids
from paged_jax.prompt import Prompt, check_length, prompt_ids
from paged_jax.sampling_params import SamplingParams
from paged_jax.sequence import Request, RequestMetrics


class Intake:
    """Makes requests for one model and its engine's limits; see Engine for what the arguments are."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        max_model_len: int,
        max_num_seqs: int,
        eos_ids: Iterable[int],
        seed: int | None,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.eos_ids = frozenset(eos_ids)
        self._seeds: random.Random = random.SystemRandom() if seed is None else random.Random(seed)

    def request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        *,
        default_max_tokens: int | None,
        priority: int,
        streams: bool,
        prompt_index: int,
    ) -> Request:
        """See Engine.make_request."""
        if not isinstance(request_id, str) or not request_id:
            raise InvalidArgument.of("request_id", request_id, "a string that is not empty")
        if not isinstance(params, SamplingParams | BeamSearchParams):
            raise InvalidArgument.of("params", params, "a SamplingParams or a BeamSearchParams")
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise InvalidArgument.of("priority", priority, "an integer; lower goes first")
        self._check_params(params)
        text, ids, salt = prompt_ids(prompt, self.tokenizer, self.vocab_size)
        check_length(len(ids), self.max_model_len)
        room = self.max_model_len - len(ids)
        common = params if isinstance(params, SamplingParams) else params.sampling_params()
        wanted = common.max_tokens_or(default_max_tokens)
        request = Request(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=ids,
            params=common,
            max_new_tokens=room if wanted is None else min(wanted, room),
            stop_token_ids=common.end_ids(self.eos_ids),
            seed=self._seeds.getrandbits(64) if common.seed is None else common.seed,
            metrics=RequestMetrics(arrival_time=monotonic()),
            priority=priority,
            cache_salt=salt or "",
            streams=streams and params is common,
        )
        if isinstance(params, BeamSearchParams):
            # The search itself keeps its beams from ending too soon.
            request.params = replace(common, min_tokens=0)
            request.beams = BeamSearch(
                params,
                end_ids=request.stop_token_ids,
                max_new_tokens=request.max_new_tokens,
                tokenizer=self.tokenizer,
                vocab_size=self.vocab_size,
                prompt_index=prompt_index,
            )
        return request

    def _check_params(self, params: SamplingParams | BeamSearchParams) -> None:
        """What depends on the model and on the engine's limits."""
        name, width = "n", params.n
        if isinstance(params, BeamSearchParams):
            name, width = "beam_width", params.beam_width
            check_token_ids("allowed_token_ids", params.allowed_token_ids or (), self.vocab_size)
            for word in params.bad_words:
                if not isinstance(word, str):
                    check_token_ids("bad_words", word, self.vocab_size)
        check_token_ids("stop_token_ids", params.stop_token_ids, self.vocab_size)
        if width is not None and width > self.max_num_seqs:
            raise InvalidSamplingParams.of(
                name,
                width,
                f"max_num_seqs={self.max_num_seqs} at most, since they run at once",
                "Raise max_num_seqs, or ask for fewer.",
            )
