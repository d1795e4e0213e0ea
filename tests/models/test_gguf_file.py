import re
import struct

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from support.checkpoints import demo_gguf, gguf_name, half_split, random_tensors, tiny_config, write_gguf

from models.checkpoint import open_checkpoint
from models.config import RopeScaling
from models.errors import ModelError, TokenizerError, UnsupportedModel, WeightsError
from models.gguf_file import GGUFFile, half_split_rows
from models.gguf_header import read_gguf_header
from models.weights import decoder_leaves

QWEN2 = {"architectures": ["Qwen2ForCausalLM"]}


def write_and_open(path, **options):
    written = write_gguf(path, **options)
    return written, open_checkpoint(path)


class TestTensors:
    def test_float32_comes_back_exactly_in_hugging_faces_layout(self, tmp_path):
        written, checkpoint = write_and_open(tmp_path / "m.gguf")
        assert set(checkpoint.tensors) == set(written)
        for name, expected in written.items():
            np.testing.assert_array_equal(checkpoint.tensors[name], expected)
            assert checkpoint.tensors.shapes[name] == expected.shape

    @pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16])
    def test_half_precision_stays_in_its_dtype(self, tmp_path, kind):
        dtype = {Kind.F16: np.float16, Kind.BF16: ml_dtypes.bfloat16}[kind]
        written, checkpoint = write_and_open(tmp_path / "m.gguf", kind=kind)
        assert checkpoint.config.dtype == np.dtype(dtype).name
        for name, expected in written.items():
            got = checkpoint.tensors[name]
            assert got.dtype == (dtype if expected.ndim > 1 else np.float32)
            np.testing.assert_array_equal(got, expected.astype(got.dtype))

    @pytest.mark.parametrize(
        ("kind", "error"),
        [(Kind.Q8_0, 0.006), (Kind.Q5_1, 0.03), (Kind.Q5_0, 0.05), (Kind.Q4_1, 0.06), (Kind.Q4_0, 0.1)],
    )
    def test_quantised_matrices_are_near_what_was_written(self, tmp_path, kind, error):
        written, checkpoint = write_and_open(tmp_path / "m.gguf", kind=kind)
        assert checkpoint.config.dtype == "float32"
        for name, expected in written.items():
            got = checkpoint.tensors[name]
            scale = np.abs(expected).max()
            assert np.abs(got - expected).max() <= (error * scale if expected.ndim > 1 else 0)

    def test_q6_k_blocks_are_decoded_by_their_definition(self, tmp_path):
        # 128 bytes of low nibbles, 64 of high pairs, 16 int8 scales, one float16: 256 weights
        block = np.zeros(210, np.uint8)
        block[:128] = 0x21  # low nibble 1 for the first half of a group, 2 for the second
        block[128:192] = 0xAA  # high bits 2 everywhere: 32 + nibble, minus 32
        block[192:208] = 3
        block[208:210] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
        writer = gguf.GGUFWriter(str(tmp_path / "q.gguf"), "llama")
        writer.add_tensor("w", np.tile(block, (4, 1)), raw_dtype=Kind.Q6_K)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        values = GGUFFile(tmp_path / "q.gguf").read("w")
        half = np.r_[np.full(64, 1.5, np.float32), np.full(64, 3.0, np.float32)]
        np.testing.assert_array_equal(values, np.tile(half, (4, 2)))

    def test_rows_of_q_and_k_are_unpermuted_for_llama_alone(self, tmp_path):
        for config in (tiny_config(), tiny_config(**QWEN2)):
            written, checkpoint = write_and_open(tmp_path / "m.gguf", config=config)
            for name in ("q_proj.weight", "k_proj.weight", "v_proj.weight"):
                name = f"model.layers.1.self_attn.{name}"
                np.testing.assert_array_equal(checkpoint.tensors[name], written[name])

    def test_biases_of_q_and_k_are_unpermuted_too(self, tmp_path):
        config = tiny_config(attention_bias=True, mlp_bias=True)
        written, checkpoint = write_and_open(tmp_path / "m.gguf", config=config)
        assert checkpoint.config.attention_bias
        assert checkpoint.config.attention_out_bias
        assert checkpoint.config.mlp_bias
        for name, expected in written.items():
            np.testing.assert_array_equal(checkpoint.tensors[name], expected)

    def test_half_split_rows_by_its_definition(self):
        rows = np.arange(12)
        assert half_split_rows(rows, 2).tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
        matrix = np.random.default_rng(0).normal(size=(24, 3))
        np.testing.assert_array_equal(half_split_rows(matrix, 3), half_split(matrix, 3))

    def test_rows_that_do_not_divide_by_the_heads_are_told(self, tmp_path):
        tensors = random_tensors(tiny_config())
        del tensors["model.layers.0.self_attn.q_proj.weight"]
        extra = {"blk.0.attn_q.weight": np.ones((62, 64), np.float32)}
        _, checkpoint = write_and_open(tmp_path / "m.gguf", tensors=tensors, extra=extra)
        with pytest.raises(WeightsError, match="62 rows do not divide by 4 heads"):
            checkpoint.tensors["model.layers.0.self_attn.q_proj.weight"]

    def test_a_type_that_cannot_be_decoded_is_refused_by_name(self, tmp_path):
        path = tmp_path / "m.gguf"
        write_gguf(path, kind=Kind.Q4_0)
        raw = bytearray(path.read_bytes())
        name = b"blk.0.ffn_up.weight"
        at = raw.index(name) + len(name) + 4 + 2 * 8
        assert raw[at] == Kind.Q4_0
        raw[at : at + 4] = int(Kind.F64).to_bytes(4, "little")
        path.write_bytes(bytes(raw) + bytes(100_000))
        with pytest.raises(UnsupportedModel, match=r"'blk.0.ffn_up.weight' has the type F64"):
            GGUFFile(path)


