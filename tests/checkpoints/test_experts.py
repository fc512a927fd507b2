"""Stacks of experts in qcut's own format: bit by bit, in shards, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import qcut
from qcut.checkpoints.description import quantization_config
from qcut.errors import CheckpointError
from tests.integrations.transformers.mixtures import FAMILIES, mixture, quantized_mixture
from tests.integrations.transformers.support import same
from tests.support.files import rewrite

NAME = "model.layers.0.mlp.experts"


def load(folder: Path, **options: Any) -> Any:
    return qcut.load(folder, progress=False, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_stacks_are_saved_and_loaded(family: str, tmp_path: Path) -> None:
    model = quantized_mixture(family, "codebook4+4_int8")
    qcut.save(model, tmp_path, max_shard_bytes=16 << 10)
    assert same(load(tmp_path), model)
    assert same(load(tmp_path, model=lambda: mixture(family)), model)


SHARED = ("mlp.experts", "mlp.gate", "mlp", "input_layernorm", "self_attn.q_proj", "self_attn", "")


def sharing(part: str) -> Any:
    """A mixture with a module of its first layer in its second one too."""
    model = mixture()
    first, second = (f"model.layers.{i}.{part}".rstrip(".") for i in (0, 1))
    outer, _, key = second.rpartition(".")
    setattr(model.get_submodule(outer), key, model.get_submodule(first))
    return model, first, second


@pytest.mark.parametrize("part", SHARED)
def test_shared_modules_are_shared_again(part: str, tmp_path: Path) -> None:
    model, first, second = sharing(part)
    qcut.quantize(model, "w8a8", progress=False)
    qcut.save(model, tmp_path)
    for build in (None, mixture, lambda: sharing(part)[0]):
        again = load(tmp_path, model=build)
        assert again.get_submodule(second) is again.get_submodule(first)
        assert same(again, model)


@pytest.mark.parametrize("part", SHARED)
def test_transformers_saves_no_shared_module(part: str, tmp_path: Path) -> None:
    model, first, second = sharing(part)
    qcut.quantize(model, "w8a8", progress=False)
    with pytest.raises(CheckpointError, match=f"'{second}' and '{first}' are one"):
        model.save_pretrained(tmp_path)


def test_transformers_saves_no_shared_float_weight(tmp_path: Path) -> None:
    model = quantized_mixture()
    first, second = (layer.input_layernorm for layer in model.model.layers)
    second.weight = first.weight
    with pytest.raises(
        CheckpointError, match=r"1\.input_layernorm\.weight' and '\S+0\.input_layernorm\.weight' are one"
    ):
        model.save_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("shared", "match"),
    [
        ({"model.layers.1.mlp.x": "model.layers.0.mlp"}, "no attribute `x`"),
        ({"model.layers.1": "model.layers.0.mlp"}, r"'model\.layers\.1' and 'model\.layers\.0\.mlp' were one"),
        ({"model.layers.1.mlp": "model"}, "were one module"),
        ({"model.layers": "model.layers.0"}, "were one module"),
        ({"model.layers.1": 5}, "found 5"),
    ],
)
def test_damaged_names_of_shared_modules_are_refused(shared: dict[str, Any], match: str, tmp_path: Path) -> None:
    qcut.save(quantized_mixture(), tmp_path)
    path = tmp_path / "qcut_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"shared": shared}))
    with pytest.raises(CheckpointError, match=match):
        load(tmp_path, verify=False)


def test_only_models_with_experts_have_newer_versions(tmp_path: Path) -> None:
    dense, mixed = quantized_mixture(include=["q_proj"]), quantized_mixture()
    for name, model in (("dense", dense), ("mixed", mixed)):
        qcut.save(model, tmp_path / name)
    versions = [
        json.loads((tmp_path / name / "qcut_config.json").read_text())["version"] for name in ("dense", "mixed")
    ]
    assert versions == [1, 2]
    assert [quantization_config(model, {})["format_version"] for model in (dense, mixed)] == [2, 3]
    assert "experts" not in quantization_config(dense, {})


def put(key: str, at: tuple[int, ...], value: float) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{NAME}.{key}"][at] = value

    return change


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (put("up.weight_scale", (3, 5), float("inf")), r"model-\S+: tensor '\S+up\.weight_scale': expert 3: "),
        (put("down.weight_scale", (2, 1), float("nan")), r"experts\.down\.weight_scale': expert 2: found nan"),
        (put("up.weight_scale", (0, 9), 0.0), r"experts\.up\.weight_scale': expert 0: found 0"),
    ],
)
def test_values_of_experts_are_refused(change: Callable[[dict[str, Tensor]], None], match: str, tmp_path: Path) -> None:
    qcut.save(quantized_mixture(scheme="w8a8"), tmp_path)
    for path in tmp_path.glob("model-*.safetensors"):
        rewrite(path, lambda tensors: change(tensors) if f"{NAME}.up.qweight" in tensors else None)
    with pytest.raises(CheckpointError, match=match):
        load(tmp_path, verify=False)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d: d["layers"][f"{NAME}.up"].update(experts=8), r"saved with \(E, K, N, bias\) = \(8, 64, 32"),
        (lambda d: d["layers"][f"{NAME}.up"].update(experts=3), "256 rows of 3 experts"),
        (lambda d: d["layers"][f"{NAME}.up"].pop("experts"), r"experts\.up"),
        (lambda d: d["experts"].pop(NAME), r"experts\.up"),
        (lambda d: d["experts"][NAME].update(count=5), "saved are 5"),
        (lambda d: d["experts"][NAME].update(gating={"kind": "silu", "limit": 7.0}), "limit=7.0"),
        (
            lambda d: d["huggingface"]["config"].update(num_experts=8, num_local_experts=8),
            "saved are 4 .*the model has 8",
        ),
    ],
)
def test_descriptions_of_stacks_are_refused(
    change: Callable[[dict[str, Any]], object], match: str, tmp_path: Path
) -> None:
    qcut.save(quantized_mixture(), tmp_path)
    rewrite(tmp_path / "qcut_config.json", change)
    with pytest.raises(CheckpointError, match=match):
        load(tmp_path, verify=False)


def test_missing_stack_is_refused(tmp_path: Path) -> None:
    qcut.save(quantized_mixture(), tmp_path)
    rewrite(tmp_path / "qcut_config.json", lambda data: data["weight_map"].pop(f"{NAME}.down.norms"))
    with pytest.raises(CheckpointError, match=r"experts\.down\.norms"):
        load(tmp_path, verify=False)


def test_loaded_experts_compute_as_saved(tmp_path: Path) -> None:
    model = quantized_mixture("GptOss", "int4")
    qcut.save(model, tmp_path)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    index, weights = torch.tensor([[0, 3], [3, 0], [1, 2], [2, 2], [0, 0]]), torch.rand(5, 2)
    one, other = (m.model.layers[0].mlp.experts for m in (model, load(tmp_path)))
    with torch.no_grad():
        assert torch.equal(one(x, index, weights), other(x, index, weights))
