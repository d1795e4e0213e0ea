"""Compiled programs: each once, ahead or when first asked for, and what the cache on disk gave."""

import jax
import jax.numpy as jnp
import pytest

from paged_jax.buckets import ProgramKey
from paged_jax.programs import Programs

KEYS = [ProgramKey("copy", size) for size in (2, 3, 5)]


class Counting:
    def __init__(self):
        self.traced = []

    def __call__(self, key):
        self.traced.append(key.size)
        return jax.jit(lambda x: x * 2).trace(jax.ShapeDtypeStruct((key.size,), jnp.int32))


@pytest.fixture
def empty_cache(tmp_path):
    names = ("dir", "min_compile_time_secs", "min_entry_size_bytes")
    names = ["jax_compilation_cache_dir", *(f"jax_persistent_cache_{name}" for name in names[1:])]
    before = {name: jax.config.values[name] for name in names}
    for name, value in zip(names, (str(tmp_path), 0.0, -1), strict=True):
        jax.config.update(name, value)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()


def test_a_program_is_compiled_once_when_it_is_first_asked_for():
    trace = Counting()
    programs = Programs(trace)
    assert len(programs) == 0
    for _ in range(2):
        assert programs[KEYS[1]](jnp.arange(3, dtype=jnp.int32)).tolist() == [0, 2, 4]
    assert trace.traced == [3]
    assert len(programs) == 1


def test_a_warm_up_compiles_what_is_left_and_tells_how_far_it_is():
    trace = Counting()
    programs = Programs(trace)
    programs[KEYS[0]]
    told = []
    done = programs.warm_up(KEYS, lambda *state: told.append(state[:2]))
    assert trace.traced == [2, 3, 5]
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert (done.num_programs, len(programs)) == (3, 3)
    assert done.seconds > 0
    programs.warm_up(KEYS, lambda *state: None)
    assert trace.traced == [2, 3, 5]


def test_programs_that_the_cache_on_disk_had_are_counted(empty_cache):
    hits = []
    for _ in range(2):
        told = []
        done = Programs(Counting()).warm_up(KEYS, lambda *state, told=told: told.append(state[2]))
        assert told[0] == 0
        assert told[-1] == done.cache_hits
        hits.append(done.cache_hits)
    assert hits == [0, 3]


def test_forgotten_programs_are_compiled_again():
    trace = Counting()
    programs = Programs(trace)
    programs[KEYS[0]]
    programs.clear()
    programs[KEYS[0]]
    assert trace.traced == [2, 2]
