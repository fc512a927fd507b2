"""Refuses texts that are too long before they are tokenized as a whole."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from qcut.errors import ContextError, ShapeError
from qcut.server.bodies import AnyPrompt, Text
from qcut.text.prompts import text_ids

PROBED_BYTES = 8
"""Characters per token of the context that are tokenized to see whether a text can fit; most tokens have 3 to 5."""
_PROBE_MARGIN = 1.25


class PromptLimit:
    """Refuses texts and chats that are longer than the context without tokenizing all of them.

    A text that passes may still be too long.

    Args:
        tokenizer: of transformers.
        vocabulary: size of the model's vocabulary.
        context: the engine's context in tokens.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, context: int) -> None:
        self._tokenizer, self._vocabulary, self._context = tokenizer, vocabulary, context

    def check(self, prompt: AnyPrompt) -> None:
        """Check a prompt. Thread-safe.

        Raises:
            ContextError: the text is too long even if every token were the longest of the vocabulary (only without a
                normalizer, which may remove text), or a prefix of it has many more tokens than the context.
            ConfigError: the tokenizer does not accept the text.
        """
        if isinstance(prompt, list):
            return
        texts = [prompt.text] if isinstance(prompt, Text) else prompt.texts
        context = self._context
        size = sum(map(len, texts))  # in characters of at least one byte
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
        except ShapeError:  # only spaces, which the tokenizer drops
            return
        if len(ids) > _PROBE_MARGIN * context:
            raise ContextError(f"the prompt has more than {len(ids)} tokens; this engine's context is {context}")

    @cached_property
    def _longest(self) -> int:
        """Most bytes of a token; in a byte-level vocabulary each byte is one character."""
        return max((len(token.encode(errors="replace")) for token in self._tokenizer.get_vocab()), default=1)

    @cached_property
    def _normalizes(self) -> bool:
        """Whether the tokenizer may change a text before splitting it."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return backend is None or backend.normalizer is not None
