"""Chat templates: Jinja programs, shipped with a model, that write a conversation as one prompt.

The environment is the one that transformers documents for templates
(https://huggingface.co/docs/transformers/chat_templating_writing). A template comes from whoever published
the model, so it runs in Jinja's immutable sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import TokenizerError

__all__ = ["ChatTemplate"]


class ChatTemplate:
    """A compiled chat template. Raises TokenizerError where its syntax is wrong.

    Args:
      source: the template's text.
      special_tokens: what it may name, such as {"bos_token": "<s>"}.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TokenizerError(f"The model's chat template does not compile: {error}.") from error

    def render(self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool) -> str:
        """Writes the messages as one prompt, ending where the model's answer begins if asked to.

        Raises TokenizerError where the messages are malformed or the template refuses them.
        """
        _check_messages(messages)
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        # A template is a program of its author's: it can fail in any way that an expression can.
        except Exception as error:
            raise TokenizerError(
                f"The model's chat template failed on these messages: {type(error).__name__}: {error}. "
                "Check their roles and their order, or write the prompt yourself and pass it to generate()."
            ) from error


def _check_messages(messages: object) -> None:
    expected = "expected a list of {'role': str, 'content': str}"
    if not isinstance(messages, list | tuple) or not messages:
        raise TokenizerError(f"messages={messages!r}: {expected}, with at least one in it.")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TokenizerError(f"messages[{i}]={message!r}: {expected}.")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise TokenizerError(f"messages[{i}][{key!r}]={message.get(key)!r}: {expected}.")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks an answer for training; here it is its body alone."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it as an instance's attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
