"""Models by their configs: published parameter counts, the cache's bytes, what the formula does not fit."""

import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import demo_gguf, tiny_config, write_gguf, write_hf, write_json

from models.config import DecoderConfig
from models.errors import ModelError
from models.llama import LlamaDecoder
from paged_jax.errors import ModelNotFound, PagedJaxError, UnsupportedModel
from paged_jax.known_models import KNOWN_MODELS, known_model
from paged_jax.model_lookup import find_shape, shape_of_decoder
from paged_jax.model_reader import RUNS, shape_from_config

GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
GEMMA2_9B = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "vocab_size": 256_000,
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
}
GEMMA3_1B = GEMMA2_9B | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 262_144,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}
QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40960,
    "sliding_window": None,
    "use_sliding_window": False,
}
QWEN15_MOE = QWEN3_30B | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
PHI3_MINI = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32064,
    "max_position_embeddings": 4096,
    "sliding_window": 2047,
}
GEMMA3_4B_NESTED = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}


# -- published figures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters", "kib_per_token"),
    [
        ("llama-2-7b", 6_738_415_616, 512),
        ("llama-2-13b", 13_015_864_320, 800),
        ("llama-2-70b", 68_976_648_192, 320),
        ("llama-3-8b", 8_030_261_248, 128),
        ("llama-3.1-8b", 8_030_261_248, 128),
        ("llama-3.1-70b", 70_553_706_496, 320),
        ("llama-3.2-1b", 1_235_814_400, 32),
        ("llama-3.2-3b", 3_212_749_824, 112),
        ("mistral-7b", 7_248_023_552, 128),
        ("mixtral-8x7b", 46_702_792_704, 128),
        ("qwen2.5-0.5b", 494_032_768, 12),
        ("qwen2.5-7b", 7_615_616_512, 56),
        ("qwen2.5-72b", 72_706_203_648, 320),
        ("qwen3-8b", 8_190_735_360, 144),
        ("smollm2-135m", 134_515_008, 22.5),
        ("smollm2-1.7b", 1_711_376_384, 192),
        ("tinyllama-1.1b", 1_100_048_384, 22),
    ],
)
def test_a_known_model_has_its_published_parameters_and_cache(name, parameters, kib_per_token):
    shape = known_model(name)
    assert shape.num_parameters == parameters
    assert shape.kv(2).bytes_per_token == kib_per_token * 1024
    assert not shape.estimated
    assert (shape.plan_only is None) == (shape.architecture in RUNS)


def test_every_known_model_is_in_the_test_above_and_found_by_any_spelling():
    assert len(KNOWN_MODELS) == 17
    assert find_shape(" Llama-2-7B ") == find_shape("llama-2-7b")


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (GPT2, 124_439_808),
        (GEMMA2_9B, 9_241_705_984),
        (GEMMA3_1B, 999_885_952),
        (QWEN3_30B, 30_532_122_624),
        (QWEN15_MOE, 14_315_784_192),
        (PHI3_MINI, 3_821_079_552),
    ],
)
def test_a_family_that_only_a_plan_knows_has_its_published_parameters(config, parameters):
    shape = shape_from_config(config)
    assert shape.num_parameters == parameters
    assert not shape.estimated
    assert "the engine runs" in shape.plan_only


def test_a_mixture_has_fewer_parameters_for_each_token():
    assert known_model("mixtral-8x7b").active_parameters == 12_879_925_248
    assert shape_from_config(QWEN3_30B).active_parameters == pytest.approx(3.3e9, rel=0.02)
    assert known_model("llama-3-8b").active_parameters == 8_030_261_248


def test_the_sum_is_written_out():
    assert known_model("llama-2-7b").kv(2).written_out == "32 layers x 2 x 32 heads x 128 x 2 bytes = 512 KiB"
    assert known_model("smollm2-135m").kv(4).written_out == "30 layers x 2 x 3 heads x 64 x 4 bytes = 45 KiB"


# -- what a step reads and computes ------------------------------------------------------------------------


def test_a_step_reads_every_weight_but_an_embedding_that_is_no_head():
    untied, tied = known_model("llama-3-8b"), known_model("llama-3.2-1b")
    assert untied.step_weight_bytes(2, 1) == untied.weight_bytes(2) - 2 * 128_256 * 4096
    assert tied.step_weight_bytes(2, 64) == tied.weight_bytes(2)


