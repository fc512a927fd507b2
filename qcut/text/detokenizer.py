"""Incremental detokenization: the text of new tokens, never taken back.

Decoders look at neighbours: a character may be the bytes of several tokens, and a leading space depends on whether a
token comes first. Each token is therefore decoded after the tokens of the piece before it, and what these decode to by
themselves is left out. The work for a token does not grow with the text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from qcut.common.failures import is_interrupt, line_of
from qcut.errors import ConfigError

Decode = Callable[[list[int]], str]
"""The text of token ids."""

_UNKNOWN = "\ufffd"
"""What decoders write for bytes that are no character, or not yet."""
_MOST_IN_CHARACTER = 3
"""Most tokens at the end of a text that a later token may complete: a character has four bytes at most."""
_FORCED = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
"""Attribute of tokenizers of transformers."""
_PATIENCE = 8
"""After so many tokens without a whole character, some of them are returned as they are."""


class IncrementalDetokenizer:
    """Incremental detokenizer of the tokens after a prompt.

    All returned texts together are the text of prompt and new tokens, without its common prefix with the prompt's text.

    Args:
        decode: returns the text of token ids.
        prompt: ids before the first new token. They decide whether a space comes first; their text is left out.

    Exactness: equal to decoding all tokens at once, if each token's text depends on the tokens of its characters and
        on whether it is the first. Decoders with byte fallback replace a whole run of byte tokens if the run is no
        UTF-8: characters of the run that were complete stay as they were returned.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int]) -> None:
        self._decode, self._ids, self._known = decode, list(prompt), ""
        self._begin_after(len(self._ids))

    def add(self, token: int) -> str:
        """The text that a token adds; empty while the last character is incomplete."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text == self._known or text.endswith(_UNKNOWN):
            return self._overdue(text) if len(self._ids) - self._read >= self._patience else ""
        piece = _following(self._known, text)
        del self._ids[: self._read]
        self._begin_after(len(self._ids))
        return piece

    def rest(self) -> str:
        """The text held back so far, incomplete characters included."""
        text = self._decode(self._ids)
        piece = _following(self._known, text)
        self._read, self._known = len(self._ids), text
        return piece

    def _begin_after(self, read: int) -> None:
        """Set that the text of the first ``read`` ids has been returned."""
        self._read, self._known = read, self._decode(self._ids[:read])
        self._patience = _PATIENCE

    def _overdue(self, text: str) -> str:
        """Text of tokens that no later token completes, from many that were held back: bytes that are no characters."""
        for cut in range(len(self._ids) - _MOST_IN_CHARACTER, self._read, -1):
            left = self._decode(self._ids[:cut])
            if left.startswith(self._known) and left + self._decode(self._ids[cut:]) == text:
                piece = left[len(self._known) :]
                del self._ids[: self._read]
                self._begin_after(cut - self._read)
                return piece
        self._patience *= 2
        return ""


class CleaningDetokenizer:
    """Incremental detokenizer for tokenizers that remove spaces before punctuation in whole texts.

    Text is held back while later text can change it, which is a word at most.

    Args:
        decode: returns the text of token ids as it is before cleaning.
        clean: removes the spaces, `PreTrainedTokenizerBase.clean_up_tokenization`.
        prompt: see `IncrementalDetokenizer`.
    """

    def __init__(self, decode: Decode, clean: Callable[[str], str], prompt: Sequence[int]) -> None:
        self._pieces, self._clean = IncrementalDetokenizer(decode, prompt), clean
        text = decode(list(prompt))
        self._held = text[_final(text) :]
        self._known = clean(self._held)

    def add(self, token: int) -> str:
        """The text that is final with a token."""
        self._held += self._pieces.add(token)
        return self._take(_final(self._held))

    def rest(self) -> str:
        """The text held back so far."""
        self._held += self._pieces.rest()
        return self._take(len(self._held))

    def _take(self, end: int) -> str:
        text = self._clean(self._held[:end])
        piece = _following(self._known, text)
        self._known = self._known[len(text) :] if self._known.startswith(text) else ""
        self._held = self._held[end:]
        return piece


class Detokenizer:
    """The decoding part of a tokenizer of transformers.

    Args:
        tokenizer: any tokenizer of transformers.
        skip_special_tokens: leave special tokens out of texts.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skips = tokenizer, skip_special_tokens
        self._cleans = _cleans(tokenizer)
        self._direct = None if self._cleans else _direct(tokenizer)
        skipped = [token for token in _special(tokenizer) if not self.decode([token])]
        self._skipped = {token: str(tokenizer.decode([token], skip_special_tokens=False)) for token in skipped}

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, as the tokenizer has it.

        Raises:
            ConfigError: the tokenizer fails.
        """
        try:
            if self._direct is not None:
                return self._direct(list(ids), self._skips)
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=self._skips))
        except BaseException as error:  # a panic in Rust is no Exception
            if is_interrupt(error):
                raise
            raise ConfigError(f"the tokenizer fails on {len(ids)} tokens: {line_of(error)}") from error

    def skips(self, token: int) -> bool:
        """Whether a token is special and never has text."""
        return token in self._skipped

    def skipped_in(self, strings: Collection[str]) -> dict[int, str]:
        """Special tokens without text that occur in some strings: their ids and spellings."""
        return {token: text for token, text in self._skipped.items() if text and any(text in s for s in strings)}

    def incremental(self, prompt: Sequence[int]) -> IncrementalDetokenizer | CleaningDetokenizer:
        """An incremental detokenizer of the tokens after a prompt."""
        ids = [token for token in prompt if token not in self._skipped]
        if self._cleans:
            return CleaningDetokenizer(self._raw, self._tokenizer.clean_up_tokenization, ids)
        return IncrementalDetokenizer(self.decode, ids)

    def _raw(self, ids: list[int]) -> str:
        options = {"skip_special_tokens": self._skips, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(ids, **options))


def _special(tokenizer: Any) -> set[int]:
    """Ids of a tokenizer's special tokens: those with a role, and those that are only added as such."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    roles = getattr(tokenizer, "all_special_ids", None) or ()
    return {*roles, *(token for token, each in added.items() if getattr(each, "special", False))}


