"""Tokenizer files of llama2.c, and the tokens that its run.c makes of a text."""

from __future__ import annotations

import heapq
import math
import re
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

from qcut.common.schema import file_size, read_bounded, read_up_to, reading
from qcut.errors import CheckpointError, ConfigError

_HEAD = struct.Struct("<i")
_TOKEN = struct.Struct("<fi")
_CHARACTER = re.compile(rb"[\x00-\xff][\x80-\xbf]{0,3}")
_RAW_BYTE = re.compile(rb"<0x([0-9A-Fa-f]{2})>")
_PRINTABLE = frozenset(b"\t\n\v\f\r") | frozenset(range(0x20, 0x7F))
_TOKENIZER_BYTES = 256 << 20
_LOWEST_SCORE = -1e10
"""run.c merges neighbours only if their token has a better score."""


class Llama2cTokenizer:
    """Byte-pair encoding with scores, as run.c does it. Token 1 begins a text, token 2 ends it.

    Args:
        pieces: the bytes of each token. A string that stands there twice is found under its first id.
        scores: of each token; among neighbours that can be merged, those that make the token with the largest are.

    Raises:
        ConfigError: as many scores as pieces are needed.

    Source: docs/schemes.md, section 7; llama2.c, ``encode``, ``decode`` and ``safe_printf`` of run.c.
    """

    bos_id = 1
    eos_id = 2

    def __init__(self, pieces: Sequence[bytes], scores: Sequence[float]) -> None:
        if len(pieces) != len(scores):
            raise ConfigError(f"{len(pieces)} pieces and {len(scores)} scores; as many are needed")
        self._pieces = list(pieces)
        self._scores = list(scores)
        self._ids = {piece: i for i, piece in reversed(list(enumerate(self._pieces)))}

    @classmethod
    def from_file(cls, path: str | Path, vocab_size: int) -> Llama2cTokenizer:
        """Read a tokenizer file: int32 max_token_length, then float32 score, int32 length and bytes of each token.

        Args:
            path: the file.
            vocab_size: tokens in it, which the file does not hold: that of the model's checkpoint.

        Raises:
            ConfigError: a vocabulary below 1.
            CheckpointError: the file is missing, truncated or foreign: a length that is negative, beyond
                max_token_length or beyond the file, a score of NaN or Inf, or bytes left over after the last token.
        """
        path = Path(path)
        if vocab_size < 1:
            raise ConfigError(f"vocab_size is {vocab_size}; allowed: >= 1")
        with reading(path, CheckpointError) as file:
            head = read_up_to(file, _HEAD.size)
            longest = _HEAD.unpack(head)[0] if len(head) == _HEAD.size else 0
            least, size = _HEAD.size + vocab_size * _TOKEN.size, file_size(file)
            if longest < 1 or not least <= size <= least + vocab_size * longest:
                raise CheckpointError(
                    f"{path}: {size} bytes, max_token_length {longest}; {vocab_size} tokens are at least {least} "
                    "bytes, and max_token_length more each at most"
                )
            data = read_bounded(file, _TOKENIZER_BYTES, path, CheckpointError)
        pieces, scores, offset = [], [], 0
        for token in range(vocab_size):
            if len(data) - offset < _TOKEN.size:
                raise CheckpointError(f"{path}: ends in token {token}; {vocab_size} are needed: truncated, or of fewer")
            score, length = _TOKEN.unpack_from(data, offset)
            offset += _TOKEN.size
            left = len(data) - offset
            if not 0 <= length <= min(longest, left):
                raise CheckpointError(
                    f"{path}: token {token} has length {length}; allowed: 0 to max_token_length ({longest}), within "
                    f"the {left} bytes that are left"
                )
            if not math.isfinite(score):
                raise CheckpointError(f"{path}: token {token} has score {score}; scores are finite")
            pieces.append(data[offset : offset + length])
            scores.append(score)
            offset += length
        if offset != len(data):
            raise CheckpointError(
                f"{path}: {len(data) - offset} bytes are left over after {vocab_size} tokens: foreign, or of more"
            )
        return cls(pieces, scores)

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self._pieces)

    def encode(self, text: str, *, bos: bool = True, eos: bool = False) -> list[int]:
        """The tokens of a text: a space in front unless it is empty, its characters, then merges.

        A character that is no token of its own becomes its UTF-8 bytes, byte b the token b + 3. Lone surrogates stand
        for the bytes that Python could not decode, as in `sys.argv`.

        Args:
            text: any.
            bos: put token 1 in front.
            eos: put token 2 at the end.

        Raises:
            ConfigError: the text needs a token that the vocabulary has not, or holds a surrogate that is no such byte.

        Exactness: run.c's tokens, but that its texts end at a NUL. Time grows with n log n, run.c's with n².
        """
        try:
            data = text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as exc:
            raise ConfigError(f"the text is not Unicode: {exc}") from exc
        ids = [self.bos_id] if bos else []
        if data and b" " not in self._ids:
            raise ConfigError("the vocabulary has no token of a space, which run.c begins every text with")
        for character in (b" ", *_CHARACTER.findall(data)) if data else ():
            known = self._ids.get(character)
            ids += [byte + 3 for byte in character] if known is None else [known]
        for token in ids:
            self._check(token)
        return self._merge(ids) + ([self.eos_id] if eos else [])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens, without tokens 1 and 2; a space just after token 1 is left out, as in `piece`.

        Tokens of single bytes are put together again, where run.c, which prints piece by piece, loses them
        (`printed_piece`). What is not UTF-8 then becomes U+FFFD.

        Raises:
            ConfigError: an id that the vocabulary has not.
        """
        data = bytearray()
        previous = self.eos_id
        for token in ids:
            self._check(token)
            if token not in (self.bos_id, self.eos_id):
                data += self.piece(previous, token)
            previous = token
        return data.decode("utf-8", "replace")

    def piece(self, previous: int, token: int) -> bytes:
        """The bytes of a token: those it stands for if it is of the form ``<0xNN>``, else its own.

        Args:
            previous: the token before it; one leading space is left out after token 1.
            token: which.

        Raises:
            ConfigError: an id that the vocabulary has not.

        Exactness: run.c's ``decode``.
        """
        self._check(previous)
        self._check(token)
        piece = self._pieces[token]
        if previous == self.bos_id:
            piece = piece.removeprefix(b" ")
        raw = _RAW_BYTE.fullmatch(piece)
        return bytes([int(raw[1], 16)]) if raw else piece

    def printed_piece(self, previous: int, token: int) -> bytes:
        """The bytes that run.c prints of a token: its `piece`, or nothing for one byte beyond ASCII or a control code.

        A character of several bytes without a token of its own is therefore not printed; `decode` keeps the character.

        Raises:
            ConfigError: an id that the vocabulary has not.
        """
        piece = self.piece(previous, token)
        return b"" if len(piece) == 1 and piece[0] not in _PRINTABLE else piece

    def _check(self, token: int) -> None:
        if not 0 <= token < len(self._pieces):
            raise ConfigError(f"token {token} does not exist; the vocabulary has 0 to {len(self._pieces) - 1}")

    def _merge(self, ids: list[int]) -> list[int]:
        """Merge the two neighbours that make the best token, the first two on ties, until none make one."""
        n = len(ids)
        before, after = list(range(-1, n - 1)), list(range(1, n + 1))
        heap: list[tuple[float, int, int, int, int]] = []

        def offer(left: int) -> None:
            if left < 0 or after[left] == n:
                return
            a, b = ids[left], ids[after[left]]
            merged = self._ids.get(self._pieces[a] + self._pieces[b])
            if merged is not None and self._scores[merged] > _LOWEST_SCORE:
                heapq.heappush(heap, (-self._scores[merged], left, a, b, merged))

        for left in range(n):
            offer(left)
        while heap:
            _, left, a, b, merged = heapq.heappop(heap)
            right = after[left]
            if ids[left] != a or right == n or ids[right] != b:
                continue  # One of the two has been merged since.
            ids[left], ids[right] = merged, -1
            after[left] = after[right]
            if after[left] < n:
                before[after[left]] = left
            offer(left)
            offer(before[left])
        return [token for token in ids if token >= 0]
