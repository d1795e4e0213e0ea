"""Audit logs of engines over a made-up device, in which everything happens that a log can tell of."""

import random

from support.naive_beam_search import MadeUpModel

from paged_jax.audit import AuditLog
from paged_jax.audit_replay import replay

from .made_up_engine import add_beams, add_samples, make_engine

VOCABULARY, EOS = 12, 3
MODEL = MadeUpModel(VOCABULARY, seed=8, spread=0.8)


class DeviceLost(Exception):
    """What the made-up device fails with."""


def audited_engine(log=None, **options):
    """An engine over a small pool whose allocator writes into a log; options: of make_engine."""
    options = {"num_blocks": 15, "block_size": 4, "seqs": 9, "budget": 16, "eos_ids": [EOS]} | options
    engine = make_engine(MODEL, **options)
    log = AuditLog() if log is None else log
    engine.allocator.audit = log
    log.begin(engine.allocator.num_blocks, engine.allocator.block_size)
    return engine


def fails_at(length):
    """A user's function that fails when a beam has so many tokens."""

    def allowed(prompt_index, token_ids):
        return range(VOCABULARY) if len(token_ids) < length else 1 / 0

    return allowed


def add_one(engine, name, rng):
    """A request of any kind, whose prompt often begins like another's."""
    prompt = rng.choice([[1, 2, 4, 5, 6, 7, 8, 9, 1, 2], [7] * 9, []])[: rng.randint(0, 10)]
    prompt = prompt + [rng.randrange(4, VOCABULARY) for _ in range(rng.randint(1, 6))]
    priority, length = rng.choice([0, 0, 0, 1, -1]), rng.randint(1, 20)
    kind = rng.choice(["greedy", "samples", "beams", "plain"])
    if kind == "beams":
        width = rng.randint(1, 4)
        options = {"prefix_allowed_tokens_fn": fails_at(12)} if rng.random() < 0.2 else {}
        add_beams(engine, name, prompt, priority=priority, beam_width=width, max_tokens=length, **options)
    elif kind == "samples":
        add_samples(engine, name, prompt, priority=priority, n=rng.randint(2, 4), max_tokens=length)
    else:
        temperature = 0 if kind == "greedy" else 1
        add_samples(
            engine,
            name,
            prompt,
            priority=priority,
            temperature=temperature,
            max_tokens=length,
            ignore_eos=True,
        )


def play(engine, seed, count=25, *, fail_at=(), abort=0.05, until=None):
    """Requests come in bursts, some are taken back, steps fail; stops before step `until`, if it is given."""
    rng = random.Random(seed)
    engine.runner.fail = {at: (DeviceLost(), rng.choice(["before", "after"])) for at in fail_at}
    arrived = 0
    while arrived < count or engine.has_unfinished:
        for _ in range(rng.choice([0, 0, 1, 1, 4])):
            if arrived < count:
                add_one(engine, f"r{arrived}", rng)
                arrived += 1
        if rng.random() < abort and engine.scheduler.queues.by_id:
            engine.abort(rng.choice(list(engine.scheduler.queues.by_id)))
        if until is not None and engine.allocator.audit.step == until:
            return engine
        try:
            engine.step()
        except DeviceLost:
            assert fail_at
    return engine


def kinds(report):
    return {finding.kind for finding in report.findings}


def assert_clean(log):
    report = replay(log)
    assert not report.findings, "\n".join(map(str, report.findings[:3]))
    return report
