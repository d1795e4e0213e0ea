"""Fetching a model from the Hugging Face hub, or from its cache on this machine."""

from __future__ import annotations

import re
from pathlib import Path

import huggingface_hub

from .errors import ModelNotFound

__all__ = ["fetch_model"]

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_NEEDED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model*.safetensors",
    "model.safetensors.index.json",
)


def fetch_model(name: str) -> Path:
    """The local directory of the hub's model `org/name`, of which only the needed files are fetched.

    Raises ModelNotFound where `name` is no such id, or the hub cannot give it; the message says what it said.
    """
    if not _ID.fullmatch(name):
        raise ModelNotFound(
            f"model={name!r}: no such file or directory, and no hub id (`org/name`). Expected a directory "
            "with config.json, a .gguf file, or a directory with one."
        )
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(_NEEDED)))
    except (
        Exception
    ) as error:  # network, authorisation, disk: all of them mean that there is no model to load
        raise ModelNotFound(
            f"model={name!r}: no such file or directory, and the Hugging Face hub did not give it: "
            f"{type(error).__name__}: {error}"
        ) from error
