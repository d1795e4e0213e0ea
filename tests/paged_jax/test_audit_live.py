"""One fault in the allocator or the tables of a running engine: its log names the culprit.

The device computes nothing, so that nothing but the books can be at fault.
"""

import pytest

from paged_jax import SamplingParams
from paged_jax import scheduler as scheduling
from paged_jax.audit import AuditLog
from paged_jax.audit_replay import replay
from paged_jax.block_table import BlockTable
from paged_jax.errors import PagedJaxError
from paged_jax.schedule import Sampled

from .audit_broken import BROKEN_POOLS, BROKEN_TABLES, FindsEvictedBlocks, WritesAndTellsNobody, did
from .audit_logs import assert_clean, audited_engine, play
from .conftest import load

GREEDY = SamplingParams(temperature=0, max_tokens=9)


class BlindRunner:
    """Computes nothing: whatever the books say is fine."""

    weight_bytes, block_bytes = 0, 100

    def __init__(self, device):
        self.device, self.fail = device, {}

    def execute(self, schedule):
        device = self.device
        tokens = [device.next_token(sequence) for sequence in schedule.decode]
        searching = any(sequence.request.beams is not None for sequence in schedule.decode)
        return Sampled(tokens, None, device.scores(schedule.decode) if searching else None)


# -- runs --------------------------------------------------------------------------------------------------


def blind_engine(log, **options):
    did.clear()
    FindsEvictedBlocks.memory.clear()
    engine = audited_engine(log, caching=True, num_blocks=30, **options)
    engine.runner = BlindRunner(engine.runner.device)
    return engine


def caught(engine, seed):
    """Run up to the first error that a fault leads to; the error, if there is one."""
    try:
        play(engine, seed, count=40)
    except (PagedJaxError, AssertionError, IndexError, KeyError) as error:
        return error
    return None


def faults(kind, patch):
    """The findings of the runs in which a fault was made, each with its owner."""
    found = 0
    for seed in range(12):
        log = AuditLog()
        engine = blind_engine(log)
        patch(engine)
        caught(engine, seed)
        if not did:
            assert_clean(log)
            continue
        report, (owner, block) = replay(log), did[0]
        about = [f for f in report.findings if (f.kind, f.block) == (kind, block)]
        assert about, (owner, block, report.findings[:3])
        assert about[0].first is not None
        assert about[0].first.block == block
        found += 1
        yield about[0], str(owner)
    assert found >= 3


def test_the_real_classes_make_no_findings():
    for seed in range(12):
        log = AuditLog()
        assert caught(blind_engine(log), seed) is None
        assert_clean(log)


@pytest.mark.parametrize(
    ("broken", "kind"), BROKEN_TABLES, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_broken_table_is_found_in_the_log_and_its_owner_named(broken, kind, monkeypatch):
    monkeypatch.setattr(scheduling, "BlockTable", broken)
    for finding, owner in faults(kind, lambda engine: None):
        assert finding.request == owner.split("/")[0]


@pytest.mark.parametrize(("broken", "kind"), BROKEN_POOLS, ids=lambda value: getattr(value, "__name__", None))
def test_a_broken_allocator_is_found_in_the_log_and_the_block_named(broken, kind):
    def patch(engine):
        engine.allocator.__class__ = broken

    for finding, owner in faults(kind, patch):
        if kind != "ref_cnt disagrees":  # which comes out when somebody next counts
            assert finding.request == owner.split("/")[0]


def test_a_table_that_writes_and_tells_nobody_is_found_by_the_gap(monkeypatch):
    monkeypatch.setattr(scheduling, "BlockTable", WritesAndTellsNobody)
    found = 0
    for seed in range(12):
        log = AuditLog()
        caught(blind_engine(log), seed)
        gaps = [f for f in replay(log).findings if f.kind == "write out of place"]
        assert {f.request for f in gaps} <= {did[0][0]} if did else not gaps
        found += bool(gaps)
    assert found >= 3


# -- swaps -------------------------------------------------------------------------------------------------


class FetchesLate(AuditLog):
    """Of an engine that takes its next step before the bytes of a swap-out have arrived."""

    late = ()

    def fetched(self, swap_out, ref_cnt):
        super().fetched(self.late, ref_cnt)
        self.late = list(swap_out)


def test_blocks_that_are_reused_while_a_swap_out_still_reads_them_are_found():
    found = []
    for seed in range(12):
        log = FetchesLate()
        play(audited_engine(log, mode="swap"), seed, count=40)
        found += [f for f in replay(log).findings if f.kind == "reused during its swap-out"]
    assert len(found) > 3
    for finding in found:
        assert (finding.first.action, finding.first.block) == ("swap-out", finding.second.block)
        assert finding.second.step == finding.step == finding.first.step + 1


def test_a_request_that_is_swapped_out_after_the_step_has_appended_to_it_is_found():
    log = AuditLog()
    engine = play(audited_engine(log, mode="swap", num_blocks=30), 5, count=40, until=9)
    engine.runner = BlindRunner(engine.runner.device)
    scheduler = engine.scheduler
    decode, request = scheduler._decode, scheduler.queues.decoding[-1]

    def set_back_last(schedule):
        decode(schedule)
        scheduler._yield_blocks([None, request], schedule)

    scheduler._decode = set_back_last
    engine.step()
    (finding, *_) = replay(log).findings
    assert (finding.kind, finding.request, finding.step) == ("swapped too early", request.request_id, 10)
    assert (finding.first.action, finding.second.action) == ("write", "swap-out")


# -- a real model ------------------------------------------------------------------------------------------


def test_a_leak_in_a_real_models_run_names_request_and_block(tiny_path, monkeypatch):
    class Leaks(BlockTable):
        def release(self, reason="release"):
            if self.owner == "llm-1" and self.blocks:
                did.append((self.owner, self.blocks.pop()))
            super().release(reason)

    did.clear()
    monkeypatch.setattr(scheduling, "BlockTable", Leaks)
    log = AuditLog()
    with load(tiny_path, kv_audit=log) as llm:
        llm.generate(["Hello", "World, how are you", "Yes"], GREEDY, use_tqdm=False)
        (finding,) = replay(log).findings
    assert (finding.kind, finding.request, finding.block) == ("leak", *did[0])
    assert (finding.first.action, finding.second.action) == ("allocate", "end")


def test_a_real_models_run_has_no_findings(tiny_path):
    log = AuditLog()
    with load(tiny_path, kv_audit=log) as llm:
        outputs = llm.generate(["Hello", "Hello", "World, how are you", "Yes"], GREEDY, use_tqdm=False)
    report = assert_clean(log)
    assert report.num_arrived == report.num_ended == len(outputs)
    assert report.running == {}
