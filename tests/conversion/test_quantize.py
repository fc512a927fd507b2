from __future__ import annotations

import copy
import gc
import json
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.conversion.calibration.calibrate import calibrate
from qcut.conversion.calibration.second_moments import collect_second_moments
from qcut.conversion.planning.plan import LayerPlan, Plan
from qcut.conversion.quantize import model_bytes, quantize
from qcut.conversion.smooth import smooth
from qcut.errors import CalibrationError, ConfigError, DeviceError, DtypeError, PlanError, QuantizationError
from qcut.layers.codebook import CodebookLinear
from qcut.layers.linear import Linear
from qcut.numerics.int8 import quantize_weight, sqnr_db
from tests.support.zoo import inject_outliers, same, snapshot, tiny_hf, tiny_lm, token_batches

EVERY_BYTE = (
    *("w8a8", "w8a8_static", "w8a16", "fp8", "fp8_blocks", "fp8_dynamic", "fp8_static", "int16x8", "int16x8_static"),
)
"""Schemes of weights of a byte."""


def linears(model: nn.Module) -> dict[str, Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, Linear)}


def make_plan(model: nn.Module, schemes: dict[str, str], cal=None) -> Plan:
    layers = {}
    for name, scheme in schemes.items():
        n, k = model.get_submodule(name).weight.shape
        layers[name] = LayerPlan(scheme, k, n, cal.range(name) if cal else None)
    return Plan(layers, 0.003, "perplexity", "time", 0.0, 0.0, 0.0)


@pytest.mark.parametrize("scheme", EVERY_BYTE)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "plain"])
def test_every_layer_becomes_the_one_from_float_makes(kind: str, scheme: str) -> None:
    model = tiny_lm() if kind == "plain" else tiny_hf(kind)
    batches = token_batches()
    cal = calibrate(model, batches, progress=False)
    original = copy.deepcopy(model)
    report = quantize(model, scheme, calibration=cal, progress=False)
    made = linears(model)
    assert set(made) == set(report.schemes) == set(cal.layers)
    for name, layer in made.items():
        static_range = cal.range(name) if scheme.endswith("_static") else None
        expected = Linear.from_float(original.get_submodule(name), scheme, static_range=static_range)
        assert all(torch.equal(a, b) for a, b in zip(layer.buffers(), expected.buffers(), strict=True))
        assert layer.scheme.name == scheme
    with torch.no_grad():
        got, want = model(batches[0]), original(batches[0])
    got, want = (t if isinstance(t, Tensor) else t.logits for t in (got, want))
    assert sqnr_db(want, got) > (20 if scheme.startswith("fp8_") else 25)
    head = model.lm_head
    assert type(head) is nn.Linear
    assert report.skipped == {"lm_head": "matched by skip"}


def test_report_states_sizes_and_errors() -> None:
    model = tiny_lm()
    cal = calibrate(model, token_batches(), progress=False)
    before = {id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}
    weight = model.blocks[0].up.weight.detach().clone()
    report = quantize(model, "w8a8", calibration=cal, progress=False)
    assert report.bytes_before == sum(before.values())
    assert report.bytes_after == sum({id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}.values())
    assert report.bytes_after == model_bytes(model) < report.bytes_before / 2
    up = next(r for r in report.layers if r.name == "blocks.0.up")
    assert (up.in_features, up.out_features, up.bytes_before) == (32, 64, 4 * (64 * 32 + 64))
    assert up.bytes_after == 64 * 32 + 64 * 8
    q, scale = quantize_weight(weight)
    error = ((q * scale[:, None] - weight).norm() / weight.norm()).item()
    assert up.weight_error == pytest.approx(error, rel=1e-5)
    assert up.output_sqnr_db is not None
    assert 30 < up.output_sqnr_db < 60
    text = str(report)
    assert "blocks.0.up" in text
    assert "64 x 32" in text
    assert "lm_head" in text
    assert json.loads(json.dumps(report.to_json()))["bytes_after"] == report.bytes_after
    assert quantize(tiny_lm(), "w8a8", progress=False).layers[0].output_sqnr_db is None


