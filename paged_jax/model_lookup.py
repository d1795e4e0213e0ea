"""Where a model's shape is found: a known name, a config.json, a directory, a GGUF file. Reads no weights.

Only a GGUF file takes the models package, and with it jax; the rest takes milliseconds.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paged_jax.errors import ModelNotFound, UnsupportedModel
from paged_jax.known_models import known_model, unknown_model
from paged_jax.model_reader import shape_from_config
from paged_jax.model_shape import ModelShape

if TYPE_CHECKING:
    from models.config import DecoderConfig


def find_shape(model: str | os.PathLike[str]) -> ModelShape:
    """The shape of a model: a path goes before a known name.

    Raises ModelNotFound where there is neither, UnsupportedModel for one that a plan does not fit.
    """
    name = os.path.expanduser(os.fspath(model))
    path = Path(name)
    try:
        exists = bool(name) and path.exists()
    except OSError as error:  # such as a name too long for a path
        raise ModelNotFound(f"model={name[:80]!r}: no path and no known name: {error}") from error
    if not exists:
        shape = known_model(name)
        if shape is None:
            raise unknown_model(name)
        return shape
    if path.is_dir():
        path = _in_directory(path)
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF" or path.suffix == ".gguf"
    return _from_gguf(path) if is_gguf else shape_from_config(_json(path), str(path))


def _in_directory(directory: Path) -> Path:
    """The file of a directory that states the sizes, chosen as the engine chooses."""
    if (directory / "config.json").is_file():
        return directory / "config.json"
    files = sorted(directory.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    found = f"{len(files)} .gguf files; pass the path of one of them" if files else "no model"
    raise ModelNotFound(f"{directory}: holds {found}: expected config.json, or one .gguf file.")


def _json(path: Path) -> dict[str, object]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path}: expected a config.json or a GGUF file: {error}") from error
    if not isinstance(values, dict):
        raise UnsupportedModel(f"{path}: holds a {type(values).__name__}; expected a JSON object.")
    return values


def _from_gguf(path: Path) -> ModelShape:
    from paged_jax.loader import models_module, our_errors

    with our_errors():
        file = models_module("gguf_file").GGUFFile(path)
        shape = shape_of_decoder(models_module("gguf_config").decoder_config(file), str(path))
    return replace(shape, notes=("a GGUF file: quantized weights are dequantized when they are loaded",))


def shape_of_decoder(config: DecoderConfig, name: str) -> ModelShape:
    """The shape of a decoder that the engine can run."""
    return ModelShape(
        name=name,
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        tie_word_embeddings=config.tie_word_embeddings,
        layer_windows=config.layer_windows,
        max_position_embeddings=config.max_position_embeddings,
        dtype=config.dtype,
        norm_parameters=(2 * config.num_layers + 1) * config.hidden_size,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_out_bias,
        mlp_bias=config.mlp_bias,
    )
