"""Every error that paged_jax raises on purpose.

Each message says what was given, what was expected and what to do. An error about an argument is a
ValueError too, so callers who know nothing of this module still catch it as they expect.
"""

from __future__ import annotations

__all__ = [
    "AllocatorCorruption",
    "AuditLogUnreadable",
    "ConstraintFailed",
    "DoubleFree",
    "EngineBusy",
    "EngineClosed",
    "InvalidArgument",
    "InvalidBlock",
    "InvalidPrompt",
    "InvalidSamplingParams",
    "ModelNotFound",
    "NoFreeBlocks",
    "PagedJaxError",
    "PoolTooSmall",
    "PromptTooLong",
    "TokenizerError",
    "UnsupportedModel",
    "WeightsError",
]


class PagedJaxError(Exception):
    """Base of all errors below."""


# -- arguments ---------------------------------------------------------------------------------------------


class InvalidArgument(PagedJaxError, ValueError):
    """An argument has a wrong type or value; nothing was changed."""

    @classmethod
    def of(cls, name: str, given: object, expected: str, hint: str = "") -> InvalidArgument:
        """The usual message: which argument, what was given, what was expected, what to do."""
        return cls(f"{name}={given!r}: expected {expected}." + (f" {hint}" if hint else ""))


class InvalidSamplingParams(InvalidArgument):
    """A sampling field is unknown, or its value is of the wrong type or out of range."""


class InvalidPrompt(InvalidArgument):
    """A prompt is empty, of the wrong type, or holds ids outside the vocabulary."""


class PromptTooLong(InvalidPrompt):
    """A prompt leaves no room for a single generated token."""


class PoolTooSmall(InvalidArgument):
    """The block pool can never hold what was asked for."""


# -- the engine --------------------------------------------------------------------------------------------


class EngineClosed(PagedJaxError):
    """An engine, or an LLM, was used after it was closed and its memory given back."""


class EngineBusy(PagedJaxError):
    """A step was asked for amid a step, as by a function that the step calls; the step itself goes on."""


class ConstraintFailed(PagedJaxError, ValueError):
    """A function of the user's that constrains a beam search failed, or gave what are no token ids.

    Its request ends there; the others go on.
    """


# -- blocks ------------------------------------------------------------------------------------------------


class NoFreeBlocks(PagedJaxError):
    """The pool cannot serve an allocation now; nothing was changed."""


class InvalidBlock(PagedJaxError, ValueError):
    """A block id is out of range, is the null block, or is not in the state that the call needs."""


class DoubleFree(InvalidBlock):
    """More counts were given back than are held; nothing was changed."""


class AllocatorCorruption(PagedJaxError):
    """The allocator's lists and counts disagree with each other or with the holders: a bug."""


class AuditLogUnreadable(PagedJaxError, ValueError):
    """A file is no audit log, or one of its lines is damaged; the message names the line."""


# -- models ------------------------------------------------------------------------------------------------


class ModelNotFound(PagedJaxError, FileNotFoundError):
    """No model lies at the path that was given."""


class UnsupportedModel(PagedJaxError, ValueError):
    """The model's architecture, or a feature of it, is not implemented."""


class WeightsError(PagedJaxError, ValueError):
    """A weights file is corrupt or truncated, or its tensors are missing, extra or mis-shaped."""


class TokenizerError(PagedJaxError, ValueError):
    """The tokenizer or the chat template is missing, of a kind that is not supported, or broken."""