def test_a_larger_batch_reads_more_experts_until_it_reads_all():
    shape = known_model("mixtral-8x7b")
    read = [shape.step_weight_bytes(2, batch) for batch in (1, 2, 8, 256)]
    assert read == sorted(read)
    assert read[0] == pytest.approx(2 * (shape.active_parameters - 32000 * 4096), rel=1e-3)
    assert read[-1] == pytest.approx(2 * (shape.num_parameters - 32000 * 4096), rel=1e-3)


def test_a_token_takes_two_flops_a_parameter_and_its_attention():
    shape = known_model("llama-2-7b")
    assert shape.step_flops(0) == pytest.approx(2 * 6.607e9, rel=1e-3)
    assert shape.step_flops(1000) - shape.step_flops(0) == 4 * 32 * 128 * 32 * 1000


def test_layers_with_a_window_read_no_more_than_it_shows():
    shape = shape_from_config(GEMMA2_9B)
    assert shape.layer_windows[:3] == (4096, None, 4096)
    assert shape.attended(8192) == 21 * (4096 + 8192)
    assert shape.step_kv_bytes(2, 100) == 100 * shape.kv(2).bytes_per_token
    assert shape_from_config(GEMMA3_1B).layer_windows.count(None) == 4  # layers 6, 12, 18 and 24


# -- what real configs say ---------------------------------------------------------------------------------


def test_a_nested_text_config_is_read_with_the_defaults_that_it_leaves_out():
    shape = shape_from_config(GEMMA3_4B_NESTED)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (8, 4, 256)
    assert shape.num_parameters == pytest.approx(3.88e9, rel=0.01)  # 4.3e9 with the vision tower
    assert shape.dtype == "bfloat16"
    assert any("text part alone" in note for note in shape.notes)


def test_a_nested_llama_that_states_almost_nothing_is_the_7b_that_transformers_takes_it_for():
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096},
    }
    assert shape_from_config(config).kv(2).bytes_per_token == 512 * 1024


def test_an_explicit_head_dim_counts_and_not_hidden_size_over_heads():
    config = tiny_config(head_dim=48)
    assert shape_from_config(config).kv(4).bytes_per_token == 2 * 2 * 2 * 48 * 4


@pytest.mark.parametrize(
    ("architecture", "kind", "expected"),
    [("LlamaForCausalLM", "llama", 32), ("MistralForCausalLM", "mistral", 8), ("FooForCausalLM", "foo", 32)],
)
def test_kv_heads_that_are_left_out_are_what_transformers_assumes(architecture, kind, expected):
    config = tiny_config(architectures=[architecture], model_type=kind, num_attention_heads=32)
    del config["num_key_value_heads"]
    assert shape_from_config(config).num_kv_heads == expected


def test_multi_query_attention_has_one_kv_head_whatever_else_is_stated():
    assert shape_from_config(GPT2 | {"multi_query": True}).num_kv_heads == 1
    falcon = {"architectures": ["FalconForCausalLM"], "model_type": "falcon", "multi_query": True}
    assert shape_from_config(tiny_config(**falcon, num_kv_heads=4)).num_kv_heads == 1
    larger = {"new_decoder_architecture": True, "num_kv_heads": 2, "num_key_value_heads": None}
    assert shape_from_config(tiny_config(**falcon, **larger)).num_kv_heads == 2


def test_a_family_that_nobody_knows_is_reckoned_as_a_llama_and_says_so():
    shape = shape_from_config(tiny_config(architectures=["FooForCausalLM"], model_type="foo"))
    assert shape.estimated
    assert any("reckoned as a Llama's" in note for note in shape.notes)
    assert shape.num_parameters == shape_from_config(tiny_config()).num_parameters


def test_a_quantized_checkpoint_is_told():
    shape = shape_from_config(tiny_config(quantization_config={"quant_method": "awq"}))
    assert "quantized" in shape.plan_only
    assert any("quantized" in note for note in shape.notes)


