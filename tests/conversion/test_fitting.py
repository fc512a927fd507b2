from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.conversion.fitting import fitting_scheme, rotatable
from qcut.errors import QuantizationError, UnsupportedError
from qcut.schemes import K_MAX, Codebook, parse_scheme
from tests.support.zoo import same, snapshot, tiny_hf, tiny_lm, token_batches


@pytest.mark.parametrize(
    ("name", "k", "served", "group"),
    [
        ("codebook4", 256, "codebook4", None),
        ("codebook4", 300, "codebook4_qr", 44),
        ("codebook4", 4304, "codebook4_qr", 80),
        ("codebook3", 3420, "codebook3_qr", 92),
        ("codebook4", 96, "codebook4_qr", 96),
        ("codebook4", 160, "codebook4", None),
        ("codebook4_rows", 300, "codebook4_rows_qr", 300),
        ("codebook4+4_g16_int8", 44, "codebook4+4_g16_qr_int8", 12),
        ("codebook4_seed7", 300, "codebook4_qr_seed7", 44),
        ("codebook4_qr", 300, "codebook4_qr", None),
        ("codebook4_pairs_int8", 300, "codebook4_pairs_qr_int8", 44),
        ("int4", 300, "int4", None),
        ("w8a8", 300, "w8a8", None),
    ],
)
def test_the_rotation_follows_k(name: str, k: int, served: str, group: int | None) -> None:
    scheme, note = rotatable(parse_scheme(name), k)
    assert scheme.name == served
    want = "" if group is None else f"rotation qr: a group of {group} of its {k} columns is no power of 2"
    assert note == want
    layer = nn.Linear(k, 32)
    made = qcut.Linear.from_float(layer, scheme)
    x = torch.randn(4, k)
    assert ((made(x) - layer(x)).norm() / layer(x).norm()).item() < 0.3


@pytest.mark.parametrize(
    ("name", "k", "served", "note"),
    [
        ("w8a8_rotated", 256, "w8a8_rotated", ""),
        ("w8a8_rotated", 160, "w8a8_rotated", ""),
        ("w8a8_rotated", 16, "w8a8_rotated", ""),
        ("w8a8_rotated_seed7", 1376, "w8a8_rotated_g64_seed7", "groups of 64: a group of 96 of its 1376 columns"),
        ("w8a8_rotated", 100, "w8a8_rotated_g32", "groups of 32: a group of 100 of its 100 columns"),
        ("w8a8_rotated_rows", 300, "w8a8", "no rotation: a group of 300 of its 300 columns is no power of 2, nor"),
        ("w8a8_rotated_rows", 320, "w8a8_rotated_g256", "groups of 256: a group of 320 of its 320 columns"),
        ("w8a8_rotated", 20, "w8a8", "no rotation: a group of 20 of its 20 columns"),
    ],
)
def test_int8_groups_follow_k(name: str, k: int, served: str, note: str) -> None:
    scheme, reason = rotatable(parse_scheme(name), k)
    assert scheme.name == served
    assert reason.startswith(note)
    assert bool(reason) == bool(note)
    layer, x = nn.Linear(k, 32), torch.randn(4, k)
    made = qcut.Linear.from_float(layer, scheme)
    assert ((made(x) - layer(x)).norm() / layer(x).norm()).item() < 0.03


class Awkward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(256, 300), nn.Linear(300, 304), nn.Linear(304, 256)
        self.head = nn.Linear(256, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.c(self.b(self.a(x)).tanh()))


