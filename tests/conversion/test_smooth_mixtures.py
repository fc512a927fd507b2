"""Smoothing of norms before experts: exact, routes unchanged, and refused where a reader cannot be shown."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.conversion.calibration.calibrate import Calibration, calibrate
from qcut.conversion.smooth import smooth
from tests.support.mixtures import EXPERTS, KINDS, mixture_batches, tiny_mixture

NORM = "model.layers.0.post_attention_layernorm"
EXPERTS_NAME = "model.layers.0.mlp.experts"


def with_outliers(kind: str = "Qwen3Moe") -> Any:
    """A mixture with norms before experts that make some channels 32 times larger; the weights make up for it."""
    model = tiny_mixture(kind)
    with torch.no_grad():
        for block in model.model.layers:
            block.post_attention_layernorm.weight[:4] *= 32
            up, router = block.mlp.experts.gate_up_proj, getattr(block.mlp, "gate", None) or block.mlp.router
            router.weight[:, :4] /= 32
            columns = up[:, :4] if kind == "GptOss" else up[:, :, :4]
            columns /= 32
    return model


def routes_of(model: nn.Module, batch: Tensor) -> list[Tensor]:
    """The experts that are chosen, by layer."""
    found: list[Tensor] = []
    experts = [module for name, module in model.named_modules() if name.endswith("mlp.experts")]
    handles = [module.register_forward_pre_hook(lambda module, args: found.append(args[1])) for module in experts]
    with torch.no_grad():
        model(batch)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_smoothing_goes_through_router_and_experts(kind: str, tmp_path: Path) -> None:
    model, batch = with_outliers(kind), mixture_batches()[0]
    calibration = calibrate(model, mixture_batches(), progress=False)
    pair = next(pair for pair in calibration.pairs if pair.norm == NORM)
    assert pair.layers == tuple(f"{EXPERTS_NAME}.up.{e}" for e in range(EXPERTS))
    assert len(pair.routers) == 1
    calibration.save(tmp_path)
    assert Calibration.load(tmp_path).pairs == calibration.pairs
    modules, before = dict(model.named_modules()), copy.deepcopy(model)
    router = before.get_parameter(pair.routers[0])
    widest = calibration.range(pair.layers[0])
    done = smooth(model, calibration)
    assert dict(model.named_modules()) == modules
    migration = next(one for one in done.migrations if one.norm == NORM)
    assert bool((migration.scale[:4] > 1).all())
    assert torch.equal(model.get_parameter(pair.routers[0]), router * migration.scale)
    assert NORM in str(done)
    with torch.no_grad():
        assert torch.equal(model(batch).logits, before(batch).logits)
    assert all(torch.equal(a, b) for a, b in zip(routes_of(model, batch), routes_of(before, batch), strict=True))
    again = calibrate(model, mixture_batches(), progress=False)
    assert again.range(pair.layers[0]) == calibration.range(pair.layers[0])
    assert calibration.range(pair.layers[0]).hi < widest.hi / 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [(), ("*.experts.up",), ("*.experts",)])
def test_quantize_smooths_as_smooth_does(kind: str, skip: tuple[str, ...]) -> None:
    model, batch = with_outliers(kind), mixture_batches()[0]
    calibration = calibrate(model, mixture_batches(), progress=False)
    at_once, apart = copy.deepcopy(model), copy.deepcopy(model)
    options: Any = {"skip": ("lm_head", *skip), "progress": False}
    qcut.quantize(at_once, "w8a8", calibration=calibration, smooth=0.5, **options)
    smooth(apart, calibration, 0.5)
    qcut.quantize(apart, "w8a8", calibration=calibration, **options)
    with torch.no_grad():
        assert torch.equal(at_once(batch).logits, apart(batch).logits)


class Peeking(nn.Module):
    """A router that reads its input, or its weight, once more."""

    def __init__(self, router: Any, weight: bool) -> None:
        super().__init__()
        self.router, self.weight = router, weight

    def forward(self, x: Tensor) -> Any:
        found = self.router(x)
        read = self.router.weight if self.weight else x
        return found if read.reshape(-1).sum() > -1e9 else found[::-1]


@pytest.mark.parametrize("weight", [False, True])
def test_other_reader_of_the_norm_is_refused(weight: bool) -> None:
    model = with_outliers()
    block = model.model.layers[0].mlp
    block.gate = Peeking(block.gate, weight)
    calibration = calibrate(model, mixture_batches(), progress=False)
    assert "also read by " in calibration.refused[NORM]
    assert NORM.replace("0", "1") in {pair.norm for pair in calibration.pairs}
