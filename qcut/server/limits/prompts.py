"""Texts that are too long, refused before the tokenizer reads all of them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from qcut.errors import ContextError, ShapeError
from qcut.server.bodies import AnyPrompt, Text
from qcut.text.prompts import text_ids

PROBED_BYTES = 8
"""Characters for each token of the context that are tokenized to see whether a long text can fit; most have 3 to 5."""
_PROBE_MARGIN = 1.25


class PromptLimit:
    """Refuses texts and chats that are longer than a context without tokenizing all of them.

    A text that passes may still be too long.

    Args:
        tokenizer: of transformers.
        vocabulary: tokens that the model knows.
        context: tokens.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, context: int) -> None:
        self._tokenizer, self._vocabulary, self._context = tokenizer, vocabulary, context

    def check(self, prompt: AnyPrompt) -> None:
        """Check a prompt; may be called in any thread.

        Raises:
            ContextError: the text has more bytes than the context has room for, if each token were the longest one
                (only where the tokenizer has no normalizer, which may remove some); or only a prefix of the text
                has many more tokens than the context.
            ConfigError: text that the tokenizer does not take.
        """
        if isinstance(prompt, list):
            return
        texts = [prompt.text] if isinstance(prompt, Text) else [message["content"] for message in prompt.messages]
        context = self._context
        size = sum(map(len, texts))  # in characters, each of a byte and more
        probed = PROBED_BYTES * context
        if size <= 2 * probed:
            return
        most = context * self._longest
        if size > most and not self._normalizes:
            raise ContextError(
                f"the prompt has {size} characters; this engine's context is {context} tokens, of at most {most} bytes"
            )
        try:
            ids = text_ids(self._tokenizer, "".join(texts)[:probed], self._vocabulary, add_special_tokens=False)
        except ShapeError:  # of only spaces, which the tokenizer leaves out
            return
        if len(ids) > _PROBE_MARGIN * context:
            raise ContextError(f"the prompt has more than {len(ids)} tokens; this engine's context is {context}")

    @cached_property
    def _longest(self) -> int:
        """Most bytes of a token; in a vocabulary of bytes, each byte is a character of one byte and more."""
        return max((len(token.encode(errors="replace")) for token in self._tokenizer.get_vocab()), default=1)

    @cached_property
    def _normalizes(self) -> bool:
        """Whether the tokenizer may change a text before it looks for tokens."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return backend is None or backend.normalizer is not None
