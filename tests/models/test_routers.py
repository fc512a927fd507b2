"""Layers that stay in float unless they are named: routers, gates of shared experts, layers of one output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import qcut
from qcut.layers.experts.opening import opened
from qcut.models.selection import float_by_default, linear_layers
from tests.conversion.test_architectures import DECODERS, OTHERS
from tests.support.architectures import tiny_config, tiny_model

transformers = pytest.importorskip("transformers")

ROUTER, SHARED = "a router, with an output for each of 4 experts", "it has one output"
STAY: dict[str, dict[str, str]] = {
    "HunYuanMoEV1ForCausalLM": {"mlp.gate.wg": ROUTER},
    "AfmoeForCausalLM": {"mlp.router.gate": ROUTER},
    "JetMoeForCausalLM": {"mlp.router.layer": ROUTER, "self_attention.experts.router.layer": ROUTER},
    "Gemma4ForCausalLM": {"router.proj": ROUTER},
    "DbrxForCausalLM": {"ffn.router.layer": ROUTER},
    "SwitchTransformersForConditionalGeneration": {"mlp.router.classifier": ROUTER},
    "Qwen2MoeForCausalLM": {"mlp.shared_expert_gate": SHARED},
    "Qwen3NextForCausalLM": {"mlp.shared_expert_gate": SHARED},
    "MixtralForCausalLM": {},
    "GptOssForCausalLM": {},
}
"""By model, the ends of names with the reason."""
OF_MIXTURES = ("Mixtral", "Moe", "GptOss", "Deepseek", "Jamba")


CANNOT = {
    "NllbMoeForConditionalGeneration": "NllbMoeTop2Router checks its class",
    "LongcatFlashForCausalLM": "LongcatFlashTopkRouter reads its weight itself",
    "Llama4ForCausalLM": "a subclass with its own forward",
}
"""Models with routers that no quantized layer can replace."""


def stays(model: nn.Module) -> dict[str, str]:
    with opened(model):
        return float_by_default(model, linear_layers(model)[0])


@pytest.mark.parametrize("name", STAY)
def test_routers_stay_in_float(name: str) -> None:
    model = tiny_model(name)
    found, expected = stays(model), STAY[name]
    assert {next(end for end in expected if layer.endswith(f".{end}")) for layer in found} == set(expected)
    assert all(found[layer] == expected[end] for layer in found for end in expected if layer.endswith(f".{end}"))
    report = qcut.quantize(model, "w8a8", allow_growth=True, verify=False, progress=False)
    assert {layer: report.skipped[layer] for layer in found} == found
    assert all(isinstance(model.get_submodule(layer), nn.Linear) for layer in found)
    # The decision is the same once the experts are quantized.
    assert stays(model) == found


@pytest.mark.parametrize("name", [name for name, expected in STAY.items() if expected])
def test_routers_are_quantized_by_name(name: str) -> None:
    model = tiny_model(name)
    layers = list(stays(model))
    report = qcut.quantize(model, "w8a8", include=layers, allow_growth=True, verify=False, progress=False)
    assert [layer.name for layer in report.layers] == layers
    assert all(isinstance(model.get_submodule(layer), qcut.Linear) for layer in layers)


@pytest.mark.parametrize("name", CANNOT)
def test_routers_that_cannot_be_replaced_are_named(name: str) -> None:
    report = qcut.quantize(tiny_model(name), "w8a8", verify=False, progress=False)
    routers = {layer: reason for layer, reason in report.skipped.items() if ".router" in layer}
    assert routers
    assert all(reason.startswith(CANNOT[name]) for reason in routers.values())


@pytest.mark.parametrize("name", [n for n in (*DECODERS, *OTHERS) if not any(part in n for part in OF_MIXTURES)])
def test_dense_models_lose_no_layer(name: str) -> None:
    cls: Any = getattr(transformers, name)
    with torch.device("meta"):
        model = cls(tiny_config(cls.config_class))
        assert stays(model) == {}


def test_parameters_of_attention_are_no_experts() -> None:
    """Their first size is by chance that of layers next to them."""
    for name in ("XLNetLMHeadModel", "FunnelForMaskedLM", "MambaForCausalLM", "RecurrentGemmaForCausalLM"):
        assert stays(tiny_model(name)) == {}


class Mixture(nn.Module):
    def __init__(self, experts: int, outputs: int) -> None:
        super().__init__()
        self.gate = nn.Linear(32, outputs)
        self.experts = nn.ModuleList(nn.Linear(32, experts) for _ in range(experts))


def test_only_layers_beside_as_many_experts_are_routers() -> None:
    assert stays(Mixture(8, 8)) == {"gate": "a router, with an output for each of 8 experts"}
    assert stays(Mixture(8, 9)) == {}
    assert stays(Mixture(1, 1)) == {"gate": SHARED, "experts.0": SHARED}
    away = nn.ModuleDict({"block": Mixture(8, 9), "head": nn.Linear(32, 8)})
    assert stays(away) == {}
