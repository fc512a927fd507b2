from __future__ import annotations

import json
import math
import os
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qcut.conversion.calibration.calibrate import METHODS, Calibration, LayerStats, calibrate
from qcut.errors import CalibrationError, ConfigError, DtypeError, QuantizationError
from qcut.numerics.int8 import quantize_per_tensor_ref, static_qparams
from tests.support.files import rewrite
from tests.support.zoo import same, snapshot, tiny_hf, tiny_lm, token_batches


def inputs_of(model: nn.Module, name: str, batches: list) -> torch.Tensor:
    """Oracle: every input row of one layer, in order."""
    rows = []
    handle = model.get_submodule(name).register_forward_pre_hook(
        lambda _, args: rows.append(args[0].reshape(-1, args[0].shape[-1]))
    )
    with torch.no_grad():
        for batch in batches:
            model(batch)
    handle.remove()
    return torch.cat(rows)


def test_statistics_are_those_of_all_inputs() -> None:
    model, batches = tiny_lm(), token_batches()
    cal = calibrate(model, batches, progress=False)
    assert len(cal.layers) == 10
    assert "lm_head" not in cal.layers
    for name, stats in cal.layers.items():
        x = inputs_of(model, name, batches)
        assert stats.tokens == len(x) == 3 * 2 * 16
        assert torch.equal(stats.lo, x.amin(0))
        assert torch.equal(stats.hi, x.amax(0))
        assert torch.equal(cal.absmax(name), x.abs().amax(0))
        r = cal.range(name)
        assert (r.lo, r.hi) == (min(0.0, x.min().item()), max(0.0, x.max().item()))
        # The sample holds everything where it fits.
        assert torch.equal(stats.sample.sort(0).values, x.sort(0).values)


def test_sample_is_bounded_uniform_and_reproducible() -> None:
    layer = nn.Sequential(nn.Linear(4, 2))
    rows = torch.arange(5000.0)[:, None].expand(5000, 4).contiguous()
    batches = list(rows.split([1, 999, 0, 3000, 1000]))
    draws = [calibrate(layer, batches, sample_size=400, seed=s, progress=False).layers["0"].sample for s in range(40)]
    assert all(d.shape == (100, 4) and len(d[:, 0].unique()) == 100 for d in draws)
    again = calibrate(layer, batches, sample_size=400, seed=0, progress=False).layers["0"].sample
    assert torch.equal(draws[0], again)
    assert not torch.equal(draws[0], draws[1])
    # The mean of 4000 draws of U(0, 5000) has a standard deviation of 23; every part is drawn at its rate.
    values = torch.stack(draws)[..., 0].flatten()
    assert abs(values.mean().item() - 2499.5) < 5 * 23
    assert abs((values < 1000).double().mean().item() - 0.2) < 5 * math.sqrt(0.2 * 0.8 / 4000)


def test_quantile_is_exact_over_the_sample() -> None:
    x = torch.randn(500, 3)
    stats = LayerStats(x.amin(0), x.amax(0), x, 500)
    cal = Calibration({"l": stats}, "quantile", 0.99)
    r = cal.range("l")
    expected = torch.quantile(x.flatten().double(), torch.tensor([0.01, 0.99], dtype=torch.float64))
    assert r.lo == pytest.approx(expected[0].item(), rel=1e-6)
    assert r.hi == pytest.approx(expected[1].item(), rel=1e-6)
    assert Calibration({"l": stats}, "quantile", 1.0).range("l") == cal.range("l", "minmax")


def test_mse_range_beats_its_neighbours() -> None:
    for shift in [0.0, 30.0, -30.0]:
        x = torch.randn(2000, 4)
        x[0, 0] = 40.0 if shift <= 0 else -40.0
        x = x + shift
        cal = Calibration({"l": LayerStats(x.amin(0), x.amax(0), x, 2000)})

        def error(lo: float, hi: float, x: torch.Tensor = x) -> float:
            scale, zero_point = static_qparams(min(lo, 0.0), max(hi, 0.0))
            q = quantize_per_tensor_ref(x, scale, zero_point, 4)
            return ((q.float() - zero_point) * scale - x).square().sum().item()

        full, best = cal.range("l", "minmax"), cal.range("l", "mse")
        assert full.lo <= best.lo <= 0 <= best.hi <= full.hi
        at_best = error(best.lo, best.hi)
        assert at_best <= error(full.lo, full.hi)
        # The grid's spacing is 6 %: a tenth off on either side is never better by more than the search's resolution.
        for f in (0.8, 0.9, 1.1, 1.25):
            assert at_best <= 1.05 * error(best.lo * f, best.hi)
            assert at_best <= 1.05 * error(best.lo, best.hi * f)


