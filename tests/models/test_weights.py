import dataclasses

import ml_dtypes
import numpy as np
import pytest
from support.checkpoints import random_tensors, tiny_config, write_gguf, write_hf

from models.checkpoint import open_checkpoint
from models.config import DecoderConfig
from models.errors import WeightsError
from models.weights import check_tensors, decoder_leaves, expected_shapes, num_leaves

MISTRAL, QWEN2 = ["MistralForCausalLM"], ["Qwen2ForCausalLM"]


def leaves_of(directory, config=None, tensors=None, dtype=np.float32):
    written = write_hf(directory, config, tensors)
    return written, dict(decoder_leaves(open_checkpoint(directory), dtype))


class TestExpectedShapes:
    def test_a_llama_by_name(self):
        config = DecoderConfig.from_hf(tiny_config(num_hidden_layers=1, head_dim=32))
        assert expected_shapes(config) == {
            "model.embed_tokens.weight": (268, 64),
            "model.layers.0.input_layernorm.weight": (64,),
            "model.layers.0.self_attn.q_proj.weight": (128, 64),
            "model.layers.0.self_attn.k_proj.weight": (64, 64),
            "model.layers.0.self_attn.v_proj.weight": (64, 64),
            "model.layers.0.self_attn.o_proj.weight": (64, 128),
            "model.layers.0.post_attention_layernorm.weight": (64,),
            "model.layers.0.mlp.gate_proj.weight": (96, 64),
            "model.layers.0.mlp.up_proj.weight": (96, 64),
            "model.layers.0.mlp.down_proj.weight": (64, 96),
            "model.norm.weight": (64,),
            "lm_head.weight": (268, 64),
        }

    @pytest.mark.parametrize(
        ("changes", "biased"),
        [
            ({}, set()),
            ({"architectures": MISTRAL}, set()),
            ({"architectures": QWEN2}, {"q_proj", "k_proj", "v_proj"}),
            ({"attention_bias": True}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
            ({"mlp_bias": True}, {"gate_proj", "up_proj", "down_proj"}),
        ],
    )
    def test_biases(self, changes, biased):
        shapes = expected_shapes(DecoderConfig.from_hf(tiny_config(**changes)))
        names = [name for name in shapes if name.startswith("model.layers.1.") and name.endswith(".bias")]
        assert {name.split(".")[-2] for name in names} == biased
        for name in names:
            assert shapes[name] == shapes[name.replace(".bias", ".weight")][:1]

    def test_a_tied_model_has_no_head(self):
        assert "lm_head.weight" not in expected_shapes(
            DecoderConfig.from_hf(tiny_config(tie_word_embeddings=True))
        )


class TestCheck:
    config = DecoderConfig.from_hf(tiny_config())

    def shapes(self, **changes):
        shapes = expected_shapes(self.config) | changes
        return {name: shape for name, shape in shapes.items() if shape is not None}

    def test_what_fits_passes(self):
        check_tensors(self.config, self.shapes(), "m")

    def test_one_error_names_everything(self):
        shapes = self.shapes(
            **{
                "model.norm.weight": None,
                "model.layers.1.mlp.up_proj.weight": (96, 65),
                "model.layers.0.self_attn.q_norm.weight": (16,),
            }
        )
        with pytest.raises(WeightsError) as caught:
            check_tensors(self.config, shapes, "folder")
        assert str(caught.value) == (
            "folder: the tensors do not fit the configuration: model.norm.weight missing; "
            "model.layers.0.self_attn.q_norm.weight unexpected; "
            "model.layers.1.mlp.up_proj.weight [96, 65] (expected [96, 64]) of a wrong shape."
        )

    def test_long_lists_are_cut(self):
        with pytest.raises(WeightsError, match="and 13 more missing"):
            check_tensors(self.config, {}, "m")

    def test_old_rotary_buffers_are_harmless(self):
        extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,), "model.rotary_emb.inv_freq": (8,)}
        check_tensors(self.config, self.shapes(**extra), "m")

    def test_a_stored_head_is_harmless_where_it_is_tied(self):
        tied = dataclasses.replace(self.config, tie_word_embeddings=True)
        check_tensors(tied, self.shapes(), "m")

    def test_a_missing_head_is_told_where_it_is_not(self):
        with pytest.raises(WeightsError, match=r"lm_head.weight missing"):
            check_tensors(self.config, self.shapes(**{"lm_head.weight": None}), "m")

    def test_an_unexpected_bias_is_told(self):
        extra = {"model.layers.0.self_attn.q_proj.bias": (64,)}
        with pytest.raises(WeightsError, match=r"q_proj\.bias unexpected"):
            check_tensors(self.config, self.shapes(**extra), "m")


