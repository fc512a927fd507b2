"""Every tile of every list gives the product: which one serves is decided by time, not by being right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import qcut
from qcut.backends.triton import codebook, int8, launch
from qcut.numerics import int16
from tests.gpu.backends.triton.test_layers import BRAIN, HALF, LIMIT, layer, tokens
from tests.gpu.support.oracles import DEVICE, assert_same

K, N = 1024, 4096
"""Enough steps for loads and products to overtake one another, and programs for every multiprocessor."""
TOKENS = (3, 20, 64, 200, 4096)
"""One number for each list."""
EXACT = ("w8a8", "w8a8_static", "int16x8", "codebook4_int8", "codebook3_g64_int8", "int4_int8")
NEAR = (("w8a16", HALF), ("w8a16", BRAIN), ("codebook4", HALF), ("codebook4", BRAIN), ("codebook2_g64", HALF))


def tiles_of(scheme: str, m: int) -> Sequence[Any]:
    if scheme.startswith("w8a16"):
        return int8.tiles_of(m, False)
    if scheme.startswith("w8a8"):
        return int8.tiles_of(m, True)
    return int8.tiles_of(int16.rows_of_blocks(m), True) if scheme.startswith("int16") else codebook.tiles_of(m)


def product(scheme: str, m: int, index: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Results of one tile, three times, and of plain torch."""
    module = codebook if tiles_of(scheme, m) == codebook.tiles_of(m) else int8
    tile = tiles_of(scheme, m)[index]
    monkeypatch.setattr(module, "tiles_of", lambda *_: [tile])
    monkeypatch.setattr(launch, "_choices", {})
    monkeypatch.setattr(launch, "_kept", lambda *_: None)
    monkeypatch.setattr(launch, "_keep", lambda *_: None)
    gpu, x = layer(scheme, K, N).to(DEVICE), tokens(m, K, dtype).to(DEVICE)
    with torch.no_grad(), qcut.execution_path("triton"):
        got = [gpu(x) for _ in range(3)]
    with torch.no_grad(), qcut.execution_path("reference"):
        return [*got, gpu(x)]


def cases(schemes: Sequence[Any]) -> list[Any]:
    """A scheme (and dtype), tokens, and the index of a tile."""
    of = [scheme if isinstance(scheme, tuple) else (scheme, HALF) for scheme in schemes]
    return [(s, dtype, m, i) for s, dtype in of for m in TOKENS for i in range(len(tiles_of(s, m)))]


@pytest.mark.parametrize(("scheme", "dtype", "m", "index"), cases(EXACT))
def test_sums_of_integers_are_exact(
    scheme: str, dtype: torch.dtype, m: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    *got, want = product(scheme, m, index, dtype, monkeypatch)
    for y in got:
        assert_same(y, want)


@pytest.mark.parametrize(("scheme", "dtype", "m", "index"), cases(NEAR))
def test_products_of_floats_are_near(
    scheme: str, dtype: torch.dtype, m: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    *got, want = product(scheme, m, index, dtype, monkeypatch)
    assert_same(got[1], got[0])
    assert_same(got[2], got[0])
    # Each token by itself: a wrong tile of rows is a small part of the whole.
    error = (got[0].double() - want.double()).norm(dim=1) / want.double().norm(dim=1)
    assert float(error.max()) <= 4 * LIMIT[dtype]
