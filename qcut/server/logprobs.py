"""Log-probabilities of tokens with each token's text in context: what the token adds to the preceding text."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from qcut.engine.likelihoods import LogProbability
from qcut.text.detokenizer import Detokenizer
from qcut.text.sequence_text import SequenceText

CONTEXT = 8
"""Number of preceding tokens that decide a token's text: a leading space, and the bytes of a split character."""
LEAST = -9999.0
"""What stands for log-probabilities of -Inf, as in OpenAI's and vLLM's answers: JSON has no such number."""
_UNKNOWN = "\ufffd"
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class Token(NamedTuple):
    """A token in its context.

    Attributes:
        id: token id.
        text: text that the token adds. A character split over tokens is added by the last of them.
        bytes: bytes of the token; None: unknown to the tokenizer for a part of a character.
        log_probability: None for the first token of a text.
    """

    id: int
    text: str
    bytes: list[int] | None
    log_probability: float | None


class Row(NamedTuple):
    """A token of a text and its alternatives.

    Attributes:
        token: the token.
        offset: characters before the token.
        top: most likely tokens at this position, in descending order; None for the first token of a text.
    """

    token: Token
    offset: int
    top: list[Token] | None


class Vocabulary:
    """The texts and bytes of a tokenizer's tokens.

    Args:
        tokenizer: a tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._detokenizer = tokenizer, Detokenizer(tokenizer)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode ids."""
        if skip_special_tokens:
            return self._detokenizer.decode(ids)
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def is_skipped(self, token: int) -> bool:
        """Whether a token is a special token, skipped while decoding."""
        return self._detokenizer.skips(token)

    def detokenizer(self, skip_special_tokens: bool) -> Detokenizer:
        """What turns tokens into text, with or without special tokens."""
        return self._detokenizer if skip_special_tokens else Detokenizer(self._tokenizer, skip_special_tokens=False)

    def name(self, token: int) -> str:
        """The text of a token, special tokens included."""
        return self.decode([token], skip_special_tokens=False)

    def bytes_of(self, token: int) -> list[int] | None:
        """The bytes of a token that may hold a part of a character; None if the tokenizer does not know them."""
        names = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        name = None if names is None else names(token)
        if not isinstance(name, str):
            return None
        if found := _BYTE.fullmatch(name):
            return [int(found[1], 16)]
        if not all(character in _bytes_of_characters() for character in name):
            return None
        data = bytes(_bytes_of_characters()[character] for character in name)
        return list(data) if data.decode(errors="replace") == self.name(token) else None


