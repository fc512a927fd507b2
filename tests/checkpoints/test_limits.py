"""Configurations that ask for more than the files hold fail at once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import qcut
from qcut.checkpoints.formats.turboquant import writer
from qcut.checkpoints.formats.turboquant.format import Config
from qcut.conversion.quantize import quantize
from qcut.errors import CheckpointError
from tests.support.files import rewrite
from tests.support.zoo import tiny_hf


def fails_at_once(folder: Path, message: str) -> None:
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match=message):
        qcut.load(folder, progress=False, verify=False)
    assert time.perf_counter() - start < 10


WIDE = {f"k{i}": i % 7 for i in range(1 << 16)}
MANY = r"a model of more than \d+ modules and tensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tiny_hf("gpt2")
    quantize(model, progress=False)
    qcut.save(model, tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("config", {"n_layer": 10**9}, r"n_layer is 1000000000; allowed: at most \d+"),
        ("config", {"num_labels": 10**9}, r"num_labels is 1000000000; allowed: at most \d+"),
        ("config", {"n_layer": 1024}, MANY),
        ("config", {"n_layer": 65536}, MANY),
        ("config", WIDE, r"config has \d+ values or more; allowed: 65536"),
        ("generation_config", WIDE, r"generation_config has \d+ values or more; allowed: 65536"),
    ],
    ids=["layers", "labels", "modules", "more modules", "values", "values of generation"],
)
def test_counts_in_qcuts_format(folder: Path, part: str, change: dict[str, int], message: str) -> None:
    rewrite(folder / "qcut_config.json", lambda data: data["huggingface"].setdefault(part, {}).update(change))
    fails_at_once(folder, message)


def test_counts_in_turboquants_format(tmp_path: Path) -> None:
    model = tiny_hf("llama")
    writer.quantize_model(model, Config(group_size=16), progress=False)
    writer.save_turboquant(model, tmp_path)
    for name in ("qcut_config.json", "config.json"):
        if (tmp_path / name).exists():
            rewrite(tmp_path / name, lambda data: data.update(num_hidden_layers=10**9))
    fails_at_once(tmp_path, "num_hidden_layers is 1000000000; allowed: at most")


def test_labels_of_many_classes_are_read(folder: Path) -> None:
    labels = {str(i): f"class {i}" for i in range(21843)}
    both = {"id2label": labels, "label2id": {name: int(i) for i, name in labels.items()}}
    rewrite(folder / "qcut_config.json", lambda data: data["huggingface"]["config"].update(both))
    assert len(qcut.load(folder, progress=False, verify=False).config.id2label) == 21843
