"""A scheduler with a made-up device under it: what the tests of scheduling drive and look at.

The device keeps for every slot which tokens its keys and values would come from, for every row its own copy
of the block table, and a swap space; it believes nothing but the schedule. So a block that is read before it
was written, a row that should have been placed, or a copy made too early shows at the next decode step.
"""

import numpy as np
from support.naive_beam_search import log_softmax

from paged_jax import BlockAllocator, BlockTable, SamplingParams
from paged_jax.preemption import Preemption
from paged_jax.prefix_cache import PrefixCache
from paged_jax.queues import unfinished
from paged_jax.sampling_params import MAX_LOGPROBS
from paged_jax.schedule import RowScores, Sampled
from paged_jax.scheduler import Scheduler
from paged_jax.sequence import Request, RequestMetrics

END = 7


def make_scheduler(
    num_blocks=64,
    block_size=4,
    *,
    seqs=8,
    budget=64,
    prefill_seqs=8,
    caching=False,
    chunk=None,
    mode="recompute",
    host_blocks=64,
    costs=None,
):
    allocator = BlockAllocator(num_blocks, block_size)
    scheduler = Scheduler(
        allocator,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_prefill_seqs=prefill_seqs,
        prefix_cache=PrefixCache(allocator, chunk=chunk) if caching else None,
        preemption=Preemption(allocator, mode=mode, num_host_blocks=host_blocks, costs=costs),
        prefill_chunk=chunk,
    )
    scheduler.device = Device(scheduler)
    scheduler.outsiders = []
    return scheduler


def add(scheduler, name, prompt, max_new_tokens=4, *, priority=0, salt="", params=None):
    """Queue a request; prompt: its token ids, or how many made-up ones of its own. Its first sequence."""
    if isinstance(prompt, int):
        prompt = [token_of(name, 0, position) for position in range(prompt)]
    request = Request(
        request_id=name,
        prompt=None,
        prompt_token_ids=list(prompt),
        params=params or SamplingParams(),
        max_new_tokens=max_new_tokens,
        stop_token_ids=frozenset([END]),
        seed=0,
        metrics=RequestMetrics(arrival_time=0.0),
        priority=priority,
        cache_salt=salt,
    )
    scheduler.add(request)
    return request.sequences[0]


def add_group(scheduler, name, prompt, width, max_new_tokens=4, **options):
    """A request of several sequences, as they stand after the first one's first token."""
    first = add(scheduler, name, prompt, max_new_tokens, **options)
    while not first.num_output_tokens:
        run_step(scheduler)
    return [first, *(scheduler.forks.fork(first) for _ in range(width - 1))]


def token_of(name, index, position):
    """The token that stands at a position of a request's sequence, prompt or answer; never END."""
    return 1000 + (31 * sum(map(ord, name)) + 211 * index + position) % 1000


def names(requests):
    return [request.request_id for request in requests]


def shape(schedule):
    """A step as a reader sees it: tokens prefilled, by request, and who decodes."""
    prefill = {chunk.sequence.request.request_id: chunk.num_tokens for chunk in schedule.prefill}
    return prefill, "".join(sequence.request.request_id for sequence in schedule.decode)


def run_step(scheduler, end=()):
    """One step; the sequences in `end` get an end token."""
    schedule = scheduler.schedule()
    if schedule is not None:
        check(scheduler, schedule)
        finish_step(scheduler, schedule, scheduler.device.execute(schedule), end)
    return schedule


def finish_step(scheduler, schedule, sampled, end=()):
    """Take the tokens of a step, and retire what they ended; returns what the step brought."""
    tokens = [
        END if sequence in end else token
        for sequence, token in zip(schedule.decode, sampled.tokens, strict=True)
    ]
    update = scheduler.update(schedule, sampled._replace(tokens=tokens))
    scheduler.retire([sequence.request for sequence in update.advanced])
    check(scheduler)
    return update


def finish(scheduler):
    """Run to the end; returns the steps."""
    steps = []
    while scheduler.has_unfinished:
        steps.append(run_step(scheduler))
        assert len(steps) < 5000
    check_all_free(scheduler)
    return steps


def take_blocks(scheduler, n):
    """Somebody else has n blocks of the pool from now on."""
    table = BlockTable(scheduler.allocator, "somebody else")
    table.append(n * scheduler.allocator.block_size)
    scheduler.outsiders.append(table)


def give_blocks_back(scheduler):
    for table in scheduler.outsiders:
        table.release()


def tables(scheduler):
    """Everything that holds blocks."""
    return [s.table for r in scheduler.queues.by_id.values() for s in r.sequences] + scheduler.outsiders


