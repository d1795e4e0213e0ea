"""LLM: a model behind a few calls, for programs that have their prompts at hand."""

from __future__ import annotations

import itertools
import os
import threading
import warnings
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Literal, Self

from paged_jax.audit import AuditLog
from paged_jax.capacity import format_bytes
from paged_jax.engine import Engine
from paged_jax.engine_builder import build_engine
from paged_jax.engine_options import EngineOptions
from paged_jax.errors import InvalidArgument, InvalidPrompt, TokenizerError
from paged_jax.loader import our_errors
from paged_jax.outputs import RequestOutput
from paged_jax.progress import track_requests
from paged_jax.prompt import Prompt, prompt_list
from paged_jax.sampling_params import DEFAULT_MAX_TOKENS, UNSET, SamplingParams
from paged_jax.sequence import Request

Message = Mapping[str, object]


class LLM:
    """A loaded model with its block pool.

    model: a Hugging Face directory, a .gguf file, or a hub id `org/name`.
    dtype: of the weights: "float32", "bfloat16", "float16", or "auto": float32 on a CPU; elsewhere float16
    where the checkpoint says so, else bfloat16.
    max_model_len: tokens of a sequence at most, prompt and answer; None: the model's limit, or what the
    pool holds if that is less.
    block_size: tokens a block. num_blocks: blocks of the pool, the null block included; kv_cache_gib: its
    size instead, in GiB; neither: 80 % of the device memory left over, on a CPU 1 GiB or a quarter of the
    free RAM.
    max_num_seqs: sequences that run at once. max_num_batched_tokens: prompt tokens of a step at most.
    implementation: of the paged attention. "auto": the Triton kernels on an NVIDIA GPU where they support
    the model's shapes, else XLA; "triton": those kernels or an error (interpreted, slowly, off a GPU);
    "xla": never them.
    kv_audit: a log that gets a record of all that happens to each block.
    seed: makes the choices of unseeded requests repeatable from one LLM to the next.

    Threads may share it: calls from several run one after the other. use_tqdm shows a bar while weights load.
    A context manager: leaving it, or `close()`, gives the memory back.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        dtype: str = "auto",
        max_model_len: int | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_gib: float | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        implementation: Literal["auto", "triton", "xla"] = "auto",
        kv_audit: AuditLog | None = None,
        seed: int | None = None,
        use_tqdm: bool = True,
    ) -> None:
        options = EngineOptions(
            dtype=dtype,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            kv_cache_gib=kv_cache_gib,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            implementation=implementation,
            kv_audit=kv_audit,
            seed=seed,
        )
        built = build_engine(model, options, show_progress=use_tqdm)
        self.engine: Engine = built.engine
        self.kv_shape = built.kv_shape
        self.tokenizer = built.loaded.tokenizer
        self.generation_defaults = built.loaded.generation
        self._request_ids = itertools.count()
        self._lock = threading.Lock()

    @property
    def max_model_len(self) -> int:
        """Tokens of a sequence at most, prompt and answer."""
        return self.engine.max_model_len

    def describe(self) -> str:
        """One line on what weights and pool take and hold."""
        allocator = self.engine.allocator
        usable = allocator.num_blocks - 1
        tokens = usable * allocator.block_size
        cache = tokens * self.kv_shape.bytes_per_token
        return (
            f"weights {format_bytes(self.engine.runner.weight_bytes)}; KV cache {usable} blocks of"
            f" {allocator.block_size} tokens = {tokens:,} tokens, {format_bytes(cache)};"
            f" {self.max_model_len:,} tokens a sequence at most"
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """What applies where a call gives no sampling_params: the publisher's generation_config.

        Its temperature, top_k and top_p if it says do_sample, otherwise greedy. A SamplingParams that is
        given applies exactly as written: nothing is mixed in from the generation_config.
        """
        defaults = self.generation_defaults
        if not defaults.do_sample:
            return SamplingParams(temperature=0.0)
        return SamplingParams(
            temperature=1.0 if defaults.temperature is None else defaults.temperature,
            top_k=defaults.top_k or 0,
            top_p=1.0 if defaults.top_p is None else defaults.top_p,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt; the outputs come in the prompts' order.

        prompts: a str or {"prompt_token_ids": [...]}, or a list of them. sampling_params: one for all, or
        one each; None: get_default_sampling_params(). Everything is checked before anything runs; an error
        names the prompt by its index, and leaves nothing behind.
        """
        return self._run(prompt_list(prompts), sampling_params, DEFAULT_MAX_TOKENS, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several, through the model's chat template.

        messages: a list of {"role": str, "content": str}, or a list of such lists. As generate, but an
        answer whose max_tokens was not given may go on to the end of the context.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise InvalidPrompt(
                f'messages={messages!r}: expected [{{"role": ..., "content": ...}}, ...] or several of them.'
            )
        several = not isinstance(messages[0], Mapping)
        conversations = messages if several else [messages]
        prompts = []
        for index, conversation in enumerate(conversations):
            try:
                prompts.append(self.chat_prompt(conversation))  # type: ignore[arg-type]  # told apart above
            except TokenizerError as error:
                raise TokenizerError(f"conversation {index}: {error}") from error
        return self._run(prompts, sampling_params, None, use_tqdm)

    def chat_prompt(self, messages: Sequence[Message]) -> Prompt:
        """A conversation as the prompt that chat generates from.

        TokenizerError where the model has no chat template, or the template refuses the messages.
        """
        with our_errors():
            return self.tokenizer.apply_chat_template(messages)

    def close(self) -> None:
        """Give the memory of weights and cache back; any later use raises PagedJaxError."""
        self.engine.close()

    def __enter__(self) -> Self:
        """Use the LLM as a context manager."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _run(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        default_max_tokens: int | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = self._params_list(sampling_params, len(prompts))
        requests = []
        for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            try:
                request = self.engine.make_request(
                    f"llm-{next(self._request_ids)}", prompt, own, default_max_tokens=default_max_tokens
                )
            except InvalidArgument as error:
                raise type(error)(f"prompt {index}: {error}") from error
            requests.append(request)
        with self._lock:
            outputs = self._finish_all(requests, use_tqdm)
        _warn_of_cut_answers(outputs, params, default_max_tokens)
        return outputs

    def _params_list(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * count
        if not isinstance(sampling_params, Sequence) or not all(
            isinstance(params, SamplingParams) for params in sampling_params
        ):
            raise InvalidArgument.of("sampling_params", sampling_params, "a SamplingParams or a list of them")
        if len(sampling_params) != count:
            raise InvalidArgument(
                f"{len(sampling_params)} sampling_params for {count} prompts: expected one, or one each."
            )
        return list(sampling_params)

    def _finish_all(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        ours: dict[str, RequestOutput | None] = {}
        finished = tokens = 0
        try:
            for request in requests:
                self.engine.add(request)
                ours[request.request_id] = None
            with track_requests(len(requests), use_tqdm) as progress:
                while finished < len(requests):
                    for output in self.engine.step():
                        tokens += 1
                        if output.finished and output.request_id in ours:
                            ours[output.request_id] = output
                            finished += 1
                    progress(finished, tokens, self.engine.block_utilization)
        finally:  # after an error, or Ctrl-C, nothing of this call stays behind
            for request_id in ours:
                self.engine.abort(request_id)
        return [output for output in ours.values() if output is not None]


def _warn_of_cut_answers(
    outputs: list[RequestOutput], params: list[SamplingParams], default_max_tokens: int | None
) -> None:
    cut = [
        output
        for output, own in zip(outputs, params, strict=True)
        if own.max_tokens is UNSET
        and output.outputs[0].finish_reason == "length"
        and len(output.outputs[0].token_ids) == default_max_tokens
    ]
    if cut:
        warnings.warn(
            f"{len(cut)} of {len(outputs)} answers were cut at the default max_tokens={default_max_tokens}:"
            " pass SamplingParams(max_tokens=...), or max_tokens=None to go on to the context's end.",
            stacklevel=4,
        )
