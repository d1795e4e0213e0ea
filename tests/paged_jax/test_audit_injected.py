"""One fault put into the log of a run that had none: the replay finds it, and names who, where and when.

Here it is counts that are taken and given back; test_audit_injected_writes has what is done to the content.
"""

import pytest

from paged_jax.audit_record import TAKES

from .audit_faults import find, found_in, given_back, gives, holds_another, places, recorded, request_of


def test_the_runs_have_no_findings_as_they_are():
    for header, records in recorded():
        assert found_in(header, records) == []


# -- leaks, double frees, uses after a free ----------------------------------------------------------------


def test_a_count_that_is_never_given_back_is_a_leak_of_who_took_it():
    for header, records, index, state in places(gives):
        gone = records[index]
        taker = state.block(gone).takers[state.count_of(state.block(gone), gone.owner)]
        later = [r for r in records[index + 1 :] if r.block != gone.block]  # it is never free again
        finding = find(
            header, records[:index] + later, "leak", block=gone.block, request=request_of(state, gone)
        )
        assert finding.second.action == "end"
        assert finding.step == finding.second.step
        assert state.are_related(finding.first.owner, taker.owner)
        assert finding.first.action in TAKES


def test_a_copy_whose_source_keeps_its_count_is_a_leak():
    for header, records, index, state in places(lambda r, _: r.reason == "copy-on-write"):
        gone = records[index]
        later = [r for r in records[index + 1 :] if r.block != gone.block]
        find(header, records[:index] + later, "leak", block=gone.block, request=request_of(state, gone))


def test_a_count_given_back_twice_names_who_did_it_first():
    for header, records, index, state in places(gives):
        first = records[index]
        again = given_back(first)
        finding = find(
            header,
            [*records[: index + 1], again, *records[index + 1 :]],
            "double free",
            block=first.block,
            request=request_of(state, first),
            step=first.step,
        )
        assert (finding.first, finding.second) == (first, again)


def test_a_count_that_somebody_gives_back_who_never_had_it_names_who_has_it():
    for header, records, index, _ in places(lambda r, _: r.action in TAKES):
        taken = records[index]
        thief = given_back(taken, owner="thief")
        (finding, *_) = found_in(header, [*records[: index + 1], thief, *records[index + 1 :]])
        assert (finding.kind, finding.block, finding.request) == ("double free", taken.block, "thief")
        assert (finding.first, finding.second) == (taken, thief)


def test_a_free_that_was_refused_is_found_too():
    for header, records, index, state in places(lambda r, _: r.action == "free"):
        first = records[index]
        again = first._replace(action="refused", ref_cnt_before=0, reason="double free")
        records = [*records[: index + 1], again, *records[index + 1 :]]
        (finding,) = found_in(header, records)
        assert (finding.kind, finding.block, finding.request) == (
            "double free",
            first.block,
            request_of(state, first),
        )
        assert (finding.first, finding.second) == (first, again)


@pytest.mark.parametrize("action", ["write", "swap-out", "swap-in", "adopt"])
def test_a_use_after_the_last_count_was_given_back_names_both(action):
    def gone(record, state):
        return gives(record, state) and not holds_another(state, record)

    for header, records, index, state in places(gone):
        gave = records[index]
        count = gave.ref_cnt_after
        use = gave._replace(action=action, ref_cnt_before=count, start=0, end=1, other=77, reason="")
        finding = find(
            header,
            [*records[: index + 1], use, *records[index + 1 :]],
            "use after free",
            block=gave.block,
            request=request_of(state, gave),
            step=gave.step,
        )
        assert (finding.first, finding.second) == (gave, use)


@pytest.mark.parametrize("action", ["incref", "hit"])
def test_a_free_block_that_is_shared_is_found(action):
    def free_for_good(record, state):
        return record.action == "free" and not state.block(record).registered

    for header, records, index, _ in places(free_for_good):
        gave = records[index]
        use = gave._replace(action=action, owner="late", ref_cnt_before=0, ref_cnt_after=1, reason="")
        finding = find(
            header,
            [*records[: index + 1], use, *records[index + 1 :]],
            "use after free",
            block=gave.block,
            request="late",
        )
        assert (finding.first, finding.second) == (gave, use)


def test_a_hit_on_a_block_whose_prefix_was_evicted_is_found():
    for header, records, index, _ in places(lambda r, _: r.action == "evict"):
        allocated = next(r for r in records[index + 1 :] if r.block == records[index].block)
        at = records.index(allocated) + 1
        hit = allocated._replace(
            action="hit", owner="late", ref_cnt_before=1, ref_cnt_after=2, reason="prefix hit"
        )
        find(header, [*records[:at], hit, *records[at:]], "use after free", block=hit.block, request="late")
