"""Configurations that ask for more than the files hold fail at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from qcut.checkpoints import qcut_format
from qcut.checkpoints.limits import LEAST_PARTS, MODULES_PER_TENSOR, check_counts, limited_modules
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
    fails_at_once(tmp_path, rf"{key} is 1000000000 in the configuration; at most \d+ are read here")


def test_counts_in_turboquants_format(tmp_path: Path) -> None:
    model = tiny_hf("llama")
    writer.quantize_model(model, Config(group_size=16), progress=False)
    writer.save_turboquant(model, tmp_path)
    for name in ("qcut_config.json", "config.json"):
        if (tmp_path / name).exists():
            rewrite(tmp_path / name, lambda data: data.update(num_hidden_layers=10**9))
    fails_at_once(tmp_path, "num_hidden_layers is 1000000000")


def test_models_of_far_more_modules_than_tensors(tmp_path: Path) -> None:
    model = tiny_hf("gpt2")
    quantize(model, progress=False)
    qcut_format.save(model, tmp_path)

    def change(data: dict[str, Any]) -> None:
        data["huggingface"]["config"]["n_layer"] = LEAST_PARTS

    rewrite(tmp_path / "qcut_config.json", change)
    fails_at_once(tmp_path, r"the model has more than \d+ modules, for \d+ stored tensors")


def test_what_models_state_is_let_through() -> None:
    config = {"n_layer": 12, "vocab_size": 1 << 30, "num_experts": 900, "text": {"num_hidden_layers": 126, "rope": 1e9}}
    check_counts(config | {"n_positions": 1 << 24, "layer_types": ["a"] * 5, "eos_token_id": 1 << 40}, 10, Path("x"))
    for bad in ({"text": {"num_hidden_layers": 5000}}, {"depths": [2, 5000]}, {"num_attention_heads": 1 << 24}):
        with pytest.raises(CheckpointError, match="in the configuration"):
            check_counts(bad, 10, Path("x"))


def test_modules_are_counted_within_the_block_alone() -> None:
    def build(count: int) -> Callable[[], object]:
        return lambda: nn.ModuleList([nn.Identity() for _ in range(count)])

    most = LEAST_PARTS + MODULES_PER_TENSOR * 3
    with limited_modules(3, Path("x")):
        build(most)()
    with (
        pytest.raises(CheckpointError, match=f"x: the model has more than {most} modules"),
        limited_modules(3, Path("x")),
    ):
        build(most + 1)()
    build(most + 1)()
