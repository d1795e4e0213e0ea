import shutil
import subprocess
import sys

import numpy as np
import pytest
from support.checkpoints import (
    demo_gguf,
    tiny_config,
    tiny_vocab,
    write_gguf,
    write_glassllm,
    write_hf,
    write_json,
)

from models import hub
from models.checkpoint import open_checkpoint
from models.errors import ModelNotFound, TokenizerError, UnsupportedModel, WeightsError
from models.weights import decoder_leaves

BOS, EOS, IM_END = (tiny_vocab().index(token) for token in ("<s>", "</s>", "<|im_end|>"))


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    """The hub is never reached; a test that wants it replaces this."""

    def offline(*_, **__):
        raise OSError("the hub was asked")

    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", offline)


class TestWhereAModelLies:
    def test_a_directory_as_path_or_string(self, tmp_path):
        write_hf(tmp_path)
        for model in (tmp_path, str(tmp_path)):
            checkpoint = open_checkpoint(model)
            assert checkpoint.path == tmp_path
            assert checkpoint.config.hidden_size == 64

    def test_a_gguf_file_and_a_directory_with_one(self, tmp_path):
        write_gguf(tmp_path / "m.gguf")
        for model in (tmp_path / "m.gguf", tmp_path):
            assert open_checkpoint(model).path == tmp_path / "m.gguf"

    def test_a_directory_with_two_gguf_files(self, tmp_path):
        for name in ("a.gguf", "b.gguf"):
            write_gguf(tmp_path / name)
        with pytest.raises(ModelNotFound, match=r"2 \.gguf files \(a\.gguf, b\.gguf\); pass the path of one"):
            open_checkpoint(tmp_path)

    def test_a_directory_without_a_model(self, tmp_path):
        with pytest.raises(ModelNotFound, match=r"no model: expected config\.json.*or one \.gguf file"):
            open_checkpoint(tmp_path)

    def test_a_config_wins_over_a_gguf_file(self, tmp_path):
        write_hf(tmp_path)
        write_gguf(tmp_path / "m.gguf")
        assert open_checkpoint(tmp_path).path == tmp_path

    @pytest.mark.parametrize(
        "model", ["", "gone", "/gone/model", "./a/b", "a/b/c", "../x", "a\0b", "x" * 5000]
    )
    def test_neither_a_path_nor_a_hub_id(self, model):
        with pytest.raises(ModelNotFound, match="no such file or directory, and no hub id"):
            open_checkpoint(model)


class TestHub:
    def test_an_id_is_fetched_with_the_needed_files_alone(self, tmp_path, monkeypatch):
        write_hf(tmp_path)
        asked = []

        def fetch(name, *, allow_patterns):
            asked.append((name, allow_patterns))
            return str(tmp_path)

        monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", fetch)
        assert open_checkpoint("org/some-model_1.5").path == tmp_path
        ((name, patterns),) = asked
        assert name == "org/some-model_1.5"
        assert {"config.json", "tokenizer.json", "model*.safetensors", "chat_template.jinja"} <= set(patterns)
        assert not any(pattern.endswith((".bin", ".pt", ".py", "*")) for pattern in patterns)

    def test_what_the_hub_says_is_passed_on(self):
        with pytest.raises(ModelNotFound, match=r"'org/name'.*no such file.*OSError: the hub was asked"):
            open_checkpoint("org/name")

    def test_a_local_directory_of_that_name_wins(self, tmp_path, monkeypatch):
        write_hf(tmp_path / "org" / "name")
        monkeypatch.chdir(tmp_path)
        assert open_checkpoint("org/name").config.hidden_size == 64


