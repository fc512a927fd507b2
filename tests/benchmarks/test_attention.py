"""The attention benchmark's variants on the CPU: each is held to float64, a wrong one is told and counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import bench_attention
from benchmarks.bench_attention import NAMES, problem_of, variants_of
from benchmarks.harness import CheckError, Timing


def test_every_variant_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_attention.main(["--contexts", "1,37", "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert "20 results checked, 0 wrong" in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_wrong_results_are_told(name: str) -> None:
    problem = problem_of(2, 50, 4, 2, 32, "cpu")
    (variant,) = (v for v in variants_of(problem) if v.name == name)
    assert variant.check is not None
    variant.check()
    problem.q.mul_(1.5)
    problem.turned.mul_(1.5)
    wrong = problem_of(2, 50, 4, 2, 32, "cpu")
    with pytest.raises(CheckError, match=f"{name}: off by"):
        bench_attention.checked(name, variant.call, wrong)  # type: ignore[arg-type]
    problem.q.fill_(torch.nan)
    problem.turned.fill_(torch.nan)
    with pytest.raises(CheckError, match="off by nan"):
        bench_attention.checked(name, variant.call, wrong)  # type: ignore[arg-type]


def test_the_report_names_the_mark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = {
        (8, 8192): {name: Timing.of([us]) for name, us in zip(NAMES, (80.0, 50.0, 30.0, 120.0, 300.0), strict=True)}
    }
    shares = {(8, 8192, "qcut"): 74.9, (8, 32768, "qcut int4"): 80.1}
    bench_attention.report(tmp_path, times, shares)
    told = capsys.readouterr().out
    assert "qcut, batch 8, context 8192: 74.9 % of the bandwidth (to reach 75: NOT reached)" in told
    assert "qcut int4, batch 8, context 32768: 80.1 % of the bandwidth (to reach 80: reached)" in told
