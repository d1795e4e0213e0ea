"""The arithmetic between bytes, tokens and blocks."""

import pytest

from paged_jax.capacity import (
    GIB,
    KVShape,
    blocks_for_bytes,
    blocks_for_tokens,
    check_pool_holds,
    default_kv_bytes,
    format_bytes,
    max_tokens_of_pool,
)
from paged_jax.errors import PoolTooSmall


def test_the_articles_number():
    """Llama-2-7B in 16 bits takes 512 KiB a token: 40 GiB hold 2,560 blocks of 32."""
    kv = KVShape(num_layers=32, num_kv_heads=32, head_dim=128, itemsize=2)
    assert kv.bytes_per_token == 512 * 1024
    assert blocks_for_bytes(40 * GIB, block_size=32, bytes_per_token=kv.bytes_per_token) == 2560


def test_a_block_that_does_not_fit_whole_is_no_block():
    assert [blocks_for_bytes(size, block_size=2, bytes_per_token=10) for size in (0, 19, 20, 39, 40)] == [
        *(0, 0, 1, 1, 2)
    ]


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_tokens_fill_blocks(tokens, blocks):
    assert blocks_for_tokens(tokens, 16) == blocks


def test_the_null_block_holds_nothing():
    assert max_tokens_of_pool(65, 16) == 64 * 16


def test_by_default_a_pool_takes_four_fifths_of_what_weights_and_programs_leave():
    size = default_kv_bytes(
        device_limit=80 * GIB, device_in_use=15 * GIB, largest_temporaries=5 * GIB, free_ram=0
    )
    assert size == 48 * GIB


def test_a_full_device_leaves_nothing_and_never_less():
    assert default_kv_bytes(device_limit=10, device_in_use=9, largest_temporaries=5, free_ram=10**12) == 0


@pytest.mark.parametrize(
    ("free_ram", "expected"), [(64 * GIB, GIB), (4 * GIB, GIB), (2 * GIB, GIB // 2), (0, 0)]
)
def test_where_no_memory_is_reported_it_is_one_gib_or_a_quarter_of_the_free_ram(free_ram, expected):
    size = default_kv_bytes(device_limit=None, device_in_use=0, largest_temporaries=GIB, free_ram=free_ram)
    assert size == expected


def test_a_pool_that_holds_the_longest_sequence_exactly_is_enough():
    check_pool_holds(num_blocks=5, block_size=16, max_model_len=64)


def test_a_pool_one_block_short_says_what_is_missing_and_what_would_fit():
    with pytest.raises(PoolTooSmall) as caught:
        check_pool_holds(num_blocks=5, block_size=16, max_model_len=65)
    for number in ("max_model_len=65", "needs 5 blocks", "the pool has 4", "num_blocks=5", "to 64"):
        assert number in str(caught.value)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (1, 16), (2, 1)])
def test_a_pool_without_room_for_a_prompt_and_an_answer_is_no_pool(num_blocks, block_size):
    with pytest.raises(PoolTooSmall, match=rf"^{num_blocks} blocks of {block_size} tokens.*raise num_blocks"):
        check_pool_holds(num_blocks, block_size, max_model_len=-16)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0.0 MiB"), (3 << 19, "1.5 MiB"), (GIB - 1, "1024.0 MiB"), (5 * GIB // 2, "2.50 GiB")],
)
def test_sizes_are_written_for_people(size, text):
    assert format_bytes(size) == text