class TestConfig:
    def test_sizes(self, tmp_path):
        _, checkpoint = write_and_open(tmp_path / "m.gguf")
        config = checkpoint.config
        assert config.architecture == "LlamaForCausalLM"
        assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (268, 64, 96)
        assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
        assert config.rms_norm_eps == pytest.approx(1e-5)
        assert (config.rope_theta, config.rope_scaling) == (10000.0, None)
        assert (config.max_position_embeddings, config.tie_word_embeddings) == (256, False)
        assert config.layer_windows == (None, None)

    def test_qwen2_has_biases_of_q_k_and_v(self, tmp_path):
        _, checkpoint = write_and_open(tmp_path / "m.gguf", config=tiny_config(**QWEN2))
        assert checkpoint.config.architecture == "Qwen2ForCausalLM"
        assert (checkpoint.config.attention_bias, checkpoint.config.attention_out_bias) == (True, False)

    def test_embeddings_are_tied_where_there_is_no_output_matrix(self, tmp_path):
        config = tiny_config(tie_word_embeddings=True)
        written, checkpoint = write_and_open(tmp_path / "m.gguf", config=config)
        assert "lm_head.weight" not in written
        assert checkpoint.config.tie_word_embeddings

    def test_a_head_dim_of_its_own(self, tmp_path):
        metadata = {"llama.attention.key_length": 32, "llama.attention.value_length": 32}
        config = tiny_config(head_dim=32)
        written, checkpoint = write_and_open(tmp_path / "m.gguf", config=config, metadata=metadata)
        assert checkpoint.config.head_dim == 32
        name = "model.layers.0.self_attn.q_proj.weight"
        np.testing.assert_array_equal(checkpoint.tensors[name], written[name])

    def test_defaults_of_llama_cpp(self, tmp_path):
        metadata = {"llama.rope.freq_base": None, "llama.attention.head_count_kv": None}
        config = tiny_config(num_key_value_heads=4)
        _, checkpoint = write_and_open(tmp_path / "m.gguf", config=config, metadata=metadata)
        assert checkpoint.config.num_kv_heads == 4
        assert checkpoint.config.rope_theta == 10000.0

    def test_one_size_for_each_layer_must_be_the_same(self, tmp_path):
        key = "llama.attention.head_count_kv"
        _, checkpoint = write_and_open(tmp_path / "m.gguf", metadata={key: [2, 2]})
        assert checkpoint.config.num_kv_heads == 2
        with pytest.raises(UnsupportedModel, match=f"{key} differs between layers"):
            write_and_open(tmp_path / "m.gguf", metadata={key: [2, 4]})

    def test_a_window(self, tmp_path):
        metadata = {"llama.attention.sliding_window": 32}
        _, checkpoint = write_and_open(tmp_path / "m.gguf", metadata=metadata)
        assert checkpoint.config.layer_windows == (32, 32)

    def test_linear_scaling(self, tmp_path):
        metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
        _, checkpoint = write_and_open(tmp_path / "m.gguf", metadata=metadata)
        assert checkpoint.config.rope_scaling == RopeScaling("linear", 2.0)
        metadata = {"llama.rope.scaling.type": "none"}
        assert write_and_open(tmp_path / "m.gguf", metadata=metadata)[1].config.rope_scaling is None

    @pytest.mark.parametrize("factor", [8.0, 32.0])
    def test_llama3_scaling_is_found_from_the_frequencies(self, tmp_path, factor):
        config = tiny_config(rope_theta=500000.0, head_dim=64)
        metadata = {"llama.attention.key_length": 64, "llama.attention.value_length": 64}
        divisors = llama3_divisors(factor, 64, 500000.0)
        assert len(set(divisors.tolist())) > 3  # all three branches occur
        _, checkpoint = write_and_open(
            tmp_path / "m.gguf", config=config, metadata=metadata, extra={"rope_freqs.weight": divisors}
        )
        assert checkpoint.config.rope_scaling == RopeScaling("llama3", factor, 1.0, 4.0, 8192)
        assert "rope_freqs.weight" not in checkpoint.tensors

    def test_llama3_scaling_of_other_settings_is_refused(self, tmp_path):
        config = tiny_config(rope_theta=500000.0, head_dim=64)
        metadata = {"llama.attention.key_length": 64, "llama.attention.value_length": 64}
        divisors = llama3_divisors(8.0, 64, 500000.0)
        divisors[(divisors > 1) & (divisors < 8)] *= 1.01
        with pytest.raises(UnsupportedModel, match=r"rope_freqs.weight is not that of Llama 3\.1"):
            write_and_open(
                tmp_path / "m.gguf", config=config, metadata=metadata, extra={"rope_freqs.weight": divisors}
            )

    def test_two_scalings_at_once_are_refused(self, tmp_path):
        metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
        with pytest.raises(UnsupportedModel, match="together with rope_freqs"):
            write_and_open(
                tmp_path / "m.gguf", metadata=metadata, extra={"rope_freqs.weight": np.ones(8, np.float32)}
            )

    def test_frequencies_of_another_scaling_are_refused(self, tmp_path):
        for divisors in (np.linspace(1, 4, 8), np.full(8, np.nan), np.ones(5)):
            with pytest.raises(UnsupportedModel, match=r"rope_freqs.weight is not that of Llama 3.1"):
                write_and_open(tmp_path / "m.gguf", extra={"rope_freqs.weight": divisors.astype(np.float32)})

    def test_frequencies_that_change_nothing_are_no_scaling(self, tmp_path):
        extra = {"rope_freqs.weight": np.ones(8, np.float32)}
        assert write_and_open(tmp_path / "m.gguf", extra=extra)[1].config.rope_scaling is None

    @pytest.mark.parametrize(
        ("metadata", "told"),
        [
            ({"general.architecture": "gemma3"}, "'gemma3' is not supported. Supported: llama, qwen2"),
            ({"llama.rope.scaling.type": "yarn"}, "'yarn' is not supported"),
            ({"llama.rope.dimension_count": 8}, "rope.dimension_count=8: expected head_dim, 16"),
            ({"llama.attention.value_length": 8}, "attention.value_length=8: expected head_dim, 16"),
            ({"llama.expert_count": 8}, "expert_count=8"),
            ({"llama.logit_scale": 0.5}, "logit_scale=0.5"),
            ({"llama.block_count": None}, "llama.block_count is missing"),
            ({"llama.block_count": 2_000_000_000}, "llama.block_count=2000000000"),
            ({"llama.embedding_length": 0}, "llama.embedding_length=0"),
            ({"llama.embedding_length": "64"}, "llama.embedding_length='64'"),
            ({"llama.attention.head_count_kv": 3}, "divisor of the 4"),
            ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon"),
        ],
    )
    def test_what_is_not_supported_or_nonsense_is_named(self, tmp_path, metadata, told):
        with pytest.raises(UnsupportedModel, match=told):
            write_and_open(tmp_path / "m.gguf", metadata=metadata)

    def test_more_tokens_than_rows_of_the_embedding(self, tmp_path):
        config = tiny_config(vocab_size=200)
        with pytest.raises(WeightsError, match=r"token_embd.weight has 200 rows for 268 tokens"):
            write_and_open(tmp_path / "m.gguf", config=config)

    def test_more_rows_than_tokens_are_padding(self, tmp_path):
        _, checkpoint = write_and_open(tmp_path / "m.gguf", config=tiny_config(vocab_size=320))
        assert (checkpoint.config.vocab_size, checkpoint.tokenizer.vocab_size) == (320, 268)


