"""The engine: takes requests, runs steps, gives outputs. One thread drives it."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from time import monotonic
from typing import Protocol

from paged_jax.answer_texts import AnswerTexts
from paged_jax.beam_params import BeamSearchParams
from paged_jax.beam_search import Tokenizer
from paged_jax.block_allocator import BlockAllocator
from paged_jax.errors import EngineBusy, EngineClosed, InvalidArgument
from paged_jax.intake import Intake
from paged_jax.outputs import RequestOutput
from paged_jax.prompt import Prompt
from paged_jax.sampling_params import DEFAULT_MAX_TOKENS, SamplingParams
from paged_jax.schedule import Sampled, Schedule
from paged_jax.scheduler import Scheduler
from paged_jax.sequence import Request, Sequence
from paged_jax.stats import BlockCounts, StepClock, StepStats, Totals, count_requests_blocks


class Runner(Protocol):
    """What computes the steps: a ModelRunner."""

    @property
    def weight_bytes(self) -> int:
        """Bytes that the parameters take on the device."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, over all layers."""
        ...

    def execute(self, schedule: Schedule) -> Sampled:
        """A token for each sequence that the schedule decodes."""
        ...

    def close(self) -> None:
        """Give the device's memory back."""
        ...


class Engine:
    """Owns the requests from arrival to their last token.

    vocab_size bounds the ids of prompts; eos_ids end a sequence unless its request ignores them. seed makes
    the seeds that unseeded requests draw repeatable. last_step is the record of the last step, totals the
    sums over all.
    """

    def __init__(
        self,
        runner: Runner,
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
        self.max_model_len = max_model_len
        self.last_step: StepStats | None = None
        self.totals = Totals()
        self._closed = False
        self._intake = Intake(
            tokenizer,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            eos_ids=eos_ids,
            seed=seed,
        )
        self._texts = AnswerTexts(tokenizer)
        self._undelivered: dict[str, Request] = {}  # have ended, and nobody was told yet
        self._is_torn = False
        self._put_back: list[RequestOutput] = []
        self._stepping = Lock()  # and no flag: an interrupt may come before a flag is taken back
        self._is_updating = False
        self._to_abort: list[str] = []

    @property
    def allocator(self) -> BlockAllocator:
        """The pool's books."""
        return self.scheduler.allocator

    @property
    def has_unfinished(self) -> bool:
        """Whether a further step has something to do."""
        return self.scheduler.has_unfinished or bool(self._undelivered or self._put_back)

    @property
    def num_unfinished(self) -> int:
        """Requests that were added and have neither ended nor been taken back."""
        return len(self.scheduler.queues.by_id) + len(self._undelivered)

    @property
    def block_utilization(self) -> float:
        """Tokens held / slots held, as the last step left it."""
        return 1.0 if self.last_step is None else self.last_step.block_utilization

    def check_open(self) -> None:
        """EngineClosed after `close`."""
        if self._closed:
            raise EngineClosed("The engine is closed, its memory given back: make a new LLM.")

    def make_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        *,
        default_max_tokens: int | None = DEFAULT_MAX_TOKENS,
        priority: int = 0,
        streams: bool = False,
        prompt_index: int = 0,
    ) -> Request:
        """Check a prompt and its parameters; nothing is queued or allocated yet.

        default_max_tokens stands in where params gives none; None: up to the end of the context. priority:
        lower goes first. streams: `step` puts out every token, and not the finished request alone; a beam
        search has nothing to put out before it ends. prompt_index: what its prefix_allowed_tokens_fn is told.
        """
        self.check_open()
        return self._intake.request(
            request_id,
            prompt,
            params,
            default_max_tokens=default_max_tokens,
            priority=priority,
            streams=streams,
            prompt_index=prompt_index,
        )

    def add(self, request: Request) -> None:
        """Queue a request that make_request has made.

        InvalidArgument if its id is in use, PoolTooSmall if the pool can never hold it.
        """
        self.check_open()
        if request.request_id in self.scheduler or request.request_id in self._undelivered:
            raise InvalidArgument.of("request_id", request.request_id, "an id that no unfinished request has")
        self.scheduler.add(request)
        if self.allocator.audit is not None:
            self.allocator.audit.arrive(request.request_id)

    def abort(self, request_id: str) -> None:
        """Take a request back and free what it holds; unknown or finished ids change nothing.

        While a step deals out its tokens, as in a function that it calls then: when it has done so.
        """
        if self._is_updating and self._stepping.locked():
            self._to_abort.append(request_id)
            return
        self.scheduler.abort(request_id)
        if self.allocator.audit is not None:
            self.allocator.audit.settle(self.scheduler.queues.by_id, "abort")
        self._undelivered.pop(request_id, None)
        self._texts.keep_only(self.scheduler.queues.by_id)

    def put_back(self, outputs: list[RequestOutput]) -> None:
        """Have the next step put these out: a caller got them that were another's."""
        self._put_back += outputs

    def output_of(self, request: Request) -> RequestOutput:
        """A request as it stands, such as one that was taken back."""
        output = self._texts.output(request)
        self._texts.keep_only(self.scheduler.queues.by_id)
        return output

    def refuse(self) -> None:
        """Refuse every further call but close: a thread that drives the engine stops before its next step."""
        self._closed = True

    def close(self) -> None:
        """Abort everything and give the device's memory back; harmless when repeated."""
        self.refuse()
        for request_id in list(self.scheduler.queues.by_id):
            self.scheduler.abort(request_id)
        if self.allocator.audit is not None:
            self.allocator.audit.settle(self.scheduler.queues.by_id, "close")
            self.allocator.audit.close()
        self._undelivered.clear()
        self._put_back.clear()
        self._texts.clear()
        self.runner.close()

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the requests that ended, and of those that stream all that got a token.

        A step that fails, or is interrupted, sets every running request back: the next step begins to
        compute them again from their tokens. No token that was taken is lost; a request that ended in the
        step that failed is put out by the next one. EngineBusy amid another step.
        """
        self.check_open()
        if self._stepping.locked():
            raise EngineBusy("A step amid a step: what is called by a step can not wait for another one.")
        try:
            with self._stepping:
                return self._whole_step()
        finally:
            while self._to_abort:
                self.abort(self._to_abort.pop())

    def _whole_step(self) -> list[RequestOutput]:
        """A step, or everything set back."""
        if self.allocator.audit is not None:
            self.allocator.audit.step += 1
        self._is_updating = False
        try:
            return self._step()
        except BaseException:
            self._is_torn = True
            self._texts.clear()  # one may have taken half a token
            self._owe(self.scheduler.queues.by_id.values())
            self.scheduler.set_back_all()
            raise
        finally:
            if self.allocator.audit is not None:
                self.allocator.audit.settle(self.scheduler.queues.by_id)

    def _step(self) -> list[RequestOutput]:
        scheduler, cache = self.scheduler, self.scheduler.prefix_cache
        clock = StepClock(monotonic())
        if cache is not None:
            clock.queried_before, clock.hits_before = cache.queried_tokens, cache.hit_tokens
        if self._is_torn:
            self._mend()
        late = self._put_back + [self._texts.output(request) for request in self._undelivered.values()]
        schedule = scheduler.schedule()
        if schedule is None:
            return self._hand_out(late)
        clock.scheduled = monotonic()
        blocks = BlockCounts.of(scheduler)
        count_requests_blocks(scheduler)
        if self.allocator.audit is not None:
            self.allocator.audit.flush()
        sampled = self.runner.execute(schedule) if schedule else Sampled([])
        if self.allocator.audit is not None:
            self.allocator.audit.fetched(schedule.swap_out, self.allocator.ref_cnt)
        clock.executed = monotonic()
        self._is_updating = True
        update = scheduler.update(schedule, sampled)
        outputs = late + self._take_texts(update.advanced)
        self.last_step = clock.record(
            schedule,
            scheduler,
            blocks=blocks,
            latencies=update.latencies,
            block_bytes=self.runner.block_bytes,
            now=monotonic(),
        )
        self.totals.add(self.last_step)
        return self._hand_out(outputs)

    def _hand_out(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """All that is owed is in these outputs: owe it no longer."""
        if self._undelivered:
            self._texts.keep_only(self.scheduler.queues.by_id)
            self._undelivered.clear()
        self._put_back = []
        return outputs

    def _take_texts(self, advanced: list[Sequence]) -> list[RequestOutput]:
        """Tokens to text; what a stop string ends ends here. The outputs that the step gives."""
        shown: dict[str, Request] = {}
        ended = []
        for sequence in advanced:
            request = sequence.request
            if request.beams is None:
                self._texts.push(sequence)
            if sequence.is_finished:
                ended.append(request)
            if request.streams or sequence.is_finished:
                shown[request.request_id] = request
        outputs = [self._texts.output(r) for r in shown.values() if r.streams or r.is_finished]
        self._owe(ended)
        self.scheduler.retire(ended)
        return outputs

    def _owe(self, requests: Iterable[Request]) -> None:
        """Those of them that have ended are to be put out, by this step or a later one."""
        self._undelivered |= {r.request_id: r for r in requests if r.is_finished}

    def _mend(self) -> None:
        """Nobody computes on who got its last token, or its text's, in a step that failed right then."""
        requests = list(self.scheduler.queues.by_id.values())
        for request in requests:
            self._texts.mend(request)
        self._owe(requests)
        self.scheduler.retire(requests)
        self._is_torn = False
