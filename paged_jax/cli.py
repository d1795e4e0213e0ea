"""The command line: `paged-jax generate` and `paged-jax chat`."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paged_jax import __version__
from paged_jax import cli_options as options
from paged_jax.beam_params import BeamSearchParams
from paged_jax.cli_audit import audit
from paged_jax.cli_output import answers, records
from paged_jax.cli_plan import plan
from paged_jax.cli_simulate import simulate
from paged_jax.errors import InvalidArgument, InvalidPrompt, PagedJaxError
from paged_jax.notes import note
from paged_jax.outputs import CutAnswers
from paged_jax.sampling_params import DEFAULT_MAX_TOKENS, UNSET, SamplingParams

if TYPE_CHECKING:
    from paged_jax.llm import LLM
    from paged_jax.outputs import CompletionOutput

app = typer.Typer(
    name="paged-jax",
    help="Text generation in JAX over a paged KV cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(audit)
app.command()(plan)
app.command()(simulate)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"paged-jax {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; none: one a line from stdin.")] = None,
    *,
    model: options.Model,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A file with one prompt a line, added to the arguments.")
    ] = None,
    chat_template: Annotated[bool, typer.Option(help="Put each prompt through the chat template.")] = False,
    max_tokens: options.MaxTokens = None,
    min_tokens: options.MinTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    n: Annotated[
        int | None, typer.Option(help="Answers to each prompt: samples, or with --beam-width hypotheses.")
    ] = None,
    beam_width: Annotated[
        int | None, typer.Option(help="Search for the most likely answers with so many beams.")
    ] = None,
    length_penalty: Annotated[
        float | None, typer.Option(help="Of a beam search: over 0 favours long answers, under 0 short ones.")
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="In --json, log-probabilities of each token and the k most likely.")
    ] = None,
    dtype: options.Dtype = "auto",
    max_model_len: options.MaxModelLen = None,
    block_size: options.BlockSize = 16,
    num_blocks: options.NumBlocks = None,
    kv_cache_gib: options.KvCacheGib = None,
    max_num_seqs: options.MaxNumSeqs = 64,
    max_num_batched_tokens: options.MaxNumBatchedTokens = 2048,
    prefix_caching: options.PrefixCaching = True,
    preemption_mode: options.PreemptionMode = "auto",
    swap_space_gib: options.SwapSpaceGib = 4.0,
    batch_invariant: options.BatchInvariant = False,
    implementation: options.Implementation = "auto",
    warm_up: options.WarmUp = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Continue each prompt, all of them in one batch."""
    texts = [*(prompts or []), *(options.prompts_of(prompt_file) if prompt_file else [])]
    if not texts and prompt_file is None:
        texts = options.lines(_stdin())
    if not texts:
        raise InvalidPrompt("no prompt: give some as arguments, or one a line in --prompt-file or on stdin.")
    if logprobs is not None and not as_json:
        raise InvalidArgument.of("--logprobs", logprobs, "--json beside it, where they are printed")
    if length_penalty is not None and beam_width is None:
        raise InvalidArgument.of("--length-penalty", length_penalty, "--beam-width beside it")
    given = options.given_params(
        default_max_tokens=None if chat_template else DEFAULT_MAX_TOKENS,
        beam_width=beam_width,
        length_penalty=length_penalty,
        n=n,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop,
        logprobs=logprobs,
    )
    llm = _load(
        model,
        dtype=dtype,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_cache_gib=kv_cache_gib,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=prefix_caching,
        preemption_mode=preemption_mode,
        swap_space_gib=swap_space_gib,
        batch_invariant=batch_invariant,
        implementation=implementation,
        warm_up=warm_up,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        conversations = [[{"role": "user", "content": text}] for text in texts]
        if beam_width is not None:
            search = BeamSearchParams(**given)
            if chat_template and search.max_tokens is UNSET:
                search = replace(search, max_tokens=None)
            outputs = llm.beam_search(
                [llm.chat_prompt(one) for one in conversations] if chat_template else texts, search
            )
        elif chat_template:
            outputs = llm.chat(conversations, options.params_for(llm, given))
        else:
            outputs = llm.generate(texts, options.params_for(llm, given))
    for warning in caught:
        note(f"note: {_for_the_command_line(warning.message)}", style="yellow")
    if as_json:
        pairs = zip(texts, outputs, strict=True)
        print(json.dumps([record for text, output in pairs for record in records(text, output)]))
        return
    shown = ["" if chat_template else text for text in texts]
    several = sum(len(output.outputs) for output in outputs) > 1
    for answer in answers(zip(shown, outputs, strict=True)):
        print(answer)
        if several:
            print("-" * 40)


@app.command()
def chat(
    *,
    model: options.Model,
    message: Annotated[str | None, typer.Option(help="Ask this, print the answer and leave.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_tokens: options.MaxTokens = None,
    min_tokens: options.MinTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    dtype: options.Dtype = "auto",
    max_model_len: options.MaxModelLen = None,
    block_size: options.BlockSize = 16,
    num_blocks: options.NumBlocks = None,
    kv_cache_gib: options.KvCacheGib = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = 2048,
    prefix_caching: options.PrefixCaching = True,
    preemption_mode: options.PreemptionMode = "auto",
    swap_space_gib: options.SwapSpaceGib = 4.0,
    batch_invariant: options.BatchInvariant = False,
    implementation: options.Implementation = "auto",
    warm_up: options.WarmUp = False,
) -> None:
    """Talk with a model; answers appear as they are generated. /clear forgets, /exit or Ctrl-D leaves."""
    given = options.given_params(
        default_max_tokens=None,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop,
    )
    llm = _load(
        model,
        dtype=dtype,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_cache_gib=kv_cache_gib,
        max_num_seqs=1,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=prefix_caching,
        preemption_mode=preemption_mode,
        swap_space_gib=swap_space_gib,
        batch_invariant=batch_invariant,
        implementation=implementation,
        warm_up=warm_up,
    )
    params = options.params_for(llm, given)
    beginning = [{"role": "system", "content": system}] if system else []
    if message is not None:
        _answer(llm, [*beginning, {"role": "user", "content": message}], params)
        return
    conversation = list(beginning)
    for line in _turns():
        if line == "/clear":
            conversation = list(beginning)
            continue
        turn = {"role": "user", "content": line}
        try:
            answer = _answer(llm, [*conversation, turn], params)
        except PagedJaxError as error:
            note(f"error: {error}", style="red")
            note("the message was not taken; /clear forgets what was said before")
            continue
        except KeyboardInterrupt:
            print(flush=True)
            continue
        conversation += [turn, {"role": "assistant", "content": answer}]


def main() -> None:
    """The entry point: errors of ours become one line and exit code 1."""
    try:
        app()
    except PagedJaxError as error:
        note(f"error: {error}", style="red")
        sys.exit(1)


def _stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidPrompt(f"stdin: expected text in {error.encoding}: {error}") from error


def _load(model: str, **engine_options: object) -> LLM:
    from paged_jax.llm import LLM

    return LLM(model, **engine_options)  # type: ignore[arg-type]  # each option has LLM's own type


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Stream one answer to stdout and return it; Ctrl-C frees what it held."""
    engine = llm.engine
    prompt = llm.chat_prompt(messages)
    engine.add(engine.make_request("chat", prompt, params, default_max_tokens=None, streams=True))
    shown = ""
    try:
        while engine.has_unfinished:
            for output in engine.step():
                completion = output.outputs[0]
                print(completion.text[len(shown) :], end="", flush=True)
                shown = completion.text
                if completion.finish_reason == "length":
                    note(f"\n[{_why_cut(completion, params)}]")
    finally:
        engine.abort("chat")
    print(flush=True)
    return shown


def _why_cut(completion: CompletionOutput, params: SamplingParams) -> str:
    if len(completion.token_ids) == params.max_tokens:
        return f"cut at --max-tokens {params.max_tokens}"
    return "cut at the context's end: --max-model-len may raise it, /clear forgets what was said before"


def _for_the_command_line(message: Warning | str) -> Warning | str:
    if isinstance(message, CutAnswers):
        return (
            f"{message.num_cut} of {message.num_answers} answers were cut at the default of"
            f" {message.max_tokens} tokens: give --max-tokens."
        )
    return message


def _turns() -> Iterator[str]:
    """What the user types, a line a turn, until /exit or the end of input."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line == "/exit":
            return
        if line:
            yield line


if __name__ == "__main__":
    main()
