"""The benchmark inside vLLM, on a tiny shape without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import vllm
from benchmarks.engine.held_process import HeldProcess
from benchmarks.harness import read_rows
from tests.support import ROOT


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}.items():
        monkeypatch.setenv(key, value)
    for name, value in {"NEW": 4, "CONTEXT": 16, "PROMPTS": 6, "ANSWER": 8}.items():
        monkeypatch.setattr(vllm, name, value)


EAGER = ["--dtype", "float32", "--arguments", '{"enforce_eager": true}']


@pytest.mark.parametrize("shape", ["tiny", "tiny-mixture"])
def test_steps_and_prompts_are_timed(shape: str, tmp_path: Path) -> None:
    asked = ["--shape", shape, "--methods", "qcut-w8a8", "--batches", "1,2", "--prompt", "64", "--out", str(tmp_path)]
    assert vllm.main([*asked, "--kernels", *EAGER]) == 0  # a CPU has none
    rows = read_rows(tmp_path / "bench_vllm.csv")
    assert [(row["method"], row["what"], row["batch"]) for row in rows] == [
        ("qcut-w8a8", "step", "1"),
        ("qcut-w8a8", "step", "2"),
        ("qcut-w8a8", "prompt", "1"),
    ]
    assert all(float(row["tokens_s"]) > 0 and row["vllm"] for row in rows)


def test_answers_of_several_gpus_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(asked: dict[str, Any], timeout: float, started: Any = None) -> Iterator[dict[str, Any]]:
        """The second answer of two processes leaves that of one at its third token."""
        yield {"vllm": "0.32.0", "layers": "OnlineMethod"}
        for i in range(len(asked["prompts"])):
            last = 9 if i == 1 and asked["arguments"]["tensor_parallel_size"] == 2 else 3
            yield {"tokens": [1, 2, last], "gaps": [0.5, 0.25, 0.125]}

    monkeypatch.setattr(vllm, "run", run)
    model = ROOT / "models" / "gpt2-5m"
    asked = ["--parallel", str(model), "--methods", "qcut-w8a16", "--gpus", "2", "--out", str(tmp_path)]
    assert vllm.main([*asked, *EAGER]) == 0
    (row,) = read_rows(tmp_path / "vllm_parallel.csv")
    assert (row["same"], row["of"], row["gap"]) == ("5", "6", "0.125")


def test_a_process_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no scheme w9 >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    asked = ["--parallel", str(ROOT / "models" / "gpt2-5m"), "--methods", "qcut-w9", "--out", str(tmp_path)]
    with pytest.raises(RuntimeError, match=r"'quantization': 'qcut-w9'.*no scheme w9"):
        vllm.main([*asked, *EAGER])


def test_a_method_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(asked: dict[str, Any], timeout: float, started: Any = None) -> Iterator[dict[str, Any]]:
        if asked["arguments"]["quantization"] == "qcut-w9":
            raise RuntimeError("no scheme w9")
        yield {"vllm": "0.32.0", "layers": "UnquantizedLinearMethod"}
        yield {"what": "step", "batch": 1, "seconds": [0.5]}
        yield {"what": "step", "batch": 1, "kernel": kernel, "count": 4.0, "us": 1.2345}

    kernel = "older gemm"
    monkeypatch.setattr(vllm, "run", run)
    assert vllm.main(["--methods", "qcut-w9,vllm gptq4,fp16", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "FAILED qcut-w9: no scheme w9" in said
    assert "FAILED vllm gptq4: its linear layers are of UnquantizedLinearMethod" in said
    assert [row["method"] for row in read_rows(tmp_path / "bench_vllm.csv")] == ["fp16"]
    kernel = "gemm"  # an older kernel's row does not stay next to it
    assert vllm.main(["--methods", "fp16", "--out", str(tmp_path)]) == 0
    (row,) = read_rows(tmp_path / "vllm_kernels.csv")
    assert [row[key] for key in ("method", "what", "batch", "kernel", "count", "us")] == [
        "fp16",
        "step",
        "1",
        "gemm",
        "4.0",
        "1.23",
    ]


TURNS = """
import json, sys
from benchmarks.engine.held_process import wait_for_turn
print(json.dumps({"vllm": "0.32.0", "layers": "OnlineMethod"}), flush=True)
wait_for_turn()
open(sys.argv[1], "a").write(sys.argv[2] + ";")
print(json.dumps({"what": "step", "batch": 1, "seconds": [0.5]}))
"""


def test_methods_start_together_and_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(asked: dict[str, Any]) -> HeldProcess:
        name = asked["arguments"]["quantization"]
        begun.append(name)
        return HeldProcess([sys.executable, "-c", TURNS, str(tmp_path / "log"), name], {"PYTHONPATH": str(ROOT)})

    begun: list[str] = []
    monkeypatch.setattr(vllm, "start", start)
    methods = ["qcut-w8a16", "qcut-codebook4", "qcut-w8a8"]
    assert vllm.main(["--together", "--methods", ",".join(methods), "--out", str(tmp_path)]) == 0
    assert begun == methods
    assert (tmp_path / "log").read_text() == ";".join([*methods, ""])
    assert [row["method"] for row in read_rows(tmp_path / "bench_vllm.csv")] == methods
