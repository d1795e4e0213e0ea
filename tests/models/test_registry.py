"""Decoders are found by the architecture's name and built around exactly the parameters they have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.checkpoints import tiny_config
from support.golden_cases import MISTRAL, QWEN2, TIED

from models.config import SUPPORTED_ARCHITECTURES, DecoderConfig
from models.errors import UnsupportedModel, WeightsError
from models.llama import LlamaDecoder
from models.registry import DECODERS, build_decoder, decoder_class

QKV = "layers.1.attention.qkv.weight"


def parameters(config, dtype=np.float32):
    """Distinct values for every parameter of the decoder, by flat name."""
    abstract = nnx.eval_shape(lambda: LlamaDecoder(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)))
    flat = nnx.to_flat_state(nnx.state(abstract))
    return {
        ".".join(map(str, path)): np.full(leaf.shape, index, leaf.dtype)
        for index, (path, leaf) in enumerate(flat)
    }


def config(**changes):
    return DecoderConfig.from_hf(tiny_config(**changes))


def build(leaves, **changes):
    return build_decoder(config(**changes), leaves, dtype=jnp.float32)


@pytest.mark.parametrize("name", SUPPORTED_ARCHITECTURES)
def test_every_architecture_whose_config_can_be_read_has_a_decoder(name):
    assert decoder_class(name) is DECODERS[name]


def test_an_unknown_architecture_is_answered_with_those_there_are():
    with pytest.raises(UnsupportedModel, match="'MambaForCausalLM'") as raised:
        decoder_class("MambaForCausalLM")
    for name in SUPPORTED_ARCHITECTURES:
        assert name in str(raised.value)


@pytest.mark.parametrize("changes", [{}, TIED, MISTRAL, QWEN2, {"attention_bias": True, "mlp_bias": True}])
def test_each_parameter_is_where_its_name_says(changes):
    leaves = parameters(config(**changes))
    decoder = build(leaves.items(), **changes)
    held = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(decoder))}
    assert held.keys() == leaves.keys()
    for name, array in leaves.items():
        assert isinstance(held[name][...], jax.Array)
        np.testing.assert_array_equal(held[name][...], array)


def test_parameters_keep_the_dtype_they_come_in():
    leaves = parameters(config(), jnp.bfloat16)
    decoder = build_decoder(config(), leaves.items(), dtype=jnp.bfloat16)
    assert decoder.embed.embedding.dtype == jnp.bfloat16
    assert decoder.layers[0].mlp.down.weight.dtype == jnp.bfloat16
    assert decoder.layers[0].input_norm.scale.dtype == jnp.float32


def test_parameters_may_come_in_any_order():
    leaves = parameters(config())
    decoder = build((name, leaves[name]) for name in reversed(leaves))
    np.testing.assert_array_equal(decoder.layers[1].attention.qkv.weight[...], leaves[QKV])


def test_missing_parameters_are_named():
    leaves = parameters(config())
    del leaves[QKV], leaves["norm.scale"]
    with pytest.raises(WeightsError, match=r"missing.*layers\.1\.attention\.qkv\.weight, norm\.scale"):
        build(leaves.items())


def test_an_unknown_parameter_is_named():
    leaves = parameters(config()) | {"layers.2.mlp.down.weight": np.zeros((64, 96), np.float32)}
    with pytest.raises(WeightsError, match=r"layers\.2\.mlp\.down\.weight: not a parameter"):
        build(leaves.items())


def test_a_head_beside_tied_embeddings_is_unknown():
    leaves = parameters(config())
    with pytest.raises(WeightsError, match=r"head\.weight: not a parameter"):
        build(leaves.items(), **TIED)


def test_a_parameter_given_twice_is_named():
    leaves = [*parameters(config()).items()]
    again = next(leaf for leaf in leaves if leaf[0] == QKV)
    with pytest.raises(WeightsError, match=r"qkv\.weight: .*given twice"):
        build([*leaves, again])


def test_a_parameter_of_another_shape_is_named_with_both():
    leaves = parameters(config())
    leaves[QKV] = leaves[QKV].T
    with pytest.raises(WeightsError, match=r"qkv\.weight: shape \(64, 128\) was given, expected \(128, 64\)"):
        build(leaves.items())
