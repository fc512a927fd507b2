"""Configurations that ask for more than the files hold fail at once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from qcut.checkpoints import qcut_format
from qcut.checkpoints.turboquant import writer
from qcut.checkpoints.turboquant.format import Config
from qcut.conversion.convert import quantize
from qcut.errors import CheckpointError
from tests.support.tamper import rewrite
from tests.support.zoo import tiny_hf


def fails_at_once(folder: Path, message: str) -> None:
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match=message):
        qcut_format.load(folder, progress=False, verify=False)
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize("key", ["n_layer", "num_labels"])
def test_counts_in_qcuts_format(tmp_path: Path, key: str) -> None:
    model = tiny_hf("gpt2")
    quantize(model, progress=False)
    qcut_format.save(model, tmp_path)
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
    qcut_format.save(model, tmp_path)

    def change(data: dict[str, Any]) -> None:
        data["huggingface"]["config"]["n_layer"] = layers

    rewrite(tmp_path / "qcut_config.json", change)
    fails_at_once(tmp_path, r"a model of more than \d+ modules and tensors")
