import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from support.checkpoints import random_tensors, tiny_config, write_hf, write_json

from models.errors import WeightsError
from models.safetensors_weights import open_safetensors

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("num_shards", [1, 2, 5])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_tensors_come_back_bit_for_bit(tmp_path, num_shards, dtype):
    written = write_hf(tmp_path, tensors=random_tensors(tiny_config(), dtype=dtype), num_shards=num_shards)
    tensors = open_safetensors(tmp_path)
    assert set(tensors) == set(written)
    assert len(tensors) == len(written)
    for name, expected in written.items():
        assert tensors.shapes[name] == expected.shape
        assert tensors[name].dtype == dtype
        assert tensors[name].tobytes() == expected.tobytes()


def test_an_unknown_name_is_a_key_error(tmp_path):
    write_hf(tmp_path)
    with pytest.raises(KeyError, match=r"no.such"):
        open_safetensors(tmp_path)["no.such"]


def test_a_single_file_wins_over_an_index(tmp_path):
    write_hf(tmp_path)
    write_json(tmp_path / INDEX, {"weight_map": {"x": "gone.safetensors"}})
    assert "model.norm.weight" in open_safetensors(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_not_read(tmp_path, name):
    (tmp_path / name).write_bytes(b"pickle")
    with pytest.raises(WeightsError, match=f"{name}.*Convert them to safetensors"):
        open_safetensors(tmp_path)


def test_no_weights_at_all(tmp_path):
    with pytest.raises(WeightsError, match=r"expected model.safetensors"):
        open_safetensors(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    write_hf(tmp_path, num_shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"model-00002-of-00003.safetensors: missing"):
        open_safetensors(tmp_path)


def test_a_tensor_that_is_in_no_shard_is_named(tmp_path):
    write_hf(tmp_path, num_shards=2)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["model.ghost.weight"] = "model-00001-of-00002.safetensors"
    write_json(tmp_path / INDEX, index)
    with pytest.raises(WeightsError, match=r"'model.ghost.weight' is in no shard"):
        open_safetensors(tmp_path)


def test_a_tensor_in_two_shards_is_named(tmp_path):
    tensors = write_hf(tmp_path, num_shards=2)
    name = next(iter(tensors))
    save_file({name: tensors[name]}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(WeightsError, match=f"{name!r} is also in model-00001-of-00002"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("weight_map", [None, {}, [], {"x": 3}, {"x": "../x.safetensors"}, {"x": "/x"}])
def test_a_malformed_index_is_refused(tmp_path, weight_map):
    write_json(tmp_path / INDEX, {"weight_map": weight_map})
    with pytest.raises(WeightsError, match="weight_map"):
        open_safetensors(tmp_path)


def test_an_index_that_is_no_json_is_refused(tmp_path):
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(WeightsError, match=f"{INDEX}: cannot be read as JSON"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("dtype", [np.float64, np.int8, np.int32])
def test_other_types_are_refused_by_name(tmp_path, dtype):
    save_file({"model.norm.weight": np.ones(4, dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"'model.norm.weight' is of type"):
        open_safetensors(tmp_path)


def test_truncation_at_any_point_is_told_at_once(tmp_path):
    write_hf(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for size in [0, 1, 7, 8, 9, 100, 2000, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(WeightsError, match=r"model.safetensors"):
            open_safetensors(tmp_path)


def test_a_damaged_header_never_gives_another_error(tmp_path):
    write_hf(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    header = 8 + int.from_bytes(whole[:8], "little")
    told = []
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[rng.integers(header)] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            tensors = open_safetensors(tmp_path)
            for name in tensors:
                assert tensors[name].shape == tensors.shapes[name]
        except WeightsError as error:
            told.append(str(error))
    assert len(told) > 50
    assert all("model.safetensors" in text for text in told)
