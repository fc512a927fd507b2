"""Attention's variants on the CPU: each is held to float64, and a wrong one is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.attention import decode, prompt
from benchmarks.harness import CheckError


def test_every_variant_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert decode.main(["--contexts", "1,37", "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert "20 results checked, 0 wrong" in capsys.readouterr().out
    assert prompt.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    assert "2 shapes checked, 0 wrong" in capsys.readouterr().out


@pytest.mark.parametrize("module", [decode, prompt], ids=["decode", "prompt"])
def test_wrong_results_are_told(module: Any) -> None:
    sizes = (2, 50, 4, 2, 32)
    made, right = (
        module.problem_of(*sizes, "cpu") if module is decode else module.problem_of(prompt.Shape(*sizes), "cpu")
        for _ in range(2)
    )
    for variant in module.variants_of(made):
        variant.check()
    for factor, message in ((1.5, "off by"), (torch.nan, "off by nan")):
        made.q.mul_(factor)
        if module is decode:
            made.turned.mul_(factor)
        for variant in module.variants_of(made):
            with pytest.raises(CheckError, match=f"{variant.name}: {message}"):
                module.checked(variant.name, variant.call, right)