def check(scheduler, schedule=None):
    """What must be so between steps, and of a step that was just scheduled."""
    queues, space = scheduler.queues, scheduler.preemption.space
    scheduler.allocator.check(tables(scheduler))
    rows = [s.row for s in queues.running_sequences]
    assert sorted([*rows, *queues.free_rows]) == list(range(scheduler.max_num_seqs))
    swapped = [b for r in queues.by_id.values() if r.swapped for b in r.swapped.host_blocks]
    assert len(set(swapped)) == len(swapped) == space.num_blocks - space.num_free_blocks
    assert queues.waiting == sorted(queues.waiting, key=lambda request: request.order)
    assert all(not s.table.blocks for request in queues.waiting for s in request.sequences)
    if schedule is None:
        return
    decode, chunks = schedule.decode, schedule.prefill
    assert len(set(decode)) == len(decode)
    assert all(s.table.num_tokens == len(s.token_ids) for s in decode)
    assert all(c.end <= len(c.sequence.token_ids) - 1 and c.num_tokens > 0 for c in chunks)
    assert len(chunks) <= scheduler.max_prefill_seqs
    assert sum(c.num_tokens for c in chunks) <= scheduler.max_num_batched_tokens
    assert len(set(schedule.placed)) == len(schedule.placed)
    assert set(schedule.placed) <= set(queues.running_sequences)
    sources, written = {src for src, _ in schedule.copies}, [dst for _, dst in schedule.copies]
    written += [block for _, block in schedule.swap_in]
    assert len(set(written)) == len(written)
    assert not sources & set(written)


def check_all_free(scheduler):
    allocator, space = scheduler.allocator, scheduler.preemption.space
    allocator.check([])
    assert allocator.num_free_blocks == allocator.num_blocks - 1
    assert space.num_free_blocks == space.num_blocks
    assert sorted(scheduler.queues.free_rows) == list(range(scheduler.max_num_seqs))
    assert not scheduler.queues.by_id
    assert not scheduler.waiting
    assert not scheduler.running


class Device:
    """What the blocks hold, by slot: a digest of all tokens up to the one whose keys and values lie there.

    model: a made-up language model, which the searches among the requests need; greedy requests follow it.
    """

    def __init__(self, scheduler, model=None):
        self.size = scheduler.allocator.block_size
        self.memory, self.host, self.rows = {}, {}, {}
        self.model = model
        self.rows_of_logits = 0
        """How many whole rows of logits the host has called for."""

    def fail(self):
        """Lose everything but the swap space."""
        self.memory.clear()
        self.rows.clear()

    def execute(self, schedule):
        gathered = [(host, self.block(block)) for block, host in schedule.swap_out]
        copied = [(dst, self.block(src)) for src, dst in schedule.copies]
        for dst, content in copied:
            self.fill(dst, content)
        for host, block in schedule.swap_in:
            self.fill(block, self.host[host])
        self.host.update(gathered)
        for sequence in schedule.placed:
            self.rows[sequence.row] = [list(sequence.table.blocks), sequence.token_ids[-1]]
        for chunk in schedule.prefill:
            digests, (table, _) = digests_of(chunk.sequence), self.rows[chunk.sequence.row]
            assert self.read(table, chunk.start) == digests[: chunk.start]
            for position in range(chunk.start, chunk.end):
                self.memory[self.slot(table, position)] = digests[position]
        tokens = [self.decode(sequence) for sequence in schedule.decode]
        searching = any(sequence.request.beams is not None for sequence in schedule.decode)
        return Sampled(tokens, None, self.scores(schedule.decode) if searching else None)

    def decode(self, sequence):
        table, last = row = self.rows[sequence.row]
        assert last == sequence.token_ids[-1]
        digests, position = digests_of(sequence), sequence.table.num_tokens - 1
        table[position // self.size :] = [sequence.table.blocks[-1]]
        assert table == sequence.table.blocks
        assert self.read(table, position) == digests[:-1]
        self.memory[self.slot(table, position)] = digests[-1]
        row[1] = self.next_token(sequence)
        return row[1]

    def next_token(self, sequence):
        if self.model is not None and sequence.request.params.is_greedy:
            return self.model.greedy(sequence.token_ids)
        token = token_of(sequence.request.request_id, sequence.index, len(sequence.token_ids))
        return token if self.model is None else token % self.model.vocab_size

    def scores(self, sequences):
        """In float64, so that searches can be compared to the last bits."""
        logits = [self.model(sequence.token_ids) for sequence in sequences]
        top_ids = np.argsort(-np.array(logits), kind="stable")[:, :MAX_LOGPROBS]
        values = np.array([log_softmax(row) for row in logits])

        def of_row(place):
            self.rows_of_logits += 1
            return logits[place]

        return RowScores(top_ids, np.take_along_axis(values, top_ids, axis=1), of_row)

    def read(self, table, num_tokens):
        return [self.memory.get(self.slot(table, position)) for position in range(num_tokens)]

    def slot(self, table, position):
        return table[position // self.size] * self.size + position % self.size

    def block(self, block):
        return [self.memory.get(block * self.size + offset) for offset in range(self.size)]

    def fill(self, block, content):
        self.memory.update(enumerate(content, block * self.size))


def digests_of(sequence):
    digests, digest = [], 0
    for token in sequence.token_ids:
        digest = hash((digest, token))
        digests.append(digest)
    return digests


def expected_tokens(sequence, forked_at=None):
    """All tokens of a sequence that ended with "length", as the device makes them up."""
    request = sequence.request
    prompt = request.prompt_token_ids
    total = len(prompt) + request.max_new_tokens
    return [
        *prompt,
        *(
            token_of(request.request_id, sequence.index if forked_at is None or p >= forked_at else 0, p)
            for p in range(len(prompt), total)
        ),
    ]


def decoding(scheduler):
    """The sequences that would decode in the next step."""
    return unfinished(scheduler.queues.decoding)
