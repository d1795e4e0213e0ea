"""The tokenizer of a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

import tokenizers

from .errors import TokenizerError
from .fields import Fields, read_json
from .tokenizer import Tokenizer

__all__ = ["hf_tokenizer"]

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_OTHER_FORMS = ("tokenizer.model", "vocab.json", "merges.txt", "spiece.model", "tekken.json", "vocab.txt")


def hf_tokenizer(directory: Path) -> Tokenizer:
    """Reads `tokenizer.json` and, where they are there, the files that stand beside it.

    Raises TokenizerError where one is missing or malformed; the message names it.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        found = [name for name in _OTHER_FORMS if (directory / name).is_file()]
        raise TokenizerError(
            f"{directory}: no tokenizer.json (found: {', '.join(found) or 'no tokenizer file'}). Convert it: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers writes one."
        )
    try:
        raw = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more specific
        raise TokenizerError(f"{path}: cannot be read: {error}. Fetch the file again.") from error
    settings = _optional(directory / "tokenizer_config.json")
    fields = Fields(settings, str(directory / "tokenizer_config.json"), TokenizerError)
    special = _special_tokens(_optional(directory / "special_tokens_map.json")) | _special_tokens(settings)
    add_bos = fields.flag("add_bos_token", False) if fields.has("add_bos_token") else None
    return Tokenizer(raw, special, add_bos, _chat_template(directory, fields))


def _optional(path: Path) -> dict[str, object]:
    return read_json(path, TokenizerError) if path.is_file() else {}


def _special_tokens(values: dict[str, object]) -> dict[str, str]:
    """The special tokens' texts; each is written as a string, or as an object with its `content`."""
    special = {}
    for name in _SPECIAL:
        value = values.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if content is None:
            continue
        if not isinstance(content, str):
            raise TokenizerError(
                f"{name}={value!r}: expected a string, or an object with a string `content`."
            )
        special[name] = content
    return special


def _chat_template(directory: Path, fields: Fields) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise TokenizerError(f"{path}: cannot be read: {error}.") from error
    value = fields.values.get("chat_template")
    if isinstance(value, list):  # several, by name
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    if value is None or isinstance(value, str):
        return value
    raise fields.wrong("chat_template", value, "a string, or a list of {name, template}")
