"""Engines with folded norms on the GPU: graphs against launches, and against the CPU's definition."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import qcut
from qcut.engine.engine import Engine
from qcut.numerics.int8 import sqnr_db
from tests.gpu.support.decoders import llama
from tests.gpu.support.oracles import DEVICE, assert_same
from tests.support.decoders import VOCABULARY, prompts_of, small


def gpt2(device: str, dtype: torch.dtype) -> Any:
    model = small("gpt2").to(device, dtype)
    qcut.quantize(model, "w8a8", allow_growth=True, prebuild=(), progress=False)
    return model


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("batch", [1, 2])
def test_graphs_are_the_launches(kind: str, batch: int) -> None:
    model = gpt2(DEVICE, torch.float16) if kind == "gpt2" else llama("w8a8")
    prompts = prompts_of(VOCABULARY, *range(4, 4 + batch))
    launched, captured = (Engine(model, batch=batch, graphs=graphs, fold_norms=True) for graphs in (False, True))
    for engine in (launched, captured):
        engine.prefill(prompts)
    for token in (5, 7, 11):
        assert_same(captured.decode([token] * batch), launched.decode([token] * batch))
    assert captured.generate(prompts, 30) == launched.generate(prompts, 30)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_float32_steps_are_near_the_cpus(kind: str) -> None:
    """Other orders of sums; a rounding to int8 may turn over."""
    cpu = gpt2("cpu", torch.float32) if kind == "gpt2" else llama("w8a8", torch.float32, "cpu")
    prompts = prompts_of(VOCABULARY, 9)
    engines = [Engine(model, fold_norms=True) for model in (cpu, copy.deepcopy(cpu).to(DEVICE))]
    for engine in engines:
        engine.prefill(prompts)
    for token in range(5, 25, 3):
        want, got = (engine.decode([token]) for engine in engines)
        assert sqnr_db(want, got.cpu()) > 30.0


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_steps_launch_two_kernels_a_block_less(kind: str) -> None:
    model = gpt2(DEVICE, torch.float16) if kind == "gpt2" else llama("w8a8")
    found = []
    for fold in (False, True):
        engine = Engine(model, fold_norms=fold, graphs=False)
        engine.prefill(prompts_of(VOCABULARY, 9))
        engine.decode([3])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
            engine.decode([5])
            torch.cuda.synchronize()
        names = [event.name for event in prof.events() if "qcut_" in event.name]
        found.append(sum("qcut_norm" in name for name in names))
    assert found == [5, 2]
