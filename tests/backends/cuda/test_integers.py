"""`qcut.backends.cuda.integers`: the kernels of a layer in integers, as a call launches them."""

from __future__ import annotations

import pytest
import torch

from qcut.backends.cuda import integers as integers_cuda
from qcut.backends.cuda.integers import IntegerLayer
from qcut.backends.cuda.launch.plans import m_bucket
from qcut.dispatch.gpus import Target
from tests.support.fakes.launches import A100, H200


@pytest.fixture(params=[H200, A100], ids=lambda gpu: gpu.arch)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setattr(integers_cuda, "target", lambda device: request.param)
    return request.param


def layer(dtype: torch.dtype, m: int, *, aligned: bool = True, n: int = 4096) -> IntegerLayer:
    return IntegerLayer(dtype, m_bucket(m), n, 4096, aligned, True)


def test_int8_takes_one_kernel(gpu: Target) -> None:
    for m, few in ((1, True), (8, True), (16, True), (17, False), (300, False)):
        split, product = layer(torch.int8, m).specs(0)
        assert split is None
        assert ("int8_stream" in product.source.name) == few, m
        assert ("_given_s8_rescale_" in product.source.name) == few
        assert not product.tail
        assert product.row_multiple == 1


def test_int16_is_split_for_more_than_eight_tokens(gpu: Target) -> None:
    for m in (1, 8):
        split, product = layer(torch.int16, m).specs(0)
        assert split is None
        assert "_given_s16_halves_rescale_" in product.source.name
    for m, aligned in ((9, True), (300, True), (3, False)):
        split, product = layer(torch.int16, m, aligned=aligned).specs(0)
        assert split is not None
        assert split.source.name.endswith("_u") == (not aligned)
        assert split.grid(m) == (-(-m * 256 // 256), 1, 1)
        assert "_s16_halves_rescale_" in product.source.name
        assert "stream" not in product.source.name


def test_no_kernel_of_int8_products_needs_nvcc(gpu: Target) -> None:
    for dtype in (torch.int8, torch.int16):
        for n in (4096, 33):
            _, product = layer(dtype, 4096, n=n).specs(0)
            assert product.source.toolchain == "nvrtc"