class TestGenerationDefaults:
    def read(self, directory, config=None, generation=None, tokenizer_config=None):
        write_hf(
            directory, tiny_config(**(config or {})), generation=generation, tokenizer_config=tokenizer_config
        )
        return open_checkpoint(directory).generation

    def test_from_the_config_where_there_is_nothing_else(self, tmp_path):
        found = self.read(tmp_path)
        assert (found.eos_ids, found.bos_id, found.pad_id) == ((EOS,), BOS, None)
        assert (found.do_sample, found.temperature, found.top_k, found.top_p) == (None, None, None, None)

    def test_sampling_values_as_found(self, tmp_path):
        found = self.read(
            tmp_path, generation={"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9}
        )
        assert (found.do_sample, found.temperature, found.top_k, found.top_p) == (True, 0.6, 20, 0.9)

    @pytest.mark.parametrize(("eos", "ids"), [(IM_END, (IM_END, EOS)), ([IM_END, 3], (IM_END, 3, EOS))])
    def test_generation_config_wins_and_the_tokenizers_own_joins(self, tmp_path, eos, ids):
        assert (
            self.read(tmp_path, config={"eos_token_id": 7}, generation={"eos_token_id": eos}).eos_ids == ids
        )

    def test_a_chat_models_end_of_turn_ends(self, tmp_path):
        """A chat model's tokenizer names the token that ends a turn, its config the one that ends a text."""
        found = self.read(tmp_path, tokenizer_config={"bos_token": "<s>", "eos_token": "<|im_end|>"})
        assert found.eos_ids == (EOS, IM_END)

    def test_null_and_minus_one_are_nothing(self, tmp_path):
        found = self.read(
            tmp_path,
            config={"eos_token_id": None, "bos_token_id": None},
            generation={"eos_token_id": None, "pad_token_id": -1, "temperature": None},
            tokenizer_config={},
        )
        assert (found.eos_ids, found.bos_id, found.pad_id, found.temperature) == ((), None, None, None)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("eos_token_id", "</s>"),
            ("eos_token_id", [1, None]),
            ("pad_token_id", 1.5),
            ("temperature", -1),
            ("temperature", float("inf")),
            ("top_p", "0.9"),
            ("top_p", 0),
            ("top_p", 1.5),
            ("top_k", 2.7),
            ("top_k", -2),
            ("top_k", float("nan")),
            ("do_sample", 1),
        ],
    )
    def test_nonsense_is_named(self, tmp_path, name, value):
        with pytest.raises(UnsupportedModel, match=rf"generation_config\.json: {name}="):
            self.read(tmp_path, generation={name: value})

    @pytest.mark.parametrize(("written", "read"), [(-1, 0), (0, 0), (20, 20), (20.0, 20)])
    def test_top_k_may_say_all(self, tmp_path, written, read):
        assert self.read(tmp_path, generation={"top_k": written}).top_k == read

    def test_of_a_gguf_file(self, tmp_path):
        metadata = {"tokenizer.ggml.eot_token_id": IM_END, "tokenizer.ggml.padding_token_id": 5}
        write_gguf(tmp_path / "m.gguf", metadata=metadata)
        found = open_checkpoint(tmp_path).generation
        assert (found.eos_ids, found.bos_id, found.pad_id) == ((EOS, IM_END), BOS, 5)


class TestBrokenDirectories:
    @pytest.mark.parametrize("text", ["", "{", "[]", "\ufeff{}x"])
    def test_a_config_that_is_no_object(self, tmp_path, text):
        write_hf(tmp_path)
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UnsupportedModel, match=r"config\.json"):
            open_checkpoint(tmp_path)

    def test_a_generation_config_that_is_no_object(self, tmp_path):
        write_hf(tmp_path)
        write_json(tmp_path / "generation_config.json", 3)
        with pytest.raises(UnsupportedModel, match=r"generation_config\.json: holds a int"):
            open_checkpoint(tmp_path)

    def test_missing_weights_and_a_missing_tokenizer_are_told_when_it_is_opened(self, tmp_path):
        write_hf(tmp_path)
        shutil.move(tmp_path / "tokenizer.json", tmp_path / "x")
        with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
            open_checkpoint(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(WeightsError, match="no weights"):
            open_checkpoint(tmp_path)


class TestTrainedModels:
    def test_the_demo_model(self):
        checkpoint = open_checkpoint(demo_gguf().parent)
        config = checkpoint.config
        assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (
            30,
            576,
            9,
            3,
        )
        assert (config.head_dim, config.intermediate_size, config.vocab_size) == (64, 1536, 49152)
        assert (config.max_position_embeddings, config.rope_theta) == (8192, 100000.0)
        assert (config.tie_word_embeddings, config.dtype) == (True, "float32")
        assert checkpoint.generation.eos_ids == (2,)
        assert (checkpoint.generation.bos_id, checkpoint.generation.pad_id) == (1, 2)
        path, embedding = next(decoder_leaves(checkpoint, np.float32))
        assert (path, embedding.shape) == ("embed.embedding", (49152, 576))

    def test_glassllm(self, tmp_path):
        written = write_glassllm(tmp_path)
        checkpoint = open_checkpoint(tmp_path)
        assert checkpoint.generation.eos_ids == (3,)
        assert checkpoint.config.intermediate_size == 341
        for name, tensor in checkpoint.tensors.items():
            np.testing.assert_array_equal(tensor, written[name])
        assert len(dict(decoder_leaves(checkpoint, np.float32))) == 4 * 6 + 2


def test_opening_a_checkpoint_imports_no_jax():
    program = "import sys, models.weights, models.checkpoint; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