@pytest.mark.parametrize("scheme", ["codebook4", "codebook3_int8", "codebook2+2"])
def test_one_awkward_layer_does_not_stop_a_model(scheme: str, tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, x = Awkward(), torch.randn(16, 256)
    want = model(x)
    report = qcut.quantize(model, scheme, progress=False)
    schemes = report.schemes
    assert schemes["a"] == scheme
    assert Codebook.from_name(schemes["b"]).rotation == Codebook.from_name(schemes["c"]).rotation == "qr"  # type: ignore[union-attr]
    assert "rotation qr: a group of 44 of its 300 columns is no power of 2" in str(report)
    assert report.skipped["head"].startswith(f"{scheme} would take ")
    assert "(2 x 256), and it has 32.1" in report.skipped["head"]
    assert ((model(x) - want).norm() / want.norm()).item() < 0.9
    qcut.save(model, tmp_path)
    assert torch.equal(qcut.load(tmp_path, model=Awkward, progress=False)(x), model(x))


def test_second_moments_and_tables_of_awkward_width() -> None:
    model = tiny_lm(width=48, vocabulary=256)
    ids = token_batches(vocabulary=256)
    moments = qcut.collect_second_moments(model, ids, progress=False)
    qcut.quantize(model, "codebook4", second_moments=moments, embeddings="codebook4", allow_growth=True, progress=False)
    assert model.embed.scheme.name == model.lm_head.scheme.name == model.blocks[0].q.scheme.name == "codebook4_qr"
    assert model.embed.linear is model.lm_head


def test_layers_that_would_grow_are_left() -> None:
    model = nn.ModuleDict({"wide": nn.Linear(768, 768), "two": nn.Linear(768, 2), "thin": nn.Linear(1, 768)}).half()
    report = qcut.quantize(model, "codebook4", progress=False)
    assert set(report.schemes) == {"wide"}
    assert report.layers[0].bits_per_weight < 5
    assert report.skipped["two"] == "codebook4 would take 132.5 bits a weight (2 x 768), and it has 16.0"
    assert "bits a weight (768 x 1), and it has 32.0" in report.skipped["thin"]
    assert report.bytes_after < report.bytes_before
    again = nn.ModuleDict({"wide": nn.Linear(768, 768), "two": nn.Linear(768, 2)}).half()
    assert set(qcut.quantize(again, "codebook4", allow_growth=True, progress=False).schemes) == {"wide", "two"}
    alone = nn.ModuleDict({"two": nn.Linear(768, 2)}).half()
    with pytest.raises(QuantizationError, match=r"no layer to quantize: two: codebook4 would take 132"):
        qcut.quantize(alone, "codebook4", progress=False)


def test_a_plan_knows_both() -> None:
    model = nn.Sequential(nn.Linear(256, 300), nn.Linear(300, 256), nn.Linear(256, 2))
    plan = qcut.plan(
        model, [torch.randn(8, 256)], candidates=["codebook4"], objective="memory", budget=10.0, progress=False
    )
    assert plan.schemes == {"0": "codebook4", "1": "codebook4_qr", "2": "fp16"}
    assert qcut.quantize(model, plan, progress=False).skipped == {"2": "fp16 by the plan"}


def test_odd_widths_are_left_by_pairs() -> None:
    model = nn.Sequential(nn.Linear(256, 255), nn.Linear(255, 256))
    report = qcut.quantize(model, "codebook4_pairs", progress=False)
    assert type(model[1]) is nn.Linear
    assert model[0].scheme.name == "codebook4_pairs"
    assert "groups of 128 of 255 columns; pairs take even numbers" in str(report)


def test_k_beyond_the_exact_range_is_left() -> None:
    model = nn.Sequential(nn.Linear(K_MAX + 1, 16, bias=False), nn.Linear(64, 64))
    for scheme in ("w8a8", "codebook4_int8"):
        report = qcut.quantize(copy.deepcopy(model), scheme, progress=False)
        assert set(report.schemes) == {"1"}
        assert str(K_MAX) in report.skipped["0"]
    assert fitting_scheme(model[0], parse_scheme("w8a16")).scheme is not None


def test_what_names_its_layer_and_changes_nothing() -> None:
    model = tiny_lm()
    model.blocks[0].up = nn.Linear(32, 64, device="meta")
    before = [id(m) for m in model.modules()]
    with pytest.raises(UnsupportedError, match=r"layer 'blocks\.0\.up': the weight is on the meta device"):
        qcut.quantize(model, "w8a16", progress=False)
    model.blocks[0].down = nn.LazyLinear(32)
    with pytest.raises(UnsupportedError, match=r"parameter 'blocks\.0\.down\.weight' has no size yet"):
        qcut.quantize(model, "w8a16", skip=("*.up",), progress=False)
    assert [id(m) for m in model.modules()][: len(before) // 2] == before[: len(before) // 2]
    model = tiny_lm()
    model.blocks[1].v.weight.data[0, 0] = torch.nan
    before = snapshot(model)
    before["values"] = []
    with pytest.raises(QuantizationError, match=r"layer 'blocks\.1\.v'.*NaN"):
        qcut.quantize(model, "w8a16", progress=False)
    assert same(before, snapshot(model) | {"values": []})


def test_layers_that_hold_nothing_to_quantize_are_left() -> None:
    model = nn.Sequential(nn.Linear(64, 0), nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight.data = model[1].weight.data.to(torch.float8_e4m3fn)
    report = qcut.quantize(model, "codebook4", progress=False)
    assert set(report.schemes) == {"2"}
    assert report.skipped == {
        "0": "its weight is empty: [0, 64]",
        "1": "its weight is float8_e4m3fn; float16, bfloat16, float32 can be quantized",
    }


def test_layers_of_float64_stay_in_float() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64).double(), nn.Linear(64, 64))
    report = qcut.quantize(model, "w8a8", verify=False, progress=False)
    assert set(report.schemes) == {"0", "2"}
    assert report.skipped == {"1": "its weight is float64; float16, bfloat16, float32 can be quantized"}
    with pytest.raises(QuantizationError, match=r"2 linear layers stay in float: 0 and .* its weight is float64"):
        qcut.quantize(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).double(), progress=False)


