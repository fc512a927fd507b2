"""Plans that may choose int16 tokens: they take them where int8 tokens lose too much."""

from __future__ import annotations

import copy

import pytest
import torch

from qcut.conversion.planning.costs import LayerSize, TimeCost
from qcut.conversion.planning.plan import Plan
from qcut.conversion.planning.planner import plan
from qcut.conversion.quantize import quantize
from tests.support.zoo import inject_outliers, tiny_lm, token_batches


def test_plan_moves_outlier_layer_to_int16() -> None:
    model, batches = tiny_lm(), token_batches()
    inject_outliers(model.blocks[0].ln2, [model.blocks[0].up])
    candidates = ("w8a8_static", "int16x8_static", "int16x8")
    start = plan(model, batches, budget=1.0, candidates=candidates, progress=False)
    found = plan(model, batches, budget=start.measured / 3, candidates=candidates, progress=False)
    assert found.schemes["blocks.0.up"] in candidates[1:]
    assert found.measured <= found.budget < start.measured
    assert found.off_int8 == []
    copied = copy.deepcopy(model)
    report = quantize(copied, Plan.from_json(found.to_json()), progress=False)
    assert report.schemes == found.schemes
    with torch.no_grad():
        assert copied(batches[0]).isfinite().all()


def test_int16_costs_two_int8_products() -> None:
    layer = LayerSize("x", 14336, 4096, False, 2 * 14336 * 4096)
    prompt, decode = TimeCost(tokens=4096), TimeCost(tokens=1)
    assert prompt(layer, "w8a8") < 0.6 * prompt(layer, "int16x8") < 0.6 * prompt(layer, "fp16")
    assert prompt(layer, "int16x8_static") < prompt(layer, "int16x8")
    assert decode(layer, "int16x8") == pytest.approx(decode(layer, "w8a8"), rel=0.02)
