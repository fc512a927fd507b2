"""Plans within bits a weight, and within the time of a step."""

from __future__ import annotations

import copy
import csv
import math
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qcut
from qcut.checkpoints.contents import contents
from qcut.conversion.planning.budget import WITHIN_COST, Budget
from qcut.conversion.planning.costs import LayerSize, StepCost, stored_cost
from qcut.conversion.planning.measure import SearchSpace
from qcut.conversion.planning.plan import Plan
from qcut.conversion.planning.planner import plan, plan_within
from qcut.engine.engine import Engine
from qcut.errors import CalibrationError, ConfigError, PlanError, UnsupportedError
from qcut.layers.linear import Linear
from qcut.numerics.codebook.passes import quantize_weight
from qcut.numerics.codebook.quantizer import RotatedCodebook, dequantize
from qcut.schemes import parse_scheme
from tests.support import ROOT
from tests.support.decoders import VOCABULARY, prompts_of, theirs
from tests.support.zoo import same, snapshot

SCHEMES = ("codebook2", "codebook3", "codebook4", "w8a16")


def chain() -> nn.Module:
    """Four layers of very different sensitivity."""
    torch.manual_seed(0)
    layers = [nn.Linear(128, 128) for _ in range(4)]
    with torch.no_grad():
        for layer, gain in zip(layers, (4.0, 0.02, 1.0, 0.3), strict=True):
            layer.weight.mul_(gain)
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh()))).eval()


def inputs() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(64, 128)]


@cache
def space(measure: Any = "model") -> SearchSpace:
    """The chain's layers under four schemes, measured once for all tests."""
    found = SearchSpace(
        chain(),
        inputs(),
        [parse_scheme(name) for name in SCHEMES],
        calibration=None,
        second_moments=None,
        measure=measure,
        together=True,
        sensitivity_batches=None,
        include=None,
        skip=(),
        progress=False,
    )
    found.check(Budget.of(None, 9.0, None, None, None))
    found.quantize()
    found.measure()
    return found


def test_passes_that_are_made_already_are_taken() -> None:
    model = chain()
    made = {("codebook2", "2"): quantize_weight(model.get_submodule("2").weight, parse_scheme("codebook2"))}
    made["codebook2", "2"] = [replace(q, norms=q.norms * 2) for q in made["codebook2", "2"]]  # unlike what is made here
    options = {"calibration": None, "second_moments": None, "measure": "model", "together": True, "include": None}
    options |= {"sensitivity_batches": None, "skip": (), "progress": False}
    found = SearchSpace(model, inputs(), [parse_scheme("codebook2")], passes=made, **options)
    found.quantize()
    layers = {group.names[0]: group.layers["codebook2"][group.names[0]] for group in found.groups}
    assert layers["2"].scheme.name == "codebook2"
    assert torch.equal(layers["2"].dequantized_weight(), dequantize(made["codebook2", "2"]))
    assert torch.equal(layers["2"].bias, model.get_submodule("2").bias)
    rounded = quantize_weight(model.get_submodule("4").weight, parse_scheme("codebook2"))
    assert torch.equal(layers["4"].dequantized_weight(), dequantize(rounded))
    wrong = SearchSpace(model, inputs(), [parse_scheme("codebook2")], passes={("codebook2", "4"): wider()}, **options)
    with pytest.raises(ConfigError, match="layer '4': passes are of codebook3; codebook2 is needed"):
        wrong.quantize()


class Counted(nn.Sequential):
    """A chain that counts its calls, and takes long over the first of them; what it counts is none of its state."""

    calls, slow = 0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counted.calls += 1
        if Counted.calls <= self.slow:
            time.sleep(0.4)
        return super().forward(x)


