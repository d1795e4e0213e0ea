"""Numbers before hardware: what a model, a device and the lengths of requests come to.

The pool is sized by the engine's own arithmetic (`capacity`), from the same options; a test builds engines
and compares. The figures that only a running program knows are estimated, and say so.
"""

from __future__ import annotations

from dataclasses import dataclass

from paged_jax.block_sizes import ASSUMED_MEAN, BlockSizeChoice, block_size_choices, recommend, table_bytes
from paged_jax.capacity import KVShape, PoolSize, blocks_for_tokens, longest_sequence
from paged_jax.decode_roofline import BATCHES, DecodeRoofline, DecodeStep
from paged_jax.demand import Demand
from paged_jax.engine_options import EngineOptions
from paged_jax.errors import InvalidArgument
from paged_jax.model_shape import ITEMSIZES, ModelShape
from paged_jax.plan_memory import Memory, PlannedPool, activation_bytes, plan_pool, with_headroom
from paged_jax.plan_options import PlanOptions
from paged_jax.plan_verdict import Comparison, Verdict, judge

MAX_NUM_SEQS = 2**16
"""What LLM takes at most."""
USUAL_CONTEXT = 2048
"""Tokens that a roofline reckons with where no lengths are given."""


@dataclass(frozen=True)
class Concurrency:
    """Sequences at once, LLM's max_num_seqs, and where the number is from."""

    num_seqs: int
    source: str


@dataclass(frozen=True)
class Plan:
    """All that came of it.

    dtype, kv_dtype: of weights and cache. longest: tokens of a sequence, before the pool is known. demand: of
    the requests that a sequence can hold; None where no lengths were given. mean_tokens: of a request,
    assumed where there is no demand. roofline: empty where the device's rates are not known; each sequence
    has roofline_context tokens. comparison: None without lengths.
    """

    shape: ModelShape
    options: PlanOptions
    dtype: str
    kv_dtype: str
    kv: KVShape
    memory: Memory
    concurrency: Concurrency
    longest: int
    planned: PlannedPool
    demand: Demand | None
    mean_tokens: float
    block_sizes: tuple[BlockSizeChoice, ...]
    recommended_block_size: int
    recommended_because: str
    roofline_context: int
    roofline: tuple[DecodeStep, ...]
    comparison: Comparison | None
    verdict: Verdict

    @property
    def pool(self) -> PoolSize:
        """Its num_blocks counts the null block."""
        return self.planned.size

    @property
    def max_model_len(self) -> int:
        """Tokens of a sequence at most; before a pool that holds nothing, where that is so."""
        return self.pool.max_model_len if self.pool.usable_blocks else self.longest

    @property
    def peak_blocks(self) -> int | None:
        """That the requests hold at once at their fullest."""
        if self.demand is None:
            return None
        return self.demand.peak_blocks(self.concurrency.num_seqs, self.pool.block_size)

    @property
    def recommended_blocks(self) -> int | None:
        """num_blocks for the requests: their peak with headroom, and the null block."""
        return None if self.peak_blocks is None else with_headroom(self.peak_blocks)

    @property
    def fits(self) -> tuple[bool, ...]:
        """Of each step of the roofline, whether max_num_blocks hold its sequences."""
        each = blocks_for_tokens(self.roofline_context, self.pool.block_size)
        return tuple(step.batch * each < self.planned.fitting_blocks for step in self.roofline)

    @property
    def table_bytes(self) -> int:
        """Of the block tables on the device."""
        return table_bytes(self.concurrency.num_seqs, self.max_model_len, self.pool.block_size)


