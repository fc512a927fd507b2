"""What a request may cost before it is refused: the shape of its JSON, and the text that is tokenized.

Both limits are looked at before the work whose cost they bound: validation lists an error for each wrong item, and a
tokenizer reads a whole text, though the context holds a small part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from re import DOTALL, sub
from typing import Any

from pydantic_core import from_json

from qcut.errors import ContextError
from qcut.server.refusals import Refusal

MOST_FIELDS = 4096
"""Fields of one JSON object."""
MOST_NESTED = 32768
"""Arrays and objects within a body."""
MOST_DEPTH = 64
"""Arrays and objects within each other."""
PROBED_BYTES = 8
"""Bytes for each token of the context that are tokenized to see whether a long text can fit; most text has 3 to 5."""
_PROBE_MARGIN = 1.25


def parse_json(data: bytes) -> dict[str, Any]:
    """Read the JSON object of a body.

    Args:
        data: the body.

    Raises:
        Refusal: no JSON (``NaN`` and ``Infinity`` are none), no object, or one that is too wide or too deep.
    """
    if _nested(data) > MOST_NESTED:  # before they are made: many objects are slow to make, and nothing runs beside it
        raise Refusal(400, f"the body has more arrays and objects than allowed: {MOST_NESTED}", code="json_invalid")
    try:
        given = from_json(data, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise Refusal(400, f"the body is no JSON: {error}"[:300], code="json_invalid") from None
    if not isinstance(given, dict):
        raise Refusal(400, f"the body is a JSON {_kind(given)}; allowed: an object", code="json_invalid")
    level: list[Any] = [given]
    depth = 0
    while level:
        depth += 1
        if depth > MOST_DEPTH:
            raise Refusal(400, f"the body is nested deeper than allowed: {MOST_DEPTH}", code="json_invalid")
        wide = max((len(one) for one in level if isinstance(one, dict)), default=0)
        if wide > MOST_FIELDS:
            raise Refusal(400, f"an object of {wide} fields; allowed: {MOST_FIELDS}", code="json_invalid")
        level = [
            item
            for one in level
            for item in (one.values() if isinstance(one, dict) else one)
            if isinstance(item, dict | list)
        ]
    return given


def _nested(data: bytes) -> int:
    """Number of brackets that open; those within strings are left out where there are many."""
    count = data.count(b"[") + data.count(b"{")
    if count <= MOST_NESTED:
        return count
    outside = sub(rb'"[^"\\]*(?:\\.[^"\\]*)*"', b"", data, flags=DOTALL)
    return outside.count(b"[") + outside.count(b"{")


class PromptLimit:
    """Refuses texts and chats that are longer than a context without tokenizing all of them.

    A text that passes may still be too long.

    Args:
        tokenizer: of transformers.
        context: tokens.
    """

    def __init__(self, tokenizer: Any, context: int) -> None:
        self._tokenizer, self._context = tokenizer, context

    def check(self, prompt: Any) -> None:
        """Check a prompt; may be called in any thread.

        Args:
            prompt: a text or a chat; token ids pass.

        Raises:
            ContextError: the text has more bytes than the context has room for, if each token were the longest one
                (only where the tokenizer has no normalizer, which may remove some); or a beginning of the text alone
                has many more tokens than the context.
        """
        texts, context = list(_texts(prompt)), self._context
        size = sum(map(len, texts))  # in characters, each of a byte and more
        probed = PROBED_BYTES * context
        if size <= 2 * probed:
            return
        most = context * self._longest
        if size > most and not self._normalizes:
            raise ContextError(
                f"the prompt has {size} characters; this engine's context is {context} tokens, of at most {most} bytes"
            )
        ids = self._tokenizer("".join(texts)[:probed], add_special_tokens=False, verbose=False)["input_ids"]
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


def _texts(prompt: Any) -> Iterator[str]:
    """The texts of a prompt."""
    if isinstance(prompt, str):
        yield prompt
    elif isinstance(prompt, Mapping):
        yield from _texts(prompt.get("content") or prompt.get("text"))
    elif isinstance(prompt, list | tuple) and prompt and not isinstance(prompt[0], int):
        for part in prompt:
            yield from _texts(part)


def _kind(value: Any) -> str:
    kinds = {list: "array", str: "string", bool: "truth value", int: "number", float: "number", type(None): "null"}
    return kinds[type(value)]
