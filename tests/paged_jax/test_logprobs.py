"""What is said of a sampled token, against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.steps import make_sequence

from paged_jax import BlockAllocator
from paged_jax.logprobs import LogprobArrays, token_logprobs, unpack_logprobs, want_logprobs
from paged_jax.sampling_params import MAX_LOGPROBS

run = jax.jit(token_logprobs, static_argnames="capturable")
EITHER = pytest.mark.parametrize("capturable", [False, True])


def log_softmax(values):
    values = np.asarray(values, np.float64)
    peak = values.max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return values - peak - np.log(np.exp(values - peak).sum(axis=-1, keepdims=True))


@EITHER
@pytest.mark.parametrize("vocab_size", [7, 20, 300])
@pytest.mark.parametrize("shift", [0, -1e4, 1e4])
def test_against_the_definition(shift, vocab_size, capturable):
    rng = np.random.default_rng(0)
    values = (rng.normal(size=(16, vocab_size)) * 4).astype(np.float32) + np.float32(shift)
    values[3, ::2] = -np.inf
    tokens = rng.integers(0, vocab_size, 16).astype(np.int32)
    tokens[3] = 1
    found = jax.tree.map(np.asarray, run(values, tokens, capturable=capturable))
    exact = log_softmax(values)
    rows = np.arange(16)
    np.testing.assert_allclose(found.logprob, exact[rows, tokens], rtol=1e-5, atol=2e-3 if shift else 1e-5)
    expected = 1 + (values > values[rows, tokens][:, None]).sum(axis=1)
    np.testing.assert_array_equal(found.rank, expected)
    order = np.argsort(-values, axis=1, kind="stable")[:, :MAX_LOGPROBS]
    real = np.isfinite(np.take_along_axis(values, order, 1))
    np.testing.assert_array_equal(found.top_ids[real], order[real])
    np.testing.assert_allclose(
        found.top, np.take_along_axis(exact, order, 1), rtol=1e-5, atol=2e-3 if shift else 1e-5
    )


@EITHER
def test_equals_share_a_rank_and_stand_in_the_order_of_their_ids(capturable):
    values = jnp.asarray([[1.0, 3.0, 3.0, 3.0, 2.0]])
    for token, rank in ((3, 1), (4, 4), (0, 5)):
        found = run(values, jnp.asarray([token], jnp.int32), capturable=capturable)
        assert found.rank.tolist() == [rank]
        assert found.top_ids.tolist() == [[1, 2, 3, 4, 0]]


def arrays(num_seqs):
    top = np.tile(np.array([-0.5, -1, -2] + [-np.inf] * 17, np.float32), (num_seqs, 1))
    ids = np.tile(np.arange(20, dtype=np.int32) + 100, (num_seqs, 1))
    return LogprobArrays(-np.arange(num_seqs, dtype=np.float32), np.arange(num_seqs), ids, top)


def sequences(*wanted):
    return [make_sequence(BlockAllocator(4, 4), [1], logprobs=k) for k in wanted]


def test_each_sequence_gets_as_many_as_its_request_asked_for():
    found = unpack_logprobs(sequences(2, 0, 20, None), [7, 8, 9, 6], arrays(8))
    assert [one.token_id for one in found] == [7, 8, 9, 6]
    assert [one.logprob for one in found] == [0, -1, -2, -3]
    assert [one.rank for one in found] == [0, 1, 2, 3]
    assert found[0].top == [(100, -0.5), (101, -1.0)]
    assert found[1].top == []
    assert found[2].top == [(100, -0.5), (101, -1.0), (102, -2.0)]  # what cannot be drawn is left out
    assert found[3].top == []
    assert type(found[0].top[0][0]) is int
    assert type(found[0].logprob) is float


@pytest.mark.parametrize(
    ("wanted", "any_wanted"), [((), False), ((None, None), False), ((None, 0), True), ((3,), True)]
)
def test_none_are_wanted_unless_someone_asks(wanted, any_wanted):
    assert want_logprobs(sequences(*wanted)) == any_wanted