class Scored:
    """The tokens of a choice so far, with their log-probabilities.

    Args:
        tokenizer: a tokenizer of transformers, or its `Vocabulary`.
        before: ids before the first token; None: unknown text.
        skip_special_tokens: whether the text omits special tokens; they are listed by name all the same.
        names_ids: whether tokens are named ``token_id:N``.

    Attributes:
        rows: tokens since the last `take`.
        names_ids: the argument.
    """

    def __init__(
        self,
        tokenizer: Any,
        before: Sequence[int] | None = None,
        *,
        skip_special_tokens: bool = True,
        names_ids: bool = False,
    ) -> None:
        self._vocabulary = tokenizer if isinstance(tokenizer, Vocabulary) else Vocabulary(tokenizer)
        self._skips, self.names_ids = skip_special_tokens, names_ids
        self.rows: list[Row] = []
        self._offset = 0
        self._context: list[int] | None = None
        self._pending: list[int] = []
        self._known = ""
        if before is not None:
            self._begin_after([token for token in before if not self._is_skipped(token)])

    def add(self, token: int, found: LogProbability | None, *, is_last: bool = False) -> str:
        """Append a token and return the text that it adds.

        Args:
            token: token id.
            found: log-probabilities of the token and of the top tokens; None for the first token of a text.
            is_last: whether to emit an incomplete character, since nothing follows.
        """
        text = self._text(token, is_last)
        top = None if found is None else [self._token(one, self._text(one, is_last), value) for one, value in found.top]
        chosen = None if found is None else found.chosen
        self.rows.append(Row(self._token(token, text, chosen), self._offset, top))
        if self._is_skipped(token):
            return ""
        self._offset += len(text)
        if text:
            self._begin_after([*self._pending, token])
        else:
            self._pending.append(token)
        return text

    def take(self) -> Scored:
        """The rows since the last call."""
        taken = copy.copy(self)
        self.rows = []
        return taken

    def _is_skipped(self, token: int) -> bool:
        return self._skips and self._vocabulary.is_skipped(token)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._vocabulary.decode(ids, skip_special_tokens=self._skips)

    def _begin_after(self, ids: list[int]) -> None:
        """Set the context of the next token: the last tokens with emitted text."""
        self._context, self._pending, self._known = ids, [], self._decode(ids)

    def _text(self, token: int, is_last: bool) -> str:
        """The text that a token adds in the current context."""
        if self._is_skipped(token):
            return self._vocabulary.name(token)
        context, known = self._context, self._known
        if context is None:  # Decoded after itself, a token keeps its leading space.
            context, known = [token], self._decode([token])
        text = self._decode([*context, *self._pending, token])
        if text.endswith(_UNKNOWN) and not is_last and len(self._pending) < CONTEXT:
            return ""
        return _beyond(known, text)

    def _token(self, token: int, text: str, value: float | None) -> Token:
        value = None if value is None else max(value, LEAST)
        is_whole = text and _UNKNOWN not in text and (not self._pending or self._is_skipped(token))
        return Token(token, text, list(text.encode()) if is_whole else self._vocabulary.bytes_of(token), value)


def continued(
    vocabulary: Vocabulary,
    before: Sequence[int],
    tokens: Sequence[int],
    skip_special_tokens: bool,
    keep_special_tokens: Sequence[str] = (),
) -> str:
    """The text that tokens add to a prompt's text."""
    detokenizer = vocabulary.detokenizer(skip_special_tokens)
    text = SequenceText(detokenizer, before[-CONTEXT:], (), keep_special_tokens)
    return "".join(text.add(token) for token in tokens) + text.rest()


def _beyond(known: str, text: str) -> str:
    """A text without the prefix that it shares with another."""
    if text.startswith(known):
        return text[len(known) :]
    pairs = zip(known, text, strict=False)
    return text[next((i for i, (one, other) in enumerate(pairs) if one != other), len(text)) :]


def columns(scored: Scored | None) -> dict[str, Any] | None:
    """Log-probabilities in the format of completions."""
    if scored is None:
        return None
    rows, names_ids = scored.rows, scored.names_ids
    return {
        "tokens": [_name(row.token, names_ids) for row in rows],
        "token_logprobs": [row.token.log_probability for row in rows],
        "top_logprobs": [None if row.top is None else _named(row.token, row.top, names_ids) for row in rows],
        "text_offset": [row.offset for row in rows],
    }


def lines(scored: Scored) -> list[dict[str, Any]]:
    """Log-probabilities in the format of chat completions: one object per token."""
    found = []
    for row in scored.rows:
        top = [_line(token, scored.names_ids) for token in row.top or ()]
        found.append({**_line(row.token, scored.names_ids), "top_logprobs": top})
    return found


def _name(token: Token, names_ids: bool) -> str:
    return f"token_id:{token.id}" if names_ids else token.text


def _named(chosen: Token, top: list[Token], names_ids: bool) -> dict[str, float | None]:
    """The top tokens by name. Of two tokens with the same name, the one that was not sampled is named by its id."""
    found: dict[str, float | None] = {}
    for token in top:
        name = _name(token, names_ids)
        if token.id != chosen.id and (not name or name == chosen.text or name in found):
            name = f"token_id:{token.id}"
        found[name] = token.log_probability
    return found


def _line(token: Token, names_ids: bool) -> dict[str, Any]:
    return {"token": _name(token, names_ids), "logprob": token.log_probability, "bytes": token.bytes}


@cache
def _bytes_of_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary (GPT-2's) stands for."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
