"""Saves that die, or find the disk full, at any step: the old model or the new one, and nothing else is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import qcut
from qcut.checkpoints.formats.llama2c.files import save_llama2c
from qcut.checkpoints.formats.turboquant import writer
from qcut.checkpoints.formats.turboquant.format import Config
from qcut.conversion.quantize import quantize
from qcut.errors import CalibrationError, CheckpointError
from tests.checkpoints.concurrent_saves import KINDS, load, save
from tests.support.faults import deaths, every_failure, files_of_at_most, mounted
from tests.support.files import rewrite
from tests.support.zoo import tiny_hf

ERRORS = (CheckpointError, CalibrationError)


def names(folder: Path) -> list[str]:
    return sorted(path.name.replace("-", ".").split(".")[0] for path in folder.iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_that_dies_at_any_step(kind: str, tmp_path: Path) -> None:
    save(kind, tmp_path / "clean", 1)
    found = []
    save(kind, tmp_path / "0", 1)
    for step in deaths(lambda: save(kind, tmp_path / f"{len(found)}", 2)):
        folder = tmp_path / f"{step}"
        found.append(load(kind, folder))
        save(kind, folder, 3)
        assert load(kind, folder) == 3
        assert names(folder) == names(tmp_path / "clean")
        save(kind, tmp_path / f"{step + 1}", 1)
    assert found == sorted(found)
    assert set(found) == {1, 2}


@pytest.mark.parametrize("kind", KINDS)
def test_a_first_save_that_dies_at_any_step(kind: str, tmp_path: Path) -> None:
    outcomes = []
    for step in deaths(lambda: save(kind, tmp_path / f"{len(outcomes)}", 2)):
        try:
            outcomes.append(load(kind, tmp_path / f"{step}"))
        except ERRORS:
            outcomes.append(0)
        save(kind, tmp_path / f"{step}", 3)
        assert load(kind, tmp_path / f"{step}") == 3
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {0, 2}


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_at_any_step(kind: str, tmp_path: Path) -> None:
    save(kind, tmp_path, 1)
    clean, tried, held = names(tmp_path), [1], [1]

    def again() -> None:
        tried.append(tried[-1] + 1)
        save(kind, tmp_path, tried[-1])

    def check() -> None:
        found = load(kind, tmp_path)
        assert found in (held[-1], tried[-1])
        held.append(found)
        # A rename that fails after another has been done is left to the next writer, with the record that says so.
        assert names(tmp_path) == clean or (tmp_path / ".turboquant_config.json.commit").exists()

    every_failure(again, ERRORS, check)
    assert len(tried) > 12
    again()
    assert names(tmp_path) == clean


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_fills_up_within_a_file(kind: str, tmp_path: Path) -> None:
    save(kind, tmp_path, 1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for size in (0, 100, 300):
        with (
            files_of_at_most(size),
            pytest.raises(ERRORS, match=f"{tmp_path}: cannot be written: .*File too large"),
        ):
            save(kind, tmp_path, 2)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
        with files_of_at_most(size), pytest.raises(ERRORS, match="cannot be written"):
            save(kind, tmp_path / "new" / "er", 2)
        assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_small_and_read_only_disks(kind: str, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with mounted(disk, "size=8k"):
        (disk / "other").write_bytes(bytes(5000))
        with pytest.raises(ERRORS, match=f"{disk}: cannot be written: .*No space"):
            save(kind, disk, 1)
        assert [path.name for path in disk.iterdir()] == ["other"]
    with mounted(disk, "ro"), pytest.raises(ERRORS, match=r"cannot be written: .*[Rr]ead-only"):
        save(kind, disk, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_where_the_directory_should_be(kind: str, tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    for folder in (tmp_path / "x", tmp_path / "x" / "y", tmp_path / ("x" * 300)):
        with pytest.raises(ERRORS, match="cannot be written"):
            save(kind, folder, 1)


def test_llama2c_files_are_whole_or_not_there(tmp_path: Path) -> None:
    model: Any = tiny_hf("llama")
    path = tmp_path / "m.bin"
    model.config.rms_norm_eps = 1e-5
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-5
    for old in ([], [b"old"]):
        with files_of_at_most(1000), pytest.raises(CheckpointError, match=f"{path}: cannot be written"):
            save_llama2c(model, path)
        assert [file.read_bytes() for file in tmp_path.iterdir()] == old
        path.write_bytes(b"old")


# ── turboquant ───────────────────────────────────────────────────────────────────────────────────


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)


def turboquant(folder: Path, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = Net()
    writer.quantize_model(model, Config(group_size=16, seed=seed), progress=False)
    writer.save_turboquant(model, folder)
    return model


def test_files_of_two_saves_are_refused(tmp_path: Path) -> None:
    for name in ("x", "y"):
        turboquant(tmp_path / name, len(name))
    for name in ("non_quantized.safetensors", "model.safetensors"):
        turboquant(tmp_path / "mixed", 1)
        (tmp_path / "x" / name).rename(tmp_path / "mixed" / name)
        with pytest.raises(
            CheckpointError, match=f"{tmp_path / 'mixed' / 'non_quantized.safetensors'}: of another save"
        ):
            qcut.load(tmp_path / "mixed", model=Net, progress=False, verify=False)
    turboquant(tmp_path / "y", 2)
    rewrite(tmp_path / "y" / "turboquant_config.json", lambda config: config.update(seed=3))
    with pytest.raises(CheckpointError, match=r"turboquant_config\.json: damaged, changed, or of another save"):
        qcut.load(tmp_path / "y", model=Net, progress=False)
    assert qcut.load(tmp_path / "y", model=Net, progress=False, verify=False)


def test_configuration_of_an_earlier_save_is_refused(tmp_path: Path) -> None:
    model = tiny_hf("llama")
    writer.quantize_model(model, Config(group_size=16), progress=False)
    writer.save_turboquant(model, tmp_path)
    turboquant(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"config\.json: damaged, changed, or of another save"):
        qcut.load(tmp_path, progress=False)
    assert qcut.load(tmp_path, model=Net, progress=False)


def test_damaged_tensors_are_named(tmp_path: Path) -> None:
    turboquant(tmp_path, 1)
    for name, tensor in (("model.safetensors", "a.indices"), ("non_quantized.safetensors", "norm.weight")):
        turboquant(tmp_path, 1)
        rewrite(tmp_path / name, lambda tensors, tensor=tensor: flip(tensors[tensor]))
        with pytest.raises(CheckpointError, match=rf"{name}: tensor '{tensor}' is damaged"):
            qcut.load(tmp_path, model=Net, progress=False)


def flip(tensor: torch.Tensor) -> None:
    tensor.view(-1)[0] = 0.5 if tensor.is_floating_point() else tensor.view(-1)[0] ^ 1


def test_quantized_models_of_before_digests_load(tmp_path: Path) -> None:
    """Files as earlier versions wrote them: no digests, no metadata but the format's."""
    model = Net()
    quantize(model, "w8a8", progress=False)
    qcut.save(model, tmp_path)
    (file,) = tmp_path.glob("model-*")
    save_file(load_file(file), file, {"format": "pt"})
    rewrite(tmp_path / "qcut_config.json", lambda data: [data.pop(key, None) for key in ("digest", "headers")])
    assert torch.equal(qcut.load(tmp_path, model=Net, progress=False).a.qweight, model.a.qweight)