def test_ranges_hold_zero_and_all_zero_input_works() -> None:
    layer = nn.Sequential(nn.Linear(4, 2))
    positive = calibrate(layer, [torch.rand(8, 4) + 1], progress=False)
    zeros = calibrate(layer, [torch.zeros(8, 4)], progress=False)
    for method in METHODS:
        assert positive.range("0", method).lo == 0.0
        assert positive.range("0", method).hi >= 1.0
        assert (zeros.range("0", method).lo, zeros.range("0", method).hi) == (0.0, 0.0)


def test_inputs_of_any_rank_and_dtype() -> None:
    for shape in [(4,), (7, 4), (2, 3, 4), (2, 1, 3, 4)]:
        for dtype in [torch.float32, torch.float16, torch.bfloat16]:
            model = nn.Sequential(nn.Linear(4, 2)).to(dtype)
            x = torch.randn(shape).to(dtype)
            stats = calibrate(model, [x], progress=False).layers["0"]
            assert stats.tokens == x.numel() // 4
            assert torch.equal(stats.lo, x.float().reshape(-1, 4).amin(0))


@pytest.mark.parametrize(
    "wrap", [lambda b: b, lambda b: (b,), lambda b: {"input_ids": b}, lambda b: UserDict(input_ids=b)]
)
def test_batches_as_tensor_tuple_or_dict(wrap) -> None:
    model = tiny_hf("gpt2")
    cal = calibrate(model, [wrap(b) for b in token_batches()], progress=False)
    assert len(cal.layers) == 8


def test_layers_are_chosen_by_globs() -> None:
    model = tiny_lm()
    assert set(calibrate(model, token_batches(), layers=["*.up"], progress=False).layers) == {
        "blocks.0.up",
        "blocks.1.up",
    }
    assert "lm_head" in calibrate(model, token_batches(), skip=(), progress=False).layers
    with pytest.raises(QuantizationError, match=r"'\*\.nope' matches none"):
        calibrate(model, token_batches(), layers=["*.nope"], progress=False)


def test_keyword_input_is_observed() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(input=x)

    assert calibrate(Model(), [torch.ones(3, 4)], progress=False).layers["layer"].tokens == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_names_layer_and_batch_and_keeps_model(bad: float) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 2)).train()
    x = torch.ones(3, 4)
    x[1, 2] = bad
    before = snapshot(model)
    with pytest.raises(CalibrationError, match=r"layer '0': batch 1: found NaN or Inf in 1 of 4 .* channel 2"):
        calibrate(model, [torch.ones(3, 4), x], progress=False)
    assert same(before, snapshot(model))


def test_modes_and_hooks_are_restored() -> None:
    model = tiny_lm().train()
    model.blocks[0].eval()
    before = snapshot(model)
    calibrate(model, token_batches(), progress=False)
    assert same(before, snapshot(model))


def test_refusals() -> None:
    model = tiny_lm()
    for batches, options, error, message in (
        ([], {}, CalibrationError, "found none"),
        ([3], {}, DtypeError, "found int"),
        (token_batches(), {"method": "max"}, ConfigError, "minmax, quantile, mse"),
        (token_batches(), {"quantile": 0.3}, ConfigError, r"quantile: found 0\.3"),
        (token_batches(), {"sample_size": 0}, ConfigError, "sample_size"),
    ):
        with pytest.raises(error, match=message):
            calibrate(model, batches, progress=False, **options)  # type: ignore[arg-type]
    with pytest.raises(CalibrationError, match="'nope' was not calibrated"):
        calibrate(model, token_batches(), progress=False).range("nope")
    idle = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    idle.forward = lambda x: idle["a"](x)  # type: ignore[method-assign]
    with pytest.raises(CalibrationError, match="layer 'b' saw no token"):
        calibrate(idle, [torch.ones(1, 4)], progress=False)


