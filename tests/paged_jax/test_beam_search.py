"""Beam searches of every kind in one engine, against the naive search on the same made-up model."""

import random

import numpy as np
import pytest
from support.naive_beam_search import MadeUpModel, naive_beam_search

from paged_jax import BeamSearchParams
from paged_jax.beam_search import BeamSearch
from paged_jax.errors import InvalidSamplingParams

from .made_up_engine import Pieces, add, add_beams, add_samples, make_engine, run

SEEDS, SEARCHES = range(24), 25


def random_constraints(rng, vocab_size, end_ids):
    """Some that are in nobody's way most of the time, and some that are."""
    found = {}
    tokens = range(vocab_size)
    if rng.random() < 0.4:
        found["min_tokens"] = rng.randint(0, 6)
    if rng.random() < 0.2:
        found["repetition_penalty"] = rng.choice([0.7, 1.2, 2.0])
    if rng.random() < 0.2:
        found["no_repeat_ngram_size"] = rng.randint(1, 3)
    if rng.random() < 0.2:
        words = [
            rng.choices(tokens, k=rng.choice([1, 1, 2, 2, 3])) for _ in range(rng.randint(1, vocab_size))
        ]
        found["bad_words"] = [word for word in words if len(word) > 1 or word[0] not in end_ids]
    if rng.random() < 0.15:
        found["allowed_token_ids"] = rng.sample(tokens, rng.randint(1, vocab_size))
    if rng.random() < 0.15:
        salt, least = rng.random(), rng.choice([0, 1, 3])

        def allowed(_, ids):
            drawn = random.Random(hash((salt, *ids)))
            return drawn.sample(tokens, drawn.randint(min(least, vocab_size), vocab_size))

        found["prefix_allowed_tokens_fn"] = allowed
    return found


def random_search(rng, vocab_size, eos_ids):
    """Fields of BeamSearchParams, and all end ids that follow from them."""
    width = rng.choice([1, 2, 3, 4, 5, 8])
    found = {
        "beam_width": width,
        "n": rng.choice([None, rng.randint(1, width)]),
        "length_penalty": rng.choice([-1.0, 0.0, 0.5, 1.0, 1.0, 2.0]),
        "early_stopping": rng.choice([True, False, "never"]),
        "ignore_eos": rng.random() < 0.2,
        "stop_token_ids": rng.sample(range(vocab_size), rng.choice([0, 0, 1, 2])),
    }
    end_ids = {*found["stop_token_ids"], *(() if found["ignore_eos"] else eos_ids)}
    found |= random_constraints(rng, vocab_size, end_ids) if rng.random() < 0.6 else {}
    found["max_tokens"] = rng.randint(max(found.get("min_tokens", 0), 1), 14)
    return found, end_ids


def random_company(rng):
    """An engine, (prompt, fields, end ids) of searches, and the prompts of others."""
    vocab_size = rng.choice([rng.randint(5, 12), rng.randint(13, 50)])
    eos_ids = rng.sample(range(vocab_size), rng.randint(0, 2))
    model = MadeUpModel(vocab_size, seed=rng.getrandbits(32), spread=rng.choice([0.3, 1, 3]))
    engine = make_engine(
        model,
        eos_ids=eos_ids,
        block_size=rng.choice([1, 2, 3, 4, 16]),
        num_blocks=rng.choice([180, 240, 400]),
        seqs=rng.choice([8, 11, 20]),
        budget=rng.choice([8, 20, 64]),
        mode=rng.choice(["recompute", "swap", "auto"]),
        caching=rng.random() < 0.5,
    )
    starts = [rng.choices(range(vocab_size), k=8) for _ in range(2)]

    def prompt():
        return rng.choice(starts)[: rng.randint(1, 8)] + rng.choices(range(vocab_size), k=rng.randint(0, 8))

    searches = [(prompt(), *random_search(rng, vocab_size, eos_ids)) for _ in range(SEARCHES)]
    return engine, searches, [prompt() for _ in range(8)]


def expected_search(model, prompt, fields, end_ids=(), **more):
    dropped = ("ignore_eos", "stop_token_ids", "stop", "include_stop_str_in_output")
    fields = {name: value for name, value in fields.items() if name not in dropped}
    return naive_beam_search(model, prompt, end_ids=end_ids, **fields, **more)


def assert_found(output, expected):
    assert [(one.token_ids, one.finish_reason) for one in output.outputs] == [
        (found.token_ids, found.finish_reason) for found in expected
    ]
    assert [one.index for one in output.outputs] == list(range(len(expected)))
    for one, found in zip(output.outputs, expected, strict=True):
        assert one.score == pytest.approx(found.score, rel=1e-9, abs=1e-12)
        assert one.cumulative_logprob == pytest.approx(found.total, rel=1e-9, abs=1e-12)


