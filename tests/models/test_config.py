import pytest
from support.checkpoints import tiny_config

from models.config import DecoderConfig, RopeScaling
from models.errors import ModelError, UnsupportedModel


def read(**changes):
    return DecoderConfig.from_hf(tiny_config(**changes))


def without(*names, **changes):
    config = tiny_config(**changes)
    return DecoderConfig.from_hf({key: value for key, value in config.items() if key not in names})


def mistral(**changes):
    return read(architectures=["MistralForCausalLM"], model_type="mistral", **changes)


def qwen2(**changes):
    return read(architectures=["Qwen2ForCausalLM"], model_type="qwen2", **changes)


class TestLlama:
    def test_reads_every_size(self):
        config = read()
        assert config.architecture == "LlamaForCausalLM"
        assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (268, 64, 96)
        assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
        assert (config.rms_norm_eps, config.rope_theta, config.rope_scaling) == (1e-5, 10000.0, None)
        assert (config.max_position_embeddings, config.tie_word_embeddings) == (256, False)
        assert (config.attention_bias, config.attention_out_bias, config.mlp_bias) == (False, False, False)
        assert (config.sliding_window, config.layer_windows) == (None, (None, None))
        assert (config.hidden_act, config.dtype) == ("silu", "float32")

    def test_what_transformers_assumes_where_a_field_is_absent(self):
        config = without(
            "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta", "torch_dtype",
            "tie_word_embeddings", "hidden_act",
        )  # fmt: skip
        assert config.num_kv_heads == 4
        assert config.max_position_embeddings == 2048
        assert config.rms_norm_eps == 1e-6
        assert config.rope_theta == 10000.0
        assert config.dtype == "float32"
        assert config.tie_word_embeddings is False

    def test_a_null_number_of_kv_heads_means_one_for_each_head(self):
        assert read(num_key_value_heads=None).num_kv_heads == 4

    @pytest.mark.parametrize("head_dim", [None, 16])
    def test_head_dim_may_be_null_or_given(self, head_dim):
        assert read(head_dim=head_dim).head_dim == 16

    def test_head_dim_need_not_be_hidden_size_over_heads(self):
        assert read(head_dim=32).head_dim == 32
        assert read(hidden_size=66, head_dim=32).head_dim == 32

    def test_attention_bias_is_of_all_four_projections(self):
        config = read(attention_bias=True, mlp_bias=True)
        assert (config.attention_bias, config.attention_out_bias, config.mlp_bias) == (True, True, True)

    def test_a_sliding_window_is_ignored_as_transformers_ignores_it(self):
        assert read(sliding_window=16).sliding_window is None

    @pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_dtype_under_its_new_and_its_old_name(self, key, dtype):
        config = {k: v for k, v in tiny_config().items() if k != "torch_dtype"} | {key: dtype}
        assert DecoderConfig.from_hf(config).dtype == dtype

    def test_a_null_dtype_is_float32(self):
        assert read(torch_dtype=None, dtype=None).dtype == "float32"


class TestRope:
    def test_theta_and_scaling_of_older_files(self):
        config = read(rope_theta=500000.0, rope_scaling={"type": "linear", "factor": 2.0})
        assert config.rope_theta == 500000.0
        assert config.rope_scaling == RopeScaling("linear", 2.0)

    def test_parameters_of_transformers_5(self):
        config = without("rope_theta", rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
        assert (config.rope_theta, config.rope_scaling) == (500000.0, None)
        config = without(
            "rope_theta", rope_parameters={"rope_type": "linear", "rope_theta": 20000, "factor": 4}
        )
        assert (config.rope_theta, config.rope_scaling) == (20000.0, RopeScaling("linear", 4.0))

    @pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
    def test_llama3(self, key):
        settings = {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        assert read(**{key: settings}).rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
        settings.pop("original_max_position_embeddings")
        assert read(**{key: settings}).rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 256)

    @pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "su", "mrope"])
    def test_other_kinds_are_refused_by_name(self, kind):
        with pytest.raises(UnsupportedModel, match=f"{kind!r}: expected 'default', 'linear' or 'llama3'"):
            read(rope_scaling={"type": kind, "factor": 2.0})

    def test_a_missing_factor_is_named(self):
        with pytest.raises(UnsupportedModel, match="factor is missing"):
            read(rope_scaling={"type": "linear"})

    def test_partial_rotation_is_refused(self):
        with pytest.raises(UnsupportedModel, match="partial_rotary_factor"):
            read(partial_rotary_factor=0.5)
        with pytest.raises(UnsupportedModel, match="partial_rotary_factor"):
            read(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5})

    def test_settings_that_differ_between_layers_are_refused(self):
        with pytest.raises(UnsupportedModel, match="differ between layers"):
            read(rope_parameters={"full_attention": {"rope_type": "default"}})

    def test_settings_that_are_no_object_are_named(self):
        with pytest.raises(UnsupportedModel, match=r"rope_parameters='linear'"):
            read(rope_scaling="linear")


