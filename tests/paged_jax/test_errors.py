"""The tree of errors, the names that paged_jax offers, and what importing them costs."""

import inspect
import subprocess
import sys

import pytest

import paged_jax
from paged_jax import errors

HOST_SIDE = (
    *("errors", "sampling_params", "sequence", "prompt", "capacity", "block_allocator", "block_table"),
    *("audit", "scheduler", "stats", "outputs", "detokenizer", "memory_report", "progress", "engine_options"),
    *("stop_strings", "text_stream", "notes", "cli_options", "cli"),
)
CLASSES = [value for _, value in inspect.getmembers(errors, inspect.isclass)]


def test_every_error_is_listed():
    assert sorted(errors.__all__) == sorted(cls.__name__ for cls in CLASSES)
    assert errors.__all__ == sorted(errors.__all__)


@pytest.mark.parametrize("cls", CLASSES)
def test_one_except_clause_catches_every_error(cls):
    assert issubclass(cls, errors.PagedJaxError)


@pytest.mark.parametrize(
    "cls",
    [
        *(errors.InvalidArgument, errors.InvalidSamplingParams, errors.InvalidPrompt, errors.PromptTooLong),
        *(errors.PoolTooSmall, errors.InvalidBlock, errors.UnsupportedModel, errors.TokenizerError),
    ],
)
def test_an_error_about_an_argument_is_a_value_error(cls):
    assert issubclass(cls, ValueError)


def test_a_missing_model_is_a_missing_file():
    assert issubclass(errors.ModelNotFound, FileNotFoundError)


def test_the_usual_message_says_what_was_given_and_expected_and_what_to_do():
    error = errors.InvalidArgument.of("n", -1, "an int of at least 0", "Count again.")
    assert str(error) == "n=-1: expected an int of at least 0. Count again."
    assert str(errors.InvalidArgument.of("n", "x", "an int")) == "n='x': expected an int."


def test_every_public_name_resolves():
    assert [name for name in paged_jax.__all__ if not hasattr(paged_jax, name)] == []
    assert set(paged_jax.__all__) <= set(dir(paged_jax))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = paged_jax.LMM


def test_the_host_side_imports_no_jax():
    imports = "; ".join(f"import paged_jax.{name}" for name in HOST_SIDE)
    code = (
        f"import sys, paged_jax; {imports}; "
        "from paged_jax import BlockAllocator, BlockTable, SamplingParams, errors; "
        "print([m for m in ('jax', 'jaxlib', 'flax', 'chex') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
