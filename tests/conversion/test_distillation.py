"""Distillation: it comes nearer to the float model, changes what it says, and leaves the rest as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.conversion.distillation import distill
from qcut.errors import CalibrationError, ConfigError, ShapeError
from tests.support.zoo import tiny_hf


def pair(scheme: str = "codebook2", kind: str = "llama") -> tuple[nn.Module, nn.Module]:
    """A float model and its quantized copy."""
    reference = tiny_hf(kind).requires_grad_(False)
    for p in reference.parameters():
        if p.dim() > 1:
            p *= 4.0  # layers that matter
    model = copy.deepcopy(reference)
    qcut.quantize(model, scheme, allow_growth=True, progress=False)
    return model, reference


def texts(count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 64, (8, 24), generator=generator) for _ in range(count)]


@torch.no_grad()
def divergence(model: nn.Module, reference: nn.Module) -> float:
    ids = texts(1, seed=9)[0]
    found, wanted = (m(ids).logits.log_softmax(-1) for m in (model, reference))
    return float(nn.functional.kl_div(found, wanted, reduction="batchmean", log_target=True))


@pytest.mark.parametrize(("scheme", "kind"), [("codebook2", "llama"), ("codebook3", "gpt2")])
def test_predictions_come_nearer(scheme: str, kind: str):
    model, reference = pair(scheme, kind)
    before, weights = divergence(model, reference), copy.deepcopy(reference.state_dict())
    norms_only = copy.deepcopy(model)
    report = distill(model, reference, texts(40), rate=1e-2, progress=False)
    assert len(report.losses) == 40
    assert 0 < report.changed < 0.5
    assert f"{report.changed:.1%} of codes" in str(report)
    after = divergence(model, reference)
    assert after < 0.7 * before
    assert distill(norms_only, reference, texts(40), rate=1e-2, codes=False, progress=False).changed == 0
    assert after < divergence(norms_only, reference) < 0.99 * before
    assert all(torch.equal(value, weights[name]) for name, value in reference.state_dict().items())
    layers = [m for m in model.modules() if isinstance(m, qcut.Linear)]
    assert not any("forward" in layer.__dict__ for layer in layers)
    assert all(layer.scheme.name.startswith(scheme) for layer in layers)


def test_only_the_second_pass_and_the_named_layers_change():
    model, reference = pair("codebook2+2")
    before = {name: m.passes for name, m in model.named_modules() if isinstance(m, qcut.Linear)}
    distill(model, reference, texts(4), layers=["*.down_proj"], rate=1e-2, progress=False)
    for name, (first, second) in before.items():
        now = model.get_submodule(name).passes
        assert torch.equal(now[0].indices, first.indices)
        assert torch.equal(now[0].norms, first.norms)
        assert torch.equal(now[1].norms, second.norms) != name.endswith("down_proj")


def test_what_is_refused():
    model, reference = pair()
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(CalibrationError, match="found none"):
        distill(model, reference, [], progress=False)
    with pytest.raises(ConfigError, match="rate: found 0"):
        distill(model, reference, texts(1), rate=0, progress=False)
    with pytest.raises(ConfigError, match=r"no untied layer with rotated codebooks among \*\.nothing"):
        distill(model, reference, texts(1), layers=["*.nothing"], progress=False)
    with pytest.raises(ConfigError, match="no untied layer"):
        distill(reference, reference, texts(1), progress=False)
    with pytest.raises(ShapeError, match="the reference's"):
        distill(model, reference.model, texts(1), progress=False)
    broken = copy.deepcopy(reference)
    broken.model.norm.weight.fill_(torch.nan)
    with pytest.raises(CalibrationError, match="batch 0: the loss is nan"):
        distill(model, broken, texts(1), progress=False)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any("forward" in m.__dict__ for m in model.modules())