def test_hooks_stay() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    seen: list[str] = []
    model[0].register_forward_hook(lambda m, args, y: seen.append("after"))
    handle = model[2].register_forward_pre_hook(lambda m, args, kwargs: seen.append("before"), with_kwargs=True)
    report = qcut.quantize(model, progress=False)
    assert len(report.layers) == 2
    assert isinstance(model[1], nn.GELU), "the hook sees what comes before the activation"
    model(torch.randn(1, 64))
    assert seen == ["after", "before"]
    handle.remove()
    model(torch.randn(1, 64))
    assert seen == ["after", "before", "after"]


def test_the_second_call_reports_the_first() -> None:
    model = tiny_lm()
    total = sum(p.numel() for p in model.parameters())
    qcut.quantize(model, include=["blocks.0.*"], progress=False)
    report = qcut.quantize(model, "w8a16", progress=False)
    assert report.already == tuple(f"blocks.0.{n}" for n in ("q", "v", "proj", "up", "down"))
    assert "quantized before, left as they are: blocks.0.q, blocks.0.v, blocks.0.proj and 2 others" not in str(report)
    assert "quantized before, left as they are: blocks.0.q, blocks.0.v, blocks.0.proj, blocks.0.up and 1 others" in str(
        report
    )
    assert sum(report.parameters.values()) == total
    assert report.parameters["already quantized"] == report.parameters["quantized"]
    assert f"{report.percent['already quantized']:.1f} % already quantized" in str(report)


def test_tied_parameters_count_once() -> None:
    model = tiny_hf("llama")
    total = sum(p.numel() for p in model.parameters())
    report = qcut.quantize(copy.deepcopy(model), embeddings="w8a16", progress=False)
    assert sum(report.parameters.values()) == total
    assert set(report.parameters) == {"quantized", "norms"}
    left = qcut.quantize(model, progress=False)
    assert left.parameters["embeddings"] == 64 * 32
    assert "linear layers" not in left.parameters


def test_parametrized_layers_are_of_their_kind() -> None:
    norm = nn.utils.parametrizations.weight_norm
    model = nn.Sequential(nn.Linear(64, 64), norm(nn.Conv1d(8, 8, 3)), norm(nn.Linear(64, 32)))
    total = sum(p.numel() for p in model.parameters())
    report = qcut.quantize(model, progress=False)
    assert report.parameters == {
        "quantized": 64 * 65,
        "convolutions": 8 * 8 * 3 + 8 + 8,
        "linear layers": 64 * 32 + 32 + 32,
    }
    assert sum(report.parameters.values()) == total
    assert "computed from other parameters" in report.skipped["2"]