def test_globs_select_layers() -> None:
    model = tiny_lm()
    report = quantize(model, include=["blocks.*.up", "down"], skip=["blocks.1.*"], progress=False)
    assert set(report.schemes) == {"blocks.0.up", "blocks.0.down"}
    assert report.skipped["blocks.1.up"] == "matched by skip"
    assert report.skipped["blocks.0.q"] == "not in include"


def test_modes_are_kept_and_float_weights_are_freed() -> None:
    model = tiny_lm().train()
    model.blocks[1].eval()
    freed = weakref.ref(model.blocks[0].up.weight)
    quantize(model, progress=False)
    gc.collect()
    assert freed() is None
    assert model.training
    assert linears(model)["blocks.0.q"].training
    assert not linears(model)["blocks.1.q"].training


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.b.weight = self.a.weight
        self.shared = nn.Linear(16, 16)
        self.again = nn.ModuleList([self.shared])

    def forward(self, x: Tensor) -> Tensor:
        return self.again[0](self.shared(self.b(self.a(x))))


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8_static"])
def test_tied_weights_and_shared_modules_stay_tied(scheme: str) -> None:
    model, x = Tied(), torch.randn(8, 16)
    cal = calibrate(model, [x], progress=False)
    report = quantize(model, scheme, calibration=cal, progress=False)
    assert model.a.qweight is model.b.qweight
    assert model.a.weight_scale is model.b.weight_scale
    assert model.b.bias is None
    assert model.again[0] is model.shared
    assert isinstance(model.shared, Linear)
    assert next(r for r in report.layers if r.name == "b").tied_to == "a"
    if scheme == "w8a8_static":
        assert model.a.colsum is model.b.colsum
        assert not torch.equal(model.a.input_scale, model.b.input_scale)
    assert report.bytes_after == sum({id(t): t.nbytes for t in model.buffers()}.values())


def test_layer_tied_to_embedding_is_reported() -> None:
    for model, embedding in ((tiny_lm(), "embed"), (tiny_hf("gpt2"), "transformer.wte")):
        report = quantize(model, skip=(), progress=False)
        assert report.skipped["lm_head"] == f"its weight is tied to {embedding!r}"
        assert model.lm_head.weight is model.get_submodule(embedding).weight


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_weight_leaves_the_model_untouched(bad: float) -> None:
    model = tiny_lm().train()
    model.blocks[0].eval()
    cal = calibrate(model, token_batches(), progress=False)
    with torch.no_grad():
        model.blocks[1].down.weight[3, 5] = bad
    before = snapshot(model)
    for kwargs in ({}, {"calibration": cal, "smooth": 0.5}):
        with pytest.raises(QuantizationError, match=r"blocks\.1\.down.*NaN or Inf"):
            quantize(model, progress=False, **kwargs)
        after = snapshot(model)
        before["values"] = after["values"] = []
        assert same(before, after)


def test_smooth_equals_smoothing_first() -> None:
    batches = token_batches()

    def fresh() -> nn.Module:
        model = tiny_lm()
        for block in model.blocks:
            inject_outliers(block.ln1, [block.q, block.v])
            inject_outliers(block.ln2, [block.up])
        return model

    for scheme in ("w8a8", "w8a8_static"):
        one, two = fresh(), fresh()
        cal = calibrate(one, batches, progress=False)
        lo = cal.layers["blocks.0.q"].lo.clone()
        skip = ("lm_head", "blocks.0.v")
        report = quantize(one, scheme, calibration=cal, smooth=0.5, skip=skip, progress=False)
        assert torch.equal(cal.layers["blocks.0.q"].lo, lo)
        assert report.smoothing is not None
        assert len(report.smoothing.migrations) == 4
        smooth(two, cal, 0.5)
        quantize(two, scheme, calibration=cal, skip=skip, progress=False)
        assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))
        plain, float_model = fresh(), fresh()
        cal = calibrate(plain, batches, progress=False)
        quantize(plain, scheme, calibration=cal, skip=skip, progress=False)
        want = float_model(batches[0])
        assert sqnr_db(want, one(batches[0])) > sqnr_db(want, plain(batches[0])) + 10


