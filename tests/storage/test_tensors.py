"""Tensors beside a JSON file that names them: which files a save, a killed save and an abandoned one leave."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qcut.errors import CheckpointError
from qcut.storage.tensors import TensorFiles, open_tensors, plain_name


def test_a_save_deletes_what_earlier_ones_left_and_nothing_else(tmp_path: Path) -> None:
    earlier = TensorFiles(tmp_path, "data", "index.json")
    old = earlier.add({"x": torch.zeros(3)})
    earlier.commit({"file": old})
    (tmp_path / f".{old}.0123abcd.tmp").touch()  # of a process that was killed
    others = {"data.safetensors", "data-mine-00001.safetensors", f".{old}.swp", "other-01234567-00001.safetensors"}
    for name in others:
        (tmp_path / name).touch()
    later = TensorFiles(tmp_path, "data", "index.json")
    new = [later.add({"x": torch.ones(3)}), later.add({"y": torch.ones(1)})]
    assert (tmp_path / old).exists()
    later.commit({"file": new})
    assert {path.name for path in tmp_path.iterdir()} == {*new, *others, "index.json"}
    assert torch.equal(open_tensors(tmp_path / new[0], CheckpointError).get_tensor("x"), torch.ones(3))


def test_what_was_abandoned_is_gone_unless_it_is_in_use(tmp_path: Path) -> None:
    files = TensorFiles(tmp_path / "new", "data", "index.json")
    files.add({"x": torch.zeros(3)})
    files.abandon()
    assert list(files.directory.iterdir()) == []
    name = files.add({"x": torch.zeros(3)})
    files.commit({"file": name})
    files.abandon()
    assert {path.name for path in files.directory.iterdir()} == {name, "index.json"}


def test_what_is_no_tensor_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(CheckpointError, match="truncated or not a safetensors file"):
        open_tensors(tmp_path / "x.safetensors", CheckpointError)
    with pytest.raises(CheckpointError, match="there is no such file"):
        open_tensors(tmp_path / "y.safetensors", CheckpointError)
    for name in ("../x.safetensors", "a/x.safetensors", "x.pt", 3, ".."):
        with pytest.raises(CheckpointError, match="found the file name"):
            plain_name(name, tmp_path, CheckpointError)
    assert plain_name("x.safetensors", tmp_path, CheckpointError) == "x.safetensors"
