"""A model on disk: what is needed to build, load and prompt it, from either format.

A format's own affairs stay in its files (`hf_*`, `safetensors_*`, `gguf_*`); here they become one record.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .config import DecoderConfig
from .errors import ModelNotFound
from .fields import read_json
from .generation import GenerationDefaults
from .gguf_config import decoder_config, permuted_heads
from .gguf_file import GGUFFile
from .gguf_tokenizer import gguf_tokenizer
from .hf_tokenizer import hf_tokenizer
from .hub import fetch_model
from .safetensors_weights import open_safetensors
from .tensors import LazyTensors
from .tokenizer import Tokenizer

__all__ = ["Checkpoint", "open_checkpoint"]


@dataclass(frozen=True)
class Checkpoint:
    """A model whose small files are read and whose tensors are read when asked for.

    Attributes:
      path: the directory or the .gguf file.
      tensors: Hugging Face's names and layout, whatever the format.
    """

    path: Path
    config: DecoderConfig
    tokenizer: Tokenizer
    generation: GenerationDefaults
    tensors: LazyTensors


def open_checkpoint(model: str | os.PathLike[str]) -> Checkpoint:
    """Opens a Hugging Face directory, a .gguf file, a directory with exactly one, or a hub id `org/name`.

    Raises:
      ModelNotFound: there is no model at that path or of that id.
      UnsupportedModel: its architecture or a feature of it is not implemented, or its configuration is bad.
      WeightsError: its weights are missing, truncated or corrupt, as far as their headers tell.
      TokenizerError: its tokenizer is missing, not supported or broken.
    """
    name = os.path.expanduser(os.fspath(model))
    path = Path(name) if name and os.path.exists(name) else fetch_model(name)
    if path.is_file():
        return _open_gguf(path)
    if (path / "config.json").is_file():
        return _open_directory(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return _open_gguf(files[0])
    if files:
        names = ", ".join(file.name for file in files[:4])
        raise ModelNotFound(
            f"{path}: holds {len(files)} .gguf files ({names}); pass the path of one of them."
        )
    raise ModelNotFound(f"{path}: holds no model: expected config.json with its files, or one .gguf file.")


def _open_gguf(path: Path) -> Checkpoint:
    file = GGUFFile(path)
    config = decoder_config(file)
    tokenizer = gguf_tokenizer(file.metadata, str(path))
    pad = file.metadata.get("tokenizer.ggml.padding_token_id")
    generation = GenerationDefaults(
        eos_ids=tokenizer.eos_ids, bos_id=tokenizer.bos_id, pad_id=pad if isinstance(pad, int) else None
    )
    return Checkpoint(path, config, tokenizer, generation, file.hf_tensors(permuted_heads(file, config)))


def _open_directory(path: Path) -> Checkpoint:
    values = read_json(path / "config.json")
    config = DecoderConfig.from_hf(values, str(path / "config.json"))
    tensors = open_safetensors(path)
    tokenizer = hf_tokenizer(path)
    recommended = path / "generation_config.json"
    generation = GenerationDefaults.from_hf(
        read_json(recommended) if recommended.is_file() else {}, values, tokenizer, str(recommended)
    )
    return Checkpoint(path, config, tokenizer, generation, tensors)
