"""The engine's benchmark on the CPU, whole, on its tiny models."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bench_engine, harness, plots
from benchmarks.bench_engine import CASES, build, kind_of, read_bytes


def test_tiny_models_get_their_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--cases", "tiny-gpt2,tiny-llama", "--device", "cpu", "--quick", "--out", str(tmp_path)]
    assert bench_engine.main(arguments) == 0
    with (tmp_path / "bench_engine.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = [(row["case"], row["what"], row["batch"]) for row in rows]
    assert found == [
        ("tiny-gpt2", "prefill of 32", "2"),
        ("tiny-gpt2", "first token after 32", "2"),
        ("tiny-gpt2", "decode", "1"),
        ("tiny-gpt2", "decode in a context of 40", "1"),
        ("tiny-gpt2", "decode in a context of 1024", "1"),
        ("tiny-llama", "prefill of 32", "1"),
        ("tiny-llama", "decode", "1"),
        ("tiny-llama", "decode", "2"),
        *(("tiny-llama", f"decode in a context of {n}", "1") for n in (40, 8192)),
    ]
    assert all(float(row["tokens_s"]) > 0 for row in rows)
    assert "tiny-llama" in capsys.readouterr().out


def test_steps_alone_leave_the_rows_of_prompts(tmp_path: Path) -> None:
    arguments = ["--cases", "tiny-gpt2", "--device", "cpu", "--quick", "--out", str(tmp_path)]
    assert bench_engine.main(arguments) == 0
    before = harness.read_rows(tmp_path / "bench_engine.csv")
    assert bench_engine.main([*arguments, "--steps"]) == 0
    after = harness.read_rows(tmp_path / "bench_engine.csv")
    assert [row["what"] for row in after] == [row["what"] for row in before]
    assert [row["median_us"] for row in after[:2]] == [row["median_us"] for row in before[:2]]
    assert after[2]["median_us"] != before[2]["median_us"]


def test_a_wrong_engine_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench_engine.qcut.Engine.decode
    monkeypatch.setattr(bench_engine.qcut.Engine, "decode", lambda self, tokens: -right(self, tokens))
    assert bench_engine.main(["--cases", "tiny-gpt2", "--device", "cpu", "--out", str(tmp_path)]) == 1
    assert len((tmp_path / "bench_engine.csv").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "embeddings"), [("tiny-gpt2", None), ("tiny-llama", "w8a16"), ("tiny-llama", "codebook4")]
)
def test_a_step_reads_the_head_and_no_table(name: str, embeddings: str | None) -> None:
    case = replace(CASES[name], embeddings=embeddings)
    model: Any = build(case, "cpu")
    layers = bench_engine.layers_of(model)
    assert len(layers) == case.layers
    parts = [*layers, model.lm_head]
    read = sum(t.nbytes for m in parts for t in (*m.parameters(), *m.buffers()))
    kept_twice = [t.nbytes for m in parts for name, t in m.named_buffers() if name.rpartition(".")[2] == "norms"]
    assert (kept_twice != []) == ("codebook" in str(case.scheme))
    read -= sum(kept_twice)
    assert read < read_bytes(model) <= read + 4 * 64 * 4


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("qcut_attention_decode_sm90a_f16_f16_h128g4_w4u4", "attention"),
        ("qcut_attention_mma_sm90a_f16_f16_h128g4_w4t2_c8", "attention"),
        ("qcut_attention_append_sm90a_f16_f16_h128g4_w4t2_c8_rope", "attention"),
        ("qcut_rotate_sm90a_f16", "rotations, int8"),
        ("qcut_codebook_stream_sm90a", "projections"),
        ("nvjet_hsh_64x8", "projections"),
        ("void at::native::vectorized_elementwise_kernel", "other"),
    ],
)
def test_kernels_have_kinds(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def test_stacks_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    parts = {"a": {"norms": 1.0, "attention": 2.0}, "b": {"attention": 1.0, "other": 4.0}}
    plots.stacks(
        tmp_path / "plot", parts, {"floor": {"a": 1.5, "b": float("nan")}, "step": {"a": 2.0, "b": 3.0}}, "title", "µs"
    )
    assert (tmp_path / "plot.svg").stat().st_size > 1000


def test_a_steps_parts_are_drawn_from_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = "what,case,batch,kind,median_us,floor_us"
    step, kernels = "decode,m,1,,10.0,4.0", ("kernel,m,1,norms,2.0,", "kernel,m,1,norms,1.5,", "kernel,m,8,norms,9.0,")
    (tmp_path / "bench_engine.csv").write_text("\n".join((columns, step, *kernels)) + "\n")
    assert bench_engine.main(["--draw", "--out", str(tmp_path)]) == 0
    cells = capsys.readouterr().out.splitlines()[-1].split()
    assert cells[:3] == ["m,", "batch", "1"]
    assert cells[3:] == ["0", "0", "3.5", "0", "0", "0", "0", "0", "0", "6.5", "4", "10"]


def test_an_engine_may_be_as_far_from_transformers_as_those_are_from_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: Any = build(CASES["tiny-gpt2"], "cpu")
    engine = bench_engine.qcut.Engine(model, context=40)
    prompts = bench_engine.prompts_of(96, 1, 12)
    right, off = bench_engine.theirs, {"sdpa": 0.0, "eager": 0.0}
    noise = torch.randn(96, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(
        bench_engine, "theirs", lambda *given: (out := right(*given)) + off[given[2]] * out.std() * noise
    )
    bench_engine.check(engine, model, prompts)
    off["sdpa"] = 0.2  # the engine is where the other one is, and both are far from this one
    bench_engine.check(engine, model, prompts)
    off["eager"] = 0.2
    with pytest.raises(bench_engine.CheckError, match=r"allowed from 0\.99"):
        bench_engine.check(engine, model, prompts)
    assert model.config._attn_implementation == "sdpa"
