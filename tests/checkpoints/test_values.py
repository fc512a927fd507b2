"""Values that quantizing never gives are refused when read, with file, tensor and value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.checkpoints.formats.turboquant import writer
from qcut.checkpoints.formats.turboquant.format import Config
from qcut.conversion.calibration.calibrate import calibrate
from qcut.conversion.quantize import quantize
from qcut.errors import CheckpointError
from tests.support.files import rewrite

INF, NAN = float("inf"), float("nan")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"l": nn.Linear(20, 6), "norm": nn.LayerNorm(6)})


def saved(folder: Path, scheme: str) -> None:
    model = net()
    model.forward = lambda x: model["norm"](model["l"](x))  # type: ignore[method-assign,operator]
    calibration = calibrate(model, [torch.randn(9, 20)], progress=False)
    quantize(model, scheme, calibration=calibration, allow_growth=True, progress=False)
    qcut.save(model, folder)


def put(at: tuple[int, ...], value: float) -> Callable[[Tensor], Tensor]:
    def change(t: Tensor) -> Tensor:
        t[at] = value
        return t

    return change


CASES: list[tuple[str, str, Callable[[Tensor], Tensor], str]] = [
    ("w8a8_static", "l.qweight", put((2, 3), -128), r"found -128 at \[2, 3\]; -127 to 127"),
    ("w8a8", "l.qweight", put((2, 31), 1), r"found 1 at \[2, 11\] of the padding; 0"),
    *[("w8a16", "l.weight_scale", put((5,), v), rf"found {v} at \[5\]; values above 0") for v in (NAN, INF, -1.0, 0.0)],
    ("w8a8", "l.weight_scale", put((5,), 3e38), r"found 3\.0.*e\+38 at \[5\]"),
    *[("w8a8", "l.bias", put((1,), v), rf"found {v} at \[1\]; finite") for v in (NAN, -INF)],
    ("w8a8_static", "l.colsum", put((4,), 77), r"found 77 at \[4\], -?\d+ is needed: the sum of its row"),
    ("w8a8_static", "l.col_scale", put((4,), 77), r"found 77\.0 at \[4\], \d.* is needed: input_scale \* weight_scale"),
    ("w8a8_static", "l.col_scale", put((4,), NAN), r"found nan at \[4\]; finite"),
    *[("w8a8_static", "l.input_scale", put((0,), v), rf"found {v} at \[0\]") for v in (NAN, INF, -1.0, 0.0)],
    *[("w8a8_static", "l.input_zero_point", put((0,), v), rf"found {v} at \[0\]; -128 to 127") for v in (128, -129)],
    ("fp8_dynamic", "l.qweight", put((2, 3), NAN), r"found nan at \[2, 3\]; finite values"),
    ("fp8_static", "l.col_scale", put((4,), 77), r"found 77\.0 at \[4\], \d.* is needed: input_scale \* weight_scale"),
    *[("fp8_static", "l.input_scale", put((0,), v), rf"found {v} at \[0\]") for v in (NAN, INF, -1.0, 0.0)],
    *[("codebook4_g16", "l.norms", put((3, 1), v), rf"found {v} at \[3, 1\]; finite") for v in (NAN, INF, -1.0)],
    ("codebook4_g16", "l.codebook", put((3,), NAN), ".*finite values, ascending"),
    ("codebook4_g16", "l.codebook", lambda t: t.flip(0).contiguous(), ".*finite values, ascending"),
    ("codebook4_g16", "l.bias", put((1,), NAN), r"found nan at \[1\]"),
    ("codebook4+4_g16", "l.residual_codebook", lambda t: t * 2, "differs from codebook"),
    ("codebook4+3_g16", "l.residual_norms", put((3, 1), NAN), r"found nan at \[3, 1\]"),
    ("int4", "l.codebook", lambda t: t * 2, r".*int4 has \[-8\.0, -7\.0"),
    *[("nvfp4", "l.norms", put((3, 1), v), rf"found {v} at \[3, 1\]; finite") for v in (NAN, -1.0)],
    *[("nvfp4", "l.norm_scale", put((3,), v), rf"found {v} at \[3\]; 1.2e-35 to") for v in (NAN, INF, -1.0, 0.0)],
    ("w8a8", "norm.weight", put((2,), NAN), r"found nan at \[2\]; finite"),
    ("w8a8", "norm.bias", put((2,), INF), r"found inf at \[2\]; finite"),
]


@pytest.mark.parametrize(("scheme", "name", "change", "message"), CASES)
def test_what_cannot_be_is_refused(
    tmp_path: Path, scheme: str, name: str, change: Callable[[Tensor], Tensor], message: str
) -> None:
    saved(tmp_path, scheme)
    assert qcut.load(tmp_path, model=net, progress=False)
    (file,) = tmp_path.glob("model-*.safetensors")
    rewrite(file, lambda tensors: tensors.update({name: change(tensors[name])}))
    with pytest.raises(CheckpointError, match=rf"{file}: tensor '{name}': {message}"):
        qcut.load(tmp_path, model=net, progress=False, verify=False)
    with pytest.raises(CheckpointError, match="damaged"):
        qcut.load(tmp_path, model=net, progress=False)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("l.norms", put((3, 1), NAN), r"found nan at \[3, 1\]"),
        ("l.norms", put((3, 1), -1.0), r"found -1\.0 at \[3, 1\]"),
        ("codebook", put((3,), NAN), "does not ascend"),
        ("l.bias", put((1,), NAN), r"found nan at \[1\]"),
    ],
)
def test_what_cannot_be_in_turboquants_files(
    tmp_path: Path, part: str, change: Callable[[Tensor], Tensor], message: str
) -> None:
    model = net()
    writer.quantize_model(model, Config(group_size=16), progress=False)
    writer.save_turboquant(model, tmp_path)
    file = tmp_path / "model.safetensors"
    rewrite(file, lambda tensors: tensors.update({part: change(tensors[part])}))
    with pytest.raises(CheckpointError, match=rf"{file}: tensor '{part}'.*{message}"):
        qcut.load(tmp_path, model=net, progress=False, verify=False)


def test_what_would_be_refused_is_not_saved(tmp_path: Path) -> None:
    model = net()
    quantize(model, "w8a8", progress=False)
    with torch.no_grad():
        model["norm"].weight[3] = NAN  # type: ignore[index]
    with pytest.raises(CheckpointError, match=r"'norm\.weight': found nan at \[3\]; finite parameters can be saved"):
        qcut.save(model, tmp_path / "x")
    assert not (tmp_path / "x").exists()


# ── sizes ────────────────────────────────────────────────────────────────────────────────────────


def huge(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda data: data["layers"]["l"].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            huge(in_features=1 << 62),
            r"layers\.l\.in_features': found 4611686018427387904; allowed: a whole number from 1",
        ),
        (huge(in_features=(1 << 31) - 1, out_features=(1 << 31) - 1), r"layer 'l': saved with \(K, N\) = .*bytes"),
        (huge(in_features="20"), r"found '20'; allowed: a whole number"),
        (huge(bias=1), "found 1; allowed: true or false"),
        (huge(activation="tanh"), "found 'tanh'; allowed: one of none, relu"),
        (huge(scheme=[]), "not a scheme"),
        (lambda data: data.update(layers={str(i): data["layers"]["l"] for i in range(9)}), "'0'"),
        (lambda data: data["weight_map"].update({"l.qweight": "a" * 5000}), "text of up to 4096"),
        (lambda data: data.update(fused={"l": "tanh"}), "one of none, relu"),
        (lambda data: data.update(embeddings={"l": {"table": "l", "dtype": "int8"}}), "one of float16"),
    ],
)
def test_sizes_that_no_file_can_hold(tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    saved(tmp_path, "w8a8")
    rewrite(tmp_path / "qcut_config.json", change)
    with pytest.raises(CheckpointError, match=message) as caught:
        qcut.load(tmp_path, model=net, progress=False, verify=False)
    assert str(caught.value).startswith(str(tmp_path))
