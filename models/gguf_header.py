"""The header of a GGUF file: its metadata and where each tensor lies.

The `gguf` package states the constants of the format and decodes the tensors, but its reader makes one array
object per vocabulary entry (3.6 s for 49,152 tokens) and answers a damaged file with whatever comes first.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from .errors import WeightsError

__all__ = ["GGUFHeader", "TensorInfo", "map_file", "read_gguf_header"]

_VERSIONS = (2, 3)
_MAX_DIMS = 4
_SCALARS: dict[int, str] = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `shape` is numpy's order, `offset` counts from the start of the file."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """What a GGUF file declares.

    `metadata` values are int, float, bool, str, or lists of them; `tensors` are under llama.cpp's names.
    """

    path: Path
    metadata: dict[str, object]
    tensors: dict[str, TensorInfo]


def read_gguf_header(path: Path) -> GGUFHeader:
    """Parses the header and checks that every tensor lies inside the file.

    Raises:
      WeightsError: the file is no GGUF, is truncated or corrupt; the message names it and the place.
    """
    return _Parser(map_file(path), path).header()


def map_file(path: Path) -> memoryview:
    """The file's bytes, mapped rather than read. Raises WeightsError where it is empty or unreadable."""
    try:
        return np.memmap(path, np.uint8, mode="r").data
    except (OSError, ValueError) as error:  # numpy's answer to an empty file is a ValueError
        raise WeightsError(f"{path}: cannot be read as a GGUF file: {error}.") from error


class _Parser:
    """A cursor over the header; every read checks that its bytes are there, so wild counts end at the end."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self.data = data
        self.path = path
        self.at = 0

    def header(self) -> GGUFHeader:
        if bytes(self.take(4, "the magic number")) != b"GGUF":
            raise WeightsError(f"{self.path}: not a GGUF file: it does not begin with 'GGUF'.")
        version = self.integer("<I", "the version")
        if version not in _VERSIONS:
            raise WeightsError(
                f"{self.path}: GGUF version {version}: expected one of {_VERSIONS} (little-endian)."
            )
        num_tensors = self.integer("<Q", "the number of tensors")
        num_fields = self.integer("<Q", "the number of metadata fields")
        metadata: dict[str, object] = {}
        for _ in range(num_fields):
            key = self.string("a metadata key")
            if key in metadata:
                raise self.corrupt(f"the metadata key {key!r} occurs twice")
            metadata[key] = self.value(self.integer("<I", key), key)
        places: dict[str, tuple[tuple[int, ...], GGMLQuantizationType, int]] = {}
        for _ in range(num_tensors):
            name = self.string("a tensor name")
            if name in places:
                raise self.corrupt(f"the tensor {name!r} occurs twice")
            places[name] = self.tensor_place(name)
        start = _aligned(self.at, self.alignment(metadata))
        tensors = {name: self.tensor_info(name, start, *place) for name, place in places.items()}
        return GGUFHeader(self.path, metadata, tensors)

    def alignment(self, metadata: dict[str, object]) -> int:
        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self.corrupt(f"general.alignment={alignment!r}: expected a power of two")
        return alignment

    def value(self, kind: int, key: str) -> object:
        if kind == GGUFValueType.STRING:
            return self.string(key)
        if kind == GGUFValueType.ARRAY:
            return self.array(key)
        return self.scalars(kind, 1, key)[0]

    def array(self, key: str) -> list[object]:
        kind = self.integer("<I", key)
        if kind == GGUFValueType.STRING:
            return [self.string(key) for _ in range(self.integer("<Q", key))]
        return self.scalars(kind, self.integer("<Q", key), key)

    def scalars(self, kind: int, count: int, key: str) -> list[object]:
        if kind not in _SCALARS:
            raise self.corrupt(f"{key}: {kind} is no type of a metadata value")
        dtype = np.dtype(_SCALARS[kind])
        values = np.frombuffer(self.take(count * dtype.itemsize, key), dtype)
        if kind == GGUFValueType.BOOL and values.view(np.uint8).max(initial=0) > 1:
            raise self.corrupt(f"{key}: a boolean is neither 0 nor 1")
        return values.tolist()

    def tensor_place(self, name: str) -> tuple[tuple[int, ...], GGMLQuantizationType, int]:
        num_dims = self.integer("<I", name)
        if not 0 < num_dims <= _MAX_DIMS:
            raise self.corrupt(f"tensor {name!r}: {num_dims} dimensions")
        shape = tuple(reversed([self.integer("<Q", name) for _ in range(num_dims)]))
        number = self.integer("<I", name)
        offset = self.integer("<Q", name)
        try:
            return shape, GGMLQuantizationType(number), offset
        except ValueError as error:
            raise self.corrupt(f"tensor {name!r}: {number} is no tensor type") from error

    def tensor_info(
        self, name: str, start: int, shape: tuple[int, ...], kind: GGMLQuantizationType, offset: int
    ) -> TensorInfo:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise self.corrupt(
                f"tensor {name!r}: rows of {shape[-1]} are no multiple of {kind.name}'s {block}"
            )
        num_bytes = math.prod(shape) // block * block_bytes
        if start + offset + num_bytes > len(self.data):
            raise WeightsError(
                f"{self.path}: truncated: tensor {name!r} needs {num_bytes} bytes at {start + offset}, but "
                f"the file ends at {len(self.data)}. Fetch the file again."
            )
        return TensorInfo(shape, kind, start + offset, num_bytes)

    def take(self, count: int, what: str) -> memoryview:
        if count > len(self.data) - self.at:
            raise WeightsError(
                f"{self.path}: truncated or corrupt: {what} needs {count} bytes at {self.at}, but the file "
                f"ends at {len(self.data)}. Fetch the file again."
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def integer(self, layout: str, what: str) -> int:
        return int(struct.unpack(layout, self.take(struct.calcsize(layout), what))[0])

    def string(self, what: str) -> str:
        raw = self.take(self.integer("<Q", what), what)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            raise self.corrupt(f"{what} is not UTF-8") from error

    def corrupt(self, what: str) -> WeightsError:
        return WeightsError(f"{self.path}: corrupt near byte {self.at}: {what}. Fetch the file again.")


def _aligned(offset: int, alignment: int) -> int:
    return (offset + alignment - 1) // alignment * alignment
