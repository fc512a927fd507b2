"""`qcut.backends.cuda.prompt_attention`: which kernels a shape gets, and what they are given."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from qcut.backends.cuda import prompt_attention as prompt_attention_cuda
from qcut.dispatch.gpus import Target
from qcut.ops.attention.prefill import PromptAttentionOp
from tests.support.fakes.launches import A100, H200, Launches, note_launches

KV_HEADS, CONTEXT = 2, 1024


@pytest.fixture(params=[H200, A100], ids=lambda gpu: gpu.arch)
def gpu(request: pytest.FixtureRequest) -> Target:
    return request.param


@pytest.fixture
def launches(gpu: Target, monkeypatch: pytest.MonkeyPatch) -> Launches:
    return note_launches(prompt_attention_cuda, gpu, monkeypatch)


def chunk(
    length: int = 300, *, dtype: torch.dtype = torch.float16, int8: bool = False, head: int = 64, scale: float = 0.125
) -> PromptAttentionOp:
    """Two sequences; queries are a part of a projection."""
    q = torch.randn(2 * length, 6 * head).to(dtype)[:, : 4 * head].unflatten(1, (4, head))
    stored = torch.int8 if int8 else dtype
    keys, values = torch.ones(2, 3, KV_HEADS, CONTEXT, head).to(stored)
    scales = torch.ones(2, 3, KV_HEADS, CONTEXT) if int8 else (None, None)
    starts, lengths = torch.tensor([[0, 5], [length, 1]], dtype=torch.int32)
    return PromptAttentionOp(q, keys, values, *scales, starts, lengths, scale, length, torch.zeros(2 * length))


def same(launch: dict[str, Any], call: PromptAttentionOp, *names: str) -> None:
    for name in names:
        tensor: Tensor | None = getattr(call, name)
        assert tensor is None or launch[name] == tensor.data_ptr(), name


@pytest.mark.parametrize("int8", [False, True])
def test_a_chunk_is_one_kernel(launches: Launches, gpu: Target, int8: bool) -> None:
    call = chunk(int8=int8)
    y = prompt_attention_cuda.prompt_attention(call)
    (launch,) = launches
    form = "wgmma" if gpu.arch == "sm_90a" else "mma"
    assert launch["kernel"].startswith(f"qcut_prompt_{form}_{gpu.arch.replace('_', '')}_f16_{'s8' if int8 else 'f16'}_")
    same(launch, call, "q", "keys", "values", "key_scales", "value_scales", "starts", "lengths", "absmax")
    assert launch["out"] == y.data_ptr()
    assert launch["q_stride"] == 6 * 64
    sizes = {"sequences": 2, "length": 300, "kv_heads": 2, "group": 2, "context": CONTEXT}
    assert {name: launch[name] for name in sizes} == sizes
    assert launch["scale"] == pytest.approx(0.125 / math.log(2))


def test_the_grid_depends_on_sizes_alone(launches: Launches, gpu: Target) -> None:
    for length in (1, 300, 3000):
        prompt_attention_cuda.prompt_attention(chunk(length))
    grids = [launch["grid"][0] for launch in launches]
    # Tiles of 64 rows, each of them a pair of queries. Clusters share few; one CTA for each SM goes through many.
    assert grids == ([4, 4 * 10, 4 * 94] if gpu.arch == "sm_80" else [4 * 4, 4 * 10 * 2, 132])


def test_queries_that_are_not_aligned_are_copied(launches: Launches) -> None:
    call = chunk(8)
    rows = torch.randn(16, 4 * 64 + 1).half()
    for q in (rows[:, 1:].unflatten(1, (4, 64)), rows[:, :-1].unflatten(1, (4, 64))):
        prompt_attention_cuda.prompt_attention(call._replace(q=q))
    for launch in launches:
        assert (launch["q"] % 16, launch["q_stride"]) == (0, 256)


@pytest.mark.parametrize(
    "changes",
    [{"dtype": torch.float32}, {"head": 20}, {"head": 40, "int8": True}, {"scale": -1.0}, {"scale": 0.0}],
    ids=str,
)
def test_what_no_kernel_takes_is_torchs(launches: Launches, changes: dict[str, Any]) -> None:
    call = chunk(8, **changes)
    y = prompt_attention_cuda.prompt_attention(call)
    assert not list(launches)
    want_absmax = torch.zeros(16)
    want = call._replace(absmax=want_absmax).cpu()
    assert (y - want).abs().max() <= 1e-2
    assert (call.absmax - want_absmax).abs().max() <= 1e-2  # type: ignore[operator]


def test_rings_hold_whole_blocks(launches: Launches) -> None:
    """Where they do not, attention is torch's; the same kernel in the same grid serves both caches where they do."""
    ring = chunk(8)._replace(window=50, ring=5000)
    prompt_attention_cuda.prompt_attention(ring)
    prompt_attention_cuda.prompt_attention(ring._replace(ring=0))
    rung, whole = launches
    assert (rung["window"], rung["ring"], rung["context"]) == (50, 5000, CONTEXT)
    assert rung["kernel"] == whole["kernel"] + "_ring"
    assert rung["grid"] == whole["grid"]
    stored = {name: getattr(ring, name)[:, :, :1000].contiguous() for name in ("keys", "values")}
    y = prompt_attention_cuda.prompt_attention(ring._replace(**stored))
    assert len(launches) == 2
    assert (y - ring._replace(**stored).cpu()).abs().max() <= 1e-2


def test_sinks_are_an_argument_of_the_kernel(launches: Launches) -> None:
    for options in ({}, {"window": 50}, {"window": 50, "softcap": 2.0, "ring": 5000}):
        sunk = chunk(8)._replace(sinks=torch.randn(4), **options)
        prompt_attention_cuda.prompt_attention(sunk)
        prompt_attention_cuda.prompt_attention(sunk._replace(sinks=None))
        same(launches[-2], sunk, "sinks")
        assert launches[-2]["kernel"] == launches[-1]["kernel"] + "_sink"
        assert launches[-2]["grid"] == launches[-1]["grid"]
    other = chunk(8, dtype=torch.float32)._replace(sinks=torch.randn(4), absmax=None)
    y = prompt_attention_cuda.prompt_attention(other)
    assert len(launches) == 6
    assert (y - other.cpu()).abs().max() <= 1e-4


def test_nobody_launches_nothing(launches: Launches) -> None:
    call = chunk(8)
    nobody = call._replace(q=call.q[:0], starts=call.starts[:0], lengths=call.lengths[:0], absmax=None)
    assert prompt_attention_cuda.prompt_attention(nobody).shape == (0, 4, 64)
    assert not list(launches)
