"""Log-probabilities of tokens with each token's text, which is what the token adds to the text before it."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from qcut.engine.sequence import LogProbability
from qcut.text.detokenizer import Detokenizer

CONTEXT = 8
"""Tokens before the first one that decide its text: whether a space begins it, and which bytes it completes."""
_UNKNOWN = "\ufffd"
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class Token(NamedTuple):
    """A token at its place in a text.

    Attributes:
        id: of the token.
        text: that the token adds; empty while a character is incomplete, which the last of its tokens adds.
        bytes: of the token; None: the tokenizer does not tell those of a part of a character.
        log_probability: of the token; None: of the first token of a text.
    """

    id: int
    text: str
    bytes: list[int] | None
    log_probability: float | None


class Row(NamedTuple):
    """A token of a text.

    Attributes:
        token: the token.
        offset: characters of the text before the token.
        top: the likeliest tokens at its place, the likeliest first; None: there are none before the first token.
    """

    token: Token
    offset: int
    top: list[Token] | None


class Vocabulary:
    """The texts and bytes of a tokenizer's tokens.

    Args:
        tokenizer: of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._detokenizer = tokenizer, Detokenizer(tokenizer)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids."""
        if skip_special_tokens:
            return self._detokenizer.decode(ids)
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def is_skipped(self, token: int) -> bool:
        """Whether a token is special and has no text of its own."""
        return self._detokenizer.skips(token)

    def name(self, token: int) -> str:
        """The text of a token, also of a special one."""
        return self.decode([token], skip_special_tokens=False)

    def bytes_of(self, token: int) -> list[int] | None:
        """The bytes of a token that may be a part of a character; None: the tokenizer does not tell them."""
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
        tokenizer: of transformers, or its `Vocabulary`.
        before: ids before the first token; None: some text that is not known.
        skip_special_tokens: whether special tokens are left out of the text; their names are listed even so.
        names_ids: whether tokens are named ``token_id:N``.

    Attributes:
        rows: of the tokens since the last `take`.
        names_ids: as given.
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
        """Take a token and return the text that it adds.

        Args:
            token: its id.
            found: its log-probability and those of the likeliest; None: of the first token of a text.
            is_last: an incomplete character is text where nothing follows.
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
        """What has come since the last call."""
        taken = copy.copy(self)
        self.rows = []
        return taken

    def _is_skipped(self, token: int) -> bool:
        return self._skips and self._vocabulary.is_skipped(token)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._vocabulary.decode(ids, skip_special_tokens=self._skips)

    def _begin_after(self, ids: list[int]) -> None:
        """Set the tokens whose text has been given out; only the last ones decide what follows."""
        self._context, self._pending, self._known = ids, [], self._decode(ids)

    def _text(self, token: int, is_last: bool) -> str:
        """The text that a token adds here."""
        if self._is_skipped(token):
            return self._vocabulary.name(token)
        context, known = self._context, self._known
        if context is None:  # A token after itself has the space that its text begins with.
            context, known = [token], self._decode([token])
        text = self._decode([*context, *self._pending, token])
        if text.endswith(_UNKNOWN) and not is_last and len(self._pending) < CONTEXT:
            return ""
        return _beyond(known, text)

    def _token(self, token: int, text: str, value: float | None) -> Token:
        is_whole = text and _UNKNOWN not in text and (not self._pending or self._is_skipped(token))
        return Token(token, text, list(text.encode()) if is_whole else self._vocabulary.bytes_of(token), value)


def continued(vocabulary: Vocabulary, before: Sequence[int], tokens: Sequence[int], skip_special_tokens: bool) -> str:
    """The text that tokens add to the text before them."""
    scored = Scored(vocabulary, before[-CONTEXT:], skip_special_tokens=skip_special_tokens)
    return "".join(scored.add(token, None, is_last=i == len(tokens)) for i, token in enumerate(tokens, 1))


def _beyond(known: str, text: str) -> str:
    """A text without the beginning that it has in common with another."""
    if text.startswith(known):
        return text[len(known) :]
    pairs = zip(known, text, strict=False)
    return text[next((i for i, (one, other) in enumerate(pairs) if one != other), len(text)) :]


def columns(scored: Scored | None) -> dict[str, Any] | None:
    """Log-probabilities in the form of completions."""
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
    """Log-probabilities in the form of chats: one object a token."""
    found = []
    for row in scored.rows:
        top = [_line(token, scored.names_ids) for token in row.top or ()]
        found.append({**_line(row.token, scored.names_ids), "top_logprobs": top})
    return found


def _name(token: Token, names_ids: bool) -> str:
    return f"token_id:{token.id}" if names_ids else token.text


def _named(chosen: Token, top: list[Token], names_ids: bool) -> dict[str, float | None]:
    """The likeliest tokens by name. The chosen token keeps its name; of two alike, the other is named by its id."""
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
    """The byte of each character in the vocabularies of byte-level tokenizers, those of GPT-2's kind."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
