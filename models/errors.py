"""Every error that loading a model raises on purpose.

Each message says what was given, what was expected and what to do. `paged_jax` translates these by class
name into its own errors of the same names, because `models` may be loaded under another module name.
"""

from __future__ import annotations

__all__ = ["ModelError", "ModelNotFound", "TokenizerError", "UnsupportedModel", "WeightsError"]


class ModelError(ValueError):
    """Base of all errors below."""


class ModelNotFound(ModelError):
    """No model lies at the path that was given."""


class UnsupportedModel(ModelError):
    """The model's architecture, or a feature of it, is not implemented."""


class WeightsError(ModelError):
    """A weights file is corrupt or truncated, or its tensors are missing, extra or mis-shaped."""


class TokenizerError(ModelError):
    """The tokenizer or the chat template is missing, of a kind that is not supported, or broken."""
