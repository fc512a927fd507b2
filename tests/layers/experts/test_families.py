"""Every class of experts of the installed transformers: opened, quantized, saved and loaded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.conversion.inventory import QUANTIZED
from qcut.layers.experts.experts import Experts
from qcut.layers.experts.families import up_parameters
from qcut.layers.experts.forms import BatchedExperts, DenseExperts, ParallelExperts, SharedExperts
from qcut.layers.experts.linear_stack import LinearStack
from qcut.layers.experts.opening import opened
from qcut.layers.experts.weights import open_experts
from tests.layers.experts.classes import EXPERTS, HIDDEN, Holder, mixture_classes, routes, tiny_experts
from tests.support.architectures import BOUNDS

pytest.importorskip("transformers")

CLASSES = mixture_classes()
OF_MODULES = ("NllbMoeExperts", "SwitchTransformersExperts")
"""Containers of modules; their linear layers are quantized one by one."""
FORMS = {
    "Llama4TextExperts": DenseExperts,
    "DbrxExperts": BatchedExperts,
    "InklingSharedExperts": SharedExperts,
    "JetMoeParallelExperts": ParallelExperts,
}
GATES = {
    "GptOssExperts": {"alpha": 1.702, "limit": 7.0, "plus_one": True},
    "MiniMaxM3VLExperts": {"alpha": 1.702, "limit": 7.0, "plus_one": True},
    "OpenAIPrivacyFilterExperts": {"alpha": 1.702, "limit": 7.0, "plus_one": True},
    "DeepseekV4Experts": {"limit": 10.0},
    "HYV4Experts": {"limit": 10.0},
    "Glm5NextTextExperts": {"limit": 10.0},
    "Inkling2Experts": {"gate_cap": 4.0, "up_cap": 25.0},
    "Gemma4TextExperts": {"kind": "gelu_tanh"},
    "DiffusionGemmaTextExperts": {"kind": "gelu_tanh"},
    "NemotronHExperts": {"kind": "relu2", "gated": False},
    "JetMoeParallelExperts": {"kind": "none", "gated": False},
}
"""Gates that are not plain, by class."""


def arguments(module: nn.Module, tokens: int, seed: int = 0) -> tuple[Any, ...]:
    """What a module of experts takes, in its own way, for random tokens and routes."""
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))
    index, weights = routes(tokens, seed=seed)
    if type(module).__name__ == "SwitchTransformersExperts":
        return x, torch.nn.functional.one_hot(index, EXPERTS), weights
    if type(module).__name__ in OF_MODULES:
        return x, index, weights
    experts = open_experts(module)
    assert isinstance(experts, Experts), experts
    return experts.arguments(x, index, weights)


def called(module: nn.Module, args: tuple[Any, ...]) -> Tensor:
    with torch.no_grad():
        y: Tensor = module(*(a.clone() if isinstance(a, Tensor) else a for a in args))
    return y


def test_every_class_is_found() -> None:
    names = {name.partition(":")[2] for name in CLASSES}
    assert len(CLASSES) >= 70
    assert {*OF_MODULES, *FORMS, *GATES, "MixtralExperts", "LongcatFlashExperts", "Step3p7Experts"} <= names


@pytest.mark.parametrize("name", CLASSES)
def test_class_is_quantized_saved_and_loaded(name: str, tmp_path: Path) -> None:
    module = tiny_experts(name)
    args, kind = arguments(module, 17), name.partition(":")[2]
    want = called(module, args)
    model = Holder(copy.deepcopy(module))
    if kind not in OF_MODULES:
        with opened(model) as mixtures:
            experts = mixtures.experts["experts"]
            assert (type(experts), mixtures.left) == (FORMS.get(kind, Experts), {})
            assert vars(experts.gating) == vars(experts.gating) | {"kind": "silu"} | GATES.get(kind, {})
            torch.testing.assert_close(called(model, args), want, rtol=1e-5, atol=1e-5)
        assert type(model.experts) is type(module)
    report = qcut.quantize(model, "w8a8", verify=False, progress=False)
    assert report.skipped == {}
    assert report.percent[QUANTIZED] >= 95
    got = called(model, args)
    assert ((got - want).norm() / want.norm()).item() <= BOUNDS["w8a8"]
    qcut.save(model, tmp_path / "saved")
    back = qcut.load(tmp_path / "saved", model=lambda: Holder(tiny_experts(name, seed=1)), progress=False)
    assert torch.equal(called(back, args), got)
    assert back.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("name", [name for name in CLASSES if name.partition(":")[2] not in OF_MODULES])
def test_columns_of_the_first_product(name: str) -> None:
    """Doubled columns are as good as a doubled token."""
    module = tiny_experts(name)
    args = arguments(module, 9)
    want = called(module, (args[0] * 2, *args[1:]))
    with torch.no_grad():
        for parameter, axis in up_parameters(module):
            shape = [-1 if i == axis else 1 for i in range(parameter.ndim)]
            parameter.mul_(torch.full((HIDDEN,), 2.0).view(shape))
    assert torch.equal(called(module, args), want)


@pytest.mark.parametrize(
    "kind", [*FORMS, "GptOssExperts", "LongcatFlashExperts", "MuseSparkExperts", "NemotronHExperts"]
)
@pytest.mark.parametrize("scheme", ["w8a16", "codebook4"])
def test_forms_under_other_schemes(kind: str, scheme: str) -> None:
    module = tiny_experts(next(name for name in CLASSES if name.endswith(f":{kind}")))
    args = arguments(module, 33)
    model = Holder(copy.deepcopy(module))
    report = qcut.quantize(model, scheme, allow_growth=True, progress=False, verify=False)
    assert {layer.experts for layer in report.layers} == {EXPERTS}
    assert all(isinstance(model.get_submodule(layer.name), LinearStack) for layer in report.layers)
    want = called(module, args)
    assert 0 < ((called(model, args) - want).norm() / want.norm()).item() <= BOUNDS[scheme]
