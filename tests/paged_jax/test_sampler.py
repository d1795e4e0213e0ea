"""The next token: the distributions against numpy in float64, and independence of everything but the seed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.batch import SamplingState
from paged_jax.sampler import _gumbel, sample

VARIANTS = ("greedy", "temperature", "filtered")
DRAWS, WIDTH = 5_000, 40
run = jax.jit(sample, static_argnames="variant")


def state(num_rows, *, temperature=1.0, top_k=0, top_p=1.0, seed=0, index=0, position=None):
    """One value for all rows or one each; each row has a position of its own unless told."""

    def column(value, dtype):
        return jnp.broadcast_to(jnp.asarray(value, dtype), (num_rows,))

    seeds = np.broadcast_to(np.asarray(seed, np.uint64), (num_rows,))
    words = np.stack([seeds >> np.uint64(32), seeds & np.uint64(0xFFFFFFFF)], axis=1)
    return SamplingState(
        temperature=column(temperature, jnp.float32),
        top_k=column(top_k, jnp.int32),
        top_p=column(top_p, jnp.float32),
        seed=jnp.asarray(words.astype(np.uint32)),
        sample=column(index, jnp.int32),
        position=jnp.arange(num_rows) if position is None else column(position, jnp.int32),
    )


def draw(logits, variant="filtered", **fields):
    logits = jnp.atleast_2d(jnp.asarray(logits, jnp.float32))
    return np.asarray(run(logits, state(len(logits), **fields), variant=variant))


def draws(logits, variant="filtered", **fields):
    """Many draws from the same logits, one at each position. Impossible tokens fill the vocabulary up."""
    logits = np.append(logits, np.full(WIDTH - len(logits), -np.inf))
    return draw(np.broadcast_to(logits, (DRAWS, WIDTH)), variant, **fields)


def expected(logits, temperature=1.0, top_k=0, top_p=1.0):
    """The distribution by the definition: float64 [vocab_size]. Ties with the last one kept are kept."""
    scaled = np.asarray(logits, np.float64) / temperature
    probabilities = np.exp(scaled - scaled.max())
    if 0 < top_k < len(scaled):
        probabilities[scaled < np.sort(scaled)[-top_k]] = 0
    probabilities /= probabilities.sum()
    if top_p < 1:
        order = np.argsort(-scaled, kind="stable")
        mass = np.cumsum(probabilities[order])
        last = order[min(np.searchsorted(mass, top_p * (1 - 1e-6)), len(order) - 1)]
        probabilities[scaled < scaled[last]] = 0
    return probabilities / probabilities.sum()


def assert_distribution(tokens, probabilities):
    """Nothing outside the kept set, all that is likely inside it, and a chi-square within 5 sigma."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    probabilities = np.append(probabilities, np.zeros(len(counts) - len(probabilities)))
    assert counts[probabilities == 0].sum() == 0
    mean = probabilities * len(tokens)
    likely = mean >= 5
    assert (counts[mean >= 20] > 0).all()
    rest = mean[~likely].sum()
    chi = ((counts - mean)[likely] ** 2 / mean[likely]).sum()
    if rest > 1:
        chi += (counts[~likely].sum() - rest) ** 2 / rest
    degrees = likely.sum()
    assert chi < degrees + 5 * np.sqrt(2 * degrees) + 5


# -- greedy ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_temperature_zero_takes_the_best_and_of_equals_the_lowest_id(variant):
    logits = [[1, 3, 2, 3], [0, 0, 0, 0], [-5, -2, -1e30, -2], [-np.inf, -np.inf, 1, 0]]
    assert draw(logits, variant, temperature=0).tolist() == [1, 0, 1, 2]


def test_greedy_rows_are_greedy_beside_rows_that_are_drawn():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(64, 100)).astype(np.float32)
    temperature = np.where(np.arange(64) % 2, 0.0, 50.0)
    for variant in ("temperature", "filtered"):
        tokens = draw(logits, variant, temperature=temperature, top_k=7, top_p=0.9)
        best = logits.argmax(axis=1)
        assert (tokens == best)[1::2].all()
        assert not (tokens == best)[::2].all()


# -- distributions -----------------------------------------------------------------------------------------

RANDOM = np.random.default_rng(1).normal(size=WIDTH) * 2
TIES = np.log([0.3, 0.2, 0.2, 0.2, 0.05, 0.05])


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("variant", ["temperature", "filtered"])
def test_temperature_divides_the_logits(temperature, variant):
    tokens = draws(RANDOM, variant=variant, temperature=temperature)
    assert_distribution(tokens, expected(RANDOM, temperature))


@pytest.mark.parametrize("top_k", [1, 2, 5, 39, 40, 41, 10**6, 0, -1])
def test_top_k_keeps_the_k_best(top_k):
    assert_distribution(draws(RANDOM, top_k=top_k), expected(RANDOM, top_k=top_k))


@pytest.mark.parametrize("top_p", [1e-30, 0.1, 0.5, 0.9, 0.999, 1.0])
def test_top_p_keeps_the_fewest_that_sum_to_it(top_p):
    assert_distribution(draws(RANDOM, top_p=top_p), expected(RANDOM, top_p=top_p))


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 0.5), (20, 0.9), (3, 1.0), (1, 0.01)])
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_top_p_is_taken_of_what_top_k_left(top_k, top_p, temperature):
    fields = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    assert_distribution(draws(RANDOM, **fields), expected(RANDOM, **fields))


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 1, 2, 3}),  # tokens as likely as the last one kept are kept too
        ({"top_k": 4}, {0, 1, 2, 3}),
        ({"top_k": 5}, {0, 1, 2, 3, 4, 5}),
        ({"top_p": 0.29}, {0}),
        ({"top_p": 0.31}, {0, 1, 2, 3}),
        ({"top_p": 0.89}, {0, 1, 2, 3}),
        ({"top_p": 0.91}, {0, 1, 2, 3, 4, 5}),
    ],
)
def test_equals_are_kept_or_dropped_together(fields, kept):
    assert set(draws(TIES, **fields).tolist()) == kept