def test_device_moves_everything_or_nothing() -> None:
    model = tiny_lm()
    embed = model.embed.weight
    quantize(model, device="cpu", progress=False)
    assert model.embed.weight is embed is model.lm_head.weight
    model = tiny_lm()
    before = snapshot(model)
    with pytest.raises((RuntimeError, AssertionError)):
        quantize(model, device="cuda:99", progress=False)
    assert same(before, snapshot(model))


def test_a_plan_is_followed() -> None:
    model = tiny_lm()
    cal = calibrate(model, token_batches(), progress=False)
    schemes = {"blocks.0.q": "w8a8_static", "blocks.0.v": "w8a8", "blocks.0.up": "w8a16", "blocks.1.up": "fp16"}
    report = quantize(model, make_plan(model, schemes, cal), progress=False)
    assert report.schemes == {k: v for k, v in schemes.items() if v != "fp16"}
    assert {n: m.scheme.name for n, m in linears(model).items()} == report.schemes
    assert report.skipped["blocks.1.up"] == "fp16 by the plan"
    assert report.skipped["blocks.1.q"] == "not in the plan"


def test_a_plan_that_does_not_fit_is_refused() -> None:
    model = tiny_lm()
    before = snapshot(model)
    plan = make_plan(model, {"blocks.0.q": "w8a8"})
    with pytest.raises(ConfigError, match="smooth, then plan"):
        quantize(model, plan, smooth=0.5, progress=False)
    nope = make_plan(model, {"blocks.0.q": "w8a8"})
    nope.layers["nope"] = nope.layers["blocks.0.q"]
    plan.layers["blocks.0.q"].in_features = 48
    for bad, message in (
        (plan, r"blocks\.0\.q.*32 x 48.*32 x 32"),
        (nope, "'nope' of the plan"),
        (make_plan(model, {"blocks.0.q": "w8a8_static"}), r"blocks\.0\.q.*static_range"),
        (make_plan(model, {"blocks.0.q": "w4"}), r"blocks\.0\.q.*'w4'"),
    ):
        with pytest.raises(PlanError, match=message):
            quantize(model, bad, progress=False)
    tied = Tied()
    with pytest.raises(PlanError, match="shares its weight with 'b'"):
        quantize(tied, make_plan(tied, {"a": "w8a8", "b": "fp16"}), progress=False)
    assert same(before, snapshot(model))


def test_refusals_name_what_is_allowed() -> None:
    model = tiny_lm()
    cal = calibrate(model, token_batches(), layers=["*.up"], progress=False)
    before = snapshot(model)
    narrow = calibrate(tiny_lm(width=16), token_batches(), progress=False)
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"scheme": "w4a4"}, ConfigError, "w8a8_static"),
        ({"scheme": "fp16"}, ConfigError, "leaves every layer"),
        ({"scheme": "w8a8_static"}, ConfigError, "needs calibration"),
        ({"smooth": 0.5}, ConfigError, "needs calibration"),
        ({"scheme": "w8a8_static", "calibration": cal}, CalibrationError, r"'blocks\.0\.q' was not calibrated"),
        (
            {"scheme": "w8a8_static", "calibration": narrow},
            CalibrationError,
            "calibrated with 16 input channels, the model has 32",
        ),
        (
            {"skip": ("*",)},
            QuantizationError,
            r"no layer to work on: all 11 linear layers.* left out by skip=\('\*',\)",
        ),
        ({"include": ["x"]}, QuantizationError, "matches none"),
    ]
    for options, error, message in refused:
        with pytest.raises(error, match=message):
            quantize(model, **options, progress=False)
    assert same(before, snapshot(model))


