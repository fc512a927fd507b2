"""Models for the commands: folders that are refused, and what stays as it was in the process around them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qcut.checkpoints.pretrained import load_pretrained
from qcut.errors import CheckpointError
from tests.fuzz.formats import build_huggingface
from tests.support import ROOT

hub = pytest.importorskip("huggingface_hub.utils")
logging = pytest.importorskip("transformers").logging

DEMO = ROOT / "models" / "gpt2-5m"


def bars() -> tuple[bool, bool]:
    return logging.is_progress_bar_enabled(), not hub.are_progress_bars_disabled()


def show(by_transformers: bool, by_hub: bool) -> None:
    (logging.enable_progress_bar if by_transformers else logging.disable_progress_bar)()
    (hub.enable_progress_bars if by_hub else hub.disable_progress_bars)()


@pytest.fixture(autouse=True)
def _bars() -> Iterator[None]:
    before = bars()
    yield
    show(*before)


@pytest.mark.parametrize("by_hub", [True, False])
@pytest.mark.parametrize("by_transformers", [True, False])
def test_progress_bars_are_off_and_then_as_before(
    by_transformers: bool, by_hub: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    show(by_transformers, by_hub)
    with pytest.raises(CheckpointError):
        load_pretrained(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    assert bars() == (by_transformers, by_hub)
    if by_transformers:
        load_pretrained(str(DEMO), dtype=torch.float32, device=torch.device("cpu"))
        assert bars() == (by_transformers, by_hub)
        assert capfd.readouterr().err == ""


def load(folder: Path) -> None:
    load_pretrained(str(folder), dtype=torch.float32, device=torch.device("cpu"))


def edit(name: str, change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def edited(folder: Path) -> None:
        data = json.loads((folder / name).read_text())
        change(data)
        (folder / name).write_text(json.dumps(data))

    return edited


def drop(name: str) -> Callable[[Path], None]:
    def dropped(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        del tensors[name]
        save_file(tensors, path, metadata={"format": "pt"})

    return dropped


def whole_numbers(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), "model.norm.weight": torch.ones(16, dtype=torch.int32)}, path, {"format": "pt"})


def huge_where_nothing_is_stored(folder: Path) -> None:
    for part in ("gate", "up", "down"):
        drop(f"model.layers.0.mlp.{part}_proj.weight")(folder)
    edit("config.json", lambda d: d.update(intermediate_size=10**6))(folder)


def pipe(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    os.mkfifo(folder / "generation_config.json")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            drop("model.layers.0.mlp.up_proj.weight"),
            r"1 missing tensors; first .*layers.0.mlp.up_proj",
        ),
        (edit("config.json", lambda d: d.pop("num_hidden_layers")), "missing tensors; first"),
        (
            edit("config.json", lambda d: d.update(num_hidden_layers=10**9)),
            r"config.json: config.num_hidden_layers is 10+; allowed",
        ),
        (edit("config.json", lambda d: d.update(intermediate_size=None)), "intermediate_size"),
        (
            edit("config.json", lambda d: d.pop("hidden_size")),
            r"embed_tokens.weight.: found \[28, 16\], the configuration needs",
        ),
        (huge_where_nothing_is_stored, r"the configuration needs \d+ values, and the files have \d+"),
        (edit("tokenizer.json", lambda d: d.update(added_tokens=[{"id": "x"}])), "expected u32"),
        (edit("tokenizer_config.json", lambda d: d.update(model_max_length="x")), "not supported between"),
        (whole_numbers, "'model.norm.weight': found I32; a floating dtype of 16, 32 or 64 bits is"),
        (pipe, "generation_config.json: not a regular file"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "config.json: .*more than 64 objects"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100), "model.safetensors: truncated or not"),
    ],
)
def test_broken_folders_are_refused(broken: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    build_huggingface(tmp_path)
    load(tmp_path)
    broken(tmp_path)
    begin = time.monotonic()
    with pytest.raises(CheckpointError, match=message) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert time.monotonic() - begin < 20


def test_code_of_a_checkpoint_is_not_asked_for(tmp_path: Path) -> None:
    build_huggingface(tmp_path)
    edit("config.json", lambda d: d.update(auto_map={"AutoModelForCausalLM": "code.Model", "AutoConfig": "code.C"}))(
        tmp_path
    )
    edit("config.json", lambda d: d.update(model_type="theirs"))(tmp_path)
    (tmp_path / "code.py").write_text("raise SystemExit('was run')")
    begin = time.monotonic()
    with pytest.raises(CheckpointError):
        load(tmp_path)
    assert time.monotonic() - begin < 10  # transformers waits 15 s for an answer from the terminal