# -- refused by name ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, r"latent attention \(MLA, kv_lora_rank=512\)"),
        ({"text_config": {"kv_lora_rank": 256}}, "latent attention"),
        ({"model_type": "mamba", "state_size": 16}, "'mamba': state-space layers"),
        ({"model_type": "falcon_mamba"}, "'falcon_mamba': state-space"),
        ({"model_type": "rwkv"}, "RWKV"),
        ({"model_type": "jamba", "attn_layer_period": 8}, "'jamba': hybrid of attention and Mamba"),
        ({"model_type": "nemotron_h"}, "hybrid of attention and Mamba-2"),
        ({"model_type": "qwen3_next"}, "gated delta net"),
        ({"model_type": "new_thing", "mamba_d_state": 128}, "mamba_d_state"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types: linear_attention"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"text_config": {"cross_attention_layers": [3, 8]}}, "cross_attention_layers"),
        ({"num_kv_shared_layers": 10}, "layers that share keys and values"),
        ({"block_configs": [{}]}, "block_configs"),
        ({"architectures": ["BertForMaskedLM"]}, "'BertForMaskedLM': it is no text generator"),
        ({"v_head_dim": 64}, "v_head_dim"),
    ],
)
def test_a_cache_of_another_kind_is_refused_by_name(changes, named):
    with pytest.raises(UnsupportedModel, match=named):
        shape_from_config(tiny_config(**changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"vocab_size": None}, "vocab_size is missing"),
        (
            {"num_hidden_layers": 2**31 - 1},
            "num_hidden_layers=2147483647: expected an integer from 1 to 4096",
        ),
        ({"num_attention_heads": 0}, "num_attention_heads=0: expected an integer"),
        ({"hidden_size": "64"}, "hidden_size=64: expected an integer"),
        ({"hidden_size": 65}, "a multiple of the 4 heads"),
        ({"num_key_value_heads": 3}, "a divisor of the 4"),
        ({"num_key_value_heads": [4, 2]}, "num_key_value_heads differs between layers"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings=no: expected true or false"),
        ({"torch_dtype": "int4"}, "dtype=int4"),
        ({"num_experts": 4, "num_experts_per_tok": 8}, "num_experts_per_tok=8: expected 4 at most"),
        ({"num_experts": 4}, "num_experts_per_tok is missing"),
        ({"architectures": ["FooForCausalLM"], "layer_types": ["full_attention"]}, "a list of 2"),
    ],
)
def test_a_field_that_is_missing_or_nonsense_is_named(changes, named):
    with pytest.raises(UnsupportedModel, match=named):
        shape_from_config(tiny_config(**changes))


JUNK = st.sampled_from(
    [None, True, 0, -1, 1, 3, 2**40, 1.5, float("nan"), "", "x", [], [1], [{}], {}, {"a": {}}]
)
FIELDS = [
    *tiny_config(),
    *("head_dim", "text_config", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers"),
    *("rope_scaling", "rope_parameters", "partial_rotary_factor", "quantization_config", "attention_bias"),
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers", "n_shared_experts"),
    *("first_k_dense_replace", "decoder_sparse_step", "shared_expert_intermediate_size", "v_head_dim"),
    *("multi_query", "dtype", "kv_lora_rank", "sliding_window_pattern", "is_encoder_decoder"),
]


@settings(deadline=None, max_examples=400)
@given(
    changes=st.dictionaries(st.sampled_from(FIELDS), JUNK, max_size=3),
    architecture=st.sampled_from(["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Foo"]),
)
def test_any_config_is_a_shape_or_an_error_of_ours(changes, architecture):
    kind = architecture.removesuffix("ForCausalLM").lower()
    config = tiny_config(architectures=[architecture], model_type=kind) | changes
    try:
        shape = shape_from_config(config)
    except UnsupportedModel:
        return
    assert shape.num_parameters > 0
    assert shape.step_flops(10) > 0
    assert shape.kv(2).bytes_per_token > 0


@settings(deadline=None, max_examples=400)
@given(
    changes=st.dictionaries(st.sampled_from(FIELDS), JUNK, max_size=3),
    architecture=st.sampled_from(sorted(RUNS)),
)
def test_whatever_the_engine_accepts_a_plan_reads_the_same_way(changes, architecture):
    kind = architecture.removesuffix("ForCausalLM").lower()
    config = tiny_config(architectures=[architecture], model_type=kind) | changes
    foreign = {*FIELDS[FIELDS.index("num_experts") :], "text_config", "layer_types"} - {"dtype"}
    if foreign & changes.keys() or changes.get("model_type", kind) != kind:
        return  # fields of other models, which the engine does not look at
    try:
        expected = DecoderConfig.from_hf(config)
    except ModelError:
        return
    shape = shape_from_config(config)
    assert shape == shape_of_decoder(expected, shape.name)


# -- the engine's own reading ------------------------------------------------------------------------------

CONFIGS = [
    {},
    {"tie_word_embeddings": True},
    {"head_dim": 32},
    {"attention_bias": True, "mlp_bias": True},
    {"num_key_value_heads": None},
    {"max_position_embeddings": None},
    {"torch_dtype": None, "dtype": "bfloat16"},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    {"rope_parameters": {"full": {"rope_type": "default"}}},
    {"partial_rotary_factor": 0.5},
    {"hidden_act": "gelu"},
    {"head_dim": 15},
    {"quantization_config": {"quant_method": "gptq"}},
    {"architectures": ["MistralForCausalLM"], "model_type": "mistral"},
    {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "attention_bias": True},
    {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 64},
    {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": True,
        "max_window_layers": 1,
        "sliding_window": 64,
    },
    {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True},
    {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 64,
    },
    {"architectures": ["FooForCausalLM"]},
    {"architectures": ["LlamaForCausalLM", "FooForCausalLM"]},
    {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
    {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "layer_types": ["full_attention"] * 2,
        "sliding_window": 64,
    },
]


@pytest.mark.parametrize("changes", CONFIGS, ids=str)
def test_a_plan_reads_what_the_engine_reads_and_labels_what_it_refuses(changes):
    config = tiny_config(**changes)
    if "model_type" not in changes and "architectures" in changes:
        del config["model_type"]
    shape = shape_from_config(config)
    try:
        expected = shape_of_decoder(DecoderConfig.from_hf(config), shape.name)
    except ModelError:
        assert shape.plan_only
        return
    assert shape.plan_only is None
    assert shape == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}, CONFIGS[17]]
)
def test_parameters_and_bytes_are_those_of_the_decoder_itself(changes, dtype):
    config = tiny_config(**changes)
    decoder = nnx.eval_shape(
        lambda: LlamaDecoder(DecoderConfig.from_hf(config), dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
    )
    leaves = jax.tree.leaves(nnx.state(decoder))
    shape = shape_from_config(config)
    assert shape.num_parameters == sum(math.prod(leaf.shape) for leaf in leaves)
    assert shape.weight_bytes(jnp.dtype(dtype).itemsize) == sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves
    )


