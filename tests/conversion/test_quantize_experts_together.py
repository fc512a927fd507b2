"""Experts of a projection that `quantize` fits together are those it fits one by one."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.errors import QuantizationError
from qcut.layers.experts.experts import Experts
from qcut.layers.experts.linear_stack import LinearStack
from qcut.layers.experts.opening import opened, stacked
from qcut.numerics.codebook import passes
from qcut.numerics.codebook.fitting import fit as codebook_fit
from qcut.numerics.codebook.quantizer import RotatedCodebook
from qcut.numerics.gating import Gating
from tests.support.oracles import normal

E, HIDDEN, INNER, TOKENS = 5, 64, 32, 48


class Mixture(nn.Module):
    """A dense layer, and experts; each token takes two."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        up = nn.ModuleList(nn.Linear(HIDDEN, 2 * INNER) for _ in range(E))
        down = nn.ModuleList(nn.Linear(INNER, HIDDEN, bias=False) for _ in range(E))
        self.experts = Experts(up, down, Gating("silu"), name="experts")

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.arange(len(x), device=x.device, dtype=torch.int64)
        index = torch.stack((tokens % E, (tokens + 1) % E), 1)
        return self.experts(self.first(x), index, torch.full(index.shape, 0.5, device=x.device, dtype=torch.float32))


def mixture() -> Mixture:
    torch.manual_seed(0)
    model = Mixture().eval()
    with torch.no_grad():
        model.experts.up[2].weight.copy_(model.experts.up[1].weight)
        model.experts.down[3].weight.zero_()
    return model


def moments(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for i, (name, module) in enumerate(model.named_modules()):
        if isinstance(module, nn.Linear):
            x = normal(4 * module.in_features, module.in_features, seed=i) * torch.linspace(0.1, 2, module.in_features)
            found[name] = x.t() @ x
    return found


@pytest.mark.parametrize("scheme", ["codebook4_g32", "codebook3+2_g32_qr", "codebook4_pairs_g32", "codebook4_g32_int8"])
@pytest.mark.parametrize("together", [1, 2, 5])
def test_stacks_are_the_layers_fitted_alone(monkeypatch: pytest.MonkeyPatch, scheme: str, together: int):
    model = mixture()
    given = moments(model)
    alone = {
        name: qcut.Linear.from_float(module, scheme, second_moment=given[name], name=name)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    counts: list[int] = []
    monkeypatch.setattr(codebook_fit, "experts_at_once", lambda n, k, device: together)

    def counted(weights: list[Tensor], *args: Any, **options: Any) -> list[RotatedCodebook]:
        counts.append(len(weights))
        return codebook_fit.fit_experts(weights, *args, **options)

    monkeypatch.setattr(passes, "fit_experts", counted)
    report = qcut.quantize(model, scheme, second_moments=given, verify=[normal(TOKENS, HIDDEN)], progress=False)
    for key in ("up", "down"):
        stack = getattr(model.experts, key)
        assert isinstance(stack, LinearStack)
        for e in range(E):
            for name, buffer in alone[f"experts.{key}.{e}"]._buffers.items():
                held = stack._buffers[name]
                assert (held is None) == (buffer is None)
                assert held is None or torch.equal(held[e], buffer)
    groups = [min(together, E - first) for first in range(0, E, together)]
    assert counts == [1, *groups, *groups]
    assert [layer.name for layer in report.layers] == ["first", "experts.up", "experts.down"]
    assert report.verified


@pytest.mark.parametrize("scheme", ["w8a8", "w8a16", "codebook4_g32", "codebook4_g32_none", "nvfp4"])
def test_stacks_without_moments_are_the_layers_alone(scheme: str):
    model = mixture()
    alone = [qcut.Linear.from_float(one, scheme) for one in model.experts.up]
    qcut.quantize(model, scheme, verify=False, progress=False)
    for e, one in enumerate(alone):
        for name, buffer in one._buffers.items():
            assert buffer is None or torch.equal(model.experts.up._buffers[name][e], buffer)


def test_expert_that_cannot_be_fitted_is_named():
    model = mixture()
    given = moments(model)
    with torch.no_grad():
        model.experts.down[4].weight[3, 3] = torch.nan
    before = model.experts
    with pytest.raises(QuantizationError, match=r"'experts\.down\.4'.*NaN"):
        qcut.quantize(model, "codebook4_g32", second_moments=given, verify=False, progress=False)
    zero = given | {"experts.up.1": torch.zeros(HIDDEN, HIDDEN)}
    with pytest.raises(QuantizationError, match=r"'experts\.up\.1'.*second moment is zero"):
        qcut.quantize(model, "codebook4_g32", second_moments=zero, verify=False, progress=False)
    assert model.experts is before


def test_no_quantized_expert_takes_memory_twice():
    model = mixture()
    with opened(model) as mixtures:
        names = [f"experts.{key}.{e}" for key in ("up", "down") for e in range(E)]
        layers = {name: qcut.Linear.from_float(model.get_submodule(name), name=name) for name in names}
        single = [weakref.ref(layer) for layer in layers.values()]
        made = stacked(mixtures, layers)["experts"]
        gc.collect()
        assert not any(layer() for layer in single)
    assert isinstance(made.up, LinearStack)
    for e in range(E):
        layer = layers[f"experts.up.{e}"]
        assert torch.equal(layer.qweight, made.up.qweight[e])
        assert layer.qweight.data_ptr() == made.up.qweight[e].data_ptr()
