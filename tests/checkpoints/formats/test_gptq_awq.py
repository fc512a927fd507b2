"""GPTQ and AWQ checkpoints: served weights are those of the formats' definitions, and what is not served is refused."""

from __future__ import annotations

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

FIRST = "model.layers.0.self_attn.q_proj"


def check(folder: Path, expected: Any, scheme: str) -> torch.nn.Module:
    """Weights exactly those expected, logits near those of float64, and a save and load that change no bit."""
    model = samples.loaded(folder)
    for name, module in samples.linears(expected).items():
        layer = model.get_submodule(name)
        assert isinstance(layer, qcut.Linear)
        assert layer.scheme.name == scheme, name
        assert torch.equal(layer.dequantized_weight().double(), module.weight), name
        assert torch.equal(layer.rows(torch.tensor([3, 0])).double(), module.weight[[3, 0]]), name
    with torch.no_grad():
        logits, wanted = model(samples.IDS).logits, expected(samples.IDS).logits
        torch.testing.assert_close(logits.double(), wanted, rtol=1e-3, atol=1e-3)
        qcut.save(model, folder / "saved")
        assert torch.equal(qcut.load(folder / "saved", progress=False)(samples.IDS).logits, logits)
    return model


@pytest.mark.parametrize(("form", "added"), [("gptq", 1), ("gptq_v2", 0)])
@pytest.mark.parametrize("size", [32, 64, -1])
def test_zero_points_of_gptq(tmp_path: Path, form: str, added: int, size: int) -> None:
    config = {**GPTQ, "group_size": size, "checkpoint_format": form}

    def pack(name: str, weight: Tensor) -> samples.Packed:
        return samples.gptq(weight, size=weight.shape[1] if size == -1 else size, added=added)

    scheme = {32: "int4_g32_shifted", 64: "int4_g64_shifted", -1: "int4_rows_shifted"}[size]
    check(tmp_path, samples.write(tmp_path, config, pack), scheme)


@pytest.mark.parametrize(("form", "added"), [("gptq", 1), ("gptq_v2", 0)])
def test_zero_points_of_0(tmp_path: Path, form: str, added: int) -> None:
    config = {**GPTQ, "checkpoint_format": form}
    expected = samples.write(tmp_path, config, lambda _, w: samples.gptq(w.abs(), size=32, added=added))
    assert min(float(m.weight.detach().min()) for m in samples.linears(expected).values()) >= 0
    check(tmp_path, expected, "int4_g32_shifted")


def test_symmetric_gptq_is_a_plain_codebook(tmp_path: Path) -> None:
    expected = samples.write(tmp_path, GPTQ, lambda _, w: samples.gptq(w, size=32, symmetric=True))
    check(tmp_path, expected, "int4_g32")


def test_gptq_v2_zero_points_under_the_name_gptq(tmp_path: Path) -> None:
    expected = samples.write(
        tmp_path, {**GPTQ, "sym": True}, lambda _, w: samples.gptq(w, size=32, added=0, symmetric=True)
    )
    check(tmp_path, expected, "int4_g32")


@pytest.mark.parametrize("symmetric", [False, True])
def test_columns_sorted_by_activation(tmp_path: Path, symmetric: bool) -> None:
    def pack(name: str, weight: Tensor) -> samples.Packed:
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(len(name)))
        return samples.gptq(weight, size=32, order=order, symmetric=symmetric)

    expected = samples.write(tmp_path, {**GPTQ, "desc_act": True}, pack)
    check(tmp_path, expected, "int4_g32_ordered" if symmetric else "int4_g32_shifted_ordered")


def test_8_bits_with_a_scale_for_each_row(tmp_path: Path) -> None:
    config = {**GPTQ, "bits": 8, "group_size": -1}
    expected = samples.write(tmp_path, config, lambda _, w: samples.gptq(w, size=w.shape[1], bits=8, symmetric=True))
    check(tmp_path, expected, "w8a16")


@pytest.mark.parametrize(("size", "symmetric"), [(32, True), (32, False), (-1, False)])
def test_8_bits_in_groups_or_with_zero_points(tmp_path: Path, size: int, symmetric: bool) -> None:
    def pack(name: str, weight: Tensor) -> samples.Packed:
        return samples.gptq(weight, size=weight.shape[1] if size == -1 else size, bits=8, symmetric=symmetric)

    expected = samples.write(tmp_path, {**GPTQ, "bits": 8, "group_size": size}, pack)
    check(tmp_path, expected, f"codebook4+4_{'rows' if size == -1 else 'g32'}_none_shifted")


@pytest.mark.parametrize("size", [32, 64])
def test_awq(tmp_path: Path, size: int) -> None:
    expected = samples.write(tmp_path, {**AWQ, "group_size": size}, lambda _, w: samples.awq(w, size))
    check(tmp_path, expected, f"int4_g{size}_shifted")


def test_16_bit_tokens_round_once(tmp_path: Path) -> None:
    expected = samples.write(tmp_path, AWQ, lambda _, w: samples.awq(w, 32))
    layer = qcut.load(tmp_path, progress=False).get_submodule(FIRST)
    x = torch.randn(7, samples.HIDDEN).half()
    exact = x.double() @ expected.get_submodule(FIRST).weight.double().T
    assert layer(x).dtype is torch.float16
    bound = exact.abs() * 2.0**-11 + 1e-4 * x.double().abs() @ expected.get_submodule(FIRST).weight.abs().double().T
    assert bool(((layer(x).double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("config", [GPTQ, AWQ], ids=["gptq", "awq"])
def test_method_under_both_its_names(config: dict[str, Any], tmp_path: Path) -> None:
    kind = config["quant_method"]
    both = {**config, "method": kind, "meta": {"quantizer": ["gptqmodel:6.0.0"]}, "pack_dtype": "int32"}
    pack = {"awq": lambda _, w: samples.awq(w, 32), "gptq": lambda _, w: samples.gptq(w, size=32)}[kind]
    expected = samples.write(tmp_path, both, pack)
    check(tmp_path, expected, "int4_g32_shifted")


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
