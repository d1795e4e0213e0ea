"""Requests that begin alike share the blocks of that beginning: keys, hits, and what the cache may offer."""

import pytest

from paged_jax.prefix_cache import KEY_BYTES, block_key, root_key

from .scheduling import (
    add,
    add_group,
    expected_tokens,
    finish,
    finish_step,
    give_blocks_back,
    make_scheduler,
    run_step,
    shape,
    take_blocks,
)
from .test_preemption import set_back

PROMPT = list(range(100, 140))


def cached(length, **options):
    """A scheduler that has run a request of the first `length` tokens of PROMPT to its end."""
    scheduler = make_scheduler(caching=True, block_size=4, **options)
    add(scheduler, "first", PROMPT[:length], max_new_tokens=1)
    finish(scheduler)
    return scheduler


# -- keys --------------------------------------------------------------------------------------------------


def test_a_key_is_128_bits_of_the_tokens_and_of_all_before_them():
    keys = {root_key(""), root_key("salt"), block_key(root_key(""), [1, 2]), block_key(root_key(""), [2, 1])}
    keys |= {block_key(root_key("salt"), [1, 2]), block_key(block_key(root_key(""), [1, 2]), [1, 2])}
    assert len(keys) == 6
    assert {len(key) for key in keys} == {KEY_BYTES} == {16}
    assert block_key(root_key(""), [1, 2]) == block_key(root_key(""), [1, 2])


def test_token_ids_do_not_run_into_each_other():
    assert block_key(b"", [1, 256]) != block_key(b"", [256, 1]) != block_key(b"", [1, 2, 56])


def test_the_same_tokens_after_another_beginning_are_no_hit():
    scheduler = cached(20)
    add(scheduler, "b", [1, *PROMPT[1:20]], max_new_tokens=1)
    assert shape(run_step(scheduler)) == ({"b": 19}, "b")


def test_a_salt_keeps_requests_apart_and_equal_salts_share():
    scheduler = make_scheduler(caching=True, block_size=4)
    for salt, computed in (("x", 19), ("y", 19), ("", 19), ("x", 3), ("", 3)):
        add(scheduler, "a", PROMPT[:20], max_new_tokens=1, salt=salt)
        assert shape(run_step(scheduler)) == ({"a": computed}, "a")


# -- hits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "hits"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (19, 4), (20, 4), (21, 5), (30, 5)]
)
def test_a_hit_covers_full_blocks_but_never_the_last_token(length, hits):
    scheduler = cached(21)
    sequence = add(scheduler, "b", PROMPT[:length], max_new_tokens=1)
    schedule = run_step(scheduler)
    to_prefill = length - 1 - 4 * hits
    assert shape(schedule) == ({"b": to_prefill} if to_prefill else {}, "b")
    assert sequence.request.metrics.num_cached_tokens == 4 * hits
    assert (scheduler.prefix_cache.queried_tokens, scheduler.prefix_cache.hit_tokens) == (
        21 + length,
        4 * hits,
    )


def test_a_full_hit_goes_straight_to_decode():
    scheduler = cached(21)
    add(scheduler, "b", PROMPT[:21], max_new_tokens=1)
    assert shape(run_step(scheduler)) == ({}, "b")


def test_running_requests_share_the_very_blocks():
    scheduler = make_scheduler(caching=True, block_size=4)
    a = add(scheduler, "a", PROMPT[:21], max_new_tokens=9)
    run_step(scheduler)
    b = add(scheduler, "b", PROMPT[:14], max_new_tokens=9)
    run_step(scheduler)
    assert b.table.blocks[:3] == a.table.blocks[:3]
    assert b.table.blocks[3] != a.table.blocks[3]
    assert scheduler.allocator.num_shared_blocks == 3
    finish(scheduler)
    assert [a.token_ids, b.token_ids] == [expected_tokens(a), expected_tokens(b)]


def test_a_block_is_found_only_when_the_step_that_writes_it_has_ended():
    scheduler = make_scheduler(caching=True, block_size=4)
    a = add(scheduler, "a", PROMPT[:21], max_new_tokens=2)
    schedule = scheduler.schedule()
    assert shape(schedule) == ({"a": 20}, "a")
    assert scheduler.prefix_cache.match(a) == []
    finish_step(scheduler, schedule, scheduler.device.execute(schedule))
    assert scheduler.prefix_cache.match(a) == a.table.blocks[:5]