def test_save_and_load(tmp_path: Path) -> None:
    cal = calibrate(tiny_lm(), token_batches(), method="mse", quantile=0.999, progress=False)
    cal.save(tmp_path / "new" / "cal")
    cal.save(tmp_path / "new" / "cal")
    assert len(list((tmp_path / "new" / "cal").iterdir())) == 2
    got = Calibration.load(tmp_path / "new" / "cal")
    assert (got.method, got.quantile, got.pairs, got.refused) == (cal.method, cal.quantile, cal.pairs, cal.refused)
    assert got.pairs
    for name in cal.layers:
        for part in ("lo", "hi", "sample"):
            assert torch.equal(getattr(got.layers[name], part), getattr(cal.layers[name], part))
        assert got.layers[name].tokens == cal.layers[name].tokens
        assert got.range(name) == cal.range(name)


def test_a_failed_save_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cal = calibrate(tiny_lm(), token_batches(), progress=False)
    cal.save(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CalibrationError, match="No space left"):
        cal.save(tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


DAMAGE: dict[str, Callable[[Any], object]] = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-100]),
    "garbage": lambda file: file.write_bytes(b"garbage"),
    "missing": lambda file: file.unlink(),
    "no json": lambda index: index.write_text("{"),
    "a list": lambda index: index.write_text("[]"),
    "foreign": lambda data: data.update(format="other"),
    "escape": lambda data: data.update(file="../x.safetensors"),
    "size": lambda data: data["layers"]["blocks.0.up"]["sample"].__setitem__(1, 33),
    "layer": lambda data: data["layers"].pop("blocks.0.up"),
    "field": lambda data: data.pop("method"),
}
OF_TENSORS, OF_INDEX = ("truncated", "garbage", "missing"), ("no json", "a list")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved calibration."""
    calibrate(tiny_lm(), token_batches(), progress=False).save(tmp_path)
    return tmp_path


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_files_are_refused(folder: Path, how: str) -> None:
    index = folder / "calibration.json"
    if how in OF_TENSORS:
        DAMAGE[how](folder / json.loads(index.read_text())["file"])
    elif how in OF_INDEX:
        DAMAGE[how](index)
    else:
        rewrite(index, DAMAGE[how])
    with pytest.raises(CalibrationError, match=r"calibration.*(json|safetensors)|\.\./x"):
        Calibration.load(folder)


def test_load_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="no such file"):
        Calibration.load(tmp_path)


def bad(part: str, at: tuple[int, ...], value: float):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"blocks.0.up.{part}"][at] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *[
            (bad(part, (1,), v), rf"{part}': found {v} at \[1\]")
            for part in ("lo", "hi")
            for v in (math.nan, -math.inf)
        ],
        (bad("sample", (2, 1), math.nan), r"sample': found nan at \[2, 1\]; finite"),
        (bad("sample", (2, 1), 1e9), r"sample': found a value outside of lo and hi at \[2, 1\]"),
        (bad("lo", (3,), 1e9), r"hi': found less than lo in channel \[3\]; lo <= hi"),
    ],
)
def test_statistics_that_cannot_be_are_refused(folder: Path, change, message: str) -> None:
    (file,) = folder.glob("*.safetensors")
    rewrite(file, change)
    with pytest.raises(CalibrationError, match=rf"{file}: tensor 'blocks\.0\.up\.{message}"):
        Calibration.load(folder, verify=False)
    with pytest.raises(CalibrationError, match="damaged"):
        Calibration.load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": -5}, r"tokens': found -5; allowed: a whole number from 0"),
        ({"tokens": 1}, r"tokens of 1; 1 to all"),
        ({"tokens": "9"}, "found '9'"),
        ({"sample": [1 << 62, 1 << 62]}, "allowed: a whole number from 1"),
        ({"sample": [2]}, "a list of 2"),
    ],
)
def test_sizes_that_cannot_be_are_refused(folder: Path, change: dict[str, object], message: str) -> None:
    rewrite(folder / "calibration.json", lambda data: data["layers"]["blocks.0.up"].update(change))
    with pytest.raises(CalibrationError, match=message):
        Calibration.load(folder, verify=False)


def test_what_is_not_finite_is_not_written(tmp_path: Path) -> None:
    cal = calibrate(tiny_lm(), token_batches(), progress=False)
    cal.quantile = math.nan
    with pytest.raises(CalibrationError, match="cannot be written"):
        cal.save(tmp_path / "x")
    assert not (tmp_path / "x").exists()
