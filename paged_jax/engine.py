"""The engine: takes requests, runs steps, gives outputs. One thread drives it."""

from __future__ import annotations

import random
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from time import monotonic
from typing import Protocol

from paged_jax.block_allocator import BlockAllocator
from paged_jax.block_table import BlockTable
from paged_jax.detokenizer import Detokenizer
from paged_jax.errors import InvalidArgument, PagedJaxError
from paged_jax.model_runner import ModelRunner
from paged_jax.outputs import CompletionOutput, RequestOutput
from paged_jax.prompt import Prompt, check_length, prompt_ids
from paged_jax.sampling_params import DEFAULT_MAX_TOKENS, UNSET, SamplingParams
from paged_jax.scheduler import Scheduler
from paged_jax.sequence import Request, RequestMetrics, Sequence
from paged_jax.stats import StepStats, step_stats


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Ids of the text, with a BOS if the model wants one."""
        ...

    def decode(self, ids: Seq[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids."""
        ...


class Engine:
    """Owns the requests from arrival to their last token.

    vocab_size bounds the ids of prompts; eos_ids end a sequence unless its request ignores them. seed makes
    the seeds that unseeded requests draw repeatable.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_ids: Iterable[int],
        seed: int | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_ids = frozenset(eos_ids)
        self.last_step: StepStats | None = None
        self._closed = False
        self._seeds: random.Random = random.SystemRandom() if seed is None else random.Random(seed)
        self._detokenizers: dict[str, Detokenizer] = {}

    @property
    def allocator(self) -> BlockAllocator:
        """The pool's books."""
        return self.scheduler.allocator

    @property
    def has_unfinished(self) -> bool:
        """Whether a further step has something to do."""
        return self.scheduler.has_unfinished

    def make_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        default_max_tokens: int | None = DEFAULT_MAX_TOKENS,
    ) -> Request:
        """Check a prompt and its parameters; nothing is queued or allocated yet.

        default_max_tokens stands in where params gives none; None: up to the end of the context.
        """
        self._check_open()
        text, ids = prompt_ids(prompt, self.tokenizer, self.vocab_size)
        check_length(len(ids), self.max_model_len)
        room = self.max_model_len - len(ids)
        wanted = default_max_tokens if params.max_tokens is UNSET else params.max_tokens
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)
        return Request(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=ids,
            params=params,
            max_new_tokens=room if wanted is None else min(wanted, room),
            stop_token_ids=ends,
            seed=self._seeds.getrandbits(64) if params.seed is None else params.seed,
            metrics=RequestMetrics(arrival_time=monotonic()),
        )

    def add(self, request: Request) -> None:
        """Queue a request that make_request has made; InvalidArgument if its id is in use."""
        self._check_open()
        if request.request_id in self._detokenizers:
            raise InvalidArgument.of("request_id", request.request_id, "an id that no unfinished request has")
        self._detokenizers[request.request_id] = Detokenizer(self.tokenizer)
        self.scheduler.add(Sequence(request, 0, BlockTable(self.allocator, request.request_id)))

    def abort(self, request_id: str) -> None:
        """Take a request back and free what it holds; unknown or finished ids change nothing."""
        self.scheduler.abort(request_id)
        self._detokenizers.pop(request_id, None)

    @property
    def block_utilization(self) -> float:
        """Tokens held / slots held, as the last step left it."""
        return 1.0 if self.last_step is None else self.last_step.block_utilization

    def close(self) -> None:
        """Abort everything and give the device's memory back; harmless when repeated."""
        self._closed = True
        for request_id in list(self._detokenizers):
            self.abort(request_id)
        self.runner.close()

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the requests that got a token, in the order they run.

        A step that fails, or is interrupted, sets every running sequence back: the next step begins to
        compute them again from their tokens.
        """
        self._check_open()
        if self.allocator.audit is not None:
            self.allocator.audit.step += 1
        try:
            schedule = self.scheduler.schedule()
            if schedule is None:
                return []
            tokens = self.runner.execute(schedule)
        except BaseException:
            self.scheduler.set_back_all()
            raise
        self.last_step = step_stats(schedule, self.scheduler, self.allocator)
        return [self._output(sequence) for sequence in self.scheduler.update(schedule, tokens)]

    def _check_open(self) -> None:
        if self._closed:
            raise PagedJaxError("The engine is closed, its memory given back: make a new LLM.")

    def _output(self, sequence: Sequence) -> RequestOutput:
        request = sequence.request
        detokenizer = self._detokenizers[request.request_id]
        detokenizer.push(sequence.token_ids[-1])
        if sequence.is_finished:
            detokenizer.finish()
            del self._detokenizers[request.request_id]
        completion = CompletionOutput(
            index=sequence.index,
            text=detokenizer.text,
            token_ids=sequence.output_token_ids,
            finish_reason=sequence.finish_reason,
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=[completion],
            finished=sequence.is_finished,
            metrics=request.metrics,
        )
