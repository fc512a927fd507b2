"""The self-test on a GPU: everything is right, and a kernel that is not is named."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from qcut.backends.cuda.launch.plans import forget_plans
from qcut.cli.selftest import all_checks, run_check, selftest
from qcut.emitters.core.source import KernelSource
from qcut.emitters.decoder.argmax import ArgmaxRows

# All that every GPU runs, and what Hopper adds.
FAMILIES = ("int8_cutlass", "int8_mma", "int8_wmma", "int8_dp4a", "int8_stream", "w8a16_mma", "w8a16_stream")
FAMILIES += ("codebook_stream", "rotate", "norm", "attention_mma", "attention_decode", "attention_append", "append")
FAMILIES += ("embed", "argmax", "accept", "silu_mul", "gelu_tanh", "route", "linear_route", "sort_routes", "sum_routes")
HOPPER = ("codebook_stream_wgmma", "codebook_wgmma", "w8a16_wgmma", "w8a16_cutlass")


def test_this_gpu_computes_what_the_cpu_does() -> None:
    verdicts = selftest(torch.cuda.current_device(), progress=False)
    assert [str(v) for v in verdicts if v.problem or v.skipped] == []
    ran = " ".join(name for v in verdicts for name in v.kernels)
    wanted = FAMILIES + (HOPPER if torch.cuda.get_device_capability() == (9, 0) else ())
    assert [family for family in wanted if f"qcut_{family}_" not in ran] == []
    attention = [name for v in verdicts if v.family == "attention" for name in v.kernels]
    if torch.cuda.get_device_capability() == (9, 0):
        assert any(re.search(r"_c\d$", name) for name in attention), "no parts met in a cluster"


def test_a_broken_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that starts to read at the second logit."""
    device = torch.device("cuda", torch.cuda.current_device())
    (check,) = (check for check in all_checks() if check.family == "argmax")
    emit = ArgmaxRows.emit

    def broken(desc: ArgmaxRows) -> KernelSource:
        source = emit(desc)
        assert source.text.count("(x, best") == 1
        text = source.text.replace("(x, best", "(x + 1, best").replace(source.name, f"{source.name}_broken")
        return replace(source, name=f"{source.name}_broken", entry=f"{source.name}_broken", text=text)

    with monkeypatch.context() as patch:
        patch.setattr(ArgmaxRows, "emit", broken)
        forget_plans()
        verdict = run_check(check, device)
    forget_plans()
    assert "values differ, first at [0]" in verdict.problem
    assert "every bit" in verdict.problem
    assert [name.endswith("_broken") for name in verdict.kernels] == [True]
    assert run_check(check, device).problem == ""