def _direct(tokenizer: Any) -> Callable[[list[int], bool], str] | None:
    """The decoder under transformers' own functions, which take ten times as long; None: they do more."""
    kind, backend = type(tokenizer), getattr(tokenizer, "backend_tokenizer", None)
    own = all(
        getattr(kind, name).__module__.startswith("transformers.tokenization_utils")
        for name in ("decode", "_decode")
        if hasattr(kind, name)
    )
    return backend.decode if own and backend is not None and "decode" not in vars(tokenizer) else None


def _cleans(tokenizer: Any) -> bool:
    """Whether a tokenizer cleans what it decodes, by the rule of transformers.

    Tokenizers that merge bytes are left as they are since 5.5, unless an attribute that came with this rule says
    otherwise.
    """
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    backend = getattr(tokenizer, "backend_tokenizer", None)
    merges = backend is not None and type(backend.model).__name__ == "BPE"
    return not merges or bool(getattr(tokenizer, _FORCED, True))


def _following(known: str, text: str) -> str:
    """A text without the beginning that it has in common with another."""
    if text.startswith(known):
        return text[len(known) :]
    pairs = zip(known, text, strict=False)
    common = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(known), len(text)))
    return text[common:]


def _final(text: str) -> int:
    """Number of characters of a text that are cleaned the same whatever follows.

    What is cleaned starts with a space and has four characters at most: ``n't`` after a space is the longest. An
    apostrophe between spaces is cleaned with the spaces around it, and may then belong to an ``n`` before it.
    """
    space = text.rfind(" ")
    if len(text) - space > 4:
        return len(text)
    while space > 0:
        before = text.rfind(" ", 0, space)
        if text[before + 1 : space] not in ("", "'", "n"):
            return space
        space = before
    return 0
