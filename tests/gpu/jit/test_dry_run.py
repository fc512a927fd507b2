"""An engine with an empty cache of kernels: what a request lacks is built together, not one after the other."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from qcut import jit
from qcut.backends.cuda.launch import plans
from qcut.emitters.core.source import KernelSource
from qcut.engine.engine import Engine
from qcut.jit import waiting
from tests.gpu.support.decoders import llama
from tests.support.decoders import VOCABULARY, prompts_of


@pytest.mark.parametrize("graphs", [False, True])
def test_the_first_request_builds_its_kernels_together(
    graphs: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, prompts = llama(), prompts_of(VOCABULARY, 40)
    want = Engine(model).generate(prompts, 3)
    monkeypatch.setenv("QCUT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(importlib.import_module("qcut.jit.build"), "_memory", {})  # qcut.jit.build is the function
    plans.forget_plans()
    together: list[int] = []
    load, build_many = plans.load, waiting.build_many

    def counted(sources: Collection[KernelSource], **options: Any) -> Any:
        together.append(len(sources))
        return build_many(sources, **options)

    def watched(source: KernelSource, device: int) -> jit.Kernel:
        assert jit.find(source) is not None, source.name
        return load(source, device)

    monkeypatch.setattr(waiting, "build_many", counted)
    monkeypatch.setattr(plans, "load", watched)
    engine = Engine(model, graphs=graphs)
    first = engine.prefill(prompts)
    assert len(together) == 1
    assert together[0] >= 5
    if graphs:  # launched steps build their own, one after the other
        assert engine.generate(prompts, 3) == want
        assert len(together) == 2
    again = engine.prefill(prompts)
    assert (first == again).all()