class TestLeaves:
    def test_paths_in_order(self, tmp_path):
        _, leaves = leaves_of(tmp_path, tiny_config(num_hidden_layers=1))
        assert {path: leaf.shape for path, leaf in leaves.items()} == {
            "embed.embedding": (268, 64),
            "layers.0.input_norm.scale": (64,),
            "layers.0.attention.qkv.weight": (128, 64),
            "layers.0.attention.out.weight": (64, 64),
            "layers.0.post_attention_norm.scale": (64,),
            "layers.0.mlp.gate_up.weight": (192, 64),
            "layers.0.mlp.down.weight": (64, 96),
            "norm.scale": (64,),
            "head.weight": (268, 64),
        }

    def test_weights_are_joined_along_their_outputs(self, tmp_path):
        tensors, leaves = leaves_of(tmp_path)
        layer = "model.layers.1"
        q, k, v = (tensors[f"{layer}.self_attn.{part}_proj.weight"] for part in "qkv")
        np.testing.assert_array_equal(leaves["layers.1.attention.qkv.weight"], np.concatenate([q, k, v]))
        gate, up, down = (tensors[f"{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        np.testing.assert_array_equal(leaves["layers.1.mlp.gate_up.weight"], np.concatenate([gate, up]))
        np.testing.assert_array_equal(leaves["layers.1.mlp.down.weight"], down)
        out = tensors[f"{layer}.self_attn.o_proj.weight"]
        np.testing.assert_array_equal(leaves["layers.1.attention.out.weight"], out)
        np.testing.assert_array_equal(leaves["embed.embedding"], tensors["model.embed_tokens.weight"])
        np.testing.assert_array_equal(leaves["head.weight"], tensors["lm_head.weight"])
        np.testing.assert_array_equal(leaves["norm.scale"], tensors["model.norm.weight"])
        scale = leaves["layers.1.post_attention_norm.scale"]
        np.testing.assert_array_equal(scale, tensors[f"{layer}.post_attention_layernorm.weight"])

    def test_biases_are_joined(self, tmp_path):
        tensors, leaves = leaves_of(tmp_path, tiny_config(attention_bias=True, mlp_bias=True))
        layer = "model.layers.0"
        qkv = [tensors[f"{layer}.self_attn.{part}_proj.bias"] for part in "qkv"]
        np.testing.assert_array_equal(leaves["layers.0.attention.qkv.bias"], np.concatenate(qkv))
        np.testing.assert_array_equal(
            leaves["layers.0.attention.out.bias"], tensors[f"{layer}.self_attn.o_proj.bias"]
        )
        gate_up = [tensors[f"{layer}.mlp.{part}_proj.bias"] for part in ("gate", "up")]
        np.testing.assert_array_equal(leaves["layers.0.mlp.gate_up.bias"], np.concatenate(gate_up))
        np.testing.assert_array_equal(
            leaves["layers.0.mlp.down.bias"], tensors[f"{layer}.mlp.down_proj.bias"]
        )

    def test_qwen2_has_one_bias(self, tmp_path):
        _, leaves = leaves_of(tmp_path, tiny_config(architectures=QWEN2, tie_word_embeddings=True))
        assert [path for path in leaves if path.startswith("layers.0.") and path.endswith(".bias")] == [
            "layers.0.attention.qkv.bias"
        ]
        assert "head.weight" not in leaves

    @pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
    @pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
    def test_everything_but_the_norms_is_cast(self, tmp_path, stored, dtype):
        tensors, leaves = leaves_of(
            tmp_path, tensors=random_tensors(tiny_config(), dtype=stored), dtype=dtype
        )
        for path, leaf in leaves.items():
            assert leaf.dtype == (np.float32 if path.endswith(".scale") else dtype), path
        down = tensors["model.layers.0.mlp.down_proj.weight"].astype(dtype)
        np.testing.assert_array_equal(leaves["layers.0.mlp.down.weight"], down)

    def test_a_gguf_file_gives_the_same_leaves(self, tmp_path):
        tensors, expected = leaves_of(tmp_path / "hf")
        write_gguf(tmp_path / "m.gguf", tensors=tensors)
        leaves = dict(decoder_leaves(open_checkpoint(tmp_path / "m.gguf"), np.float32))
        assert leaves.keys() == expected.keys()
        for path, leaf in leaves.items():
            np.testing.assert_array_equal(leaf, expected[path])

    def test_progress_counts_to_the_number_of_leaves(self, tmp_path):
        write_hf(tmp_path)
        checkpoint = open_checkpoint(tmp_path)
        seen = []
        paths = [path for path, _ in decoder_leaves(checkpoint, np.float32, lambda *at: seen.append(at))]
        assert len(paths) == len(set(paths)) == num_leaves(checkpoint.config) == 15
        assert seen == [(done, 15) for done in range(1, 16)]

    def test_one_tensor_is_read_at_a_time(self, tmp_path):
        write_hf(tmp_path)
        checkpoint = open_checkpoint(tmp_path)
        read = []
        load = checkpoint.tensors._load
        checkpoint.tensors._load = lambda name: read.append(name) or load(name)
        leaves = decoder_leaves(checkpoint, np.float32)
        assert read == []
        assert next(leaves)[0] == "embed.embedding"
        assert read == ["model.embed_tokens.weight"]
        assert [path for path, _ in leaves][1] == "layers.0.attention.qkv.weight"
        assert read[2:5] == [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_a_damaged_weight_is_named(self, tmp_path, value):
        tensors = random_tensors(tiny_config())
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
        with pytest.raises(WeightsError, match=r"layers\.1\.mlp\.up_proj\.weight' holds NaN or infinity"):
            leaves_of(tmp_path, tensors=tensors)

    def test_a_weight_beyond_float16_is_told(self, tmp_path):
        tensors = random_tensors(tiny_config())
        tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e5
        with pytest.raises(WeightsError, match=r"in float16.*load it as bfloat16 or float32"):
            leaves_of(tmp_path, tensors=tensors, dtype=np.float16)
        _, leaves = leaves_of(tmp_path, tensors=tensors, dtype=ml_dtypes.bfloat16)
        assert np.isfinite(leaves["layers.0.mlp.gate_up.weight"].astype(np.float32)).all()
