"""Configurations that ask for more than the files hold fail at once."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from transformers import GPTJConfig, GPTJForCausalLM

import qcut
from qcut.checkpoints.formats.turboquant import writer
from qcut.checkpoints.formats.turboquant.format import Config
from qcut.checkpoints.pretrained import load_pretrained
from qcut.conversion.quantize import quantize
from qcut.errors import CheckpointError
from tests.support import ROOT
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


@pytest.mark.parametrize("writer", ["compressed-tensors", "save_pretrained", "float"])
def test_computed_buffers_are_bounded(tmp_path: Path, writer: str) -> None:
    sizes = {"vocab_size": 64, "n_embd": 64, "n_layer": 1, "n_head": 4, "rotary_dim": 16, "n_positions": 32}
    model = GPTJForCausalLM(GPTJConfig(**sizes))
    if writer == "compressed-tensors":
        qcut.quantize(model, "w8a8", progress=False)
        qcut.save_compressed_tensors(model, tmp_path)
    else:
        model.save_pretrained(tmp_path)
    if writer == "save_pretrained":
        GPTJForCausalLM.from_pretrained(tmp_path, quantization_config=qcut.QcutConfig("w8a8")).save_pretrained(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "models" / "gpt2-5m" / file, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rotary_dim": 1 << 24}))
    with pytest.raises(CheckpointError, match=r"2147483648 bytes of buffers; the largest is '.*embed_positions'"):
        load_pretrained(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
