"""Recorded runs in which nothing is wrong, the places in them where a fault can be put, and finding it."""

import random
from functools import cache

from paged_jax.audit import AuditLog
from paged_jax.audit_record import GIVES
from paged_jax.audit_replay import header_of, replay
from paged_jax.audit_state import PoolState

from .audit_logs import audited_engine, play

SIZE = 4
MOST_PLACES = 40


@cache
def recorded():
    """Three runs in which nothing fails: (header, records) of each."""
    runs = []
    for mode, seed, caching in (("swap", 11, True), ("recompute", 12, True), ("swap", 13, False)):
        log = AuditLog()
        play(audited_engine(log, mode=mode, caching=caching), seed, count=40)
        runs.append((header_of(log), list(log)))
    return runs


def places(is_place):
    """Some of the places in the runs where a record is as wanted: (header, records, index, state there)."""
    found = []
    for header, records in recorded():
        state = PoolState(header)
        for index, record in enumerate(records):
            if is_place(record, state):
                found.append((header, records, index))
            state.apply(record)
    assert len(found) >= 3, "the runs lack what this fault needs"
    rng = random.Random(0)
    for header, records, index in rng.sample(found, min(len(found), MOST_PLACES)):
        state = PoolState(header)
        for record in records[:index]:
            state.apply(record)
        yield header, records, index, state


def found_in(header, records):
    return replay(records, header).findings


def find(header, records, kind, *, block, request=None, step=None):
    """The one finding of this kind about this block, request and step."""
    report = replay(records, header)
    about = [f for f in report.findings if (f.kind, f.block) == (kind, block)]
    about = [f for f in about if request is None or f.request == request]
    about = [f for f in about if step is None or f.step == step]
    assert about, f"{kind} of block {block} by {request}: found only {report.findings[:3]}"
    return about[0]


def gives(record, state):
    return record.action in GIVES


def request_of(state, record):
    return state.requests_of(record.owner)[0]


def holds_another(state, record):
    """Whether a record's request has a further count of the block, a sibling's."""
    takers = state.block(record).takers
    return sum(state.are_related(taker.owner, record.owner) for taker in takers) > 1


def given_back(record, **changes):
    """One more count is given back after a record."""
    count = record.ref_cnt_after
    action = "decref" if count > 1 else "free"
    return record._replace(action=action, ref_cnt_before=count, ref_cnt_after=count - 1, **changes)
