"""safetensors files: written for every reader, read without believing the header; and the digests in them."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qcut.common.safetensors import DTYPES, PIECE_BYTES, TensorFile, json_digest, tensor_digest, torch_dtype
from qcut.common.safetensors_writer import write_tensors
from qcut.errors import CheckpointError

TENSORS = {
    **{f"of {code}": torch.arange(6).view(2, 3).to(torch_dtype(code)) for code in DTYPES},
    "turned": torch.randn(3, 5).t(),
    "one": torch.tensor(2.5),
    "none": torch.empty(0, 4),
}


def write(path: Path, tensors: dict[str, torch.Tensor] = TENSORS, **options: Any) -> str:
    with open(path, "wb") as file:
        return write_tensors(file, tensors, **options)


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def test_every_dtype_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    digest = write(path, facts={"revision": "7"})
    with TensorFile(path, CheckpointError) as file:
        assert file.header_digest == digest
        assert file.facts["revision"] == "7"
        assert file.headers.keys() == TENSORS.keys()
        for name, expected in TENSORS.items():
            assert bits(file.read(name)) == bits(expected)
            assert file.headers[name].start % expected.dtype.itemsize == 0


def test_other_readers_read_it(tmp_path: Path) -> None:
    # The oldest version of the package that qcut works with knows no complex numbers.
    written = {name: tensor for name, tensor in TENSORS.items() if not tensor.is_complex()}
    write(tmp_path / "x.safetensors", written)
    found = load_file(tmp_path / "x.safetensors")
    assert {name: bits(tensor) for name, tensor in found.items()} == {name: bits(t) for name, t in written.items()}


def test_files_of_other_writers_are_read(tmp_path: Path) -> None:
    held = {"a": torch.randn(3, 4), "b": torch.arange(5)}
    save_file(held, tmp_path / "x", {"by": "another"})
    with TensorFile(tmp_path / "x", CheckpointError) as file:
        assert file.facts == {}
        assert all(torch.equal(file.read(name), tensor) for name, tensor in held.items())


def test_damaged_tensors_are_named_unless_nobody_asks(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write(path, {"a": torch.zeros(4), "b": torch.zeros(4)})
    data = bytearray(path.read_bytes())
    data[-1] = 0x3F
    path.write_bytes(data)
    with TensorFile(path, CheckpointError) as file:
        assert file.read("a").sum() == 0
        with pytest.raises(CheckpointError, match=f"{path}: tensor 'b' is damaged: found the SHA-256"):
            file.read("b")
        assert file.read("b", verify=False)[3] != 0


def test_changed_dtype_or_shape_of_equal_bytes_is_damage(tmp_path: Path) -> None:
    for change in ({"dtype": "BF16"}, {"shape": [3, 2]}):
        path = tmp_path / "x"
        write(path, {"a": torch.ones(2, 3, dtype=torch.float16)})
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        header["a"].update(change)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
        with TensorFile(path, CheckpointError) as file, pytest.raises(CheckpointError, match="damaged"):
            file.read("a")


def raw(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(start: int = 0, end: int = 4, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [start, end]}


REFUSED = {
    "empty": b"",
    "short": b"\0" * 20,
    "header beyond the file": struct.pack("<Q", 1 << 62) + b"{}",
    "no JSON": raw(b"[[[["),
    "deep": raw(b"[" * 200_000),
    "a list": raw([]),
    "beyond the end": raw({"a": entry(0, 8, (2,))}, b"1234"),
    "negative": raw({"a": entry(-4, 0)}, b"1234"),
    "overlap": raw({"a": entry(), "b": entry(2, 6)}, b"123456"),
    "gap": raw({"a": entry(), "b": entry(8, 12)}, b"1" * 12),
    "left over": raw({"a": entry()}, b"12345"),
    "another size": raw({"a": entry(0, 4, (2,))}, b"1234"),
    "product beyond 64 bits": raw({"a": entry(0, 0, (1 << 62, 1 << 62, 4))}),
    "a dimension beyond 64 bits": raw(
        b'{"a": {"dtype": "F32", "shape": [1' + b"0" * 400 + b'], "data_offsets": [0, 0]}}'
    ),
    "Infinity": raw(b'{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 0]}}'),
    "negative shape": raw({"a": entry(0, 4, (-1, -1))}, b"1234"),
    "many dimensions": raw({"a": entry(0, 4, (1,) * 33)}, b"1234"),
    "unknown dtype": raw({"a": entry(dtype="F31")}, b"1234"),
    "dtype of a number": raw({"a": entry(dtype=32)}, b"1234"),
    "shape of text": raw({"a": entry(shape="abc")}, b"1234"),
    "a number": raw({"a": 1}),
    "twice": raw(b'{"a": %s, "a": %s}' % ((json.dumps(entry()).encode(),) * 2), b"1234"),
    "a long name": raw({"a" * 5000: entry()}, b"1234"),
    "lone surrogate": raw(b'{"\\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', b"1234"),
    "metadata of numbers": raw({"__metadata__": {"a": 1}}),
    "digests of numbers": raw({"__metadata__": {"qcut": '{"digests": {"a": 1}}'}}),
    "digests that are no JSON": raw({"__metadata__": {"qcut": "{"}}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_malformed_files_are_refused_without_allocating(tmp_path: Path, case: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(REFUSED[case])
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            TensorFile(path, CheckpointError)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith(str(path))


def test_shrinking_files_and_invalid_bools_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save_file({"a": torch.ones(1000), "flag": torch.tensor([True])}, path)
    data = bytearray(path.read_bytes())
    data[-1] = 2
    path.write_bytes(data)
    with TensorFile(path, CheckpointError) as file:
        with pytest.raises(CheckpointError, match="'flag': found the byte 2; a BOOL is 0 or 1"):
            file.read("flag")
        path.write_bytes(data[:500])
        with pytest.raises(CheckpointError, match="'a': the file ends in it"):
            file.read("a")


def sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 35])
def test_tensor_digest_is_the_documented_formula(size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    pieces = b"".join(sha(data[i : i + PIECE_BYTES]) for i in range(0, size, PIECE_BYTES))
    assert tensor_digest("U8", [size, 1], memoryview(data)) == sha(b"U8[%d,1]" % size + pieces).hex()


def test_json_digests_ignore_order_and_spaces() -> None:
    assert json_digest({"b": [1, 2.5], "a": None}) == sha(b'{"a":null,"b":[1,2.5]}').hex()


def test_a_forked_child_has_threads_of_its_own() -> None:
    data = memoryview(bytes(3 * PIECE_BYTES))
    expected = tensor_digest("U8", [len(data)], data)
    child = os.fork()
    if child == 0:
        os._exit(tensor_digest("U8", [len(data)], data) != expected)
    assert os.waitpid(child, 0)[1] == 0
