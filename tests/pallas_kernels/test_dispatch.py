"""Which implementation runs: from static shapes, one argument and the platform that is lowered for."""

import jax
import jax.numpy as jnp
import pytest
from support.paged_cache import ops_of, paged

import pallas_kernels as pk
from pallas_kernels import KVPool, supports_triton
from pallas_kernels.tuning import decode_settings, prefill_settings

KERNEL_CALL = "xla.gpu.triton"


def array(shape, dtype="int32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def abstract(head_dim=64, dtype="bfloat16", q_dtype="bfloat16", heads=(8, 2), num_blocks=9, block_size=16):
    """(q, pool, block_tables, seq_lens) of four sequences, shapes only."""
    blocks = array((num_blocks, heads[1], block_size, head_dim), dtype)
    q = array((4, heads[0], head_dim), q_dtype)
    return q, KVPool(blocks, blocks), array((4, 8)), array((4,))


def lowered(op, args, platform):
    return op.trace(*args).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"head_dim": 256}, None),
        ({"head_dim": 272}, "head_dim 272 is over 256"),
        ({"heads": (65, 1)}, "65 query heads a kv head are over 64 in bfloat16"),
        ({"heads": (33, 1), "dtype": "float32"}, "33 query heads a kv head are over 32 in float32"),
        ({"dtype": "float64"}, "pool is float64; the kernels take float32"),
        ({"q_dtype": "float8_e5m2"}, "q is float8_e5m2; single bytes"),
        ({"dtype": "float8_e4m3fn"}, None),
    ],
)
def test_reasons(changes, reason):
    got = supports_triton(*abstract(**changes)[:2])
    assert got is None if reason is None else got.startswith(reason)


BLOCK = 2 * 16 * 128  # elements, with two kv heads


@pytest.mark.parametrize(
    ("dtype", "elements", "supported"),
    [
        ("bfloat16", 2**31 + BLOCK, True),
        ("float32", 2**33, True),
        ("float8_e4m3fn", 2**31, True),
        ("float8_e4m3fn", 2**31 + BLOCK, False),
        ("float8_e4m3fn", 2**32, False),
        ("float8_e5m2", 2**32 + BLOCK, True),
    ],
)
def test_offsets_that_int32_cannot_hold_are_refused(dtype, elements, supported):
    args = abstract(head_dim=128, dtype=dtype, num_blocks=elements // BLOCK)
    assert (supports_triton(*args[:2]) is None) is supported
    if not supported:
        with pytest.raises(ValueError, match=r"between 2 and 4 GiB.*overflow the int32.*fewer blocks"):
            ops_of("triton").decode.trace(*args)
        ops_of("auto").decode.trace(*args)


@pytest.mark.parametrize("implementation", ["auto", "triton"])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_cuda_gets_the_kernel_and_not_the_fallback(implementation, phase):
    """A switch over a constant is left, which XLA folds (scripts/check_gpu_program.py sees to that)."""
    args = abstract() + (() if phase == "decode" else (array((5,)),))
    text = lowered(getattr(ops_of(implementation), phase), args, "cuda")
    assert KERNEL_CALL in text
    assert "stablehlo.while" not in text


@pytest.mark.parametrize("changes", [{"head_dim": 272}, {"heads": (65, 1)}])
def test_auto_takes_xla_where_the_kernels_cannot_run(changes):
    args = abstract(**changes)
    assert KERNEL_CALL not in lowered(ops_of("auto").decode, args, "cuda")
    with pytest.raises(ValueError, match=r"implementation='triton' cannot run: .* 'auto' takes XLA"):
        ops_of("triton").decode.trace(*args)


def test_xla_is_always_xla():
    assert KERNEL_CALL not in lowered(ops_of("xla").decode, abstract(), "cuda")


def test_auto_off_a_gpu_is_xla_and_nothing_else():
    case = paged([5, 40])
    texts = [ops_of(name).decode.lower(*case[:4]).compile().as_text() for name in ("auto", "xla")]
    bodies = [[line.split(", metadata=")[0] for line in text.splitlines()[1:]] for text in texts]
    assert len(bodies[0]) == len(bodies[1])


def test_an_unknown_implementation_raises():
    with pytest.raises(ValueError, match=r"one of \('auto', 'triton', 'xla'\); got 'cuda'"):
        pk.paged_decode_attention(*paged([5])[:4], implementation="cuda")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [1, 64, 80, 96, 128, 160, 256])
def test_there_are_settings_for_every_shape(dtype, head_dim):
    for group in (1, 7, 16, 64 if dtype == "bfloat16" else 32):
        for queries in (1, 4, 10**4):
            chosen = prefill_settings(jnp.dtype(dtype), head_dim, group=group, queries=queries)
            assert chosen.rows >= group
        chosen = decode_settings(jnp.dtype(dtype), head_dim, group=group, programs=8, context=32768, sms=132)
        assert chosen.splits > 8


def test_splits_follow_the_batch_and_the_context():
    def splits(programs, context):
        dtype = jnp.dtype("bfloat16")
        return decode_settings(dtype, 128, group=4, programs=programs, context=context, sms=132).splits

    assert splits(64 * 8, 32768) == 1
    assert splits(8, 32768) == 64
    assert splits(8, 1024) == 4
    assert splits(8, 256) == 1
    assert splits(64, 32768) == 8
