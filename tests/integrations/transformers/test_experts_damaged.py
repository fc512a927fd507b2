"""Folders of quantized mixtures that are damaged or made up: file and tensor are named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import qcut
from qcut.errors import CheckpointError
from tests.integrations.transformers.mixtures import quantized_mixture
from tests.integrations.transformers.support import opened
from tests.support.files import rewrite

NAME = "model.layers.1.mlp.experts"
STORED = "model.layers.1.block_sparse_moe.experts"


@pytest.fixture(scope="module", params=["Qwen3Moe", "Mixtral"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What stands before an expert's number in the files, and a folder; of two families, one with other names."""
    folder = tmp_path_factory.mktemp("written")
    quantized_mixture(request.param).save_pretrained(folder)
    return (NAME if request.param == "Qwen3Moe" else STORED), folder


@pytest.fixture
def folder(written: tuple[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(written[1], tmp_path, dirs_exist_ok=True)


@pytest.fixture
def experts(written: tuple[str, Path]) -> str:
    return written[0]


def refused(folder: Path, match: str) -> None:
    for read in (opened, lambda path: qcut.load(path, progress=False)):
        with pytest.raises(CheckpointError, match=match):
            read(folder)


DAMAGES: dict[str, tuple[Callable[[dict[str, Tensor], str, str], object], str]] = {
    "missing expert": (lambda t, at, _: _drop(t, f"{at}.3."), r"experts\.3\.\w+\.\w+' is missing"),
    "missing tensor": (lambda t, at, up: t.pop(f"{at}.1.{up}.norms"), r"experts\.1\.\w+\.norms' is missing"),
    "superfluous expert": (
        lambda t, at, up: t.update({f"{at}.4.{up}.norms": t[f"{at}.3.{up}.norms"]}),
        r"model\.safetensors: tensor '.*experts\.4\.\w+\.norms' does not belong to the model",
    ),
    "superfluous tensor": (
        lambda t, at, up: t.update({f"{at}.0.{up}.bias": torch.zeros(32)}),
        r"model\.safetensors: tensor '.*experts\.0\.\w+\.bias' does not belong to the model",
    ),
    "shape": (
        lambda t, at, up: t.update({f"{at}.0.{up}.indices": t[f"{at}.0.{up}.indices"][:16]}),
        r"model\.safetensors: tensor '.*experts\.0\.\w+\.indices': found torch\.uint8 \[16, 32\].*\[32, 32\] is needed",
    ),
    "dtype": (
        lambda t, at, up: t.update({f"{at}.0.{up}.indices": t[f"{at}.0.{up}.indices"].char()}),
        r"experts\.0\.\w+\.indices': found torch\.int8",
    ),
    "not a number": (
        lambda t, at, up: t[f"{at}.2.{up}.norms"].fill_(float("nan")),
        r"model\.safetensors: tensor '.*experts\.2\.\w+\.norms': found nan",
    ),
    "negative norms": (
        lambda t, at, up: t[f"{at}.2.{up}.norms"].fill_(-1.0),
        r"model\.safetensors: tensor '.*experts\.2\.\w+\.norms': found -1",
    ),
    "codebook": (
        lambda t, at, up: t[f"{at}.0.{up}.codebook"].copy_(t[f"{at}.0.{up}.codebook"].flip(0)),
        r"experts\.0\.\w+\.codebook': found",
    ),
    "other codebook": (
        lambda t, at, up: t[f"{at}.0.{up}.codebook"].mul_(2),
        r"experts\.0\.\w+\.codebook': found other values than those of (gate_proj|w1)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_tensors_of_experts(damage: str, folder: Path, experts: str) -> None:
    change, match = DAMAGES[damage]
    up = "up_proj" if experts == NAME else "w3"
    rewrite(folder / "model.safetensors", lambda tensors: _changed(tensors, lambda t: change(t, experts, up)))
    refused(folder, match)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda q: q["experts"][NAME].update(count=8), r"experts'.*saved are 8 with .*the model has 4"),
        (lambda q: q["experts"][NAME].update(count=1 << 20), "count"),
        (lambda q: q["experts"][NAME]["gating"].update(kind="relu"), "kind='relu'.*the model has 4 with"),
        (lambda q: q["experts"][NAME]["gating"].update(kind="exp"), "kind"),
        (lambda q: q["experts"][NAME].update(pieces={"up": ["a/b", "c"], "down": ["d"]}), "found pieces"),
        (lambda q: q["experts"][NAME].update(pieces={"up": ["a", "a"], "down": ["d"]}), "found pieces"),
        (lambda q: q["experts"][NAME].update(pieces={"up": [], "down": ["d"]}), "found pieces"),
        (lambda q: q["experts"][NAME].update(pieces={"up": ["a", "b"]}), "down"),
        (lambda q: q["experts"][NAME].update(pieces=None), r"experts\.(up|down)\.\w+' is missing"),
        (lambda q: q["experts"].update({"model.norm": q["experts"][NAME]}), "model.norm"),
        (lambda q: q["experts"].pop(NAME), "experts"),
        (lambda q: q["layers"].pop(f"{NAME}.up"), "does not belong|is missing"),
        (lambda q: q["layers"][f"{NAME}.up"].update(experts=2), r"saved with \(E, K, N, bias\)"),
        (lambda q: q["layers"][f"{NAME}.up"].update(out_features=255), "255 rows of 4 experts"),
        (lambda q: q["layers"][f"{NAME}.up"].update(out_features=1 << 30), r"experts\.up'.*the data files have"),
        (lambda q: q["layers"][f"{NAME}.up"].update(in_features=32), r"saved with \(E, K, N, bias\)"),
    ],
)
def test_descriptions_of_experts(change: Callable[[dict[str, Any]], object], match: str, folder: Path) -> None:
    rewrite(folder / "config.json", lambda data: change(data["quantization_config"]))
    refused(folder, match)


def _drop(tensors: dict[str, Tensor], prefix: str) -> None:
    for name in [name for name in tensors if name.startswith(prefix)]:
        del tensors[name]


def _changed(tensors: dict[str, Tensor], change: Callable[[dict[str, Tensor]], object]) -> None:
    change(tensors)
    tensors.update({name: tensor.clone() for name, tensor in tensors.items()})
