"""Benchmarks of the engine, the scheduler, the server and all-reduces on the CPU, whole, on tiny models."""

from __future__ import annotations

import math
import os
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import qcut
from benchmarks import harness
from benchmarks.engine import acceptance, allreduce, batching, caches, families, speculation, steps
from benchmarks.harness import CheckError, read_rows
from qcut.engine.kv_cache.cache import KV_DTYPES
from qcut.errors import ConfigError

LOAD = ["--case", "tiny-llama", "--device", "cpu", "--clients", "3", "--rounds", "2", "--new", "6", "--lengths", "4,20"]


def test_tiny_models_get_their_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--cases", "tiny-gpt2,tiny-llama", "--device", "cpu", "--quick", "--out", str(tmp_path)]
    assert steps.main(arguments) == 0
    rows = read_rows(tmp_path / "bench_engine.csv")
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


@pytest.mark.parametrize(
    ("name", "embeddings"), [("tiny-gpt2", None), ("tiny-llama", "w8a16"), ("tiny-llama", "codebook4")]
)
def test_a_step_reads_the_head_and_no_table(name: str, embeddings: str | None) -> None:
    case = replace(steps.CASES[name], embeddings=embeddings)
    model: Any = steps.build(case, "cpu")
    layers = steps.layers_of(model)
    assert len(layers) == case.layers
    parts = [*layers, model.lm_head]
    read = sum(t.nbytes for m in parts for t in (*m.parameters(), *m.buffers()))
    kept_twice = [t.nbytes for m in parts for name, t in m.named_buffers() if name.rpartition(".")[2] == "norms"]
    assert (kept_twice != []) == ("codebook" in str(case.scheme))
    read -= sum(kept_twice)
    assert read < steps.read_bytes(model) <= read + 4 * 64 * 4


def test_a_wrong_engine_is_caught() -> None:
    model: Any = steps.build(steps.CASES["tiny-gpt2"], "cpu")
    engine, prompts = qcut.Engine(model, context=40), steps.prompts_of(96, 1, 12)
    with torch.no_grad():
        steps.check(engine, model, prompts)
        other = steps.build(steps.CASES["tiny-gpt2"], "cpu")
        other.transformer.wpe.weight.neg_()
        with pytest.raises(CheckError, match=r"allowed from 0\.99"):
            steps.check(engine, other, prompts)


@pytest.mark.parametrize(("scheme", "skip"), [("codebook4_g64", None), ("mxfp4", ("*.self_attn.*", "lm_head"))])
def test_layers_of_gpt_oss_are_copied_in_turn(scheme: str, skip: tuple[str, ...] | None) -> None:
    case = replace(steps.CASES["tiny-gpt-oss"], scheme=scheme, embeddings=None, skip=skip)
    model: Any = steps.build(case, "cpu")
    engine = qcut.Engine(model, context=40)
    assert [block.attention.window for block in engine.decoder.blocks] == [128, 0, 128, 0]
    assert isinstance(model.model.layers[3].self_attn.q_proj, qcut.Linear) == (skip is None)
    assert 0 < steps.read_bytes(model) < steps.read_bytes(model, 4)
    with torch.no_grad():
        steps.check(engine, model, steps.prompts_of(96, 1, 12))


def test_steps_of_tiny_models_are_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--families", "tiny-llama,tiny-gpt_neox", "--batches", "1,2", "--quick", "--out", str(tmp_path)]
    assert families.main(words) == 0
    rows = read_rows(tmp_path / "bench_families.csv")
    assert [(row["family"], row["batch"]) for row in rows] == [
        (name, batch) for name in ("tiny-llama", "tiny-gpt_neox") for batch in ("1", "2")
    ]
    assert all(int(row["tokens_s"]) > 0 and float(row["gb"]) > 0 for row in rows)
    assert "tiny-gpt_neox" in capsys.readouterr().out


def test_steps_of_every_cache_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--case", "tiny-llama", "--contexts", "24,40", "--batches", "1,2", "--device", "cpu"]
    assert caches.main([*given, "--out", str(tmp_path)]) == 0
    assert f"{4 * len(KV_DTYPES)} results checked, 0 wrong; nothing timed on a CPU" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    logits = torch.randn(2, 50)
    caches.check("int4", logits + 0.01 * torch.randn(2, 50), logits)
    for wrong in (logits.flip(1), torch.full_like(logits, math.nan)):
        with pytest.raises(CheckError, match="int4: logits have cosine"):
            caches.check("int4", wrong, logits)


