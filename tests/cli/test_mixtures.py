"""``qcut quantize`` and ``qcut info`` of a mixture of experts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from qcut.checkpoints.contents import contents
from qcut.cli import main as cli
from tests.support import ROOT
from tests.support.mixtures import tiny_mixture


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mixture") / "float"
    tiny_mixture().save_pretrained(made)
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
