"""Writes, copies, hand-outs and swaps that are wrong, put into the log of a run in which none was."""

import pytest

from paged_jax.audit_record import GIVES, TAKES

from .audit_faults import SIZE, find, found_in, places, request_of

# -- writes and copies -------------------------------------------------------------------------------------


def test_a_write_into_a_shared_block_names_writer_and_holder():
    def shared_last(record, state):
        filled = state.block(record).filled
        return record.action == "incref" and record.ref_cnt_after > 1 and 0 < filled < SIZE

    for header, records, index, state in places(shared_last):
        shared = records[index]
        filled, count = state.block(shared).filled, shared.ref_cnt_after
        write = shared._replace(action="write", ref_cnt_before=count, reason="", start=filled, end=filled + 1)
        finding = find(
            header,
            [*records[: index + 1], write, *records[index + 1 :]],
            "write into a shared block",
            block=shared.block,
            request=request_of(state, shared),
            step=shared.step,
        )
        assert finding.second == write
        assert finding.first.action in TAKES
        assert finding.first.owner != write.owner


def test_a_copy_that_was_left_out_is_a_write_into_a_shared_block():
    """The allocation, the copy and its decref go; what is written then goes into the source."""
    for header, records, index, state in places(lambda r, _: r.action == "copy"):
        copy = records[index]
        gone = {
            r
            for r in records[index - 4 : index + 3]
            if (r.action == "allocate" and r.block == copy.other)
            or r == copy
            or (r.block == copy.block and r.reason == "copy-on-write")
        }
        rest = [r for r in records[index:] if r not in gone]
        place = next(at for at, r in enumerate(rest) if r.action == "write" and r.block == copy.other)
        count = copy.ref_cnt_before
        write = rest[place]._replace(block=copy.block, ref_cnt_before=count, ref_cnt_after=count)
        rest[place] = write
        records = [r for r in records[:index] if r not in gone] + rest
        finding = find(
            header,
            records,
            "write into a shared block",
            block=copy.block,
            request=request_of(state, copy),
            step=copy.step,
        )
        assert finding.second == write


def test_a_write_into_a_full_block_names_who_filled_it():
    def fills(record, state):
        return record.action == "write" and record.end == SIZE

    for header, records, index, state in places(fills):
        filled = records[index]
        again = filled._replace(start=0, end=1)
        finding = find(
            header,
            [*records[: index + 1], again, *records[index + 1 :]],
            "write into a full block",
            block=filled.block,
            request=request_of(state, filled),
            step=filled.step,
        )
        assert (finding.first, finding.second) == (filled, again)


def test_a_write_that_was_left_out_shows_at_the_next_one():
    def goes_on(record, state):
        return record.action == "write" and record.end < SIZE and record.owner in state.live

    found = 0
    for header, records, index, _ in places(goes_on):
        gone = records[index]
        later = (r for r in records[index + 1 :] if r.owner == gone.owner or r.block == gone.block)
        if next(later).action == "write":  # and not the request's end
            records = records[:index] + records[index + 1 :]
            find(header, records, "write out of place", block=gone.block, request=gone.owner)
            found += 1
    assert found > 3


def test_a_write_past_the_end_of_a_block_is_found():
    for header, records, index, state in places(lambda r, _: r.action == "write" and r.end == SIZE):
        write = records[index]._replace(end=SIZE + 1)
        records = [*records[:index], write, *records[index + 1 :]]
        find(header, records, "write out of place", block=write.block, request=request_of(state, write))


def test_a_copy_that_its_only_holder_makes_is_without_need():
    def alone(record, state):
        return record.action == "write" and record.end < SIZE and len(state.block(record).takers) == 1

    for header, records, index, state in places(alone):
        write = records[index]
        free = next(
            b for b in range(1, header.num_blocks) if b not in state.blocks or not state.blocks[b].takers
        )
        into = write._replace(action="allocate", block=free, ref_cnt_before=0, start=None, end=None)
        copy = write._replace(action="copy", other=free, start=None, end=None)
        finding = find(
            header,
            [*records[: index + 1], into, copy, *records[index + 1 :]],
            "copy without need",
            block=write.block,
            request=request_of(state, write),
            step=write.step,
        )
        assert finding.second == copy
        assert finding.first == state.block(write).takers[0]