def test_modules_that_only_look_linear_are_left() -> None:
    class Adapter(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    model = nn.Sequential(
        nn.Linear(8, 8),
        Adapter(8, 8),
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        nn.MultiheadAttention(8, 2),
    )
    assert set(quantize(model, progress=False).schemes) == {"0"}


# ── codebooks ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("scheme", ["codebook4_g16", "codebook4+4_g16_int8", "int4", "nvfp4"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "plain"])
def test_codebooks_of_every_model(kind: str, scheme: str) -> None:
    model = tiny_lm() if kind == "plain" else tiny_hf(kind)
    original, batches = copy.deepcopy(model), token_batches()
    cal = calibrate(model, batches, progress=False)
    report = quantize(model, scheme, calibration=cal, allow_growth=True, progress=False)
    made = linears(model)
    assert set(made) == set(report.schemes)
    assert set(report.schemes.values()) == {scheme}
    for name, layer in made.items():
        expected = Linear.from_float(original.get_submodule(name), scheme, activation=layer.activation)
        assert type(layer) is CodebookLinear
        assert all(torch.equal(a, b) for a, b in zip(layer.buffers(), expected.buffers(), strict=True))
    with torch.no_grad():
        got, want = model(batches[0]), original(batches[0])
    got, want = (t if isinstance(t, Tensor) else t.logits for t in (got, want))
    assert sqnr_db(want, got) > 12
    for one in report.layers:
        assert one.bits_per_weight == 8 * one.bytes_after / (one.in_features * one.out_features)
        assert one.weight_error < 0.2
        assert one.output_sqnr_db > 10
        assert f"{one.bits_per_weight:.2f}" in str(report)
    assert "bits/weight" in str(report)


def test_second_moments_fit_codebooks() -> None:
    model = tiny_lm()
    plain, batches = copy.deepcopy(model), token_batches(8)
    moments = collect_second_moments(model, batches, progress=False)
    cal = calibrate(model, batches, progress=False)
    fitted = quantize(model, "codebook3", second_moments=moments, calibration=cal, progress=False)
    rounded = quantize(plain, "codebook3", calibration=cal, progress=False)
    gains = [a.output_sqnr_db - b.output_sqnr_db for a, b in zip(fitted.layers, rounded.layers, strict=True)]
    assert sum(gains) / len(gains) > 1
    # int8 and unrotated schemes have nothing to fit.
    quantize(tiny_lm(), "w8a8", second_moments={}, progress=False)
    quantize(tiny_lm(), "int4", second_moments={}, progress=False)


def test_second_moments_follow_smoothing() -> None:
    batches = token_batches(8)
    model, by_hand = tiny_lm(), tiny_lm()
    moments = collect_second_moments(model, batches, progress=False)
    cal = calibrate(model, batches, progress=False)
    quantize(model, "codebook4", second_moments=moments, calibration=cal, smooth=0.5, progress=False)
    smooth(by_hand, cal.copy(), 0.5)
    moments = collect_second_moments(by_hand, batches, progress=False)
    quantize(by_hand, "codebook4", second_moments=moments, progress=False)
    for name, layer in linears(model).items():
        other = by_hand.get_submodule(name)
        assert torch.equal(layer.codebook, other.codebook)
        same_indices = (layer.passes[0].indices == other.passes[0].indices).float().mean()
        assert same_indices > 0.98, name


def test_wrong_second_moment_keeps_model() -> None:
    model = tiny_lm()
    moments = collect_second_moments(model, token_batches(), progress=False)
    before = snapshot(model)
    with pytest.raises(CalibrationError, match=r"layer 'blocks\.1\.up': its second moment has shape \[64, 64\]"):
        quantize(model, "codebook4", second_moments={**moments, "blocks.1.up": torch.eye(64)}, progress=False)
    fewer = {name: moment for name, moment in moments.items() if name != "blocks.1.up"}
    with pytest.raises(CalibrationError, match=r"layer 'blocks\.1\.up': no second moment; collect_second_moments"):
        quantize(model, "codebook4", second_moments=fewer, progress=False)
    assert same(before, snapshot(model))


def test_layer_with_odd_k_gets_another_rotation() -> None:
    model = tiny_lm(width=48)
    report = quantize(model, "codebook4", calibration=calibrate(model, token_batches(), progress=False), progress=False)
    by_name = {layer.name: layer for layer in report.layers}
    assert by_name["blocks.0.q"].scheme == "codebook4_qr"
    assert by_name["blocks.0.q"].note == "rotation qr: a group of 48 of its 48 columns is no power of 2"
    assert by_name["blocks.0.q"].output_sqnr_db > 10
    assert by_name["blocks.0.q"].note in str(report)
    assert "blocks.0.down" not in by_name or by_name["blocks.0.down"].scheme == "codebook4_qr"  # K = 96


def test_tied_codebooks_share_their_memory() -> None:
    model = Tied()
    report = quantize(model, "codebook4+4_g16", allow_growth=True, progress=False)
    (tied,) = (one for one in report.layers if one.tied_to is not None)
    pair = model.get_submodule(tied.name), model.get_submodule(tied.tied_to)
    for key in ("units", "packed_norms", "norms", "codebook", "col_scale"):
        assert len({getattr(layer, key).data_ptr() for layer in pair}) == 1, key


def test_a_plan_may_name_codebooks() -> None:
    model = tiny_lm()
    names = {"blocks.0.q": "codebook4_int8", "blocks.0.up": "codebook3_g16_qr", "blocks.1.up": "w8a8"}
    report = quantize(model, make_plan(model, names), progress=False)
    assert report.schemes == names


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


OF_OTHER_TYPES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "calibration": (lambda: quantize(chain(), calibration={}), DtypeError, "calibration: found dict; what"),
    "in a configuration": (lambda: qcut.QcutConfig("w8a8", calibration=3), DtypeError, "calibration: found int"),
    "in a plan": (lambda: qcut.plan(chain(), [torch.ones(1, 64)], calibration=3), DtypeError, "calibration: found int"),
    "smoothed": (lambda: qcut.smooth(chain(), [torch.ones(1, 64)]), DtypeError, "calibration: found list"),
    "moments": (lambda: quantize(chain(), "codebook4", second_moments=3), DtypeError, "second_moments: found int"),
    "one moment": (
        lambda: quantize(chain(), "codebook4", second_moments={"0": 3, "2": 3}),
        DtypeError,
        "layer '0': its second moment is of type int",
    ),
    "alpha": (
        lambda: qcut.smooth(chain(), qcut.calibrate(chain(), [torch.ones(1, 64)]), "much"),
        ConfigError,
        "found alpha = 'much'; allowed",
    ),
    "budget": (lambda: qcut.plan(chain(), [torch.ones(1, 64)], budget="small"), ConfigError, "budget: found 'small'"),
    "device": (lambda: quantize(chain(), device="gpu"), DeviceError, "device: found 'gpu'; allowed: cpu, cuda"),
    "no memory": (lambda: quantize(chain(), device="meta"), DeviceError, "found 'meta', which holds no values"),
    "too many": (lambda: quantize(chain(), device="cuda:99"), DeviceError, "device: found 'cuda:99', and torch finds"),
}


@pytest.mark.parametrize("what", OF_OTHER_TYPES)
def test_arguments_of_other_types_are_refused(what: str) -> None:
    act, error, words = OF_OTHER_TYPES[what]
    with pytest.raises(error) as found:
        act()
    assert words in str(found.value)
