"""An engine over the made-up device and a made-up language model: what tests of samples and beams drive."""

from collections import Counter

from paged_jax import BeamSearchParams, SamplingParams
from paged_jax.engine import Engine

from .scheduling import Device, check, check_all_free, make_scheduler


class Pieces:
    """A tokenizer: token i is pieces[i]; tokens beyond are special and give no text."""

    def __init__(self, pieces=tuple("abcdefghijklmnopqrstuvwxyz")):
        self.pieces = pieces

    def encode(self, text):
        return [self.pieces.index(char) for char in text]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(self.pieces[token] for token in ids if token < len(self.pieces))


class DeviceRunner:
    """A Device as the engine drives it; checks and keeps every schedule.

    amid: called in each step, when the device has done its part. fail: {number of a step, counted from 1:
    (error, "before" the device has done its part or "after" that)}.
    """

    weight_bytes, block_bytes = 0, 100

    def __init__(self, scheduler, model):
        self.scheduler, self.device = scheduler, Device(scheduler, model)
        self.schedules, self.fail, self.amid = [], {}, lambda: None

    def execute(self, schedule):
        check(self.scheduler, schedule)
        self.schedules.append(schedule)
        error, when = self.fail.get(len(self.schedules), (None, None))
        if when == "before":
            self.device.fail()
            raise error
        sampled = self.device.execute(schedule)
        self.amid()
        if when == "after":
            self.device.fail()
            raise error
        return sampled

    def close(self):
        pass


def make_engine(model, *, max_model_len=10_000, eos_ids=(), tokenizer=None, **options):
    """options: of make_scheduler."""
    scheduler = make_scheduler(**{"num_blocks": 400, "seqs": 40} | options)
    return Engine(
        DeviceRunner(scheduler, model),
        scheduler,
        tokenizer or Pieces(),
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        eos_ids=eos_ids,
        seed=1,
    )


def add(engine, name, prompt, params, **options):
    """Queue a request with a prompt of token ids."""
    request = engine.make_request(name, {"prompt_token_ids": list(prompt)}, params, **options)
    engine.add(request)
    return request


def add_beams(engine, name, prompt, *, priority=0, **params):
    return add(engine, name, prompt, BeamSearchParams(**params), priority=priority)


def add_samples(engine, name, prompt, *, priority=0, streams=False, **params):
    return add(engine, name, prompt, SamplingParams(**params), priority=priority, streams=streams)


def step(engine):
    outputs = engine.step()
    check(engine.scheduler)
    return outputs


def run(engine):
    """The last output of each request, by id; the books are checked after every step."""
    outputs, steps = {}, 0
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in step(engine)}
        steps += 1
        assert steps < 3000
    check_all_free(engine.scheduler)
    assert not engine._texts
    return outputs


def answers(output):
    """All that must be the same in company, after a set-back and after a failure."""
    return [
        (one.index, one.token_ids, one.text, one.finish_reason, one.stop_reason, one.score)
        for one in output.outputs
    ]


def set_back_in_next_step(engine, request):
    """Have the next step begin by setting a running request back, as if blocks were lacking."""
    scheduler = engine.scheduler
    decode = scheduler._decode

    def set_back_first(schedule):
        scheduler._decode = decode
        scheduler._yield_blocks([None, request], schedule)
        decode(schedule)

    scheduler._decode = set_back_first


def sharing(request):
    """Which blocks a request's sequences share, whatever these are called: numbers in order of first use."""
    numbers = {}
    return [[numbers.setdefault(block, len(numbers)) for block in s.table.blocks] for s in request.sequences]


def num_blocks_held(request):
    return len({block for sequence in request.sequences for block in sequence.table.blocks})


class CopyCounts:
    """How many blocks the next step must copy, told from the tables as they stand.

    Of the holders of a partly filled last block all but one copy it if all of them go on, and all of those
    that go on if somebody else keeps it.
    """

    def __init__(self, scheduler):
        self.blocks, self.holders = {}, Counter()
        for request in scheduler.queues.by_id.values():
            for place, sequence in enumerate(request.sequences):
                table, where = (sequence.table.blocks, sequence.table.num_tokens), "device"
                if request.swapped is not None:
                    table, where = request.swapped.tables[place], "host"
                self._note(sequence, *table, where, scheduler.allocator.block_size)
        for table in scheduler.outsiders:
            self._note(table, table.blocks, table.num_tokens, "device", scheduler.allocator.block_size)

    def _note(self, holder, blocks, num_tokens, where, block_size):
        if num_tokens % block_size:
            self.blocks[holder] = where, blocks[-1]
            self.holders[where, blocks[-1]] += 1

    def expected(self, schedule):
        """Of the step that was then scheduled."""
        holders = self.holders.copy()
        for request in schedule.preempted:
            holders.subtract(self.blocks[s] for s in request.sequences if s in self.blocks)
        writers = Counter(self.blocks[s] for s in schedule.decode if s in self.blocks)
        return sum(n - (n == holders[block]) for block, n in writers.items())


def num_copies(schedule):
    """Copies of blocks that were there, and those that come back from the swap space once more."""
    hosts = [host for host, _ in schedule.swap_in]
    return len(schedule.copies) + len(hosts) - len(set(hosts))