def test_a_newcomer_waits_for_a_beginning_that_is_just_being_computed():
    """Many prompts after one beginning, all at once: it is computed once."""
    scheduler = make_scheduler(caching=True, block_size=4, budget=8)
    add(scheduler, "a", PROMPT[:17])
    add(scheduler, "b", [*PROMPT[:12], 1, 2, 3])
    add(scheduler, "c", [*PROMPT[:12], 4, 5, 6])
    assert shape(run_step(scheduler)) == ({"a": 8}, "")
    assert shape(run_step(scheduler)) == ({"a": 8}, "a")
    assert shape(run_step(scheduler)) == ({"b": 2, "c": 2}, "abc")
    assert scheduler.prefix_cache.hit_tokens == 24
    finish(scheduler)


def test_a_newcomer_does_not_wait_for_another_salt_or_a_block_that_is_not_full():
    scheduler = make_scheduler(caching=True, block_size=4)
    add(scheduler, "a", PROMPT[:8])
    add(scheduler, "b", PROMPT[:9], salt="x")
    add(scheduler, "c", PROMPT[:3])
    assert shape(run_step(scheduler)) == ({"a": 7, "b": 8, "c": 2}, "abc")


def test_an_aborted_requests_step_offers_nothing():
    scheduler = make_scheduler(caching=True, block_size=4)
    add(scheduler, "a", PROMPT[:21], max_new_tokens=2)
    schedule = scheduler.schedule()
    sampled = scheduler.device.execute(schedule)
    scheduler.abort("a")
    finish_step(scheduler, schedule, sampled)
    assert scheduler.allocator.num_cached_blocks == 0


def test_generated_tokens_are_found_again_the_block_that_the_last_one_filled_too():
    scheduler = make_scheduler(caching=True, block_size=4)
    a = add(scheduler, "a", PROMPT[:6], max_new_tokens=7)
    finish(scheduler)
    assert len(a.token_ids) == 13
    add(scheduler, "b", [*a.token_ids, 1], max_new_tokens=1)
    assert shape(run_step(scheduler)) == ({"b": 1}, "b")


def test_what_a_long_prompts_pieces_wrote_is_found_while_it_goes_on():
    scheduler = make_scheduler(caching=True, block_size=4, budget=8)
    add(scheduler, "a", PROMPT[:33], max_new_tokens=1)
    run_step(scheduler)
    run_step(scheduler)
    assert len(scheduler.prefix_cache.match(scheduler.running[0].sequences[0])) == 4


def test_the_cache_can_be_off():
    scheduler = make_scheduler(block_size=4)
    add(scheduler, "first", PROMPT[:21], max_new_tokens=1)
    finish(scheduler)
    add(scheduler, "b", PROMPT[:21], max_new_tokens=1)
    assert shape(run_step(scheduler)) == ({"b": 20}, "b")
    assert scheduler.allocator.num_cached_blocks == 0


# -- free blocks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("others", "enters"), [(1, True), (2, False)])
def test_a_cached_block_that_is_revived_is_free_no_more(others, enters):
    """Of 10 blocks a holds 1 and 5 are cached; b hits 5, needs 1, and 2 must stay."""
    scheduler = cached(21, num_blocks=11)
    add(scheduler, "a", [1, 2], max_new_tokens=3)
    run_step(scheduler)
    take_blocks(scheduler, others)
    b = add(scheduler, "b", PROMPT[:21], max_new_tokens=1)
    run_step(scheduler)
    assert b.is_finished == enters
    give_blocks_back(scheduler)
    finish(scheduler)