def search(model, prompt, *, eos_ids=(), tokenizer=None, **fields):
    """A search alone in an engine: its output, and the engine."""
    engine = make_engine(model, eos_ids=eos_ids, tokenizer=tokenizer)
    add_beams(engine, "b", prompt, **fields)
    return run(engine)["b"], engine


# -- against the naive search ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_many_searches_at_once_find_what_the_naive_search_finds(seed):
    rng = random.Random(seed)
    engine, searches, others = random_company(rng)
    model = engine.runner.device.model
    for place, (ids, fields, _) in enumerate(searches):
        add_beams(engine, str(place), ids, priority=rng.choice([0, 0, 1]), **fields)
    for place, ids in enumerate(others):
        add_samples(engine, f"greedy {place}", ids, temperature=0, ignore_eos=True, max_tokens=9)
        add_samples(engine, f"samples {place}", ids, n=rng.randint(1, 5), max_tokens=9)
    outputs = run(engine)
    for place, (ids, fields, end_ids) in enumerate(searches):
        output = outputs[str(place)]
        assert_found(output, expected_search(model, ids, fields, end_ids))
        for one in output.outputs:
            last = one.token_ids[-1] if one.token_ids else None
            assert one.stop_reason == (last if last in fields["stop_token_ids"] else None)
    for place, ids in enumerate(others):
        for _ in range(9):
            ids = [*ids, model.greedy(ids)]
        assert outputs[f"greedy {place}"].outputs[0].token_ids == ids[-9:]


@pytest.mark.parametrize("early_stopping", [True, False])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
def test_a_search_of_width_1_is_greedy(early_stopping, length_penalty):
    for seed in range(10):
        model = MadeUpModel(9, seed=seed)
        found, engine = search(
            model,
            [1, 2, 3],
            eos_ids=[4, 5],
            beam_width=1,
            max_tokens=12,
            early_stopping=early_stopping,
            length_penalty=length_penalty,
        )
        add_samples(engine, "g", [1, 2, 3], temperature=0, max_tokens=12)
        greedy = run(engine)["g"].outputs
        assert [(one.token_ids, one.finish_reason) for one in found.outputs] == [
            (one.token_ids, one.finish_reason) for one in greedy
        ]


@pytest.mark.parametrize(
    ("vocab_size", "width", "max_tokens", "num_found"), [(3, 8, 1, 3), (2, 5, 2, 3), (3, 8, 4, 8)]
)
def test_a_vocabulary_may_have_fewer_tokens_than_the_search_has_beams(
    vocab_size, width, max_tokens, num_found
):
    model = MadeUpModel(vocab_size, seed=3)
    output, _ = search(model, [0, 1], eos_ids=[1], beam_width=width, max_tokens=max_tokens)
    expected = expected_search(model, [0, 1], {"beam_width": width, "max_tokens": max_tokens}, {1})
    assert_found(output, expected)
    assert len(expected) == num_found


def test_a_row_of_logits_comes_to_the_host_only_where_a_search_needs_more_than_the_best_few():
    model = MadeUpModel(60, seed=1)
    for fields, is_asked_for in [
        ({"beam_width": 4, "min_tokens": 3, "no_repeat_ngram_size": 2, "bad_words": [[3], [4, 5]]}, False),
        ({"beam_width": 30}, True),
        ({"beam_width": 4, "bad_words": [[token] for token in range(57)]}, True),
        ({"beam_width": 2, "repetition_penalty": 1.1}, True),
        ({"beam_width": 2, "allowed_token_ids": range(0, 60, 9)}, True),
        ({"beam_width": 2, "prefix_allowed_tokens_fn": lambda _, ids: range(len(ids) % 7, 60, 7)}, True),
    ]:
        fields = {"max_tokens": 7} | fields
        output, engine = search(model, [1, 2, 3], eos_ids=[0], **fields)
        assert_found(output, expected_search(model, [1, 2, 3], fields, {0}))
        assert bool(engine.runner.device.rows_of_logits) == is_asked_for


def test_the_best_n_of_the_hypotheses_are_given_back():
    model = MadeUpModel(12, seed=4)
    outputs = [
        search(model, [1], eos_ids=[0], beam_width=6, max_tokens=9, n=n)[0].outputs for n in (None, 6, 2, 1)
    ]
    assert outputs[0] == outputs[1]
    assert [len(found) for found in outputs] == [6, 6, 2, 1]
    assert outputs[2:] == [outputs[0][:2], outputs[0][:1]]
    scores = [one.score for one in outputs[0]]
    assert scores == sorted(scores, reverse=True)


