"""Text to token ids and back, whichever file the tokenizer came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tokenizers

from .chat_template import ChatTemplate
from .errors import TokenizerError

__all__ = ["Tokenizer"]


class Tokenizer:
    """A `tokenizers.Tokenizer` with the model's rules for BOS, and its chat template.

    Attributes:
      raw: the `tokenizers.Tokenizer`; its truncation and padding are switched off.
      vocab_size: number of tokens, added ones included; the model's embedding may have more rows.
      bos_id: None where the tokenizer names no BOS.
      eos_ids: what ends a text as far as the tokenizer knows; the checkpoint's generation defaults know more.
      adds_bos: whether `encode` puts a BOS in front.

    Args:
      special_tokens: the texts of `bos_token`, `eos_token` and so on; templates may name them.
      add_bos: None to do as the tokenizer's own post-processor does; True adds nothing where no BOS is named.
      eos_tokens: further tokens that end a text.

    Raises:
      TokenizerError: a special token is not in the vocabulary, or the chat template does not compile.
    """

    def __init__(
        self,
        raw: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        add_bos: bool | None = None,
        chat_template: str | None = None,
        eos_tokens: Sequence[str] = (),
    ) -> None:
        raw.no_truncation()
        raw.no_padding()
        self.raw = raw
        self.vocab_size = raw.get_vocab_size(with_added_tokens=True)
        bos, eos = special_tokens.get("bos_token"), special_tokens.get("eos_token")
        self.bos_id = None if bos is None else self._id_of(bos)
        ends = [*eos_tokens] if eos is None else [eos, *eos_tokens]
        self.eos_ids = tuple(dict.fromkeys(self._id_of(token) for token in ends))
        self._prefix = self._find_prefix(add_bos)
        self.adds_bos = self.bos_id in self._prefix if self.bos_id is not None else False
        self.chat_template = None if chat_template is None else ChatTemplate(chat_template, special_tokens)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written in it are recognised.

        BOS goes in front if the model wants one and the text does not begin with it already, so a prompt that
        a template or a user began with it has one, not two. EOS is never added: a prompt is to be continued.

        Raises TokenizerError where the text is no string, or holds a lone surrogate.
        """
        if not isinstance(text, str):
            raise TokenizerError(f"text={text!r}: expected a string.")
        try:
            text.encode("utf-8")  # tokenizers would call it no string
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"The text holds a lone surrogate, {text[error.start]!r} at index {error.start}, which is no "
                "character. Remove it, or decode the text with errors='replace'."
            ) from error
        ids = self.raw.encode(text, add_special_tokens=False).ids
        if add_special_tokens and ids[: len(self._prefix)] != self._prefix:
            return self._prefix + ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids beyond the vocabulary (padding rows of the embedding) give nothing."""
        return self.raw.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, or None beyond the vocabulary."""
        return self.raw.id_to_token(token_id)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool = True
    ) -> str:
        """Writes a conversation as one prompt.

        messages: a list of {"role": str, "content": str}.
        Raises TokenizerError where there is no template, the messages are malformed, or the template refuses.
        """
        if self.chat_template is None:
            raise TokenizerError(
                "The model has no chat template, so it cannot be chatted with. "
                "Write the prompt yourself and pass it to generate()."
            )
        return self.chat_template.render(messages, add_generation_prompt)

    def encode_chat(
        self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation, with one BOS whether or not the template wrote it."""
        return self.encode(self.apply_chat_template(messages, add_generation_prompt))

    def _id_of(self, token: str) -> int:
        token_id = self.raw.token_to_id(token)
        if token_id is None:
            raise TokenizerError(f"The special token {token!r} is not in the tokenizer's vocabulary.")
        return token_id

    def _find_prefix(self, add_bos: bool | None) -> list[int]:
        """What stands before every text: the post-processor's prefix, unless `add_bos` overrules it."""
        if add_bos is not None:
            return [self.bos_id] if add_bos and self.bos_id is not None else []
        bare = self.raw.encode("a", add_special_tokens=False).ids
        full = self.raw.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start]
        raise TokenizerError(
            "The tokenizer's post-processor changes the tokens of a text, which is not supported."
        )
