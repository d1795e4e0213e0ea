"""Small models and engines over them, loaded once: compiling their programs is what the tests wait for."""

import io
import json
import sys

import pytest
from support.checkpoints import random_tensors, tiny_config, write_glassllm, write_hf

from paged_jax import LLM, cli

TINY = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


def load(path, **options):
    """An LLM with few program shapes, each compiled when it is needed: one prefill, and one row or four."""
    options = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "block_size": 4,
        "use_tqdm": False,
        "warm_up": False,
    } | options
    return LLM(path, **options)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    """One random layer with a context of 64, a BOS and a chat template."""
    path = tmp_path_factory.mktemp("tiny")
    config = tiny_config(**TINY)
    write_hf(path, config, random_tensors(config, seed=5))
    return path


@pytest.fixture(scope="session")
def glass_path(tmp_path_factory):
    """glassllm: trained, four layers, a context of 128, no BOS and no chat template."""
    path = tmp_path_factory.mktemp("glass")
    write_glassllm(path)
    return path


@pytest.fixture(scope="session")
def tiny(tiny_path):
    """Leave it as you found it."""
    with load(tiny_path) as llm:
        yield llm


@pytest.fixture(scope="session")
def glass(glass_path):
    """Leave it as you found it."""
    with load(glass_path, block_size=16) as llm:
        yield llm


@pytest.fixture
def program(monkeypatch, capsys):
    """Run `paged-jax` as a person does: (exit code, stdout, stderr)."""

    def call(*arguments, stdin=""):
        monkeypatch.setattr(sys, "argv", ["paged-jax", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code or 0, out, err

    return call


def record_of(call):
    """The record that a command prints with --json, where it succeeds and says nothing else."""

    def recorded(*arguments):
        code, out, err = call(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return recorded