def test_a_copy_of_a_full_block_is_without_need():
    """The write before it filled the block, says the log now."""
    found = 0
    for header, records, index, state in places(lambda r, _: r.action == "copy"):
        copy, write = records[index], state.block(records[index]).written
        if write is not None:
            full = write._replace(end=SIZE)
            records = [full if record == write else record for record in records]
            finding = find(header, records, "copy without need", block=copy.block, step=copy.step)
            assert (finding.first, finding.second.action) == (full, "copy")
            found += 1
    assert found > 3


# -- counts and hand-outs ----------------------------------------------------------------------------------


def test_a_count_that_disagrees_is_the_only_finding_and_names_what_changed_it_last():
    def counted(record, state):
        return record.action in TAKES | GIVES | {"write", "copy", "register"}

    for header, records, index, state in places(counted):
        told = records[index]
        lie = told._replace(ref_cnt_before=told.ref_cnt_before + 1, ref_cnt_after=told.ref_cnt_after + 1)
        changed = state.block(told).changed
        (finding, *_) = found_in(header, [*records[:index], lie, *records[index + 1 :]])
        assert (finding.kind, finding.block, finding.request, finding.step) == (
            "ref_cnt disagrees",
            told.block,
            request_of(state, told),
            told.step,
        )
        assert (finding.first, finding.second) == (changed, lie)


def test_a_block_that_is_handed_out_while_it_is_held_names_the_holder():
    for header, records, index, state in places(lambda r, _: r.action == "write"):
        write = records[index]
        again = write._replace(
            action="allocate", owner="late", ref_cnt_before=0, ref_cnt_after=1, start=None, end=None
        )
        taker = state.block(write).takers[-1]
        (finding, *_) = found_in(header, [*records[: index + 1], again, *records[index + 1 :]])
        assert (finding.kind, finding.block, finding.request) == ("handed out twice", write.block, "late")
        assert (finding.first, finding.second) == (taker, again)


@pytest.mark.parametrize("block", [0, -1, 10**6])
def test_a_block_that_the_pool_does_not_have_is_found(block):
    for header, records, index, _ in places(lambda r, _: r.action == "allocate"):
        wrong = records[index]._replace(block=block)
        (finding, *_) = found_in(header, [*records[:index], wrong, *records[index + 1 :]])
        assert (finding.kind, finding.block, finding.second) == ("no such block", block, wrong)


# -- swaps -------------------------------------------------------------------------------------------------


def test_a_block_that_is_reused_before_its_swap_out_was_fetched_names_both():
    found = 0
    for header, records, index, state in places(lambda r, _: r.action == "fetched"):
        gone = records[index]
        swap_out = state.block(gone).pending
        reused = next((r for r in records[index:] if r.action == "allocate" and r.block == gone.block), None)
        if reused is not None and reused.step > gone.step:
            finding = find(
                header,
                records[:index] + records[index + 1 :],
                "reused during its swap-out",
                block=gone.block,
                request=reused.owner.split("/")[0],
                step=reused.step,
            )
            assert (finding.first, finding.second) == (swap_out, reused)
            found += 1
    assert found


def test_bytes_that_are_brought_back_before_they_arrived_are_found():
    for header, records, index, _ in places(lambda r, _: r.action == "swap-in"):
        back = records[index]
        rest = [r for r in records if not (r.action == "fetched" and r.other == back.other)]
        finding = find(header, rest, "swapped too early", block=back.block, request=back.owner)
        assert (finding.first.action, finding.first.other) == ("swap-out", back.other)


def test_a_block_that_is_swapped_out_after_its_step_has_written_into_it_is_found():
    for header, records, index, state in places(lambda r, _: r.action == "write"):
        write = records[index]
        swap = write._replace(action="swap-out", start=None, end=None, other=99)
        finding = find(
            header,
            [*records[: index + 1], swap, *records[index + 1 :]],
            "swapped too early",
            block=write.block,
            request=request_of(state, write),
        )
        assert (finding.first, finding.second) == (write, swap)
