"""Mixtures of experts as whole models: quantized, saved, loaded, and bounded with the float model's routes."""

from __future__ import annotations

import pytest
import torch

import qcut
from qcut.conversion.inventory import QUANTIZED
from qcut.layers.experts.opening import opened
from qcut.models.modules import ExpertsModule, has_stacked_weights
from tests.support.architectures import check, forced_routes, inputs_of, recorded_routes, run, tiny_model

pytest.importorskip("transformers")

FAMILIES = (
    *("DbrxForCausalLM", "Llama4ForCausalLM", "JetMoeForCausalLM", "LongcatFlashForCausalLM", "InklingForCausalLM"),
    *("Gemma4ForCausalLM", "NemotronHForCausalLM", "MuseSparkTextModel", "AfmoeForCausalLM", "Qwen2MoeForCausalLM"),
    *("SwitchTransformersForConditionalGeneration", "NllbMoeForConditionalGeneration", "PhimoeForCausalLM"),
)


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name: str) -> None:
    model = tiny_model(name)
    batch = inputs_of(model)
    assert batch is not None
    outcome = check(model, batch, "w8a8")
    assert outcome.error > 0
    assert "experts" not in outcome.percent
    assert outcome.percent[QUANTIZED] + outcome.percent["embeddings"] + outcome.percent.get("convolutions", 0) > 97


NAMES = {
    "DbrxForCausalLM": ("transformer.blocks.0.ffn.experts", ("up", "down")),
    "Llama4ForCausalLM": ("model.layers.0.feed_forward.experts", ("up", "down")),
    "JetMoeForCausalLM": ("model.layers.0.self_attention.experts.output_linear", ("up",)),
    "LongcatFlashForCausalLM": ("model.layers.0.mlp.experts", ("up", "down")),
    "InklingForCausalLM": ("model.layers.1.mlp.shared_experts", ("up", "down")),
    "GptOssForCausalLM": ("model.layers.0.mlp.experts", ("up", "down")),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_tensors(name: str) -> None:
    """Files are read by them."""
    model, (experts, parts) = tiny_model(name), NAMES[name]
    qcut.quantize(model, "w8a8", verify=False, progress=False)
    found = {key.removeprefix(f"{experts}.") for key in model.state_dict() if key.startswith(f"{experts}.")}
    bias = ("bias",) if name == "GptOssForCausalLM" else ()
    assert found == {f"{part}.{key}" for part in parts for key in ("qweight", "weight_scale", *bias)}


@pytest.mark.parametrize("name", ["Llama4ForCausalLM", "GptOssForCausalLM", "DbrxForCausalLM"])
def test_experts_in_half_precision(name: str) -> None:
    model = tiny_model(name).to(torch.bfloat16)
    batch = inputs_of(model)
    assert batch is not None
    with recorded_routes(model) as record, torch.no_grad():
        want = run(model, batch)
    report = qcut.quantize(model, "w8a16", verify=False, progress=False)
    assert "experts" not in report.percent
    with forced_routes(model, record), torch.no_grad():
        got = run(model, batch)
    assert ((got - want).norm() / want.norm()).item() < 0.08


def test_mixture_on_meta_is_opened() -> None:
    from transformers import Llama4ForCausalLM

    from tests.support.architectures import tiny_config

    with torch.device("meta"):
        model = Llama4ForCausalLM(tiny_config(Llama4ForCausalLM.config_class))
    with opened(model) as mixtures:
        assert mixtures.left == {}
        assert len(mixtures.experts) == sum(isinstance(m, ExpertsModule) for m in model.modules()) > 0
    assert sum(map(has_stacked_weights, model.modules())) == len(mixtures.experts)


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "DbrxForCausalLM"])
def test_experts_are_included_and_skipped_by_name(name: str) -> None:
    model = tiny_model(name)
    report = qcut.quantize(model, "w8a8", include=["*.experts.up.*"], verify=False, progress=False)
    assert report.layers
    assert all(layer.name.endswith(".experts.up") for layer in report.layers)
    again = qcut.quantize(model, "codebook4", include=["*.experts.down.*"], verify=False, progress=False)
    assert [layer.name for layer in again.layers] == [r.name.replace(".up", ".down") for r in report.layers]
    left = qcut.quantize(tiny_model(name), "w8a8", skip=["*.experts.*"], verify=False, progress=False)
    assert all("experts" not in layer.name for layer in left.layers)
    assert {reason for layer, reason in left.skipped.items() if ".experts." in layer} == {"matched by skip"}
