"""The door to the models package: found by place, its errors turned into ours."""

import subprocess
import sys

import jax.numpy as jnp
import pytest
from support.checkpoints import write_gguf, write_hf, write_json

from paged_jax import errors
from paged_jax.loader import load_model, models_module, our_errors


def load(path):
    return load_model(path, dtype=lambda stated: jnp.dtype(stated))


def test_a_folder_named_models_beside_the_users_script_changes_nothing(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("mine = True\n")
    (tmp_path / "script.py").write_text(
        "import models\n"
        "from paged_jax.loader import models_module\n"
        "theirs = models_module('errors')\n"
        "print(models.mine, theirs.ModelError.__name__, hasattr(theirs, 'mine'))\n"
    )
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "ModelError", "False"]


def test_a_module_is_loaded_once():
    assert models_module("errors") is models_module("errors")


def test_every_error_of_a_model_has_one_of_ours():
    theirs = models_module("errors")
    for name in theirs.__all__:
        with pytest.raises(getattr(errors, name, errors.PagedJaxError), match="told") as caught, our_errors():
            raise getattr(theirs, name)("told")
        assert type(caught.value.__cause__).__name__ == name


def test_other_errors_pass():
    with pytest.raises(KeyError), our_errors():
        raise KeyError


@pytest.mark.parametrize("name", ["nowhere", "no/such", "./a/b/c", ""])
def test_no_such_path_is_model_not_found(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(errors.ModelNotFound, match="no such file or directory"):
        load(name)


def test_a_directory_without_a_model_is_model_not_found(tmp_path):
    with pytest.raises(errors.ModelNotFound, match=r"holds no model: expected config\.json"):
        load(tmp_path)


def test_an_architecture_that_is_not_there_is_told_with_those_that_are(tmp_path):
    write_hf(tmp_path)
    config = {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    write_json(tmp_path / "config.json", config)
    with pytest.raises(errors.UnsupportedModel, match="Mamba"):
        load(tmp_path)


def test_weights_that_end_too_early_are_a_weights_error(tmp_path):
    write_hf(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(errors.WeightsError):
        load(tmp_path)


def test_a_model_without_its_tokenizer_is_a_tokenizer_error(tmp_path):
    write_hf(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(errors.TokenizerError, match="tokenizer"):
        load(tmp_path)


def test_the_dtype_is_chosen_from_the_stated_one_and_progress_is_told(tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    stated, done = [], []
    loaded = load_model(
        tmp_path / "tiny.gguf",
        dtype=lambda name: stated.append(name) or jnp.dtype(jnp.bfloat16),
        progress=lambda arrays, total: done.append((arrays, total)),
    )
    assert loaded.decoder.embed.embedding.dtype == jnp.bfloat16
    assert len(stated) == 1
    assert done[-1][0] == done[-1][1] > 0
