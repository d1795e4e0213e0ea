"""LLM: a model behind a few calls, for programs that have their prompts at hand."""

from __future__ import annotations

import itertools
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, TypeVar

from paged_jax.audit import AuditLog
from paged_jax.audit_file import audit_log
from paged_jax.beam_params import BeamSearchParams
from paged_jax.capacity import format_bytes
from paged_jax.engine import Engine
from paged_jax.engine_builder import build_engine
from paged_jax.engine_options import EngineOptions
from paged_jax.errors import InvalidPrompt
from paged_jax.llm_call import LLMCall, OnError, params_of_each, priorities_of_each
from paged_jax.loader import our_errors
from paged_jax.notes import note
from paged_jax.outputs import RequestOutput
from paged_jax.prompt import Prompt, prompt_list
from paged_jax.sampling_params import DEFAULT_MAX_TOKENS, SamplingParams

if TYPE_CHECKING:
    from paged_jax.programs import WarmUp

Message = Mapping[str, object]
_T = TypeVar("_T")


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
    max_num_seqs: sequences that run at once. max_num_batched_tokens: tokens that a step computes at most.
    enable_prefix_caching: keep the blocks of finished requests, and let a prompt that begins like an earlier
    one (with the same cache_salt) share them.
    preemption_mode: what happens to a request's keys and values when it has to give its blocks back:
    "recompute" them later, "swap" them to host memory and back, or "auto": whichever is estimated to be
    faster. swap_space_gib: host memory for that, at most; taken when it is first needed.
    batch_invariant: the same answers to the bit whatever shares the batch, at a price in speed; it swaps.
    logprobs_mode: "raw": log-probabilities of the model's logits; "processed": of what is sampled from,
    after min_tokens, temperature, top_k and top_p.
    warm_up: compile every program before the first request, and not when it is first needed.
    implementation: of the paged attention. "auto": the Triton kernels on an NVIDIA GPU where they support
    the model's shapes, else XLA; "triton": those kernels or an error (interpreted, slowly, off a GPU);
    "xla": never them.
    kv_audit: a path to which a record of all that happens to each block is written, for `paged-jax audit`
    (an AuditFile, to say how large the files may get), or an AuditLog, which keeps them in memory.
    seed: makes the choices of unseeded requests repeatable from one LLM to the next.

    Threads may share it: calls from several run one after the other. use_tqdm shows bars while weights load
    and programs compile, and then what describe() says, on standard error.
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
        enable_prefix_caching: bool = True,
        preemption_mode: Literal["auto", "recompute", "swap"] = "auto",
        swap_space_gib: float = 4.0,
        batch_invariant: bool = False,
        logprobs_mode: Literal["raw", "processed"] = "raw",
        warm_up: bool = True,
        implementation: Literal["auto", "triton", "xla"] = "auto",
        kv_audit: AuditLog | str | os.PathLike[str] | None = None,
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
            enable_prefix_caching=enable_prefix_caching,
            preemption_mode=preemption_mode,
            swap_space_gib=swap_space_gib,
            batch_invariant=batch_invariant,
            logprobs_mode=logprobs_mode,
            warm_up=warm_up,
            implementation=implementation,
            kv_audit=audit_log(kv_audit),
            seed=seed,
        )
        built = build_engine(model, options, show_progress=use_tqdm)
        self.engine: Engine = built.engine
        self.kv_shape = built.kv_shape
        self.pool = built.pool
        self.tokenizer = built.loaded.tokenizer
        self.generation_defaults = built.loaded.generation
        self._request_ids = itertools.count()
        self._lock = threading.RLock()
        if use_tqdm:
            if built.warm_up is not None:
                note(_warm_up_line(built.warm_up))
            note(self.describe())

    @property
    def max_model_len(self) -> int:
        """Tokens of a sequence at most, prompt and answer."""
        return self.engine.max_model_len

    def describe(self) -> str:
        """One line on what the weights take, and the pool and the swap space hold."""
        scheduler = self.engine.scheduler
        swap = scheduler.preemption.space.num_blocks
        return (
            f"{self.pool.describe(self.engine.runner.weight_bytes)}; "
            + (
                f"swap space {swap:,} blocks, {format_bytes(swap * self.pool.block_bytes)}"
                if swap
                else "no swap space"
            )
            + f"; prefix caching {'off' if scheduler.prefix_cache is None else 'on'}"
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
        priority: int | Sequence[int] = 0,
        on_error: OnError = "raise",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt; the outputs come in the prompts' order.

        prompts: a str, {"prompt": str} or {"prompt_token_ids": [...]}, or a list of them; the dicts may have
        a "cache_salt" too: only prompts of the same salt share cached blocks.
        sampling_params: one for all, or one each; None: get_default_sampling_params(). priority: one for
        all, or one each; lower ones go first.
        on_error: "raise": everything is checked before anything runs; the error names the first bad prompt by
        its index and leaves nothing behind. "return": a bad prompt's output has its .error and no .outputs;
        the others are answered.
        """
        return self._run(
            prompt_list(prompts),
            lambda prompt: prompt,
            partial(self._sampling_params, sampling_params),
            default_max_tokens=DEFAULT_MAX_TOKENS,
            priority=priority,
            on_error=on_error,
            use_tqdm=use_tqdm,
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        on_error: OnError = "raise",
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
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        return self._run(
            conversations,
            self.chat_prompt,  # type: ignore[arg-type]  # one conversation or several, told apart above
            partial(self._sampling_params, sampling_params),
            default_max_tokens=None,
            priority=priority,
            on_error=on_error,
            use_tqdm=use_tqdm,
        )

    def chat_prompt(self, messages: Sequence[Message]) -> Prompt:
        """A conversation as the prompt that chat generates from.

        TokenizerError where the model has no chat template, or the template refuses the messages.
        """
        with our_errors():
            return self.tokenizer.apply_chat_template(messages)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        *,
        priority: int | Sequence[int] = 0,
        on_error: OnError = "raise",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Search for each prompt's most likely continuations; the outputs come in the prompts' order.

        An output's .outputs are the hypotheses, the best first, each with its .score. prompts, priority and
        on_error: as in generate; of conversations, pass what chat_prompt makes. params: one for all, or one
        each, of any widths. The beams of a prompt share every full block that they have in common.
        """
        return self._run(
            prompt_list(prompts),
            lambda prompt: prompt,
            lambda count: params_of_each(params, count, BeamSearchParams, "params"),
            default_max_tokens=DEFAULT_MAX_TOKENS,
            priority=priority,
            on_error=on_error,
            use_tqdm=use_tqdm,
        )

    def close(self) -> None:
        """Give the memory of weights and cache back; asking for anything later raises EngineClosed.

        A call that another thread has running ends with that error before its next step.
        """
        self.engine.refuse()
        with self._lock:
            self.engine.close()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, as after the weights have changed; what runs is left alone."""
        with self._lock:
            self.engine.check_open()
            self.engine.allocator.forget_cached()

    def __enter__(self) -> Self:
        """Use the LLM as a context manager."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _sampling_params(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        return params_of_each(given, count, SamplingParams)

    def _run(
        self,
        items: Sequence[_T],
        as_prompt: Callable[[_T], Prompt],
        params: Callable[[int], Sequence[SamplingParams | BeamSearchParams]],
        *,
        default_max_tokens: int | None,
        priority: int | Sequence[int],
        on_error: OnError,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        self.engine.check_open()
        call = LLMCall(
            self.engine,
            params(len(items)),
            priorities_of_each(priority, len(items)),
            default_max_tokens=default_max_tokens,
            on_error=on_error,
        )
        call.check(items, as_prompt, self._request_ids)
        with self._lock:
            outputs = call.run(use_tqdm)
        if cut := call.cut_answers():
            warnings.warn(cut, stacklevel=3)
        return outputs


def _warm_up_line(warm_up: WarmUp) -> str:
    """What the start compiled, in a line."""
    line = f"{warm_up.num_programs} programs ready in {warm_up.seconds:.1f} s"
    if warm_up.cache_hits:
        line += f", {warm_up.cache_hits} of them from the cache on disk"
    return line
