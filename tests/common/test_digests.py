"""Digests are what the documents say, whatever threads compute them."""

from __future__ import annotations

import hashlib
import os

import pytest

from qcut.common import digests


def sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@pytest.mark.parametrize("size", [0, 1, 10, 11, 35])
def test_the_formula(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(digests, "PIECE_BYTES", 10)
    data = bytes(range(size))
    pieces = b"".join(sha(data[i : i + 10]) for i in range(0, size, 10))
    assert digests.tensor_digest("U8", [size, 1], memoryview(data)) == sha(b"U8[%d,1]" % size + pieces).hex()


def test_json_digests_ignore_order_and_spaces() -> None:
    assert digests.json_digest({"b": [1, 2.5], "a": None}) == sha(b'{"a":null,"b":[1,2.5]}').hex()


def test_a_forked_child_has_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "PIECE_BYTES", 10)
    data = memoryview(bytes(100))
    expected = digests.tensor_digest("U8", [100], data)
    child = os.fork()
    if child == 0:
        os._exit(digests.tensor_digest("U8", [100], data) != expected)
    assert os.waitpid(child, 0)[1] == 0
