"""Where compiled programs are kept, and that the user's own choice counts."""

from pathlib import Path

import jax
import pytest

from paged_jax.compilation_cache import enable_compilation_cache

DIR, SECONDS = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
BYTES = "jax_persistent_cache_min_entry_size_bytes"


@pytest.fixture(autouse=True)
def no_choice_yet():
    before = {name: jax.config.values[name] for name in (DIR, SECONDS, BYTES)}
    jax.config.update(DIR, None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_are_kept_under_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    enable_compilation_cache()
    folder = Path(jax.config.values[DIR])
    assert folder.parent == tmp_path / "paged_jax"
    assert folder.name.startswith("programs-")


def test_small_programs_are_kept_too(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    enable_compilation_cache()
    assert (jax.config.values[SECONDS], jax.config.values[BYTES]) == (0.0, -1)


def test_without_a_cache_folder_it_is_that_of_the_home(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    enable_compilation_cache()
    assert Path(jax.config.values[DIR]).parent == tmp_path / ".cache" / "paged_jax"


def test_a_user_without_a_home_has_no_cache_and_no_error(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    enable_compilation_cache()
    assert jax.config.values[DIR] is None


def test_a_place_that_the_user_chose_stays():
    jax.config.update(DIR, "/chosen")
    jax.config.update(SECONDS, 7.0)
    enable_compilation_cache()
    assert (jax.config.values[DIR], jax.config.values[SECONDS]) == ("/chosen", 7.0)


def test_the_same_processor_finds_its_folder_again(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folders = set()
    for _ in range(2):
        jax.config.update(DIR, None)
        enable_compilation_cache()
        folders.add(jax.config.values[DIR])
    assert len(folders) == 1