@pytest.mark.parametrize(("others", "enters"), [(4, True), (5, False)])
def test_a_block_that_others_hold_costs_nothing(others, enters):
    """Of 13 blocks a holds 6; b shares 5 of them, needs 1, and 2 must stay."""
    scheduler = make_scheduler(num_blocks=14, caching=True, block_size=4)
    add(scheduler, "a", PROMPT[:21], max_new_tokens=3)
    run_step(scheduler)
    take_blocks(scheduler, others)
    b = add(scheduler, "b", PROMPT[:21], max_new_tokens=1)
    run_step(scheduler)
    assert b.is_finished == enters
    give_blocks_back(scheduler)
    finish(scheduler)


def test_the_tail_of_the_prefix_used_longest_ago_goes_first():
    scheduler = make_scheduler(num_blocks=11, caching=True, block_size=4)
    for name, start in (("a", 0), ("b", 100), ("a again", 0)):
        add(scheduler, name, range(start, start + 17), max_new_tokens=1)
        finish(scheduler)
    assert scheduler.allocator.num_cached_blocks == 8
    add(scheduler, "c", range(200, 213), max_new_tokens=1)  # 4 blocks: 2 that cache nothing, then b's tail
    finish(scheduler)
    for start, left in ((0, 4), (100, 2)):
        sequence = add(scheduler, "d", range(start, start + 17), max_new_tokens=1)
        assert len(scheduler.prefix_cache.match(sequence)) == left
        scheduler.abort("d")


def test_what_was_set_back_finds_its_own_blocks_again():
    scheduler = make_scheduler(caching=True, block_size=4)
    sequence = add(scheduler, "a", PROMPT[:9], max_new_tokens=9)
    for _ in range(5):
        run_step(scheduler)
    queried = scheduler.prefix_cache.queried_tokens
    set_back(scheduler, sequence.request)
    assert shape(run_step(scheduler)) == ({"a": 1}, "a")  # of 13 tokens, 12 were in full blocks
    assert sequence.request.metrics.num_cached_tokens == 0  # of the prompt, at the first admission
    assert scheduler.prefix_cache.queried_tokens - queried == 14
    finish(scheduler)
    assert sequence.token_ids == expected_tokens(sequence)


def test_siblings_offer_what_they_wrote_each_for_itself():
    scheduler = make_scheduler(caching=True, block_size=4)
    group = add_group(scheduler, "a", PROMPT[:6], 2, max_new_tokens=7)
    finish(scheduler)
    for place, sequence in enumerate(group):
        again = add(scheduler, f"b{place}", [*sequence.token_ids, 1], max_new_tokens=1)
        assert len(scheduler.prefix_cache.match(again)) == 3


def test_what_came_back_from_the_swap_space_is_offered_again():
    scheduler = make_scheduler(caching=True, block_size=4, mode="swap")
    sequence = add(scheduler, "a", PROMPT[:9], max_new_tokens=5)
    run_step(scheduler)
    set_back(scheduler, sequence.request)
    scheduler.allocator.forget_cached()
    finish(scheduler)
    again = add(scheduler, "b", PROMPT[:9])
    assert len(scheduler.prefix_cache.match(again)) == 2


# -- fixed chunks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "start"), [(8, 0), (9, 8), (16, 8), (17, 16), (24, 16)])
def test_hits_are_whole_chunks(length, start):
    scheduler = cached(40, chunk=8, budget=8, prefill_seqs=1)
    sequence = add(scheduler, "b", PROMPT[:length], max_new_tokens=1)
    run_step(scheduler)
    assert sequence.request.metrics.num_cached_tokens == start


def test_generated_tokens_are_never_offered_not_even_when_they_are_computed_by_a_prefill():
    scheduler = make_scheduler(caching=True, block_size=4, chunk=8, budget=8, prefill_seqs=1)
    sequence = add(scheduler, "a", PROMPT[:9], max_new_tokens=12)
    for _ in range(10):
        run_step(scheduler)
    set_back(scheduler, sequence.request)
    finish(scheduler)
    again = add(scheduler, "b", [*sequence.token_ids, 1])
    assert len(scheduler.prefix_cache.match(again)) == 2


def test_the_last_token_of_a_prompt_is_computed_by_a_decode_step_and_so_not_offered():
    scheduler = cached(8, chunk=4, budget=4, prefill_seqs=1)
    assert len(scheduler.prefix_cache.match(add(scheduler, "b", PROMPT[:20]))) == 1