@pytest.mark.parametrize("count", [1, 3])
def test_passes_are_known_before_they_run(count: int) -> None:
    model = Counted(*chain())
    options = {"calibration": None, "second_moments": None, "measure": "model", "together": True, "include": None}
    options |= {"sensitivity_batches": count, "skip": (), "progress": False}
    found = SearchSpace(model, inputs() * 3, [parse_scheme(name) for name in ("codebook2", "w8a16")], **options)
    bits = Budget.of(None, 5.0, None, None, None)
    found.check(bits)
    once, again = (found.forecast(budget)[0] for budget in (Budget.of(0.1, None, None, None, None), bits))
    before = model.calls
    found.quantize()
    found.measure()
    assert model.calls - before == once
    before = model.calls
    plan_within(found, bits)
    # The rest are whole plans, each on all batches: the float model, two uniform ones, and one or two found.
    assert (model.calls - before - (again - once)) / 3 in (4, 5)


def test_long_plan_says_how_long(capsys: pytest.CaptureFixture[str]) -> None:
    model = Counted(*chain())
    options: dict[str, Any] = {"candidates": SCHEMES, "together": False}
    plan(model, inputs(), bits=6.0, **options)
    assert "passes of the model" not in capsys.readouterr().err
    Counted.calls, model.slow = 0, 4  # those before the search
    plan(model, inputs(), bits=6.0, **options)
    line = re.search(r"plan: (\d+) passes of the model measure its layers, about (\d+) s", capsys.readouterr().err)
    assert line is not None
    assert 0.4 * int(line[1]) - 1 <= int(line[2]) <= 0.8 * int(line[1])


def wider() -> list[RotatedCodebook]:
    """Passes of a scheme that the plan has not."""
    return quantize_weight(chain().get_submodule("4").weight, parse_scheme("codebook3"))


def within(bits: float, measure: Any = "model") -> Plan:
    return plan_within(space(measure), Budget.of(None, bits, None, None, None))


def test_bits_are_kept_and_losses_fall() -> None:
    plans = [within(bits) for bits in (2.125, 2.4, 3.125, 3.5, 4.125, 6.0, 9.0)]
    for made in plans:
        assert made.limit is not None
        assert made.cost <= made.limit <= made.bits_of(made.limit) * made.weights / 8
        assert made.budget is None
        assert made.objective == "stored"
        assert made.predicted is not None
    predicted = [made.predicted - made.gap for made in plans if made.predicted is not None and made.gap is not None]
    assert predicted == sorted(predicted, reverse=True)
    assert set(plans[0].schemes.values()) == {"codebook2"}
    assert plans[-1].measured <= min(point.loss for point in plans[-1].uniform)


def test_plan_is_no_worse_than_uniform_scheme() -> None:
    for scheme in SCHEMES:
        bits = within(9.0).bits_of(next(p.cost for p in within(9.0).uniform if p.scheme == scheme))
        made = within(bits)
        (same_size,) = (p for p in made.uniform if p.scheme == scheme)
        assert made.cost <= same_size.cost
        assert made.measured <= same_size.loss
    mixed = within(3.125)
    assert len(set(mixed.schemes.values())) > 1
    assert mixed.measured < next(p.loss for p in mixed.uniform if p.scheme == "codebook3")


def test_predicted_loss_is_least_of_all_choices() -> None:
    made = within(3.4)
    assert made.limit is not None
    names, best = list(made.layers), math.inf
    choices: list[tuple[float, float]] = [(0.0, 0.0)]
    for name in names:
        layer = made.layers[name]
        choices = [(c + layer.cost[s], x + layer.sensitivity[s]) for c, x in choices for s in SCHEMES]
    best = min(x for c, x in choices if c <= made.limit)
    assert made.predicted is not None
    assert made.gap is not None
    assert made.predicted - made.gap == pytest.approx(best, rel=1e-9)


def test_curve_falls_from_cheapest_to_most_exact() -> None:
    made = within(3.5)
    costs, losses = [p.cost for p in made.curve], [p.loss for p in made.curve]
    assert costs == sorted(set(costs))
    assert losses == sorted(set(losses), reverse=True)
    assert costs[0] == sum(layer.cost["codebook2"] for layer in made.layers.values())