class TestMistral:
    def test_the_window_is_of_every_layer(self):
        config = mistral(sliding_window=32)
        assert (config.sliding_window, config.layer_windows) == (32, (32, 32))

    def test_null_is_no_window_and_absent_is_4096(self):
        assert mistral(sliding_window=None).layer_windows == (None, None)
        assert mistral().layer_windows == (4096, 4096)

    def test_what_transformers_assumes_where_a_field_is_absent(self):
        config = without(
            "num_key_value_heads", "max_position_embeddings", architectures=["MistralForCausalLM"],
            num_attention_heads=16,
        )  # fmt: skip
        assert (config.num_kv_heads, config.max_position_embeddings) == (8, 131072)

    def test_a_null_number_of_kv_heads_means_one_for_each_head(self):
        assert mistral(num_key_value_heads=None).num_kv_heads == 4

    def test_it_never_has_biases(self):
        assert mistral(attention_bias=True).attention_bias is False


class TestQwen2:
    def test_q_k_and_v_have_biases_and_o_has_none(self):
        config = qwen2(attention_bias=False)
        assert (config.attention_bias, config.attention_out_bias, config.mlp_bias) == (True, False, False)

    def test_the_window_is_off_unless_asked_for(self):
        assert qwen2(sliding_window=32, max_window_layers=0).layer_windows == (None, None)
        assert qwen2(sliding_window=None, use_sliding_window=True).layer_windows == (None, None)

    def test_the_first_max_window_layers_see_everything(self):
        config = qwen2(use_sliding_window=True, sliding_window=32, max_window_layers=1)
        assert (config.sliding_window, config.layer_windows) == (32, (None, 32))
        config = qwen2(use_sliding_window=True, sliding_window=32, max_window_layers=0)
        assert config.layer_windows == (32, 32)
        config = qwen2(use_sliding_window=True, sliding_window=32)
        assert (config.sliding_window, config.layer_windows) == (None, (None, None))

    def test_layer_types_overrule(self):
        kinds = ["sliding_attention", "full_attention"]
        config = qwen2(use_sliding_window=True, sliding_window=8, layer_types=kinds)
        assert config.layer_windows == (8, None)

    def test_unknown_or_missing_layer_types_are_named(self):
        with pytest.raises(UnsupportedModel, match="'linear_attention'"):
            qwen2(use_sliding_window=True, layer_types=["linear_attention"] * 2)
        with pytest.raises(UnsupportedModel, match="a list of 2 strings"):
            qwen2(use_sliding_window=True, layer_types=["full_attention"])


class TestRefusals:
    @pytest.mark.parametrize("name", ["GPT2LMHeadModel", "Qwen3ForCausalLM", "MixtralForCausalLM"])
    def test_other_architectures_are_refused_with_the_supported_ones(self, name):
        with pytest.raises(UnsupportedModel, match=f"{name!r}.*LlamaForCausalLM, MistralForCausalLM, Qwen2"):
            read(architectures=[name])

    @pytest.mark.parametrize("names", [None, [], "LlamaForCausalLM", ["LlamaForCausalLM"] * 2, [7]])
    def test_a_malformed_architecture_is_refused(self, names):
        with pytest.raises(UnsupportedModel, match=r"architectures|7"):
            read(architectures=names)

    @pytest.mark.parametrize(
        "name", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    )
    def test_a_missing_size_is_named(self, name):
        with pytest.raises(UnsupportedModel, match=f"config.json: the field {name} is missing"):
            without(name)

    @pytest.mark.parametrize(
        "name",
        [
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings",
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("value", [0, -1, 1.5, "4", True, [4], 2**40])
    def test_a_nonsense_size_is_named(self, name, value):
        with pytest.raises(UnsupportedModel, match=name):
            read(**{name: value})

    def test_a_wild_number_of_layers_ends_before_anything_is_built(self):
        with pytest.raises(UnsupportedModel, match="num_hidden_layers=2000000000"):
            read(num_hidden_layers=2_000_000_000)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("rms_norm_eps", 0.0),
            ("rms_norm_eps", float("nan")),
            ("rope_theta", -1.0),
            ("rope_theta", float("inf")),
            ("rope_theta", "10000"),
            ("tie_word_embeddings", "yes"),
            ("attention_bias", 1),
            ("hidden_act", 3),
        ],
    )
    def test_a_nonsense_value_is_named(self, name, value):
        with pytest.raises(UnsupportedModel, match=name):
            read(**{name: value})

    def test_heads_must_divide(self):
        with pytest.raises(UnsupportedModel, match=r"num_key_value_heads=3.*divisor of the 4"):
            read(num_key_value_heads=3)
        with pytest.raises(UnsupportedModel, match=r"hidden_size=65.*multiple of the 4 heads"):
            read(hidden_size=65)

    def test_an_odd_head_dim_is_refused(self):
        with pytest.raises(UnsupportedModel, match=r"head_dim=15.*even"):
            read(head_dim=15)

    @pytest.mark.parametrize("activation", ["gelu", "relu"])
    def test_other_activations_are_refused(self, activation):
        with pytest.raises(UnsupportedModel, match=f"hidden_act={activation!r}: expected 'silu'"):
            read(hidden_act=activation)

    @pytest.mark.parametrize("dtype", ["float64", "int8", "float8_e4m3fn"])
    def test_other_dtypes_are_refused(self, dtype):
        with pytest.raises(UnsupportedModel, match=dtype):
            read(torch_dtype=dtype)

    @pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8"])
    def test_quantized_checkpoints_are_refused_by_name(self, method):
        with pytest.raises(UnsupportedModel, match=f"quantized \\({method}\\)"):
            read(quantization_config={"quant_method": method, "bits": 4})

    def test_every_error_is_a_value_error(self):
        with pytest.raises(ValueError, match="vocab_size") as caught:
            without("vocab_size")
        assert isinstance(caught.value, ModelError)
