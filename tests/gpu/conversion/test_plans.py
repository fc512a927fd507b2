"""Plans within bits on the GPU: measured by the kernels that then serve the model, by one product for each set."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import qcut
from qcut.conversion.planning.sensitivity import Judge
from qcut.engine.engine import Engine
from qcut.numerics.int8 import sqnr_db
from tests.gpu.support.decoders import llama
from tests.support.decoders import VOCABULARY, prompts_of

CANDIDATES = ("codebook2", "codebook4", "w8a16")


@pytest.mark.parametrize("measure", ["model", "gradient"])
def test_the_engine_serves_what_was_planned(measure: Any) -> None:
    model = llama()
    prompts = prompts_of(VOCABULARY, 20, 20)
    batches = [torch.tensor(prompts)]
    plan = qcut.plan(model, batches, bits=6, candidates=CANDIDATES, measure=measure, progress=False)
    assert plan.limit is not None
    assert plan.cost <= plan.limit
    assert len(set(plan.schemes.values())) > 1
    assert plan.parted == []
    assert plan.measured < next(point.loss for point in plan.uniform if point.scheme == "codebook4")
    quantized = copy.deepcopy(model)
    qcut.quantize(quantized, plan, prebuild=(), progress=False)
    layers = {name: module for name, module in quantized.named_modules() if isinstance(module, qcut.Linear)}
    assert Judge(model, batches, False).losses([layers], "x")[0] == pytest.approx(plan.measured, rel=0.02)
    with torch.no_grad():
        want = quantized(batches[0].to("cuda")).logits[:, -1]
    engine = Engine(quantized, batch=2)
    blocks = engine.decoder.blocks
    assert {(len(b.attention.projections), len(b.mlp.projections)) for b in blocks} == {(1, 1)}
    assert sqnr_db(want, engine.prefill(prompts)) > 30
