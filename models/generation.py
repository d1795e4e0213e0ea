"""The sampling values and end tokens that a model's publisher recommends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from .errors import UnsupportedModel
from .fields import Fields
from .tokenizer import Tokenizer

__all__ = ["GenerationDefaults"]


@dataclass(frozen=True)
class GenerationDefaults:
    """Recommendations as found; None where the checkpoint gives none.

    Attributes:
      eos_ids: tokens that end a generation; the first is the one to show as EOS.
    """

    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    pad_id: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    @classmethod
    def from_hf(
        cls, generation: Mapping[str, object], config: Mapping[str, object], tokenizer: Tokenizer, source: str
    ) -> GenerationDefaults:
        """Reads parsed `generation_config.json` and `config.json`; the former wins, field by field.

        The tokenizer's own end tokens are added to the end tokens: in chat models, they end a turn.
        Raises UnsupportedModel where a field has a nonsense value; named.
        """
        merged = {key: value for key, value in config.items() if key.endswith("_token_id")}
        merged |= {key: value for key, value in generation.items() if value is not None}
        fields = Fields(merged, source)
        bos = _ids(fields, "bos_token_id") or ([] if tokenizer.bos_id is None else [tokenizer.bos_id])
        pad = _ids(fields, "pad_token_id")
        whole = "a whole number of 1 or more, or 0 or -1 for all tokens"
        top_k = _number(fields, "top_k", whole, lambda x: x >= -1 and x == int(x))
        return cls(
            eos_ids=_unique([*_ids(fields, "eos_token_id"), *tokenizer.eos_ids]),
            bos_id=bos[0] if bos else None,
            pad_id=pad[0] if pad else None,
            do_sample=fields.flag("do_sample", False) if fields.has("do_sample") else None,
            temperature=_number(fields, "temperature", "a number of 0 or more", lambda x: x >= 0),
            top_k=None if top_k is None else max(int(top_k), 0),
            top_p=_number(fields, "top_p", "a number above 0, and 1 at most", lambda x: 0 < x <= 1),
        )


def _unique(ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(ids))


def _ids(fields: Fields, name: str) -> list[int]:
    value = fields.values.get(name)
    ids = []
    for token_id in value if isinstance(value, list) else [] if value is None else [value]:
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise fields.wrong(name, value, "a token id, or a list of them")
        if token_id >= 0:  # -1 is an old spelling of "none"
            ids.append(token_id)
    return ids


def _number(fields: Fields, name: str, expected: str, ok: Callable[[float], bool]) -> float | None:
    value = fields.values.get(name)
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not ok(value)
    ):
        raise UnsupportedModel(f"{fields.source}: {name}={value!r}: expected {expected}.")
    return float(value)
