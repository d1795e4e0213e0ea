"""`paged-jax plan`: numbers before hardware, from a model's config and the lengths of requests."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from paged_jax.cli_options import BlockSize, KvCacheGib, MaxModelLen, MaxNumBatchedTokens, NumBlocks
from paged_jax.cli_trace import (
    CharactersPerToken,
    Mean,
    SkipInvalid,
    Std,
    Tokenizer,
    TraceFile,
    trace_of,
)

MADE_UP_REQUESTS = 10_000

Model = Annotated[
    str, typer.Option(help="A directory, a config.json, a .gguf file, or a known name such as llama-3-8b.")
]
Dtype = Annotated[str, typer.Option(help="Of the weights: auto, float32, bfloat16 or float16.")]
KvDtype = Annotated[str, typer.Option(help="Of keys and values: auto is the weights'; also float8_e4m3fn.")]
DeviceName = Annotated[
    str | None, typer.Option(help="h100, h200, a100-40, a100-80, l4, rtx4090, or memory such as 24GiB.")
]
MemoryFraction = Annotated[
    float, typer.Option(help="Of a named device that JAX may have, as XLA_CLIENT_MEM_FRACTION.")
]
Concurrency = Annotated[int | None, typer.Option(help="Sequences at once: LLM's max_num_seqs.")]


def plan(
    *,
    model: Model,
    dtype: Dtype = "auto",
    kv_dtype: KvDtype = "auto",
    device: DeviceName = None,
    memory_fraction: MemoryFraction = 0.75,
    max_model_len: MaxModelLen = None,
    concurrency: Concurrency = None,
    trace: TraceFile = None,
    mean_tokens: Mean = None,
    std_tokens: Std = None,
    tokenizer: Tokenizer = None,
    characters_per_token: CharactersPerToken = 4.0,
    skip_invalid: SkipInvalid = False,
    kv_cache_gib: KvCacheGib = None,
    num_blocks: NumBlocks = None,
    block_size: BlockSize = 16,
    max_num_batched_tokens: MaxNumBatchedTokens = 2048,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What a model needs before there is hardware: memory, block size, concurrency, and whether to page."""
    from paged_jax.devices import device_of
    from paged_jax.model_lookup import find_shape
    from paged_jax.plan_options import PlanOptions
    from paged_jax.planner import make_plan

    requests = trace_of(
        trace,
        mean_tokens,
        std_tokens,
        tokenizer=tokenizer,
        characters_per_token=characters_per_token,
        skip_invalid=skip_invalid,
        num_requests=MADE_UP_REQUESTS,
    )
    made = make_plan(
        find_shape(model),
        PlanOptions(
            dtype=dtype,
            kv_dtype=kv_dtype,
            device=device_of(device) if device else None,
            memory_fraction=memory_fraction,
            max_model_len=max_model_len,
            concurrency=concurrency,
            trace=requests,
            # the tails of a distribution reach past every limit; those of a trace are somebody's requests
            skip_invalid=skip_invalid or mean_tokens is not None,
            kv_cache_gib=kv_cache_gib,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens,
        ),
    )
    if as_json:
        from paged_jax.plan_dict import plan_dict

        print(json.dumps(plan_dict(made), indent=2))
        return
    from rich.console import Console

    from paged_jax.plan_report import print_plan

    print_plan(made, Console(highlight=False, markup=False, emoji=False))
