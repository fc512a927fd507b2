"""Calibration and moments of experts: names, experts without tokens, turns, and the model afterwards."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.conversion.calibration.calibrate import Calibration, calibrate
from qcut.conversion.calibration.curvature import collect_curvature
from qcut.conversion.calibration.moments import Moments
from qcut.conversion.calibration.second_moments import collect_second_moments
from qcut.conversion.calibration.second_order import channel_weights
from qcut.conversion.inventory import FEW_TOKENS
from qcut.errors import CalibrationError, ConfigError, QuantizationError
from qcut.layers.experts.opening import opened
from qcut.models.modules import as_given, float_linear
from qcut.numerics.codebook.fitting.curvature import as_curvature
from tests.support.mixtures import EXPERTS, KINDS, NEVER, mixture_batches, tiny_mixture

LAYER = "model.layers.1.mlp.experts"
COLLECTORS: list[Any] = [collect_second_moments, collect_curvature]


def inputs_of(model: nn.Module, name: str) -> Tensor:
    """Oracle: what a layer of an expert reads, of all batches."""
    seen: list[Tensor] = []
    with opened(model), torch.no_grad():
        layer = model.get_submodule(name)
        handle = layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
        for batch in mixture_batches():
            model(batch)
        handle.remove()
    return torch.cat(seen) if seen else torch.empty(0, 64)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_calibrated_as_layers(kind: str) -> None:
    model = tiny_mixture(kind)
    modules, before = dict(model.named_modules()), copy.deepcopy(model.state_dict())
    found = calibrate(model, mixture_batches(), progress=False)
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    for key in ("up", "down"):
        for e in range(EXPERTS):
            name = f"{LAYER}.{key}.{e}"
            assert found.tokens[name] == len(inputs_of(model, name))
            assert (found.tokens[name] == 0) == (e in NEVER)
    again = calibrate(model, mixture_batches(), progress=False)
    assert all(torch.equal(s.sample, again.layers[name].sample) for name, s in found.layers.items())


def test_experts_without_tokens_borrow() -> None:
    model = tiny_mixture()
    found = calibrate(model, mixture_batches(), progress=False)
    seen = torch.cat([inputs_of(model, f"{LAYER}.up.{e}") for e in range(EXPERTS)])
    e = NEVER[0]
    up, down = found.layers[f"{LAYER}.up.{e}"], found.layers[f"{LAYER}.down.{e}"]
    assert up.borrowed
    assert down.borrowed
    assert torch.equal(up.lo, seen.amin(0))
    assert torch.equal(up.hi, seen.amax(0))
    with opened(model) as mixtures, torch.no_grad():
        inside = mixtures.experts[LAYER].gating(float_linear(model.get_submodule(f"{LAYER}.up.{e}"), up.sample))
    torch.testing.assert_close(down.sample, inside)
    for name in (f"{LAYER}.up.{e}", f"{LAYER}.down.{e}"):
        static = found.range(name)
        assert static.lo < 0 < static.hi


def test_ranges_of_few_tokens_hold_those_of_all() -> None:
    model = tiny_mixture()
    few = calibrate(model, mixture_batches(1, 1, 4), progress=False)
    own = inputs_of(model, f"{LAYER}.up.0")
    stats = few.layers[f"{LAYER}.up.0"]
    assert stats.borrowed
    assert 0 < stats.tokens < FEW_TOKENS
    lows = torch.stack([few.layers[f"{LAYER}.up.{e}"].lo for e in range(EXPERTS)])
    assert torch.equal(lows.amin(0), stats.lo)
    many = calibrate(model, mixture_batches(8, 8, 32), progress=False)
    assert not many.layers[f"{LAYER}.up.0"].borrowed
    assert many.layers[f"{LAYER}.up.{NEVER[0]}"].borrowed
    assert len(own)


def test_experts_share_the_sample() -> None:
    model, size = tiny_mixture(), 64 * 60
    found = calibrate(model, mixture_batches(8, 8, 32), sample_size=size, progress=False)
    assert len(found.layers["model.layers.0.self_attn.q_proj"].sample) == 60
    assert len(found.layers[f"{LAYER}.up.0"].sample) == 60 // EXPERTS
    least = calibrate(model, mixture_batches(8, 8, 32), sample_size=64, progress=False)
    assert len(least.layers[f"{LAYER}.up.0"].sample) == 8


def test_calibration_with_experts_is_saved(tmp_path: Any) -> None:
    found = calibrate(tiny_mixture(), mixture_batches(), progress=False)
    found.save(tmp_path)
    back = Calibration.load(tmp_path)
    assert back.tokens == found.tokens
    assert {n: s.borrowed for n, s in back.layers.items()} == {n: s.borrowed for n, s in found.layers.items()}
    assert back.range(f"{LAYER}.down.{NEVER[0]}") == found.range(f"{LAYER}.down.{NEVER[0]}")


@pytest.mark.parametrize("glob", [f"{LAYER}.up", f"{LAYER}.up.*", "*.1.mlp.experts.up"])
def test_globs_name_stacks(glob: str) -> None:
    model = tiny_mixture()
    names = {f"{LAYER}.up.{e}" for e in range(EXPERTS)}
    assert set(calibrate(model, mixture_batches(), layers=[glob], progress=False).layers) == names
    assert not names & set(calibrate(model, mixture_batches(), skip=[glob], progress=False).layers)
    report = qcut.quantize(model, "w8a16", include=[glob], progress=False)
    assert report.schemes == {f"{LAYER}.up": "w8a16"}
    with pytest.raises(QuantizationError, match="matches none"):
        calibrate(model, mixture_batches(), layers=["*.mlp.experts.sideways"], progress=False)


@pytest.mark.parametrize("collect", COLLECTORS)
def test_moments_of_experts_are_drawn_to_all(collect: Any) -> None:
    model = tiny_mixture()
    found = collect(model, mixture_batches(), progress=False)
    raw = collect(model, mixture_batches(), prior=0.0, progress=False)
    for key in ("up", "down"):
        names = [f"{LAYER}.{key}.{e}" for e in range(EXPERTS)]
        counts = [raw.tokens[name] for name in names]
        assert [not count for count in counts] == [e in NEVER for e in range(EXPERTS)]
        own = [as_curvature(raw[name]).inputs for name in names]
        prior = sum(h * n for h, n in zip(own, counts, strict=True)) / sum(counts)
        if key == "down":
            prior = torch.eye(64) * prior.trace() / 64
        for name, h, n in zip(names, own, counts, strict=True):
            wanted = (h * n + 4 * 64 * prior) / (n + 4 * 64) if n else prior
            torch.testing.assert_close(as_curvature(found[name]).inputs, wanted, rtol=1e-3, atol=1e-4)
    x = inputs_of(model, f"{LAYER}.down.1")
    if collect is collect_second_moments:
        torch.testing.assert_close(raw[f"{LAYER}.down.1"], x.t() @ x / len(x))


def test_curvature_outputs_are_drawn_where_channels_agree() -> None:
    found = collect_curvature(tiny_mixture(), mixture_batches(), progress=False)
    inside, residual = found[f"{LAYER}.up.{NEVER[0]}"].outputs, found[f"{LAYER}.down.{NEVER[0]}"].outputs
    assert inside is not None
    assert residual is not None
    assert torch.equal(inside, torch.diag(inside.diagonal()))
    assert not torch.equal(residual, torch.diag(residual.diagonal()))


@pytest.mark.parametrize("collect", COLLECTORS)
def test_turns_hold_few_bytes(collect: Any) -> None:
    model = tiny_mixture()
    whole = collect(model, mixture_batches(), progress=False)
    most = 150_000 if collect is collect_second_moments else 500_000
    found: Moments[Any] = collect(model, iter(mixture_batches()), most_bytes=most, progress=False)
    assert not found.tokens
    assert list(found) == list(whole)

    refs: list[weakref.ref[Tensor]] = []
    largest = 0
    for name in whole:
        one, other = as_curvature(found[name]), as_curvature(whole[name])
        assert torch.equal(one.inputs, other.inputs)
        refs.append(weakref.ref(one.inputs))
        if other.outputs is not None:
            assert one.outputs is not None
            assert torch.equal(one.outputs, other.outputs)
            refs.append(weakref.ref(one.outputs))
        del one
        alive = {id(t): t.nbytes for ref in refs if (t := ref()) is not None}
        largest = max(largest, sum(alive.values()))
    assert 0 < largest <= most < 64 * 64 * 4 * len(whole)
    assert found.tokens == whole.tokens


@pytest.mark.parametrize("collect", COLLECTORS)
def test_quantize_takes_moments_in_turns(collect: Any) -> None:
    made = []
    for most in (None, 1.0):
        model = tiny_mixture()
        moments = collect(model, mixture_batches(), most_bytes=most, progress=False)
        qcut.quantize(model, "codebook4", second_moments=moments, progress=False)
        made.append(model.state_dict())
    assert all(torch.equal(tensor, made[1][key]) for key, tensor in made[0].items())
    with pytest.raises(ConfigError, match="most_bytes: found -1"):
        collect(tiny_mixture(), mixture_batches(), most_bytes=-1, progress=False)
    with pytest.raises(ConfigError, match="prior: found -1"):
        collect(tiny_mixture(), mixture_batches(), prior=-1, progress=False)


@pytest.mark.parametrize("collect", [*COLLECTORS, calibrate])
def test_unseen_projection_is_an_error(collect: Callable[..., Any]) -> None:
    model = tiny_mixture()
    modules = dict(model.named_modules())
    names = [f"{LAYER}.up.{e}" for e in NEVER]
    if collect is calibrate:
        assert set(collect(model, mixture_batches(), layers=names, progress=False).layers) == set(names)
        model.model.layers[1].mlp.forward = lambda x: x
        names = [f"{LAYER}.up"]
    with pytest.raises(CalibrationError, match=rf"layer '{LAYER}.up(\.4)?'|saw no"):
        collect(model, mixture_batches(), layers=names, progress=False)
    assert dict(model.named_modules()) == modules


def test_model_is_restored_after_exceptions() -> None:
    model = tiny_mixture().train()
    modules = dict(model.named_modules())
    for collect in (*COLLECTORS, calibrate):
        with pytest.raises(qcut.errors.QcutError):
            collect(model, [torch.full((1, 4), 1000)], progress=False)
        assert dict(model.named_modules()) == modules
        assert all(module.training for module in model.modules())
        assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


def test_channel_weights_of_unseen_experts_are_zero() -> None:
    model = tiny_mixture()
    with opened(model):
        layers = {f"{LAYER}.down.{e}": model.get_submodule(f"{LAYER}.down.{e}") for e in range(EXPERTS)}
        found = channel_weights(model, mixture_batches(), layers, "perplexity", progress=False)
    for e in range(EXPERTS):
        assert bool(found[f"{LAYER}.down.{e}"].any()) == (e not in NEVER)


def test_static_ranges_of_experts_are_their_own() -> None:
    model = tiny_mixture()
    found = calibrate(model, mixture_batches(8, 8, 32), progress=False)
    wanted = [found.range(f"{LAYER}.down.{e}") for e in range(EXPERTS)]
    qcut.quantize(model, "w8a8_static", calibration=found, progress=False)
    stack = model.get_submodule(f"{LAYER}.down")
    one = qcut.Linear.from_float(nn.Linear(64, 64), "w8a8_static", static_range=wanted[1])
    assert float(stack.expert(1).input_scale) == float(one.input_scale)
    assert len({float(layer.input_scale) for layer in stack.layers}) > 1
    x = as_given(found.layers[f"{LAYER}.down.4"].sample, nn.Linear(64, 64))
    assert bool(stack.expert(4)(x).isfinite().all())


def test_report_counts_experts_of_few_tokens() -> None:
    model, batches = tiny_mixture(), mixture_batches(40)
    calibration = qcut.calibrate(model, batches, progress=False)
    report = qcut.quantize(model, "w8a8", calibration=calibration, verify=False, progress=False)
    (up,) = (layer for layer in report.layers if layer.name.endswith("layers.0.mlp.experts.up"))
    few = [e for e in range(EXPERTS) if calibration.tokens[f"{up.name}.{e}"] < FEW_TOKENS]
    assert set(NEVER) <= set(few) != set(range(EXPERTS))
    assert up.few_tokens == len(few)
    assert f"{len(few)} of {EXPERTS} experts saw fewer than {FEW_TOKENS} tokens" in str(report)
