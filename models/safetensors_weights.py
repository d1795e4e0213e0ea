"""Tensors of a Hugging Face directory: `model.safetensors`, or shards with their index.

Nothing else is read: a `.bin` or `.pt` file is a pickle, which can run any program when it is loaded.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from .errors import WeightsError
from .fields import read_json
from .tensors import LazyTensors

__all__ = ["open_safetensors"]

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")


def open_safetensors(directory: Path) -> LazyTensors:
    """Opens the shards and checks them against the index; tensors are read when asked for.

    Raises:
      WeightsError: there are no safetensors; a shard is missing, truncated or corrupt; the index and the
        shards disagree; a tensor is neither float32, float16 nor bfloat16. Files and tensors are named.
    """
    home: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    files = {}
    for shard in _shards(directory):
        files[shard] = _open(shard)
        for name in files[shard].keys():  # noqa: SIM118 - the handle is no mapping
            view = files[shard].get_slice(name)
            if view.get_dtype() not in _DTYPES:
                raise WeightsError(
                    f"{shard}: tensor {name!r} is of type {view.get_dtype()}; expected one of {_DTYPES}."
                )
            if name in home:
                raise WeightsError(f"{shard}: tensor {name!r} is also in {home[name].name}.")
            home[name] = shard
            shapes[name] = tuple(view.get_shape())
    _check_index(directory, home)

    def load(name: str) -> np.ndarray:
        try:
            return files[home[name]].get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            raise WeightsError(f"{home[name]}: tensor {name!r} cannot be read: {error}.") from error

    return LazyTensors(shapes, load, str(directory))


def _shards(directory: Path) -> list[Path]:
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    if (directory / _INDEX).is_file():
        shards = [directory / name for name in sorted(set(_weight_map(directory).values()))]
        for shard in shards:
            if not shard.is_file():
                raise WeightsError(f"{shard}: missing, but {_INDEX} names it. Fetch the file.")
        return shards
    pickles = sorted(
        path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt")
    )
    if pickles:
        raise WeightsError(
            f"{directory}: holds only pickled weights ({', '.join(pickles[:3])}), which are not read because "
            "they can run any program. Convert them to safetensors (save_pretrained of transformers does)."
        )
    raise WeightsError(f"{directory}: no weights: expected {_SINGLE}, or {_INDEX} with its shards.")


def _weight_map(directory: Path) -> dict[str, str]:
    index = directory / _INDEX
    weight_map = read_json(index, WeightsError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{index}: weight_map: expected an object of tensor names and file names.")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise WeightsError(f"{index}: weight_map[{tensor!r}]={file!r}: expected a file name.")
    return weight_map


def _open(shard: Path) -> safe_open:
    try:
        return safe_open(shard, framework="numpy")
    except (SafetensorError, OSError, ValueError) as error:
        raise WeightsError(f"{shard}: truncated or corrupt: {error}. Fetch the file again.") from error


def _check_index(directory: Path, home: dict[str, Path]) -> None:
    if (directory / _SINGLE).is_file():
        return
    for name, file in _weight_map(directory).items():
        if name not in home:
            raise WeightsError(
                f"{directory / _INDEX}: tensor {name!r} is in no shard; expected it in {file}."
            )
