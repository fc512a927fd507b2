"""Folders of quantized models that are damaged, newer or made up: an exception of qcut's that names what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import qcut
from qcut.errors import CheckpointError, QcutError
from tests.integrations.transformers.support import opened, quantized, same, small
from tests.support.files import rewrite

UP = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    quantized("llama", embeddings="w8a16").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path, dirs_exist_ok=True)


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    rewrite(folder / "config.json", lambda data: change(data["quantization_config"]))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    rewrite(folder / "model.safetensors", change)


def refused(folder: Path, match: str) -> None:
    for read in (opened, lambda path: qcut.load(path, progress=False)):
        with pytest.raises(CheckpointError, match=match):
            read(folder)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda q: q.update(format_version=4), r"format_version 4; 'qcut' and one of \(1, 2, 3\) are needed"),
        (lambda q: q.pop("format_version"), "format_version None"),
        (lambda q: q.update(bits=4), "bits"),
        (lambda q: q.pop("layers"), "layers"),
        (lambda q: q.update(layers=[]), "layers"),
        (lambda q: q["layers"][UP].update(in_features="64"), "in_features"),
        (lambda q: q["layers"][UP].update(in_features=1 << 40), "in_features"),
        (lambda q: q["layers"][UP].update(out_features=1 << 30), "up_proj"),
        (lambda q: q["layers"][UP].update(in_features=32), r"up_proj.*saved with \(K, N\) = \(32, 128\)"),
        (lambda q: q["layers"][UP].update(activation="exp"), "activation"),
        (lambda q: q["layers"][UP].update(bias=True), "up_proj.bias' is missing"),
        (lambda q: q["layers"][UP].update(extra=1), "extra"),
        (lambda q: q["layers"][UP].update(scheme={"kind": "codebook", "bits": 9}), "up_proj.*bits is 9"),
        (lambda q: q["layers"][UP].update(scheme="w8a8"), "up_proj"),
        (lambda q: q["layers"].update({"model.layers.9.mlp.up_proj": q["layers"][UP]}), "layers.9.mlp.up_proj"),
        (lambda q: q["layers"].update({"model.norm": q["layers"][UP]}), "model.norm.*no linear layer"),
        (lambda q: q["layers"].pop(UP), "up_proj"),
        (lambda q: q.update(fused={UP: "relu"}), "up_proj"),
        (lambda q: q.update(fused={"model.nothing": "relu"}), "model.nothing"),
        (lambda q: q.update(embeddings={}), "embed_tokens"),
        (lambda q: q["embeddings"]["model.embed_tokens"].update(dtype="int8"), "dtype"),
        (lambda q: q["embeddings"]["model.embed_tokens"].update(table="nothing"), "embed_tokens"),
        (lambda q: q.update(tied={f"{UP}.indices": "nothing.indices"}), "up_proj.indices|nothing.indices"),
        (lambda q: q.update(tied=3), "tied"),
    ],
)
def test_descriptions(folder: Path, change: Any, match: str) -> None:
    change_config(folder, change)
    refused(folder, match)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop(f"{UP}.indices"), "up_proj.indices' is missing"),
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight' is missing"),
        (lambda t: t.update({f"{UP}.more": torch.ones(2)}), "up_proj.more' does not belong"),
        (lambda t: t.update({f"{UP}.weight": torch.ones(128, 64)}), "up_proj.weight' does not belong"),
        (lambda t: t.update({"model.norm.more": torch.ones(2)}), "norm.more' does not belong"),
        (
            lambda t: t.update({f"{UP}.norms": torch.ones(128, 9).half()}),
            r"up_proj.norms': found torch.float16 \[128, 9\]",
        ),
        (lambda t: t.update({f"{UP}.norms": t[f"{UP}.norms"].float()}), "up_proj.norms': found torch.float32"),
        (lambda t: t.update({f"{UP}.norms": -t[f"{UP}.norms"]}), "up_proj.norms': found -"),
        (lambda t: t.update({f"{UP}.codebook": t[f"{UP}.codebook"].flip(0)}), "codebook.*ascending"),
        (lambda t: t.update({"model.norm.weight": torch.ones(65)}), r"norm.weight': found \[65\], \[64\]"),
        (lambda t: t["model.norm.weight"].fill_(torch.nan), "norm.weight': found nan"),
        (lambda t: t["lm_head.weight_scale"].fill_(0), "lm_head.weight_scale"),
    ],
)
def test_tensors(folder: Path, change: Any, match: str) -> None:
    change_tensors(folder, change)
    refused(folder, match)


def test_truncated_files(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    refused(folder, "model.safetensors|truncated|incomplete")


@pytest.mark.parametrize("key", ["num_hidden_layers", "vocab_size", "intermediate_size", "hidden_size"])
def test_sizes_that_the_files_do_not_bear_out(folder: Path, key: str) -> None:
    rewrite(folder / "config.json", lambda data: data.update({key: 1 << 15}))
    with pytest.raises(CheckpointError):
        qcut.load(folder)
    if key != "num_hidden_layers":  # a model of so many layers takes minutes to make, before it is given to qcut
        with pytest.raises(CheckpointError):
            opened(folder)


def test_unknown_model_class_is_not_searched(folder: Path) -> None:
    kept = (folder / "config.json").read_text()
    rewrite(folder / "config.json", lambda data: data.update(architectures=["Nothing"]))
    with pytest.raises(CheckpointError, match="model class 'Nothing'"):
        qcut.load(folder)
    (folder / "config.json").write_text(kept)
    rewrite(folder / "config.json", lambda data: data.update(auto_map={"AutoModelForCausalLM": "code.Model"}))
    assert same(qcut.load(folder), opened(folder))


def test_a_second_configuration_does_not_quantize_again(folder: Path) -> None:
    model = opened(folder)
    with pytest.warns(UserWarning, match="already has a `quantization_config`"):
        assert same(opened(folder, quantization_config=qcut.QcutConfig("w8a8")), model)


def test_a_float_folder_is_no_quantized_model(tmp_path: Path) -> None:
    small("llama").save_pretrained(tmp_path)
    with pytest.raises(QcutError, match=r"qcut_config\.json"):
        qcut.load(tmp_path)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.input_layernorm.weight"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_floats_stored_as_other_kinds(folder: Path, name: str, dtype: torch.dtype) -> None:
    change_tensors(folder, lambda tensors: tensors.update({name: torch.ones_like(tensors[name]).to(dtype)}))
    refused(folder, rf"tensor '{name}': found .*; a floating dtype of 16, 32 or 64 bits is needed")


def test_floats_stored_as_integers_are_not_quantized(tmp_path: Path) -> None:
    small("llama").save_pretrained(tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.update({f"{UP}.weight": tensors[f"{UP}.weight"].to(torch.int8)}))
    with pytest.raises(CheckpointError, match=rf"tensor '{UP}.weight': found I8; a floating dtype"):
        opened(tmp_path, quantization_config=qcut.QcutConfig("w8a16"))


def test_an_adapter_beside_a_model_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: an adapter next to a model"):
        qcut.load(folder, progress=False)


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ({"weight_map": {"a": "../other/model.safetensors"}}, "a .safetensors file in the same directory is needed"),
        ({"weight_map": {"a": "gone.safetensors"}}, "no such file"),
        ({}, "field 'weight_map' is missing"),
    ],
    ids=str,
)
def test_index_of_other_files_is_refused(index: dict[str, Any], text: str, tmp_path: Path) -> None:
    quantized("llama", "w8a8").save_pretrained(tmp_path, max_shard_size="40KB")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=text):
        qcut.load(tmp_path, progress=False)
