"""Plans of mixtures: a projection of experts is one layer, priced by the experts that tokens read."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import qcut
from qcut.conversion.calibration.calibrate import calibrate
from qcut.conversion.planning.costs import LayerSize, StepCost, TimeCost
from qcut.conversion.planning.measure import routes_of
from qcut.conversion.planning.plan import Plan
from qcut.conversion.planning.planner import plan
from qcut.conversion.planning.sensitivity import Judge
from qcut.errors import ConfigError, PlanError
from qcut.layers.experts.opening import opened
from qcut.numerics.codebook import passes
from qcut.numerics.codebook.fitting.fit import fit_experts
from tests.support.mixtures import EXPERTS, KINDS, mixture_batches, tiny_mixture

STACK = "model.layers.0.mlp.experts.up"
STACKS = [f"model.layers.{i}.mlp.experts.{key}" for i in range(2) for key in ("up", "down")]


def measured(model: Any, quantized: Any) -> float:
    """The loss of a quantized model, as the plan measures it."""
    judge = Judge(model, mixture_batches(), progress=False)
    with opened(model), opened(quantized):
        names = [name for name in dict(quantized.named_modules()) if _is_layer(quantized.get_submodule(name))]
        return judge.losses([{name: quantized.get_submodule(name) for name in names}], "test")[0]


def _is_layer(module: Any) -> bool:
    return isinstance(module, qcut.Linear)


@pytest.mark.parametrize("kind", KINDS)
def test_projection_of_experts_is_one_layer(kind: str, tmp_path: Path) -> None:
    model = tiny_mixture(kind)
    modules = dict(model.named_modules())
    found = plan(model, mixture_batches(), bits=5.0, candidates=["codebook4_g64", "w8a16"], progress=False)
    assert dict(model.named_modules()) == modules
    assert [name for name in found.layers if "experts" in name] == STACKS
    assert (found.layers[STACK].out_features, found.layers[STACK].in_features) == (EXPERTS * 128, 64)
    assert found.layers[STACK].cost["w8a16"] == EXPERTS * 128 * (64 + 4)
    found.layers[STACK].scheme = "w8a16"  # a user's choice
    found.layers[STACKS[1]].scheme = "fp16"
    found.save(tmp_path / "plan.json")
    back = Plan.load(tmp_path / "plan.json")
    assert back == found
    quantized = copy.deepcopy(model)
    report = qcut.quantize(quantized, back, progress=False)
    assert {name: scheme for name, scheme in found.schemes.items() if scheme != "fp16"} == report.schemes
    assert report.skipped[STACKS[1]] == "fp16 by the plan"


def test_measured_loss_is_that_of_the_model() -> None:
    model = tiny_mixture()
    found = plan(model, mixture_batches(), bits=4.6, candidates=["codebook4_g64", "w8a16"], progress=False)
    assert len(set(found.schemes.values())) == 2
    quantized = copy.deepcopy(model)
    qcut.quantize(quantized, found, progress=False)
    assert measured(model, quantized) == pytest.approx(found.measured, rel=1e-3)
    uniform = {point.scheme: point for point in found.uniform}
    assert found.measured <= uniform["codebook4_g64"].loss


@pytest.mark.parametrize("measure", ["gradient", "layer"])
def test_other_measures_take_experts(measure: Any) -> None:
    model, options = tiny_mixture(), {"candidates": ["codebook4_g64", "w8a16"], "progress": False}
    found = plan(model, mixture_batches(), bits=5.0, measure=measure, **options)
    losses = found.layers[STACK].sensitivity
    assert 0 < losses["w8a16"] < losses["codebook4_g64"] < 1


def test_experts_are_fitted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model, counts = tiny_mixture(), []
    moments = qcut.collect_second_moments(model, mixture_batches(), progress=False)

    def counted(weights: Any, *args: Any, **options: Any) -> Any:
        counts.append(len(weights))
        return fit_experts(weights, *args, **options)

    monkeypatch.setattr(passes, "fit_experts", counted)
    options: dict[str, Any] = {"candidates": ["codebook4_g64", "w8a16"], "second_moments": moments, "progress": False}
    found = plan(model, mixture_batches(), bits=5.0, **options)
    assert counts.count(EXPERTS) == len(STACKS)
    assert found.fitted


def test_plan_has_a_static_range_for_each_expert(tmp_path: Path) -> None:
    model = tiny_mixture()
    calibration = calibrate(model, mixture_batches(), progress=False)
    options: Any = {"candidates": ["w8a8_static"], "calibration": calibration, "progress": False}
    found = plan(model, mixture_batches(), budget=1.0, **options)
    entry = found.layers[STACKS[1]]
    assert entry.static_range is None
    assert len(entry.static_ranges) == EXPERTS == len(set(entry.static_ranges))
    found.save(tmp_path / "plan.json")
    quantized = copy.deepcopy(model)
    qcut.quantize(quantized, Plan.load(tmp_path / "plan.json"), progress=False)
    scales = [float(layer.input_scale) for layer in quantized.get_submodule(STACKS[1]).layers]
    spans = [one.hi - one.lo for one in entry.static_ranges]
    assert scales == pytest.approx([span / 255 for span in spans], rel=1e-4)
    entry.static_ranges.pop()
    with pytest.raises(PlanError, match=f"'{STACKS[1]}': the plan has 5 static ranges, the model 6 experts"):
        qcut.quantize(copy.deepcopy(model), found, progress=False)
    entry.static_ranges.clear()
    with pytest.raises(PlanError, match="needs a static_range"):
        found.check()


def test_plan_refuses_some_experts() -> None:
    model = tiny_mixture()
    modules = dict(model.named_modules())
    with pytest.raises(ConfigError, match=f"'{STACK}': 5 of its 6 experts.*{STACK}' names them"):
        plan(model, mixture_batches(), skip=[f"{STACK}.2"], progress=False)
    with pytest.raises(PlanError, match="bits=2"):
        plan(model, mixture_batches(), bits=2, candidates=["w8a16"], progress=False)
    assert dict(model.named_modules()) == modules
    found = plan(model, mixture_batches(), include=["*.mlp.experts"], bits=9, candidates=["w8a16"], progress=False)
    assert list(found.layers) == STACKS
    found.layers[STACK].out_features = 128
    with pytest.raises(PlanError, match="the plan has 128 x 64, the model 768 x 64"):
        qcut.quantize(model, found, progress=False)


def test_costs_count_experts_that_tokens_read() -> None:
    one = LayerSize("up.0", 512, 256, False, 0, rows=8 * 512, experts=8, routes=2)
    alone = StepCost()(LayerSize("up.0", 512, 256, False, 0), "codebook4")
    step = 8 * StepCost()(one, "codebook4")
    start = StepCost()(LayerSize("none", 1, 128, False, 0), "codebook4")
    assert step - start == pytest.approx(2 * (alone - start), rel=0.05)  # two of eight are read, and one start is paid
    few = TimeCost(tokens=1024)(LayerSize("up.0", 512, 256, False, 0), "w8a8")
    assert TimeCost(tokens=4096)(one, "w8a8") == pytest.approx(few)  # each computes a quarter of the tokens
    assert one.share_read(1) == 0.25
    assert one.share_read(64) == pytest.approx(1.0)


SIZES: dict[str, int] = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
OTHER_CALLS = {
    "Llama4": lambda: transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**SIZES, head_dim=32)),
    "JetMoe": lambda: transformers.JetMoeForCausalLM(transformers.JetMoeConfig(**SIZES, kv_channels=32)),
}


@pytest.mark.parametrize("kind", OTHER_CALLS)
def test_experts_without_routes_are_planned(kind: str) -> None:
    model = OTHER_CALLS[kind]().eval()
    with opened(model) as mixtures:
        experts = {f"{name}.up.{e}": one for name, one in mixtures.experts.items() for e in range(4)}
        assert set(routes_of(model, mixture_batches()[0], experts).values()) == {2}
        embedded = {"inputs_embeds": torch.randn(1, 5, 64)}
        assert set(routes_of(model, embedded, experts).values()) == {4}
    found = plan(model, mixture_batches(), bits=5.0, measure="gradient", progress=False)
    assert qcut.quantize(model, found, progress=False).percent_experts > 50


def test_tied_experts_stay_tied() -> None:
    model = tiny_mixture()
    first, second = (layer.mlp.experts for layer in model.model.layers)
    for name in list(first._parameters):
        second._parameters[name] = first._parameters[name]
    found = plan(model, mixture_batches(), bits=5.0, measure="gradient", progress=False)
    assert [name for name in found.layers if "experts" in name] == STACKS
    assert found.layers[STACKS[0]].scheme == found.layers[STACKS[2]].scheme
    assert found.layers[STACKS[0]].out_features == EXPERTS * 128
    qcut.quantize(model, found, progress=False)
    one, other = (layer.mlp.experts for layer in model.model.layers)
    for key in ("up", "down"):
        for mine, theirs in zip(getattr(one, key).buffers(), getattr(other, key).buffers(), strict=True):
            assert mine.data_ptr() == theirs.data_ptr()


def test_step_limit_takes_routes_from_the_model() -> None:
    model = tiny_mixture()
    found = plan(model, mixture_batches(), step_us=60, candidates=["w8a16", "codebook4_g64"], progress=False)
    size = LayerSize("up", 128, 64, False, 0, rows=EXPERTS * 128, experts=EXPERTS, routes=2)
    assert found.layers[STACK].cost["w8a16"] == pytest.approx(EXPERTS * StepCost()(size, "w8a16"))


def test_plan_is_deterministic() -> None:
    plans = [
        plan(tiny_mixture(), mixture_batches(), bits=4.6, candidates=["codebook4_g64", "w8a16"], progress=False)
        for _ in range(2)
    ]
    assert plans[0] == plans[1]
    assert torch.isfinite(torch.tensor(plans[0].measured))