def test_the_noise_is_gumbel_noise_far_into_the_tail():
    """Tokens of a probability of 1e-9 can be drawn: large vocabularies have many of them."""
    bits = np.array([0, 1, 2, 1000, 2**20, 2**31, 2**32 - 2**20], np.uint32)
    exact = -np.log(-np.log1p(-(bits + 0.5) / 2.0**32))
    np.testing.assert_allclose(_gumbel(jnp.asarray(bits)), exact, rtol=1e-5)
    assert exact[0] > -np.log(1e-9)
    assert np.isfinite(_gumbel(jnp.asarray(2**32 - 1, jnp.uint32)))


# -- extremes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["temperature", "filtered"])
@pytest.mark.parametrize("temperature", [np.finfo(np.float32).tiny, 1e-20, 1e-6])
def test_the_lowest_temperatures_take_the_best(temperature, variant):
    logits = [1e4, 2e4, 2e4 - 1, -np.inf]
    assert set(draws(logits, variant, temperature=temperature, top_p=0.9).tolist()) == {1}


@pytest.mark.parametrize("variant", ["temperature", "filtered"])
@pytest.mark.parametrize("temperature", [1e6, 1e30, 1 / np.finfo(np.float32).tiny])
def test_the_highest_temperatures_take_all_alike_but_the_impossible(temperature, variant):
    logits = [3.0, -3.0, 0.0, -np.inf]
    assert_distribution(draws(logits, variant, temperature=temperature), np.array([1, 1, 1, 0]) / 3)


@pytest.mark.parametrize("top_p", [np.finfo(np.float32).tiny, 1e-10])
def test_the_smallest_top_p_takes_the_best(top_p):
    assert set(draws(RANDOM, top_p=top_p, temperature=5.0).tolist()) == {int(RANDOM.argmax())}


@pytest.mark.parametrize("shift", [-1e4, 0, 1e4])
@pytest.mark.parametrize("fields", [{}, {"top_k": 3}, {"top_p": 0.8}])
def test_where_the_logits_lie_makes_no_difference(shift, fields):
    logits = np.array([0.0, 1.0, 2.0, 3.0, 0.5])
    assert_distribution(draws(logits + shift, **fields), expected(logits, **fields))


@pytest.mark.parametrize("fields", [{}, {"top_k": 3}, {"top_p": 0.9}, {"top_k": 5, "top_p": 1.0}])
def test_an_impossible_token_is_never_drawn(fields):
    logits = np.array([-np.inf, 1.0, -np.inf, 0.0, -np.inf])
    assert set(draws(logits, **fields).tolist()) == {1, 3}


# -- what a draw depends on --------------------------------------------------------------------------------


def test_a_row_draws_the_same_in_every_variant_that_serves_it():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(64, 100)) * 3
    temperature = rng.choice([0.0, 0.1, 0.7, 1.0, 5.0], 64)
    plain, filtered = (draw(logits, v, temperature=temperature, seed=9) for v in ("temperature", "filtered"))
    assert (plain == filtered).all()


def test_a_row_draws_the_same_wherever_it_stands_and_whatever_stands_beside_it():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(64, 100)) * 2
    fields = {
        "temperature": rng.uniform(0.5, 2, 64),
        "top_k": rng.integers(0, 50, 64),
        "top_p": rng.uniform(0.3, 1, 64),
        "seed": rng.integers(0, 2**63, 64).astype(np.uint64),
        "index": rng.integers(0, 4, 64),
        "position": rng.integers(0, 999, 64),
    }
    together = draw(logits, **fields)
    order = rng.permutation(64)
    moved = draw(logits[order], **{name: values[order] for name, values in fields.items()})
    assert (moved == together[order]).all()
    for row in (0, 13, 63):
        alone = draw(logits[row], **{name: values[row] for name, values in fields.items()})
        assert alone[0] == together[row]


@pytest.mark.parametrize("field", ["seed", "index", "position"])
def test_another_seed_or_sample_or_position_is_another_stream(field):
    logits = np.zeros((200, 1000))
    rows = np.arange(200, dtype=np.uint64 if field == "seed" else np.int32)
    tokens = draw(logits, "temperature", **{"position": 5, field: rows})
    assert len(set(tokens.tolist())) > 150
    again = draw(logits, "temperature", **{"position": 5, field: rows})
    assert (tokens == again).all()


def test_both_words_of_a_seed_count():
    seeds = np.array([0, 1, 2**32, 2**32 + 1, 2**64 - 1], np.uint64)
    tokens = draw(np.zeros((5, 100_000)), "temperature", seed=seeds, position=0)
    assert len(set(tokens.tolist())) == 5


def test_one_sequences_draws_are_independent_from_position_to_position():
    tokens = draws(np.zeros(4), seed=3)
    pairs = np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
    assert_distribution(np.repeat(np.arange(16), pairs), np.full(16, 1 / 16))
