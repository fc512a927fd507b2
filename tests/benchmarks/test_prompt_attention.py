"""The benchmark of prompt attention on the CPU: each variant is held to float64, a wrong one is told and counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import bench_prompt_attention
from benchmarks.bench_prompt_attention import MARK, NAMES, Shape, checked, problem_of, variants_of
from benchmarks.harness import CheckError, Timing


def test_every_variant_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_prompt_attention.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    assert "2 shapes checked, 0 wrong" in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES[:3])
def test_wrong_results_are_told(name: str) -> None:
    shape = Shape(2, 50, 4, 2, 16)
    problem, right = problem_of(shape, "cpu"), problem_of(shape, "cpu")
    (variant,) = (v for v in variants_of(problem) if v.name == name)
    assert variant.check is not None
    variant.check()
    problem.q.mul_(1.5)
    with pytest.raises(CheckError, match=f"{name}: off by"):
        checked(name, variant.call, right)  # type: ignore[arg-type]
    problem.q.fill_(torch.nan)
    with pytest.raises(CheckError, match="off by nan"):
        checked(name, variant.call, right)  # type: ignore[arg-type]


def test_the_mask_leaves_half_of_the_products_and_the_diagonal() -> None:
    shape = Shape(2, 3, 4, 2, 16)
    assert shape.operations == 4 * 16 * 2 * 4 * (1 + 2 + 3)


def test_the_report_compares_with_the_fastest(capsys: pytest.CaptureFixture[str]) -> None:
    times = {MARK: {name: Timing.of([us]) for name, us in (("qcut", 300.0), ("sdpa", 400.0), ("cudnn", 270.0))}}
    bench_prompt_attention.report(times)
    assert "4096 tokens: 0.90 x torch's fastest attention (to reach 1: NOT reached)" in capsys.readouterr().out
