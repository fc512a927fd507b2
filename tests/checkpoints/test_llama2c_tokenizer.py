"""llama2.c's tokenizer files, and the tokens that its program makes of a text."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from qcut.checkpoints.formats.llama2c.tokenizer import Llama2cTokenizer
from qcut.errors import CheckpointError, ConfigError
from tests.support.llama2c_oracle import Sample, naive_encode, packed, vocabulary

MERGES = vocabulary(
    (b" a", -3.0),
    (b"ab", -1.0),
    (b"ba", -1.0),
    (b"bab", -2.0),
    (b"aa", -4.0),
    (b"aaa", 0.0),
    (b"cc", -1e10),
    (b"c\xc3\xa9", -5.0),
    (b"<0xF0><0x9F>", -6.0),
    (b"\n<s>\n a", -7.0),
    (b"ab", 5.0),
)


def test_encoding_is_the_naive_one():
    tokenizer = Llama2cTokenizer([piece for piece, _ in MERGES], [score for _, score in MERGES])
    rng = random.Random(3)
    texts = ["", " ", "a", "ababab", "aaaaaaa", "🦙", "cc", "x\x80é", "a\nb\t"]
    texts += ["".join(rng.choices("aaabbc é🦙", k=rng.randrange(1, 30))) for _ in range(200)]
    for text in texts:
        for bos, eos in ((True, False), (False, True)):
            ids = tokenizer.encode(text, bos=bos, eos=eos)
            assert ids == naive_encode(MERGES, text, bos, eos), text
        # Merged with the name of another token, a token is not what it was made of.
        if "🦙" not in text and not text.startswith("a"):
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokens_of_known_texts():
    tokenizer = Llama2cTokenizer([piece for piece, _ in MERGES], [score for _, score in MERGES])
    first = 259 + 5
    assert tokenizer.vocab_size == len(MERGES)
    assert tokenizer.encode("") == [1]
    assert tokenizer.encode("", bos=False, eos=True) == [2]
    assert tokenizer.encode("b", eos=True) == [1, 259, 261, 2]
    assert tokenizer.encode("\x80", bos=False) == [259, 0xC2 + 3, 0x80 + 3]
    assert tokenizer.encode("\udc80", bos=False) == [259, 0x80 + 3]  # a byte that Python could not decode
    assert tokenizer.encode("aba", bos=False) == [259, first + 1, 260]  # ab and ba are as good: the first
    assert tokenizer.encode("bab", bos=False) == [259, first + 3]
    with pytest.raises(ConfigError, match="the text is not Unicode"):
        tokenizer.encode("\ud800")


def test_tokens_of_a_file(llama2c_sample: Sample):
    data = llama2c_sample.tokens.read_bytes()
    tokenizer = Llama2cTokenizer.from_file(llama2c_sample.tokens, llama2c_sample.vocab_size)
    tokens, offset = [], 4
    while offset < len(data):
        score, length = struct.unpack_from("<fi", data, offset)
        tokens.append((data[offset + 8 : offset + 8 + length], score))
        offset += 8 + length
    assert len(tokens) == tokenizer.vocab_size == llama2c_sample.vocab_size
    texts = ["", " ", "Once upon a time, Lily's mom said: \"Let's go!\"\n", "  two  spaces ", "🦙 naïve … ™\x7f\0\t"]
    for text in (*texts, llama2c_sample.text.read_text()):
        ids = tokenizer.encode(text, eos=True)
        if "\0" not in text:
            assert ids == naive_encode(tokens, text, True, True)
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("🦙", bos=False)[1:] == [byte + 3 for byte in "🦙".encode()]


def test_pieces_and_what_is_printed_of_them():
    tokens = vocabulary((b" a", 0.0), (b"  a", 0.0), (b"<0x4", 0.0), (b"\x7f", 0.0), (b"", 0.0), (b"\xc3\xa9", 0.0))
    tokenizer = Llama2cTokenizer([piece for piece, _ in tokens], [score for _, score in tokens])
    first = 259 + 5
    assert tokenizer.piece(1, first) == b"a"
    assert tokenizer.piece(5, first) == b" a"
    assert tokenizer.piece(1, first + 1) == b" a"
    assert tokenizer.piece(1, 259) == b""
    assert tokenizer.piece(5, first + 2) == b"<0x4"
    assert tokenizer.piece(5, 1) == b"\n<s>\n"
    assert [tokenizer.piece(5, i + 3) for i in range(256)] == [bytes([i]) for i in range(256)]
    printed = [i for i in range(256) if tokenizer.printed_piece(5, i + 3)]
    assert printed == [9, 10, 11, 12, 13, *range(32, 127)]
    assert [tokenizer.printed_piece(5, first + i) for i in (0, 3, 4, 5)] == [b" a", b"", b"", b"\xc3\xa9"]
    assert tokenizer.decode([1, *(b + 3 for b in "é".encode()), 2]) == "é"
    assert tokenizer.decode([0xC3 + 3, first]) == "\ufffd a"
    assert tokenizer.decode([first, 1, first, first]) == " aa a"
    assert tokenizer.decode([]) == ""


def test_ids_that_do_not_exist():
    tokenizer = Llama2cTokenizer([b"<unk>", b"<s>", b"</s>", b" ", b"a"], [0.0] * 5)
    for token in (-1, 5):
        for call in (tokenizer.piece, tokenizer.printed_piece):
            for pair in ((1, token), (token, 1)):
                with pytest.raises(ConfigError, match=f"token {token} does not exist; the vocabulary has 0 to 4"):
                    call(*pair)
        with pytest.raises(ConfigError, match=f"token {token} does not exist"):
            tokenizer.decode([1, token])
    with pytest.raises(ConfigError, match=f"token {ord('b') + 3} does not exist"):
        tokenizer.encode("b")  # no token, and no bytes to fall back to
    with pytest.raises(ConfigError, match="no token of a space"):
        Llama2cTokenizer([b"<unk>", b"<s>", b"</s>", b"a"], [0.0] * 4).encode("a")
    with pytest.raises(ConfigError, match="2 pieces and 1 scores"):
        Llama2cTokenizer([b"a", b"b"], [0.0])


def test_tokenizer_files_are_read(tmp_path: Path):
    path = tmp_path / "t.bin"
    path.write_bytes(packed(MERGES))
    tokenizer = Llama2cTokenizer.from_file(path, len(MERGES))
    assert tokenizer.encode("abc é") == naive_encode(MERGES, "abc é", True, False)


def with_length(length: int) -> bytes:
    data = bytearray(packed(MERGES))
    struct.pack_into("<i", data, 8, length)
    return bytes(data)


def with_score(score: float) -> bytes:
    data = bytearray(packed(MERGES))
    struct.pack_into("<f", data, 4, score)
    return bytes(data)


BAD_FILES = {
    "empty": (b"", "0 bytes, max_token_length 0"),
    "a few bytes": (b"abc", "3 bytes, max_token_length 0"),
    "no length": (packed(MERGES, 0), "max_token_length 0"),
    "negative maximum": (packed(MERGES, -5), "max_token_length -5"),
    "cut in a token": (packed(MERGES)[:-1], r"token 274 has length 2; .* the 1 bytes that are left"),
    "cut in a score": (packed(MERGES)[:-7], "ends in token 274; 275 are needed"),
    "fewer tokens": (packed(MERGES[:-1]), "ends in token 274; 275 are needed"),
    "more tokens": (packed([*MERGES, (b"z", 0.0)]), "9 bytes are left over after 275 tokens"),
    "left over": (packed(MERGES) + b"\0", "1 bytes are left over"),
    "negative length": (with_length(-1), "token 0 has length -1; allowed: 0 to"),
    "long token": (with_length(13), r"token 0 has length 13; allowed: 0 to max_token_length \(12\)"),
    "endless token": (with_length(2**31 - 1), "token 0 has length 2147483647"),
    "NaN": (with_score(float("nan")), "token 0 has score nan"),
    "Inf": (with_score(float("-inf")), "token 0 has score -inf"),
    "text": (b"Once upon a time\n" * 300, "token 0 has length 543236206"),
    "a checkpoint": (struct.pack("<7i", 30, 17, 3, 3, 1, 37, 11) + bytes(60000), r"60028 bytes, max_token_length 30"),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_tokenizer_files_that_are_refused(what: str, tmp_path: Path):
    data, message = BAD_FILES[what]
    path = tmp_path / "t.bin"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"t\.bin: .*{message}"):
        Llama2cTokenizer.from_file(path, len(MERGES))


def test_tokenizer_files_that_are_missing(tmp_path: Path):
    with pytest.raises(CheckpointError, match="there is no such file"):
        Llama2cTokenizer.from_file(tmp_path / "t.bin", 512)
    with pytest.raises(ConfigError, match="vocab_size is 0; allowed: >= 1"):
        Llama2cTokenizer.from_file(tmp_path / "t.bin", 0)