def make_plan(shape: ModelShape, options: PlanOptions) -> Plan:
    """Plan for a model. Raises InvalidArgument for options, and requests, that can not be."""
    dtype = options.weights_dtype(shape.dtype)
    kv_dtype = dtype if options.kv_dtype == "auto" else options.kv_dtype
    itemsize, kv = ITEMSIZES[dtype], shape.kv(ITEMSIZES[kv_dtype])
    limit = shape.max_position_embeddings or options.max_model_len
    if limit is None:
        raise InvalidArgument(f"{shape.name} states no context length: give a max_model_len.")
    block_size = options.block_size
    longest = longest_sequence(
        options.max_model_len, limit, num_blocks=options.num_blocks, block_size=block_size
    )
    rates = options.device.rates if options.device else None
    roofline = DecodeRoofline(shape, rates, itemsize, kv.itemsize) if rates else None

    demand = _demand(options, longest, "the longest sequence here (max_model_len)")

    def memory_for(num_seqs: int) -> Memory:
        activations = activation_bytes(shape, itemsize, options.max_num_batched_tokens, num_seqs)
        return Memory(shape.weight_bytes(itemsize), activations, options.limit_bytes)

    usual = EngineOptions().max_num_seqs
    concurrency = Concurrency(usual, "LLM's default; --concurrency gives another")
    if options.concurrency is not None:
        concurrency = Concurrency(options.concurrency, "as given")
    elif demand is not None and demand.trace.span_s and roofline is not None:
        room = memory_for(usual).pool_bytes // kv.bytes_per_token
        concurrency = _of_the_arrivals(demand, roofline, room_tokens=options.given_tokens(kv) or room)
    num_seqs = concurrency.num_seqs
    memory = memory_for(num_seqs)
    planned = plan_pool(
        options, memory, kv, limit=limit, longest=longest, concurrency=num_seqs, demand=demand
    )
    pool = planned.size
    if pool.usable_blocks and pool.max_model_len < longest:
        demand = _demand(options, pool.max_model_len, "what the pool holds")

    mean_tokens = demand.mean_tokens if demand else min(ASSUMED_MEAN, max(longest // 2, 1))
    choices = block_size_choices(
        kv,
        max_num_seqs=num_seqs,
        max_model_len=pool.max_model_len if pool.usable_blocks else longest,
        mean_tokens=mean_tokens,
        measured_waste=demand.tail_waste if demand and not demand.trace.is_made_up else None,
    )
    recommended, because = recommend(choices)
    context = round(demand.mean_held_tokens) if demand else min(USUAL_CONTEXT, longest)
    verdict = judge(
        weights_fit=memory.weights_fit,
        bytes_per_token=kv.bytes_per_token,
        concurrency=num_seqs,
        max_model_len=longest,
        room_bytes={"given": pool.num_bytes, "device": memory.pool_bytes}.get(planned.source),
        held_tokens=demand.mean_held_blocks(block_size) * block_size if demand else None,
    )
    return Plan(
        shape=shape,
        options=options,
        dtype=dtype,
        kv_dtype=kv_dtype,
        kv=kv,
        memory=memory,
        concurrency=concurrency,
        longest=longest,
        planned=planned,
        demand=demand,
        mean_tokens=mean_tokens,
        block_sizes=choices,
        recommended_block_size=recommended,
        recommended_because=because,
        roofline_context=context,
        roofline=tuple(roofline.step(batch, context) for batch in BATCHES) if roofline else (),
        comparison=Comparison.of(pool, demand) if demand and pool.usable_blocks else None,
        verdict=verdict,
    )


def _demand(options: PlanOptions, max_tokens: int, what: str) -> Demand | None:
    """Of the requests that are not too long; InvalidArgument for the first that is, unless it may go."""
    if options.trace is None:
        return None
    return Demand(options.trace.within(max_tokens, what, skip_invalid=options.skip_invalid))


def _of_the_arrivals(demand: Demand, roofline: DecodeRoofline, *, room_tokens: int) -> Concurrency:
    """What the arrivals come to at the roofline's speed, or what there is room for, if that is less."""
    context = demand.mean_held_tokens
    room = min(max(int(room_tokens / context), 1), MAX_NUM_SEQS)
    prompts = sum(roofline.prefill_seconds(tokens) for tokens in demand.trace.prompt_tokens.tolist())
    found = demand.at_once(
        lambda batch: roofline.step(batch, round(context)).seconds,
        busy_share=prompts / demand.trace.span_s,
        most=room,
    )
    if found is None:
        return Concurrency(room, "what the pool holds on average: the trace comes faster and has to queue")
    return Concurrency(
        found, "most in flight if each request is served as it arrives, at the roofline's speed: at least"
    )
