"""The next token: the distributions against numpy in float64, and independence of everything but the seed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.rows import Sampling, padding_ids
from paged_jax.sampler import _gumbel, sample
from paged_jax.sampling_params import MAX_SUPPRESSED_IDS

VARIANTS = ("greedy", "temperature", "full")
DRAWS, WIDTH = 5_000, 40
PLAIN_IDS = [386, 423, 340, 297, 488, 362, 322, 493]
FILTERED_IDS = [220, 139, 73, 469, 488, 168, 220, 493]
run = jax.jit(sample, static_argnames=("variant", "logprobs_mode", "capturable"))


def state(
    num_rows,
    *,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    seed=0,
    index=0,
    position=None,
    min_position=0,
    suppressed=(),
    logprobs=-1,
):
    """One value for all rows or one each, and the positions: each row has one of its own unless told."""

    def column(value, dtype):
        return jnp.broadcast_to(jnp.asarray(value, dtype), (num_rows,))

    seeds = np.broadcast_to(np.asarray(seed, np.uint64), (num_rows,))
    words = np.stack([seeds >> np.uint64(32), seeds & np.uint64(0xFFFFFFFF)], axis=1)
    ids = jnp.concatenate([jnp.asarray(suppressed, jnp.int32), padding_ids(MAX_SUPPRESSED_IDS)])
    positions = jnp.arange(num_rows) if position is None else column(position, jnp.int32)
    sampling = Sampling(
        temperature=column(temperature, jnp.float32),
        top_k=column(top_k, jnp.int32),
        top_p=column(top_p, jnp.float32),
        seed=jnp.asarray(words.astype(np.uint32)),
        sample=column(index, jnp.int32),
        min_position=column(min_position, jnp.int32),
        suppressed=jnp.broadcast_to(ids[:MAX_SUPPRESSED_IDS], (num_rows, MAX_SUPPRESSED_IDS)),
        num_logprobs=column(logprobs, jnp.int32),
    )
    return sampling, positions


def sampled(logits, variant="full", *, mode="raw", capturable=False, **fields):
    """Tokens, and what is known of them."""
    logits = jnp.atleast_2d(jnp.asarray(logits, jnp.float32))
    options = {"variant": variant, "logprobs_mode": mode, "capturable": capturable}
    return jax.tree.map(np.asarray, run(logits, *state(len(logits), **fields), **options))


def draw(logits, variant="full", **fields):
    return sampled(logits, variant, **fields)[0]


def draws(logits, variant="full", **fields):
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
    for variant in ("temperature", "full"):
        tokens = draw(logits, variant, temperature=temperature, top_k=7, top_p=0.9)
        best = logits.argmax(axis=1)
        assert (tokens == best)[1::2].all()
        assert not (tokens == best)[::2].all()


# -- distributions -----------------------------------------------------------------------------------------

RANDOM = np.random.default_rng(1).normal(size=WIDTH) * 2
TIES = np.log([0.3, 0.2, 0.2, 0.2, 0.05, 0.05])


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("variant", ["temperature", "full"])
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


@pytest.mark.parametrize("variant", ["temperature", "full"])
@pytest.mark.parametrize("temperature", [np.finfo(np.float32).tiny, 1e-20, 1e-6])
def test_the_lowest_temperatures_take_the_best(temperature, variant):
    logits = [1e4, 2e4, 2e4 - 1, -np.inf]
    assert set(draws(logits, variant, temperature=temperature, top_p=0.9).tolist()) == {1}


@pytest.mark.parametrize("variant", ["temperature", "full"])
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


# -- min_tokens --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_end_id_is_not_sampled_before_min_tokens(temperature):
    """Rows 0 to 9 are too young; the others take what they like."""
    logits = np.full((20, 8), -50.0)
    logits[:, [2, 5]] = 100.0
    logits[:, 6] = 1.0
    tokens = draw(logits, temperature=temperature, min_position=10, suppressed=[2, 5])
    assert (tokens[:10] == 6).all()
    assert np.isin(tokens[10:], [2, 5]).all()


def test_the_others_share_what_the_suppressed_ids_leave():
    tokens = draws(RANDOM, min_position=2**31 - 1, suppressed=[int(RANDOM.argmax()), 0, 10**6])
    left = RANDOM.copy()
    left[[RANDOM.argmax(), 0]] = -np.inf
    assert_distribution(tokens, expected(left))


def test_top_k_counts_the_ids_that_are_left():
    tokens = draws([5.0, 4.0, 3.0, 2.0], top_k=2, min_position=2**31 - 1, suppressed=[0])
    assert set(tokens.tolist()) == {1, 2}


# -- logprobs ----------------------------------------------------------------------------------------------


def processed(logits, temperature, suppressed, **fields):
    """The distribution by the definition, one row."""
    logits = np.array(logits, np.float64)
    logits[suppressed] = -np.inf
    if temperature == 0:
        return np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    return expected(logits, temperature, **fields)


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_logprobs_are_of_the_model_or_of_what_is_drawn_from(mode):
    rng = np.random.default_rng(8)
    logits = (rng.normal(size=(60, 50)) * 2).astype(np.float32)
    rows = [
        {"temperature": t, "top_k": k, "top_p": p}
        for t in (0.0, 0.5, 3.0)
        for k, p in ((0, 1.0), (5, 1.0), (0, 0.7), (9, 0.8))
    ]
    rows = [rows[i % len(rows)] for i in range(60)]
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    young = np.arange(60) % 2
    tokens, found = sampled(
        logits, mode=mode, suppressed=[3, 4], min_position=1000 * young, logprobs=20, **columns
    )
    for i, row in enumerate(rows):
        suppressed = [3, 4] if young[i] else []
        if mode == "raw":
            exact = np.exp(logits[i].astype(np.float64) - logits[i].max())
            exact /= exact.sum()
        else:
            exact = processed(logits[i], suppressed=suppressed, **row)
        assert exact[tokens[i]] > 0
        np.testing.assert_allclose(found.logprob[i], np.log(exact[tokens[i]]), atol=1e-5)
        assert found.rank[i] == 1 + (exact > exact[tokens[i]]).sum()
        order = np.argsort(-exact, kind="stable")[:20]
        possible = exact[order] > 0
        assert found.top_ids[i][possible].tolist() == order[possible].tolist()
        np.testing.assert_allclose(found.top[i][possible], np.log(exact[order[possible]]), atol=1e-5)
        assert np.isneginf(found.top[i][~possible]).all()
        if row["temperature"] == 0 and not young[i]:
            assert found.rank[i] == 1


def test_logprobs_change_no_token():
    rng = np.random.default_rng(9)
    logits = rng.normal(size=(32, 100))
    fields = {"temperature": rng.choice([0, 1.0], 32), "top_k": 7}
    for mode in ("raw", "processed"):
        assert (draw(logits, mode=mode, logprobs=3, **fields) == draw(logits, **fields)).all()


# -- what a draw depends on --------------------------------------------------------------------------------


def test_a_row_draws_the_same_in_every_variant_that_serves_it():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(64, 100)) * 3
    temperature = rng.choice([0.0, 0.1, 0.7, 1.0, 5.0], 64)
    plain, full = (draw(logits, v, temperature=temperature, seed=9) for v in ("temperature", "full"))
    assert (plain == full).all()


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_a_program_without_conditionals_gives_the_same(mode):
    rng = np.random.default_rng(12)
    fields = {
        "temperature": rng.choice([0, 0.3, 1, 2], 64),
        "top_k": rng.choice([-1, 0, 5, 50], 64),
        "top_p": rng.choice([0.5, 0.9, 1], 64),
        "min_position": rng.integers(0, 64, 64),
        "suppressed": [1, 3, 50],
        "logprobs": 5,
    }
    logits = rng.normal(size=(64, 100)) * 3
    here, captured = (sampled(logits, mode=mode, capturable=flag, **fields) for flag in (False, True))
    assert (here[0] == captured[0]).all()
    for ours, theirs in zip(here[1], captured[1], strict=True):
        impossible = np.isneginf(here[1].top) if ours.ndim == 2 else np.zeros(len(ours), bool)
        np.testing.assert_allclose(ours[~impossible], theirs[~impossible], rtol=1e-6)


def test_ids_are_those_that_every_version_drew():
    """A seed promises its tokens: these were drawn before rows, and logprobs, and min_tokens were there."""
    logits = np.random.default_rng(5).normal(size=(8, 500)) * 3
    fields = {"seed": np.arange(8, dtype=np.uint64) << np.uint64(30), "index": np.arange(8) % 3}
    assert draw(logits, "temperature", **fields).tolist() == PLAIN_IDS
    assert draw(logits, top_k=20, top_p=0.9, temperature=0.8, **fields).tolist() == FILTERED_IDS


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