# -- where a model is found --------------------------------------------------------------------------------


def test_a_directory_a_config_and_a_gguf_file_give_the_same_shape(tmp_path):
    write_hf(tmp_path / "hf")
    write_gguf(tmp_path / "tiny.gguf")
    shapes = [
        find_shape(path)
        for path in (tmp_path / "hf", tmp_path / "hf" / "config.json", tmp_path / "tiny.gguf", tmp_path)
    ]
    for shape in shapes:
        assert shape.num_parameters == shapes[0].num_parameters
        assert shape.kv(4) == shapes[0].kv(4)
        assert shape.plan_only is None
    assert any("dequantized" in note for note in shapes[-1].notes)


def test_the_demo_models_file_is_smollm2_135m():
    shape, known = find_shape(demo_gguf()), known_model("smollm2-135m")
    assert (shape.num_parameters, shape.kv(4)) == (known.num_parameters, known.kv(4))
    assert shape.weight_bytes(4) == known.weight_bytes(4) == 4 * 134_515_008


def test_a_path_goes_before_a_known_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_json(tmp_path / "llama-2-7b", tiny_config())
    assert find_shape("llama-2-7b").num_layers == 2


@pytest.mark.parametrize("name", ["", "lama-2-7b", "org/name", "/no/such/place"])
def test_a_model_that_is_not_there_is_told_with_the_names_that_are_known(name):
    with pytest.raises(ModelNotFound, match=r"no such file.*one of llama-2-7b, .*tinyllama") as caught:
        find_shape(name)
    assert ("Did you mean llama-2-7b?" in str(caught.value)) == (name == "lama-2-7b")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"\xff\xfe", b"GGUF", b"GGUF" + b"\x00" * 40, b"[" * 100_000]
)
def test_a_file_that_is_no_model_is_an_error_of_ours(content, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(PagedJaxError, match=r"config\.json"):
        find_shape(path)


def test_a_directory_with_no_model_or_several_says_what_was_expected(tmp_path):
    with pytest.raises(ModelNotFound, match="holds no model"):
        find_shape(tmp_path)
    write_gguf(tmp_path / "a.gguf")
    write_gguf(tmp_path / "b.gguf")
    with pytest.raises(ModelNotFound, match=r"2 \.gguf files; pass the path of one"):
        find_shape(tmp_path)
