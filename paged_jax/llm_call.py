"""One call of an LLM: its prompts checked one by one, then queued together and run to the end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Literal, TypeGuard, TypeVar

from paged_jax.beam_params import BeamSearchParams
from paged_jax.engine import Engine
from paged_jax.errors import InvalidArgument, PagedJaxError, TokenizerError
from paged_jax.outputs import CutAnswers, RequestOutput
from paged_jax.progress import track_requests
from paged_jax.prompt import Prompt
from paged_jax.sampling_params import UNSET, SamplingParams
from paged_jax.sequence import Request

OnError = Literal["raise", "return"]
T = TypeVar("T")
P = TypeVar("P", SamplingParams, BeamSearchParams)


class LLMCall:
    """What applies to each prompt of a call, and what becomes of it.

    default_max_tokens stands in where params give no max_tokens. on_error: "raise" the first error, with the
    prompt's index in its message, or "return" it in the place of the answer.
    """

    def __init__(
        self,
        engine: Engine,
        params: Sequence[SamplingParams | BeamSearchParams],
        priorities: Sequence[int],
        *,
        default_max_tokens: int | None,
        on_error: OnError,
    ) -> None:
        if on_error not in ("raise", "return"):
            raise InvalidArgument.of("on_error", on_error, '"raise" or "return"')
        self._engine = engine
        self._params = params
        self._priorities = priorities
        self._default_max_tokens = default_max_tokens
        self._raises = on_error == "raise"
        self._requests: dict[int, Request] = {}
        self._index_of: dict[str, int] = {}
        self._outputs: list[RequestOutput | None] = [None] * len(params)

    def check(self, items: Sequence[T], as_prompt: Callable[[T], Prompt], ids: itertools.count[int]) -> None:
        """Make a request of each item; nothing is queued yet. as_prompt may raise TokenizerError."""
        for index, item in enumerate(items):
            request_id = f"llm-{next(ids)}"
            try:
                prompt = as_prompt(item)
            except TokenizerError as error:
                self._refuse(index, request_id, item, error, "conversation")
                continue
            try:
                self._index_of[request_id] = index
                self._requests[index] = self._engine.make_request(
                    request_id,
                    prompt,
                    self._params[index],
                    default_max_tokens=self._default_max_tokens,
                    priority=self._priorities[index],
                    prompt_index=index,
                )
            except InvalidArgument as error:
                self._refuse(index, request_id, prompt, error)

    def run(self, use_tqdm: bool) -> list[RequestOutput]:
        """Queue the requests and step until the last one ends; the outputs come in the prompts' order.

        After an error, or Ctrl-C, nothing of the call stays behind.
        """
        engine = self._engine
        index_of = self._index_of
        before = engine.totals.generated_tokens
        others: list[RequestOutput] = []
        added: list[Request] = []
        try:
            for index, request in self._requests.items():
                try:
                    added.append(request)  # first, so that an interrupt between the two leaves nothing behind
                    engine.add(request)
                except InvalidArgument as error:
                    added.pop()
                    self._refuse(index, request.request_id, request.prompt, error)
            unfinished = self._outputs.count(None)
            with track_requests(len(self._outputs), use_tqdm) as progress:
                while unfinished:
                    for output in engine.step():
                        if output.request_id not in index_of:
                            others.append(output)
                        elif output.finished:
                            self._take(output)
                            unfinished -= 1
                    if engine.num_unfinished < unfinished:  # somebody has taken some of them back
                        self._take_aborted(added)
                        unfinished = self._outputs.count(None)
                    tokens = engine.totals.generated_tokens - before
                    progress(len(self._outputs) - unfinished, tokens, engine.block_utilization)
        finally:
            for request in added:
                if self._outputs[index_of[request.request_id]] is None:
                    engine.abort(request.request_id)
            engine.put_back(others)
        return [output for output in self._outputs if output is not None]

    def _take(self, output: RequestOutput) -> None:
        index = self._index_of[output.request_id]
        if output.error is not None:
            error = _at_index(output.error, "prompt", index)
            if self._raises:
                raise error
            output = replace(output, error=error)
        self._outputs[index] = output

    def _take_aborted(self, added: list[Request]) -> None:
        for request in added:
            index = self._index_of[request.request_id]
            if self._outputs[index] is None and request.is_finished:
                self._outputs[index] = self._engine.output_of(request)

    def _refuse(
        self, index: int, request_id: str, prompt: object, error: PagedJaxError, what: str = "prompt"
    ) -> None:
        named = _at_index(error, what, index)
        if self._raises:
            raise named
        self._outputs[index] = RequestOutput.refused(request_id, prompt, named)

    def cut_answers(self) -> CutAnswers | None:
        """The warning about answers that the default max_tokens has cut, if it cut any."""
        limit = self._default_max_tokens
        cut = sum(
            own.max_tokens is UNSET
            and completion.finish_reason == "length"
            and len(completion.token_ids) == limit
            for output, own in zip(self._outputs, self._params, strict=True)
            if output is not None
            for completion in output.outputs
        )
        answers = sum(len(output.outputs) for output in self._outputs if output is not None)
        return CutAnswers(cut, answers, limit) if cut and limit is not None else None


def _at_index(error: PagedJaxError, what: str, index: int) -> PagedJaxError:
    named = type(error)(f"{what} {index}: {error}")
    named.__cause__ = error
    return named


def params_of_each(
    given: P | Sequence[P], count: int, kind: type[P], name: str = "sampling_params"
) -> list[P]:
    """One record of a kind for each of count prompts, from one for all or from one each."""
    if isinstance(given, kind):
        return [given] * count
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise InvalidArgument.of(name, given, f"a {kind.__name__} or a list of them")
    for index, params in enumerate(given):
        if not isinstance(params, kind):
            raise InvalidArgument.of(f"{name}[{index}]", params, f"a {kind.__name__}")
    if len(given) != count:
        raise InvalidArgument(f"{len(given)} {name} for {count} prompts: expected one, or one each.")
    return list(given)


def priorities_of_each(priority: int | Sequence[int], count: int) -> list[int]:
    """One priority for each of count prompts, from one for all or from one each."""
    if _is_integer(priority):
        return [int(priority)] * count
    if not isinstance(priority, Sequence) or isinstance(priority, str | bytes):
        raise InvalidArgument.of("priority", priority, "an integer or a list of them")
    for index, own in enumerate(priority):
        if not _is_integer(own):
            raise InvalidArgument.of(f"priority[{index}]", own, "an integer")
    if len(priority) != count:
        raise InvalidArgument(f"{len(priority)} priorities for {count} prompts: expected one, or one each.")
    return [int(own) for own in priority]


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)
