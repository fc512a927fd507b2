"""Configurations that ask for more than the files hold fail at once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("key", ["n_layer", "num_labels"])
def test_counts_in_qcuts_format(tmp_path: Path, key: str) -> None:
    model = tiny_hf("gpt2")
    quantize(model, progress=False)
    qcut.save(model, tmp_path)
    rewrite(tmp_path / "qcut_config.json", lambda data: data["huggingface"]["config"].update({key: 10**9}))
    fails_at_once(tmp_path, rf"{key} is 1000000000; allowed: at most \d+")


def test_counts_in_turboquants_format(tmp_path: Path) -> None:
    model = tiny_hf("llama")
    writer.quantize_model(model, Config(group_size=16), progress=False)
    writer.save_turboquant(model, tmp_path)
    for name in ("qcut_config.json", "config.json"):
        if (tmp_path / name).exists():
            rewrite(tmp_path / name, lambda data: data.update(num_hidden_layers=10**9))
    fails_at_once(tmp_path, "num_hidden_layers is 1000000000; allowed: at most")


@pytest.mark.parametrize("layers", [1024, 65536])
def test_models_of_far_more_modules_than_tensors(tmp_path: Path, layers: int) -> None:
    model = tiny_hf("gpt2")
    quantize(model, progress=False)
    qcut.save(model, tmp_path)

    def change(data: dict[str, Any]) -> None:
        data["huggingface"]["config"]["n_layer"] = layers

    rewrite(tmp_path / "qcut_config.json", change)
    fails_at_once(tmp_path, r"a model of more than \d+ modules and tensors")


@pytest.mark.parametrize("key", ["config", "generation_config"])
def test_configurations_of_many_values(tmp_path: Path, key: str) -> None:
    model = tiny_hf("gpt2")
    quantize(model, progress=False)
    qcut.save(model, tmp_path)
    wide = {f"k{i}": i % 7 for i in range(1 << 16)}
    rewrite(tmp_path / "qcut_config.json", lambda data: data["huggingface"].setdefault(key, {}).update(wide))
    fails_at_once(tmp_path, rf"{key} has \d+ values or more; allowed: 65536")


def test_labels_of_many_classes_are_read(tmp_path: Path) -> None:
    model = tiny_hf("gpt2")
    quantize(model, progress=False)
    qcut.save(model, tmp_path)
    labels = {str(i): f"class {i}" for i in range(21843)}
    backwards = {name: int(i) for i, name in labels.items()}

    def change(data: dict[str, Any]) -> None:
        data["huggingface"]["config"] |= {"id2label": labels, "label2id": backwards}

    rewrite(tmp_path / "qcut_config.json", change)
    assert len(qcut.load(tmp_path, progress=False, verify=False).config.id2label) == 21843