@pytest.mark.parametrize("measure", ["gradient", "layer"])
def test_cheaper_measures_keep_the_limit_too(measure: str) -> None:
    made = within(3.125, measure)
    assert made.limit is not None
    assert made.cost <= made.limit
    assert (made.predicted is None) == (measure == "layer")
    assert made.measured <= next(p.loss for p in made.uniform if p.scheme == "codebook3")


def test_quantizing_gives_what_was_planned_and_measured(tmp_path: Path) -> None:
    model = chain()
    before = snapshot(model)
    made = plan(model, inputs(), bits=3.3, candidates=SCHEMES, skip=(), progress=False)
    assert same(before, snapshot(model))
    made.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert read == made
    want = model(inputs()[0])
    quantized = copy.deepcopy(model)
    report = qcut.quantize(quantized, read, progress=False)
    assert report.schemes == made.schemes
    with torch.no_grad():
        error = (quantized(inputs()[0]) - want).square().sum() / want.square().sum()
    assert float(error) == pytest.approx(made.measured, rel=1e-3)
    # The bits are those of the file, except biases and codebooks, which all rows share.
    qcut.save(quantized, tmp_path / "model", progress=False)
    stored = {layer.name: layer.nbytes for layer in contents(tmp_path / "model").layers}
    shared = {"codebook2": 16, "codebook3": 32, "codebook4": 64, "w8a16": 0}
    for name, layer in made.layers.items():
        assert stored[name] - shared[layer.scheme] - 4 * layer.out_features == layer.cost[layer.scheme]


def test_fitted_plans_need_every_second_moment() -> None:
    model, batches = chain(), inputs()
    moments = qcut.collect_second_moments(model, batches, skip=(), progress=False)
    options: dict[str, Any] = {"bits": 2.6, "candidates": ("codebook2", "codebook3"), "skip": (), "progress": False}
    plain, fitted = plan(model, batches, **options), plan(model, batches, second_moments=moments, **options)
    assert not plain.fitted
    assert fitted.fitted
    assert fitted.measured < plain.measured
    fewer = {name: moment for name, moment in moments.items() if name != "2"}
    with pytest.raises(CalibrationError, match="layer '2': no second moment"):
        plan(model, batches, second_moments=fewer, **options)