def test_a_load_is_answered_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert batching.main([*LOAD, "--chunk", "8", "--constrained", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "3 clients, 6 prompts" in said
    assert "of a static batch's" in said
    assert "20 tokens, when a sequence leaves" in said
    rows = {row["what"]: row for row in read_rows(tmp_path / "bench_batching.csv")}
    assert list(rows) == ["continuous", "static", "free", "constrained", "row copied", "gap"]
    assert min(float(rows[what]["tokens_s"]) for what in ("continuous", "free", "constrained")) > 0
    assert "of those without" in said
    assert float(rows["gap"]["p99_us"]) >= float(rows["gap"]["median_us"]) > 0


def test_another_answer_is_caught() -> None:
    case = steps.CASES["tiny-llama"]
    engine = qcut.Engine(steps.build(replace(case, layers=1), "cpu", 40), context=40)
    prompts = batching.prompts_of(5, case.vocabulary, 4, 20)
    assert sorted(map(len, prompts)) == [4, 8, 12, 16, 20]
    answers = [batching.Answer(one.tokens, []) for prompt in prompts for one in engine.generate([prompt], 6)]
    batching.check(engine, prompts, answers)
    with pytest.raises(CheckError, match="deviations less likely"):
        batching.check(engine, prompts, answers[1:] + answers[:1])


def test_a_load_over_http(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("starlette")
    from benchmarks.engine import server

    assert server.main([*LOAD, "--chunk", "8", "--out", str(tmp_path)]) == 0
    assert "3 clients of HTTP, 6 prompts" in capsys.readouterr().out
    rows = {row["what"]: row for row in read_rows(tmp_path / "bench_server.csv")}
    assert list(rows) == ["server", "scheduler", "first token", "gap"]
    assert float(rows["gap"]["p99_us"]) >= float(rows["gap"]["median_us"]) >= 0


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def environment(rank: int, processes: int, port: int) -> dict[str, str]:
    """What torchrun tells a process."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in told.items()}}


def test_two_processes_write_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port, given = free_port(), ["--device", "cpu", "--quick", "--out", str(tmp_path), "--sizes", "256", "1024"]
    other = subprocess.Popen(
        harness.command("benchmarks.engine.allreduce", *given), env=environment(1, 2, port), stdout=subprocess.PIPE
    )
    try:
        for name, value in environment(0, 2, port).items():
            monkeypatch.setenv(name, value)
        assert allreduce.main(given) == 0
        assert other.communicate(timeout=60)[0] == b""
    finally:
        other.kill()
        other.wait()
    assert other.returncode == 0
    assert "2 of 2 measured, 0 wrong sums" in capsys.readouterr().out
    rows = read_rows(tmp_path / "bench_allreduce.csv")
    assert [(row["gpus"], row["bytes"], row["variant"], row["backend"]) for row in rows] == [
        ("2", "256", "eager", "gloo"),
        ("2", "1024", "eager", "gloo"),
    ]
    assert all(float(row["median_us"]) > 0 and row["gpu"] == "none" for row in rows)


def test_what_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in allreduce.TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    given = ["--device", "cpu"]
    for told, arguments, message in (
        (0, given, "no RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: start it by torchrun"),
        (1, given, "one process has nothing to add up"),
        (2, [*given, "--sizes", "7"], "--sizes 7: a positive even number"),
    ):
        for name, value in environment(0, told, 1).items() if told else ():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as stopped:
            allreduce.main(arguments)
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err


# ── drafts ───────────────────────────────────────────────────────────────────────────────────────


def test_steps_with_drafts_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--case", "tiny-llama", "--device", "cpu", "--quick", "--batches", "1", "--out", str(tmp_path)]
    assert speculation.main(given) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("plain", "look-up finds nothing", "wrong drafts", "right drafts, steps as"))
    with pytest.raises(CheckError, match="here: token 2 of answer 0 is 9, by plain steps 3"):
        speculation.check([[1, 2, 9, 4]], [[1, 2, 3, 4]], "here")


def test_a_repeated_document_takes_few_steps(tmp_path: Path) -> None:
    costs = {1: 10.0, 2: 11.0, 4: 12.0, 8: 13.0}
    document = list(range(100, 400))
    steps_of_same, spent = acceptance.looked_up(document, document, qcut.Lookup(), costs)
    assert steps_of_same < len(document) / 6
    assert spent < 13 * (steps_of_same + 3)
    changed = acceptance.edited(document, 1)
    assert changed == acceptance.edited(document, 1) != document
    assert steps_of_same < acceptance.looked_up(document, changed, qcut.Lookup(), costs)[0] < len(changed) / 2
    fresh = list(range(500, 700))
    assert acceptance.looked_up(document, fresh, qcut.Lookup(), costs) == (199, 1990.0)
    with pytest.raises(ConfigError, match="has no rows of llama-3-8b-codebook4; run benchmarks engine speculation"):
        acceptance.costs_of(tmp_path, "llama-3-8b-codebook4")