def test_without_max_tokens_a_hypothesis_ends_with_the_context():
    engine = make_engine(MadeUpModel(9), max_model_len=14)
    add_beams(engine, "b", [1, 2, 3], beam_width=3, max_tokens=None)
    outputs = run(engine)["b"].outputs
    assert [(len(one.token_ids), one.finish_reason) for one in outputs] == [(11, "length")] * 3


# -- constraints -------------------------------------------------------------------------------------------


def test_a_beam_after_which_nothing_may_come_is_finished_as_it_stands():
    """Other beams go on; with the last one the search ends."""
    model = MadeUpModel(10, seed=2)
    answers = {(): [3, 4], (3,): [5], (4,): [6, 7], (4, 6): [8], (3, 5): [], (4, 7): [], (4, 6, 8): []}

    def allowed(index, ids):
        return answers[tuple(ids[2:])]

    fields = {"beam_width": 3, "max_tokens": 8, "prefix_allowed_tokens_fn": allowed}
    output, _ = search(model, [0, 1], **fields)
    assert sorted(one.token_ids for one in output.outputs) == [[3, 5], [4, 6, 8], [4, 7]]
    assert {one.finish_reason for one in output.outputs} == {"stop"}
    assert_found(output, expected_search(model, [0, 1], fields))


def test_the_users_function_is_told_the_index_and_all_ids_of_each_beam_in_each_step():
    model = MadeUpModel(10, seed=2)
    calls = []

    def allowed(index, ids):
        calls.append((index, list(ids)))
        ids.clear()  # the list is the function's own
        return range(10)

    engine = make_engine(model)
    params = BeamSearchParams(beam_width=3, max_tokens=4, prefix_allowed_tokens_fn=allowed)
    add(engine, "b", [5, 6], params, prompt_index=7)
    run(engine)
    assert {index for index, _ in calls} == {7}
    assert [ids[:2] for _, ids in calls] == [[5, 6]] * 10
    assert [len(ids) for _, ids in calls] == [2, 3, 3, 3, 4, 4, 4, 5, 5, 5]


def test_bad_words_count_as_texts_with_a_space_before_them_and_without():
    tokenizer = Pieces((*"abcdefgh", " "))
    model = MadeUpModel(9, seed=6, spread=0.2)
    output, _ = search(model, [0], tokenizer=tokenizer, beam_width=8, max_tokens=6, bad_words=["ab", "c"])
    words = [[0, 1], [8, 0, 1], [2], [8, 2]]
    assert_found(output, expected_search(model, [0], {"beam_width": 8, "max_tokens": 6, "bad_words": words}))
    assert not any("ab" in "a" + one.text or "c" in one.text for one in output.outputs)


@pytest.mark.parametrize(
    "fields",
    [
        {"length_penalty": 20.1},
        {"length_penalty": -2000.0},
        {"length_penalty": float("nan")},
        {"early_stopping": "always"},
        {"early_stopping": 1},
        {"early_stopping": np.array([1, 2])},
    ],
)
def test_a_field_that_no_search_can_go_by_is_refused_by_name(fields):
    (name,) = fields
    with pytest.raises(InvalidSamplingParams, match=f"{name}=.*: expected"):
        BeamSearchParams(**fields)


@pytest.mark.parametrize("penalty", [-20, 20])
def test_the_largest_length_penalties_give_finite_scores(penalty):
    search = BeamSearch(
        BeamSearchParams(beam_width=1, length_penalty=penalty),
        end_ids=frozenset(),
        max_new_tokens=1,
        tokenizer=Pieces(),
        vocab_size=5,
    )
    assert -np.inf < search.score(-1e9, 10**9) < 0


def test_a_bad_word_that_no_tokenizer_encodes_is_refused_by_name():
    engine = make_engine(MadeUpModel(9), tokenizer=Pieces((*"abcdefgh", " ")))
    params = BeamSearchParams(beam_width=2, bad_words=["a", "\ud800"])
    with pytest.raises(InvalidSamplingParams, match=r"bad_words='\\ud800': "):
        add(engine, "b", [1], params)


def test_ids_that_the_tokenizer_has_and_the_model_has_not_are_no_candidates():
    model, tokenizer = MadeUpModel(9, seed=6), Pieces((*"abcdefgh", " ", "z"))
    fields = {"beam_width": 3, "max_tokens": 4, "repetition_penalty": 1.1}
    output, _ = search(model, [0], tokenizer=tokenizer, bad_words=["z", "b"], **fields)
    assert_found(output, expected_search(model, [0], fields | {"bad_words": [[1], [8, 1]]}))
