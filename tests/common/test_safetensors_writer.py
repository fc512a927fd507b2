"""Tensors next to an index that names them: which files a save, a killed save and an abandoned one leave."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from qcut.common.safetensors import plain_name, read_index
from qcut.common.safetensors_writer import TensorFiles
from qcut.errors import CheckpointError


def one(data: dict[str, Any]) -> tuple[Any, Iterable[Any]]:
    return data.get("file"), [data.get("file")]


def save(folder: Path, value: float) -> str:
    with TensorFiles(folder, "data", "index.json") as files:
        name = files.add({"x": torch.full((3,), value)})
        files.commit({"file": name})
    return name


def read(folder: Path, **options: Any) -> float:
    _, files = read_index(folder / "index.json", CheckpointError, one, **options)
    (file,) = files.values()
    with file:
        return float(file.read("x")[0])


def test_save_deletes_only_leftovers_of_earlier_saves(tmp_path: Path) -> None:
    old = save(tmp_path, 0)
    dead = {f".{old}.0123abcd.tmp", "data-01234567-00001.safetensors"}  # of processes that were killed
    others = {"data.safetensors", "data-mine-00001.safetensors", f".{old}.swp", "other-01234567-00001.safetensors"}
    for name in dead | others:
        (tmp_path / name).touch()
    with TensorFiles(tmp_path, "data", "index.json") as later:
        assert not any((tmp_path / name).exists() for name in dead)
        new = [later.add({"x": torch.ones(3)}), later.add({"y": torch.ones(1)})]
        assert read(tmp_path) == 0
        later.commit({"file": new[0], "more": new[1]}, {"beside.json": {"a": 1}})
    assert {path.name for path in tmp_path.iterdir()} == {*new, *others, "index.json", "beside.json"}
    assert read(tmp_path) == 1


def interrupted(folder: Path, commit: bool) -> str:
    with contextlib.suppress(KeyboardInterrupt), TensorFiles(folder, "data", "index.json") as files:
        name = files.add({"x": torch.zeros(3)})
        if commit:
            files.commit({"file": name})
        raise KeyboardInterrupt
    return name


def test_what_was_not_committed_is_gone(tmp_path: Path) -> None:
    with TensorFiles(tmp_path / "new" / "er", "data", "index.json") as files:
        files.add({"x": torch.zeros(3)})
    assert list(tmp_path.iterdir()) == []
    name = save(tmp_path, 1)
    interrupted(tmp_path, commit=False)
    assert {path.name for path in tmp_path.iterdir()} == {name, "index.json"}
    assert interrupted(tmp_path, commit=True) != name
    assert len(list(tmp_path.iterdir())) == 2
    assert read(tmp_path) == 0


def test_reader_of_deleted_files_takes_the_newer_index(tmp_path: Path) -> None:
    save(tmp_path, 0)
    saves = []

    def slow(data: dict[str, Any]) -> tuple[Any, Iterable[Any]]:
        if len(saves) < 3:
            saves.append(save(tmp_path, len(saves) + 1))
        return one(data)

    name, files = read_index(tmp_path / "index.json", CheckpointError, slow)
    assert name == saves[-1]
    held = files[name]
    save(tmp_path, 9)
    with held:
        assert float(held.read("x")[0]) == 3  # open files stay what they were


def test_missing_data_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / save(tmp_path, 0)).unlink()
    with pytest.raises(CheckpointError, match=r"data-.*-00001\.safetensors: there is no such file"):
        read(tmp_path)


def test_index_that_keeps_changing_is_an_error(tmp_path: Path) -> None:
    index = tmp_path / "index.json"
    index.write_text('{"file": "gone.safetensors", "turn": 0}')

    def replace_it(data: dict[str, Any]) -> tuple[Any, Iterable[Any]]:
        index.write_text(json.dumps({**data, "turn": data["turn"] + 1}))
        return one(data)

    with pytest.raises(CheckpointError, match="replaced 100 times while it was read"):
        read_index(index, CheckpointError, replace_it)


def test_unreadable_index_deletes_no_file(tmp_path: Path) -> None:
    """Whatever lies there is no proof that a data file is a leftover."""
    save(tmp_path, 1)
    index = tmp_path / "index.json"
    kept = index.rename(tmp_path / "kept")
    os.mkfifo(index)
    interrupted(tmp_path, commit=False)
    kept.rename(index)
    assert read(tmp_path) == 1


def test_every_byte_is_under_a_digest(tmp_path: Path) -> None:
    """Each byte changed: an error, or the same data (spaces of JSON, and the key of the digest)."""
    right = 0
    name = save(tmp_path, 1)
    for path in (tmp_path / "index.json", tmp_path / name):
        data = path.read_bytes()
        for at in range(len(data)):
            changed = bytearray(data)
            changed[at] ^= 1 << at % 7
            path.write_bytes(changed)
            with contextlib.suppress(CheckpointError):
                assert read(tmp_path) == 1
                right += 1
                assert path.name == "index.json"
        path.write_bytes(data)
    assert right < 40


def test_edited_index_reads_unverified_and_old_index_reads(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = tmp_path / "index.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "note": 1}))
    with pytest.raises(CheckpointError, match=r"index\.json: damaged.*verify=False"):
        read(tmp_path)
    assert read(tmp_path, verify=False) == 1
    path.write_text(json.dumps({"file": data["file"]}))
    assert read(tmp_path) == 1


@pytest.mark.parametrize("name", ["../x.safetensors", "a/x.safetensors", "x.pt", 3, "..", "x" * 300 + ".safetensors"])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: object) -> None:
    with pytest.raises(CheckpointError, match="found the file name"):
        plain_name(name, tmp_path, CheckpointError)
    assert plain_name("x.safetensors", tmp_path, CheckpointError) == "x.safetensors"
