"""Blocks of GGUF's quantized types: their values are the gguf package's bit by bit, and wrong ones are refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

import qcut
from qcut.checkpoints.formats.gguf.blocks import FLOATS, TYPES, dequantized
from qcut.errors import CheckpointError, QcutError
from tests.checkpoints.formats.gguf.written import SCALES, Type, gguf, q4_k_m, write

pytestmark = pytest.mark.filterwarnings("ignore::qcut.errors.QuantizationWarning")
KINDS = [kind for kind in TYPES if kind not in FLOATS]


def blocks_of(kind: str, count: int) -> numpy.ndarray:
    """Random blocks, then those of all bits 0 and all bits 1, with finite scales of both signs and all exponents."""
    draws = numpy.random.default_rng(0)
    blocks = draws.integers(0, 256, (count, TYPES[kind].nbytes), dtype=numpy.uint8)
    blocks[-2:] = [[0], [255]]
    for at in SCALES[kind]:
        upper = blocks[:, at + 1]
        upper[(upper & 0x7C) == 0x7C] ^= 0x40
    return blocks


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_the_packages(kind: str) -> None:
    form, blocks = TYPES[kind], blocks_of(kind, 5000)
    assert (Type[kind].value, *gguf.GGML_QUANT_SIZES[Type[kind]]) == (form.number, form.size, form.nbytes)
    assert form.scales == SCALES[kind]
    if kind == "MXFP4":
        blocks[:, 0] %= 253  # beyond it no float32 holds 6 times the power of two
    expected = gguf.quants.dequantize(blocks, Type[kind])
    found = dequantized(kind, torch.from_numpy(blocks)[:, None]).numpy()
    assert numpy.array_equal(found.view(numpy.uint32), expected.view(numpy.uint32))


def test_values_of_many_blocks_are_made_in_parts() -> None:
    blocks = blocks_of("Q4_K", 3 * (1 << 11) + 5)  # of 256 values, more than are made at once
    found = dequantized("Q4_K", torch.from_numpy(blocks).view(-1, 1, 144))
    assert numpy.array_equal(found.numpy(), gguf.quants.dequantize(blocks, Type.Q4_K))


def place_of(path: Path, name: str) -> tuple[int, int]:
    """First byte of a tensor, and its bytes."""
    tensor = next(one for one in gguf.GGUFReader(str(path)).tensors if one.name == name)
    return int(tensor.data_offset), int(tensor.n_bytes)


@pytest.mark.parametrize("kind", KINDS)
def test_scales_that_are_not_finite_are_refused(tmp_path: Path, kind: str) -> None:
    path, name = tmp_path / "model.gguf", "blk.1.ffn_down.weight"
    write(path, "llama", lambda new, values: Type[kind] if new == name else q4_k_m(new, values))
    data, (start, _) = bytearray(path.read_bytes()), place_of(path, name)
    changes: list[tuple[int, str, int, str]] = [(0, "<B", 255, "255, which is NaN,")]
    if SCALES[kind]:
        changes = [(SCALES[kind][-1], "<H", 0x7E00, "nan"), (SCALES[kind][0], "<H", 0xFC00, "-inf")]
    for at, form, bits, value in changes:
        changed = data.copy()
        struct.pack_into(form, changed, start + 3 * TYPES[kind].nbytes + at, bits)
        path.write_bytes(changed)
        with pytest.raises(
            CheckpointError, match=rf"model\.gguf: tensor '{name}': found the scale {value} at \[.*finite"
        ):
            qcut.load(path, progress=False)


def header_of(path: Path, name: str) -> int:
    """First byte of a tensor's entry behind its name: extents, type and offset follow."""
    return path.read_bytes().index(name.encode()) + len(name)


def put(path: Path, at: int, form: str, value: int) -> None:
    data = bytearray(path.read_bytes())
    struct.pack_into(form, data, at, value)
    path.write_bytes(data)


NAME = "blk.0.attn_q.weight"
"""Of Q4_K ``[256, 256]``: 4 bytes of dimensions, 16 of extents, 4 of type, 8 of offset."""
HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "columns of no whole blocks": (
        lambda path: put(path, header_of(path, NAME) + 4, "<Q", 255),
        rf"tensor '{NAME}': Q4_K \[256, 255\]",
    ),
    "more rows than the file": (
        lambda path: put(path, header_of(path, NAME) + 12, "<Q", 1 << 39),
        rf"tensor '{NAME}': Q4_K \[549755813888, 256\]",
    ),
    "more rows than exist": (
        lambda path: put(path, header_of(path, NAME) + 12, "<Q", 1 << 50),
        rf"found 1125899906842624 extent of '{NAME}'; at most",
    ),
    "a type of more bytes": (
        lambda path: put(path, header_of(path, NAME) + 20, "<I", Type.Q6_K.value),
        rf"tensors '{NAME}' and 'blk.0.attn_k.weight' overlap",
    ),
    "a type that is not read": (
        lambda path: put(path, header_of(path, NAME) + 20, "<I", Type.Q8_K.value),
        rf"tensor '{NAME}' is of the type Q8_K; F32, F16, .* are served",
    ),
    "a place behind the end": (
        lambda path: put(path, header_of(path, NAME) + 24, "<Q", path.stat().st_size),
        rf"tensor '{NAME}': Q4_K \[256, 256\] at \d+; \d+ bytes of data are there",
    ),
    "the place of another tensor": (
        lambda path: put(path, header_of(path, NAME) + 24, "<Q", 0),
        r"tensors '\S+' and '\S+' overlap",
    ),
    "half of a tensor": (
        lambda path: path.write_bytes(path.read_bytes()[: sum(place_of(path, "blk.1.ffn_down.weight")) - 1000]),
        r"truncated, or not a GGUF file: tensor 'blk\.1\.ffn_down\.weight': Q6_K \[256, 512\]",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_tensors_are_refused_by_name(tmp_path: Path, case: str) -> None:
    path, (change, message) = tmp_path / "model.gguf", HOSTILE[case]
    write(path, "llama")
    change(path)
    with pytest.raises(QcutError, match=message) as caught:
        qcut.load(path, progress=False)
    assert str(path) in str(caught.value)
