"""``qcut quantize`` and ``qcut info`` of a mixture of experts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import qcut
from qcut.checkpoints.contents import contents
from qcut.cli import main as cli
from tests.support import ROOT
from tests.support.mixtures import tiny_mixture


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mixture") / "float"
    model = tiny_mixture()
    model.resize_token_embeddings(8192)  # the tokenizer's
    model.save_pretrained(made)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "models" / "gpt2-5m" / name, made)
    return made


def test_experts_are_quantized_and_counted(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "int8"
    arguments = ["quantize", str(folder), "--scheme", "w8a8", "--device", "cpu", "--out", str(out)]
    assert cli.main([*arguments, "--require-quantized", "0.95"]) == 0
    assert "% quantized (experts " in capfd.readouterr().out
    found = contents(out)
    stacks = [layer for layer in found.layers if layer.experts]
    assert len(stacks) == 4
    weights = sum(layer.weights or 0 for layer in stacks)
    assert found.percent_experts == pytest.approx(100 * weights / (found.parameters or 0))
    assert cli.main(["info", str(out)]) == 0
    assert f"{found.percent_experts:.1f} % quantized experts" in capfd.readouterr().out.splitlines()[-1]


def test_too_small_a_share_writes_nothing(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "int8"
    arguments = ["quantize", str(folder), "--scheme", "w8a8", "--device", "cpu", "--out", str(out)]
    assert cli.main([*arguments, "--require-quantized", "0.9999"]) != 0
    assert "--require-quantized 0.9999" in capfd.readouterr().err
    assert not out.exists()
    with pytest.raises(SystemExit):
        cli.main([*arguments, "--require-quantized", "1.5"])


def test_moments_in_turns_give_the_same_model(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Experts of few tokens are fitted to what all of them saw. " * 40)
    arguments = ["quantize", str(folder), "--scheme", "codebook4_g64", "--device", "cpu", "--no-verify", "--fit"]
    arguments += ["--calibrate", str(text), "--window", "32", "--max-windows", "4"]
    for name, more in (("whole", ()), ("turns", ("--fit-memory", "1e-5"))):
        assert cli.main([*arguments, "--out", str(tmp_path / name), *more]) == 0
    first, second = (qcut.load(tmp_path / name, device="cpu").state_dict() for name in ("whole", "turns"))
    assert [*first] == [*second]
    assert all(torch.equal(first[name], second[name]) for name in first)
