"""GPTQ and AWQ checkpoints: served weights are those of the formats' definitions, and what is not served is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import qcut
from qcut.checkpoints.formats.reader import format_of, layer_of
from qcut.errors import CheckpointError, UnsupportedError
from tests.checkpoints.formats import samples
from tests.checkpoints.formats.samples import AWQ, GPTQ

Pack = Callable[[str, Tensor], samples.Packed]
FIRST = "model.layers.0.self_attn.q_proj"


def check(folder: Path, expected: Any, scheme: str) -> None:
    """Weights exactly those expected, logits near those of float64, and a save and load that change no bit."""
    model = samples.loaded(folder)
    for name, module in samples.linears(expected).items():
        layer = model.get_submodule(name)
        assert isinstance(layer, qcut.Linear)
        assert layer.scheme.name == scheme, name
        assert torch.equal(layer.dequantized_weight().double(), module.weight), name
        assert torch.equal(layer.rows(torch.tensor([3, 0])).double(), module.weight[[3, 0]]), name
    samples.assert_serves(model, expected, folder / "saved")


def gptq(size: int = 32, **options: Any) -> Pack:
    return lambda _, weight: samples.gptq(weight, size=weight.shape[1] if size == -1 else size, **options)


def awq(size: int = 32) -> Pack:
    return lambda _, weight: samples.awq(weight, size)


def sorted_columns(symmetric: bool) -> Pack:
    def pack(name: str, weight: Tensor) -> samples.Packed:
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(len(name)))
        return samples.gptq(weight, size=32, order=order, symmetric=symmetric)

    return pack


GROUPS = {32: "g32", 64: "g64", -1: "rows"}
BOTH = {"meta": {"quantizer": ["gptqmodel:6.0.0"]}, "pack_dtype": "int32"}
READ: list[tuple[dict[str, Any], Pack, str]] = [
    *(
        ({"group_size": size, "checkpoint_format": form}, gptq(size, added=added), f"int4_{group}_shifted")
        for size, group in GROUPS.items()
        for form, added in (("gptq", 1), ("gptq_v2", 0))
    ),
    ({}, gptq(symmetric=True), "int4_g32"),
    ({"sym": True}, gptq(added=0, symmetric=True), "int4_g32"),  # zero points of gptq_v2 under the name gptq
    ({"desc_act": True}, sorted_columns(True), "int4_g32_ordered"),
    ({"desc_act": True}, sorted_columns(False), "int4_g32_shifted_ordered"),
    ({"bits": 8, "group_size": -1}, gptq(-1, bits=8, symmetric=True), "w8a16"),
    ({"bits": 8}, gptq(bits=8, symmetric=True), "codebook4+4_g32_none_shifted"),
    ({"bits": 8}, gptq(bits=8), "codebook4+4_g32_none_shifted"),
    ({"bits": 8, "group_size": -1}, gptq(-1, bits=8), "codebook4+4_rows_none_shifted"),
    (AWQ, awq(), "int4_g32_shifted"),
    ({**AWQ, "group_size": 64}, awq(64), "int4_g64_shifted"),
    ({**BOTH, "method": "gptq"}, gptq(), "int4_g32_shifted"),
    ({**AWQ, **BOTH, "method": "awq"}, awq(), "int4_g32_shifted"),
]


@pytest.mark.parametrize(("changes", "pack", "scheme"), READ)
def test_weights_are_those_of_the_definition(tmp_path: Path, changes: dict[str, Any], pack: Pack, scheme: str) -> None:
    config = changes if "quant_method" in changes else {**GPTQ, **changes}
    check(tmp_path, samples.write(tmp_path, config, pack), scheme)


@pytest.mark.parametrize(("form", "added"), [("gptq", 1), ("gptq_v2", 0)])
def test_zero_points_of_0(tmp_path: Path, form: str, added: int) -> None:
    config = {**GPTQ, "checkpoint_format": form}
    expected = samples.write(tmp_path, config, lambda _, w: samples.gptq(w.abs(), size=32, added=added))
    assert min(float(m.weight.detach().min()) for m in samples.linears(expected).values()) >= 0
    check(tmp_path, expected, "int4_g32_shifted")


def test_16_bit_tokens_round_once(tmp_path: Path) -> None:
    expected = samples.write(tmp_path, AWQ, lambda _, w: samples.awq(w, 32))
    layer = qcut.load(tmp_path, progress=False).get_submodule(FIRST)
    x = torch.randn(7, samples.HIDDEN).half()
    exact = x.double() @ expected.get_submodule(FIRST).weight.double().T
    assert layer(x).dtype is torch.float16
    bound = exact.abs() * 2.0**-11 + 1e-4 * x.double().abs() @ expected.get_submodule(FIRST).weight.abs().double().T
    assert bool(((layer(x).double() - exact).abs() <= bound).all())


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("bits", 3, "bits is 3; 4 and 8 are served"),
        ("bits", "4", "field 'bits': found '4'"),
        ("group_size", 0, "group_size is 0"),
        ("checkpoint_format", "marlin", "checkpoint_format is 'marlin'; gptq, gptq_v2"),
        ("pack_dtype", "int8", "pack_dtype is 'int8'"),
        ("dynamic", {"-:lm_head": {}}, "dynamic is"),
        ("quant_method", ["gptq"], r"quant_method \"\['gptq'\]\"; compressed-tensors, gptq"),
        ("method", "qqq", "field 'method': found 'qqq'; allowed: one of gptq"),
        ("quant_method", "quip", "quant_method 'quip'; compressed-tensors, gptq"),
        ("group_size", 64, "qzeros': found I32 .*; needed: I32"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, key: str, value: object, text: str) -> None:
    samples.write(tmp_path, GPTQ, lambda _, w: samples.gptq(w, size=32))
    samples.change_config(tmp_path, lambda config: config.update({key: value}))
    samples.refused(tmp_path, (CheckpointError, UnsupportedError), text)


def test_tensors_that_are_refused(tmp_path: Path) -> None:
    def damaged(name: str, edit: Any, text: str) -> None:
        samples.write(tmp_path, GPTQ, lambda _, w: samples.gptq(w, size=32))
        samples.change(tmp_path, edit)
        samples.refused(tmp_path, (CheckpointError, UnsupportedError), text)

    damaged("shape", lambda t: t.update({f"{FIRST}.scales": torch.ones(3, 64).half()}), "scales': found F16 .3, 64.")
    damaged("dtype", lambda t: t.update({f"{FIRST}.qweight": torch.ones(8, 64)}), "qweight': found F32")
    damaged("missing", lambda t: t.pop(f"{FIRST}.qzeros"), "qzeros': is missing")
    damaged("extra", lambda t: t.update({f"{FIRST}.extra": torch.ones(1)}), "extra': the format has none")
    damaged("foreign", lambda t: t.update({"model.layers.7.x.qweight": torch.ones(1)}), "belong to no layer")
    damaged("nan", lambda t: t[f"{FIRST}.scales"].fill_(float("nan")), "scales': found nan")
    damaged("norm", lambda t: t.pop("model.norm.weight"), "1 tensors of the model are missing .*'model.norm.weight'")
    damaged("uneven", lambda t: t[f"{FIRST}.g_idx"].fill_(0), "g_idx': found group 0 at place 32")


@pytest.mark.parametrize(
    ("config", "n", "k", "text"),
    [
        (GPTQ, 60, 64, "qweight': the layer is .N=60, K=64.; N and K are packed in multiples of 8"),
        (GPTQ, 64, 68, "N and K are packed in multiples of 8"),
        ({**GPTQ, "bits": 8}, 64, 62, "N and K are packed in multiples of 4"),
        (AWQ, 60, 64, "N is packed in multiples of 8"),
        (AWQ, 64, 68, "qweight': found I32 .64, 8.; needed: I32 .68, 8."),
    ],
)
def test_sizes_that_words_do_not_fill_are_refused(config: dict[str, Any], n: int, k: int, text: str) -> None:
    method = config["quant_method"]
    weight = torch.randn(64, 64)
    packed, _ = samples.gptq(weight, size=32) if method == "gptq" else samples.awq(weight, 32)
    with pytest.raises(CheckpointError, match=text):
        layer_of(format_of(config, "c", method), "l", packed, n, k)


def test_other_versions_of_awq_are_refused(tmp_path: Path) -> None:
    samples.write(tmp_path, {**AWQ, "version": "gemv"}, lambda _, w: samples.awq(w, 32))
    samples.refused(tmp_path, UnsupportedError, "version is 'gemv'; gemm is served")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    samples.write(tmp_path, AWQ, lambda _, w: samples.awq(w, 32))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    samples.refused(tmp_path, CheckpointError, "model.safetensors: truncated")


def test_pickles_are_not_read(tmp_path: Path) -> None:
    samples.write(tmp_path, AWQ, lambda _, w: samples.awq(w, 32))
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    samples.refused(tmp_path, CheckpointError, "no safetensors files; pickles are not read")
