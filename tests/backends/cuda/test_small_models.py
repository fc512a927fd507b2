"""What kernels take of small models, asked without a GPU: served, or refused by an error of qcut's own."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from qcut.backends.cuda import attention
from qcut.backends.cuda.codebook import CodebookLayer
from qcut.backends.cuda.launch import plans
from qcut.dispatch.gpus import Target
from qcut.emitters.core.source import EmitError
from qcut.errors import UnsupportedError
from qcut.layers.codebook import CodebookLinear
from qcut.schemes import parse_scheme
from tests.support.fakes.launches import A100, H200

HEADS = (2, 8, 12, 16, 24, 32, 64, 80, 96, 128, 256, 264)
CACHES = (None, torch.int8)


@pytest.fixture(params=[H200, A100], ids=["sm_90a", "sm_80"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setattr(attention, "target", lambda device: request.param)
    found: Target = request.param
    return found


def test_caches_are_checked_by_the_size_of_heads(gpu: Target) -> None:
    for dtype, cache, head in product((torch.float16, torch.bfloat16, torch.float32), CACHES, HEADS):
        stored = cache or dtype
        vector = 16 // torch.empty(0, dtype=stored).element_size()
        if 8 <= head <= 256 and head % vector == 0:
            attention.check_cache(dtype, stored, stored, head, 0)
            continue
        with pytest.raises(UnsupportedError, match=r"this GPU has no kernel of qcut's for the call: qcut_.*head: is"):
            attention.check_cache(dtype, stored, stored, head, 0)


def test_errors_of_emitters_reach_nobody() -> None:
    def fail() -> Any:
        raise EmitError("qcut_some_kernel: n: is a multiple of 8")

    with pytest.raises(
        UnsupportedError, match="this GPU has no kernel of qcut's for the call: qcut_some_kernel: n: is"
    ):
        plans.PlanCache[Any]().make("key", fail)


@pytest.mark.parametrize("k", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("group_size", [None, 32, 64, 128, 256])
def test_layers_of_narrow_rows_have_kernels(k: int, group_size: int | None, gpu: Target) -> None:
    scheme: Any = replace(parse_scheme("codebook4_int8"), group_size=group_size)  # type: ignore[type-var]
    for rows in (1, 2, 16, 64, 300):
        calls = CodebookLinear.cuda_calls(
            scheme, dtype=torch.float16, rows=rows, n=96, k=k, bias=True, activation="none"
        )
        for call in calls:
            assert isinstance(call, CodebookLayer)
            assert call.specs(gpu)
            layer: Any = CodebookLinear(k, 96, True, scheme, "none", "cpu", None)
            assert call.row_norm == layer._one_norm