def llama3_divisors(factor, head_dim, theta):
    """What llama.cpp's converter writes, by the branches of the definition."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192 / 1:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def header_bytes(fields=(), tensors=(), counts=None):
    """A GGUF header from raw parts: fields are (key, type, value), tensors (name, dims, type, offset)."""

    def string(text):
        return struct.pack("<Q", len(text)) + text.encode()

    counts = counts or (len(tensors), len(fields))
    parts = [b"GGUF", struct.pack("<IQQ", 3, *counts)]
    parts += [string(key) + struct.pack("<I", kind) + value for key, kind, value in fields]
    for name, dims, kind, offset in tensors:
        parts.append(string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset))
    return b"".join(parts)


UINT32, BOOL, ARRAY = 4, 7, 9


class TestDamage:
    @pytest.mark.parametrize(
        ("parts", "told"),
        [
            ({"fields": [("k", UINT32, bytes(4))] * 2}, "the metadata key 'k' occurs twice"),
            ({"fields": [("k", 77, bytes(4))]}, "k: 77 is no type of a metadata value"),
            ({"fields": [("k", BOOL, b"\x02")]}, "a boolean is neither 0 nor 1"),
            ({"fields": [("k", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(64))]}, "9 is no type"),
            ({"fields": [("k", ARRAY, struct.pack("<IQ", UINT32, 2**62))]}, "truncated or corrupt: k needs"),
            ({"fields": [("general.alignment", UINT32, struct.pack("<I", 3))]}, "expected a power of two"),
            ({"tensors": [("t", [4], 0, 0)] * 2}, "the tensor 't' occurs twice"),
            ({"tensors": [("t", [4] * 5, 0, 0)]}, "5 dimensions"),
            ({"tensors": [("t", [], 0, 0)]}, "0 dimensions"),
            ({"tensors": [("t", [4], 99, 0)]}, "99 is no tensor type"),
            ({"tensors": [("t", [33], 2, 0)]}, "rows of 33 are no multiple of Q4_0's 32"),
            ({"tensors": [("t", [2**40], 0, 0)]}, "truncated: tensor 't' needs 4398046511104 bytes"),
            ({"tensors": [("t", [4], 0, 2**63)]}, "truncated: tensor 't'"),
            ({"counts": (0, 2**63)}, "truncated or corrupt|corrupt near"),
            ({"counts": (2**63, 0)}, "truncated or corrupt|corrupt near"),
        ],
    )
    def test_a_wrong_header_is_told(self, tmp_path, parts, told):
        path = tmp_path / "m.gguf"
        path.write_bytes(header_bytes(**parts) + bytes(256))
        with pytest.raises(WeightsError, match=told):
            read_gguf_header(path)

    def test_no_gguf_file(self, tmp_path):
        path = tmp_path / "m.gguf"
        path.write_bytes(b"<html>404 Not Found</html>")
        with pytest.raises(WeightsError, match=r"m\.gguf: not a GGUF file"):
            open_checkpoint(path)

    @pytest.mark.parametrize("version", [1, 4, 0x03000000])
    def test_other_versions_are_refused(self, tmp_path, version):
        path = tmp_path / "m.gguf"
        path.write_bytes(b"GGUF" + version.to_bytes(4, "little") + bytes(64))
        with pytest.raises(WeightsError, match=f"GGUF version {version}"):
            open_checkpoint(path)

    def test_truncation_at_any_point_is_told_at_once(self, tmp_path):
        path = tmp_path / "m.gguf"
        write_gguf(path)
        whole = path.read_bytes()
        for size in [*range(64), *range(64, len(whole), 997), len(whole) - 1]:
            path.write_bytes(whole[:size])
            with pytest.raises(WeightsError, match=r"m\.gguf"):
                open_checkpoint(path)

    def test_a_flipped_header_bit_never_gives_another_error(self, tmp_path):
        path = tmp_path / "m.gguf"
        write_gguf(
            path, config=tiny_config(num_hidden_layers=1), extra={"rope_freqs.weight": np.ones(8, np.float32)}
        )
        header = min(info.offset for info in read_gguf_header(path).tensors.values())
        whole = path.read_bytes()
        rng = np.random.default_rng(0)
        told = []
        for _ in range(600):
            damaged = bytearray(whole)
            damaged[rng.integers(header)] ^= 1 << int(rng.integers(8))
            path.write_bytes(damaged)
            try:
                for _ in decoder_leaves(open_checkpoint(path), np.float32):
                    pass
            except ModelError as error:
                told.append(error)
        assert len(told) > 100
        assert {type(error) for error in told} == {UnsupportedModel, WeightsError, TokenizerError}
        assert all(re.search(f"{path}|token|template", str(error)) for error in told)

    def test_a_flipped_bit_in_any_number_of_the_tensor_table_is_told(self, tmp_path):
        path = tmp_path / "m.gguf"
        written = write_gguf(path, config=tiny_config(num_hidden_layers=1))
        whole = path.read_bytes()
        for name, tensor in written.items():
            source = gguf_name(name).encode()
            start = whole.index(source) + len(source)
            for at in range(start, start + 4 + 8 * tensor.ndim + 4):
                damaged = bytearray(whole)
                damaged[at] ^= 1
                path.write_bytes(damaged)
                with pytest.raises(ModelError):
                    for _ in decoder_leaves(open_checkpoint(path), np.float32):
                        pass

    def test_metadata_of_a_wrong_type_is_told(self, tmp_path):
        path = tmp_path / "m.gguf"
        for key in (
            "tokenizer.ggml.tokens",
            "tokenizer.ggml.merges",
            "llama.block_count",
            "llama.context_length",
        ):
            write_gguf(path, metadata={key: "text"})
            with pytest.raises(ModelError, match=key):
                open_checkpoint(path)

    def test_an_unknown_tensor_is_reported_under_its_own_name(self, tmp_path):
        extra = {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}
        _, checkpoint = write_and_open(tmp_path / "m.gguf", extra=extra)
        with pytest.raises(WeightsError, match=r"blk.0.attn_q_norm.weight unexpected"):
            next(decoder_leaves(checkpoint, np.float32))


@pytest.fixture(scope="module")
def reader():
    return gguf.GGUFReader(demo_gguf())


class TestAgainstTheReader:
    """The header parser against the one of the `gguf` package, on the trained file."""

    def test_metadata_is_the_same(self, reader):
        metadata = read_gguf_header(demo_gguf()).metadata
        fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        assert metadata.keys() == fields.keys()
        for key, field in fields.items():
            assert metadata[key] == field.contents(), key

    def test_tensors_lie_where_it_says(self, reader):
        infos = read_gguf_header(demo_gguf()).tensors
        assert list(infos) == [tensor.name for tensor in reader.tensors]
        for tensor in reader.tensors:
            info = infos[tensor.name]
            assert info.shape == tuple(reversed(tensor.shape.tolist()))
            assert (info.kind, info.offset) == (tensor.tensor_type, tensor.data_offset)
            assert info.num_bytes == tensor.n_bytes

    def test_values_are_the_same(self, reader):
        file = GGUFFile(demo_gguf())
        for tensor in reader.tensors[:12]:
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(file.read(tensor.name), expected)