@pytest.mark.parametrize(
    ("limits", "error", "message"),
    [
        ({"bits": 2.0}, PlanError, r"found 2.125 bits a weight.*allow 2.125 or more"),
        ({"step_us": 2.0}, PlanError, r"found an estimate of 5\.\d+ us.*allow 5\.\d+ or more"),
        ({"bits": 3.0, "budget": 0.1}, ConfigError, "budget and bits: one of them"),
        ({"bits": 3.0, "step_us": 9.0}, ConfigError, "bits and step_us: one of them"),
        ({"bits": math.nan}, ConfigError, "bits: found nan; a finite number above 0"),
        ({"bits": 0.0}, ConfigError, "bits: found 0"),
        ({"step_us": math.inf}, ConfigError, "step_us: found inf"),
        ({"bits": 3.0, "objective": "time"}, ConfigError, "found 'time' with bits"),
        ({"bits": 3.0, "cost": StepCost()}, ConfigError, "cost: found a cost model with bits"),
        ({"step_us": 9.0, "cost": StepCost("abacus")}, UnsupportedError, "abacus"),
    ],
)
def test_impossible_limits(limits: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan(chain(), inputs(), skip=(), progress=False, **limits)


def test_a_step_of_fewer_microseconds() -> None:
    """Costs that rise with the bits, as those of large layers do."""
    bytes_of: Callable[[LayerSize, str], float] = lambda layer, scheme: stored_cost(layer, scheme) / 1e3  # noqa: E731
    made = plan(chain(), inputs(), step_us=30.0, candidates=SCHEMES, cost=bytes_of, skip=(), progress=False)
    assert made.objective == "step"
    assert made.cost <= 30.0
    assert "us a step (estimated)" in str(made)


def test_costs_of_files_and_steps() -> None:
    for k, bits in ((4096, {"codebook4": 4.125, "codebook2": 2.125, "codebook4+4": 8.25, "codebook3_g32": 3.5}),):
        size = LayerSize("x", 512, k, True, 2 * (512 * k + 512))
        for scheme, want in bits.items():
            assert 8 * stored_cost(size, scheme) / (512 * k) == want
        assert stored_cost(size, "w8a16") == 512 * k + 4 * 512
        assert stored_cost(size, "fp16") == 2 * 512 * k
    large = LayerSize("x", 14336, 4096, False, 2 * 14336 * 4096)
    step = StepCost()
    assert step(large, "codebook4") < step(large, "w8a16") < step(large, "fp16")
    # Siblings share one start.
    apart, joined = (step(replace(large, out_features=1024, rows=rows), "codebook4") for rows in (0, 3072))
    assert joined < apart
    assert StepCost("NVIDIA L40S")(large, "codebook4") > 3 * step(large, "codebook4")


def test_steps_are_those_of_the_measured_rows() -> None:
    """Whole layers of one token on an H200."""
    with (ROOT / "benchmarks" / "results" / "report_layers.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["m"] == "1" and row["variant"] in (*WITHIN_COST, "float")]
    assert len(rows) == 30
    for row in rows:
        n, k, scheme = int(row["n"]), int(row["k"]), row["variant"].replace("float", "fp16")
        estimate = StepCost()(LayerSize("x", n, k, True, 2 * n * k), scheme)
        assert estimate == pytest.approx(float(row["median_us"]), rel=0.15), row


@cache
def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=1, max_position_embeddings=64, **sizes)
    return LlamaForCausalLM(config).eval()


def test_fused_projections_get_one_scheme() -> None:
    batches = [torch.tensor(prompts_of(VOCABULARY, 12))]
    made = plan(llama(), batches, bits=3.3, candidates=SCHEMES, measure="gradient", progress=False)
    assert [[name.rpartition(".")[2] for name in names] for names in made.siblings] == [
        ["q_proj", "k_proj", "v_proj"],
        ["gate_proj", "up_proj"],
    ]
    assert made.parted == []
    model = copy.deepcopy(llama())
    qcut.quantize(model, made, progress=False)
    engine = Engine(model, batch=1, context=32)
    assert [(len(b.attention.projections), len(b.mlp.projections)) for b in engine.decoder.blocks] == [(1, 1)]
    prompt = prompts_of(VOCABULARY, 5)[0]
    assert engine.generate([prompt], 4)[0].tokens == theirs(model, prompt, 4)

    edited = Plan.from_json(made.to_json())
    first = edited.siblings[0]
    edited.layers[first[0]].scheme = "w8a16" if edited.schemes[first[1]] != "w8a16" else "codebook4"
    assert edited.parted == [first]
    assert "1 sets of layers have several schemes" in str(edited)
    model = copy.deepcopy(llama())
    qcut.quantize(model, edited, progress=False)
    engine = Engine(model, batch=1, context=32)
    assert [len(b.attention.projections) for b in engine.decoder.blocks] == [3]
    assert engine.generate([prompt], 4)[0].tokens == theirs(model, prompt, 4)


def test_transformers_loads_by_a_plan(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    batches = [torch.tensor(prompts_of(VOCABULARY, 12))]
    made = plan(llama(), batches, bits=4.2, measure="layer", candidates=("codebook3", "w8a16"), progress=False)
    llama().save_pretrained(tmp_path)
    config = qcut.QcutConfig.from_dict(qcut.QcutConfig(made).to_dict())
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=torch.float32)
    found = {name: m.scheme.name for name, m in model.named_modules() if isinstance(m, Linear)}
    assert found == made.schemes


def test_the_default_candidates_are_those_of_the_cost() -> None:
    assert [s.name for s in Budget.of(None, 3.5, None, None, None).schemes(None)] == list(WITHIN_COST)
    assert "fp16" in [s.name for s in Budget.of(None, None, None, None, None).schemes(None)]
