"""The comparison's ways to run a llama2.c file, on the CPU: the C++ program, transformers' loops, what is refused."""

from __future__ import annotations

import csv
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import qcut
from benchmarks import bench_compare, cpu_program
from benchmarks.bench_compare import (
    CASES,
    TOLERANCE,
    TOLERANCE_16,
    Loop,
    check,
    shortfall,
    widened,
    write_random,
)
from benchmarks.cpu_program import FLAGS, SOURCE, run_cpp
from benchmarks.harness import CheckError, Timing
from qcut.errors import BuildError, QcutError, ToolchainError
from tests.support.llama2c_oracle import CASES as FILES
from tests.support.llama2c_oracle import Sizes, make

TINY = CASES["tiny"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cpu_program.build_cpp(tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.bin"
    write_random(TINY, path)
    return path


# ── the C++ program ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", FILES)
def test_the_program_gives_the_engines_tokens(name: str, program: Path, tmp_path: Path) -> None:
    sizes = FILES[name]
    make(tmp_path / "model.bin", sizes)
    prompt = [3, 1, abs(sizes.vocab_size) - 1][: sizes.seq_len // 2]
    new = sizes.seq_len + 1 - len(prompt)  # all of the context: the last token is not read
    engine = qcut.Engine(qcut.load_llama2c(tmp_path / "model.bin"))
    wanted = engine.generate([prompt], new)[0].tokens
    assert len(wanted) == new
    for threads in (1, 3):
        tokens, rate = run_cpp(program, tmp_path / "model.bin", prompt, new, threads)
        assert tokens == wanted
        assert rate > 0


def test_the_program_compiles_without_warnings() -> None:
    warnings = ("-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only")
    done = subprocess.run(["g++", *FLAGS, *warnings, str(SOURCE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def header(path: Path, **changes: int) -> None:
    """Overwrite sizes in a file's header."""
    data = path.read_bytes()
    sizes = Sizes(*struct.unpack_from("<7i", data))._replace(**changes)
    path.write_bytes(struct.pack("<7i", *sizes) + data[28:])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"\d+ bytes of weights; the header asks for \d+"),
        (lambda path: path.write_bytes(path.read_bytes() + b"\0\0\0\0"), r"\d+ bytes of weights; the header asks for"),
        (lambda path: path.write_bytes(path.read_bytes()[:20]), "no header"),
        (lambda path: path.unlink(), "cannot be opened"),
        (lambda path: header(path, n_layers=0), "a size of the header is 0"),
        (lambda path: header(path, hidden_dim=-172), "a size of the header is -172"),
        (lambda path: header(path, dim=0x616B3432), "a size of the header is 1634415666"),
        (lambda path: header(path, n_kv_heads=3), "heads do not divide"),
        (lambda path: header(path, n_heads=5), "heads do not divide"),
        (lambda path: header(path, n_heads=64, n_kv_heads=64), "heads do not divide"),
        (lambda path: header(path, vocab_size=-512), r"\d+ bytes of weights; the header asks for"),
    ],
)
def test_the_program_refuses_a_corrupt_file(damage: Any, message: str, program: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    make(path, FILES["the sample's sizes"])
    assert run_cpp(program, path, [1], 2, 1)
    damage(path)
    with pytest.raises(QcutError, match=f"model.bin: .*{message}"):
        run_cpp(program, path, [1], 2, 1)


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        ([512], 1, "no token 512"),
        ([-1], 1, "no token -1"),
        ([1], 0, "exceed the context of 24"),
        ([1], 25, "exceed the context of 24"),
        ([1, 10**30], 2, "not a number: 1000"),
        (["1x"], 2, "not a number: 1x"),
    ],
)
def test_the_program_refuses_ids_and_lengths(
    prompt: list[Any], new: int, message: str, program: Path, tmp_path: Path
) -> None:
    make(tmp_path / "model.bin", FILES["the sample's sizes"])
    with pytest.raises(QcutError, match=message) as caught:
        run_cpp(program, tmp_path / "model.bin", prompt, new, 1)
    # The greatest number of tokens that the message allows works.
    if "exceed" in str(caught.value):
        assert len(run_cpp(program, tmp_path / "model.bin", prompt, 24, 1)[0]) == 24


def test_no_compiler_and_a_failing_one_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_program, "FLAGS", ("-DkTheta=",))
    with pytest.raises(BuildError, match=r"cpu_llama.cpp: g\+\+ failed\ncommand: .*-DkTheta=.*\n.*error"):
        cpu_program.build_cpp(tmp_path)
    monkeypatch.setattr(cpu_program.shutil, "which", lambda name: None)
    with pytest.raises(ToolchainError, match=r"there is no g\+\+ in PATH"):
        cpu_program.build_cpp(tmp_path)


# ── loops and checks ─────────────────────────────────────────────────────────────────────────────


def test_random_weights_make_tokens_that_depend_on_all_before(tiny: Path) -> None:
    engine = qcut.Engine(qcut.load_llama2c(tiny))
    one, other = (engine.generate([[first, 5, 6, 7]], 30)[0].tokens for first in (1, 2))
    assert one != other
    assert len(set(one)) > 10


@pytest.mark.parametrize("context", [None, 40])
def test_loops_give_the_engines_tokens_again_and_again(context: int | None, tiny: Path) -> None:
    model = qcut.load_llama2c(tiny)
    prompts = [[1, 2, 3], [9, 8, 7]]
    engine = qcut.Engine(model, context=40)
    with torch.no_grad():
        loop = Loop(model, context)
        for prompt in (*prompts, prompts[0]):
            assert loop.generate([prompt], 30) == engine.generate([prompt], 30)


def test_widened_weights_are_those_of_the_quantized_model(tiny: Path) -> None:
    model = qcut.load_llama2c(tiny)
    quantized = qcut.load_llama2c(tiny)
    qcut.quantize(quantized, "w8a16", embeddings="w8a16", progress=False)
    float32 = widened(quantized, model)
    layer, table = quantized.model.layers[0].mlp.up_proj, quantized.model.embed_tokens
    assert torch.equal(float32.model.layers[0].mlp.up_proj.weight, layer.dequantized_weight())
    assert torch.equal(float32.model.embed_tokens.weight, table.linear.dequantized_weight())
    assert torch.equal(float32.lm_head.weight, quantized.lm_head.dequantized_weight())
    assert not torch.equal(float32.lm_head.weight, model.lm_head.weight)
    ids = torch.tensor([[1, 5, 9]])
    torch.testing.assert_close(float32(ids).logits, quantized(ids).logits, atol=1e-4, rtol=1e-4)


def test_shortfall_is_of_the_worst_token(tiny: Path) -> None:
    model = qcut.load_llama2c(tiny)
    prompt = [4, 5]
    tokens = qcut.Engine(model).generate([prompt], 6)[0].tokens
    with torch.no_grad():
        assert shortfall(model, prompt, tokens) == 0
        logits = model(torch.tensor([[*prompt, *tokens[:5]]])).logits[0, -1].double()
        second = int(logits.topk(2).indices[1])
        wanted = (logits.max() - logits[second]) / logits.std()
        assert shortfall(model, prompt, [*tokens[:5], second]) == pytest.approx(float(wanted), rel=1e-3)
        check(model, prompt, tokens, 6, TOLERANCE)
        with pytest.raises(CheckError, match="standard deviations"):
            check(model, prompt, [*tokens[:5], int(logits.argmin())], 6, TOLERANCE_16)
        with pytest.raises(CheckError, match="5 tokens; asked for 6"):
            check(model, prompt, tokens[:5], 6, TOLERANCE)
        model.lm_head.weight.fill_(torch.nan)
        with pytest.raises(CheckError, match="nan standard deviations"):
            check(model, prompt, tokens, 6, TOLERANCE_16)


# ── the script ───────────────────────────────────────────────────────────────────────────────────

VARIANTS = ["qcut", "cpp", "eager_dynamic", "eager_static", "qcut_w8a16", "compile"]


@pytest.fixture
def script(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the benchmark; its status, and its rows by variant. Steps are traced, not compiled; time is made up."""
    monkeypatch.setattr(bench_compare, "build_cpp", lambda folder: program)
    monkeypatch.setattr(bench_compare, "compiled", lambda step: torch.compile(step, backend="eager", fullgraph=True))
    monkeypatch.setattr(bench_compare, "decode_us", lambda *_: Timing.of([20.0, 40.0, 30.0], "wall"))
    monkeypatch.setattr(bench_compare, "thread_counts", lambda: [1])

    def run(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
        options = ["--device", "cpu", "--quick", "--out", str(tmp_path), *arguments]
        status = bench_compare.main(options if "--cases" in arguments else ["--cases", "tiny", *options])
        with (tmp_path / "bench_compare.csv").open(newline="") as file:
            return status, {row["variant"]: row for row in csv.DictReader(file)}

    return run


def test_every_way_gets_its_row(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, rows = script()
    assert status == 0
    assert list(rows) == VARIANTS
    assert {row["case"] for row in rows.values()} == {"tiny"}
    assert rows["cpp"]["threads"] == "1"
    assert float(rows["cpp"].pop("tokens_s")) > 0
    assert {row["tokens_s"] for row in rows.values() if "tokens_s" in row} == {"33333.3"}
    assert "0 wrong" in capsys.readouterr().out


def test_a_gpus_types_are_checked_too(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_compare, "served_dtype", lambda device: torch.float16)
    status, _ = script()
    with (tmp_path / "bench_compare.csv").open(newline="") as file:
        found = [(row["variant"], row["dtype"], bool(row["tokens_s"])) for row in csv.DictReader(file)]
    half = [(name, "float16", True) for name in ("qcut", *VARIANTS[2:])]
    assert (status, found) == (0, [("qcut", "float32", True), ("cpp", "float32", True), *half])


def test_files_are_run_too(script: Any, tmp_path: Path) -> None:
    make(tmp_path / "mine.bin", FILES["the sample's sizes"])
    status, rows = script("--cases", "", "--files", str(tmp_path / "mine.bin"))
    assert (status, list(rows)) == (0, VARIANTS)
    assert {(row["case"], row["width"], row["new"]) for row in rows.values()} == {("mine", "64", "12")}


def test_a_corrupt_file_ends_the_run(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "mine.bin", FILES["the sample's sizes"])
    header(tmp_path / "mine.bin", n_layers=3)
    status, rows = script("--files", str(tmp_path / "mine.bin"))
    assert (status, list(rows)) == (1, VARIANTS)  # what was measured before stays
    assert "mine.bin: found" in capsys.readouterr().err


def test_what_does_not_compile_says_why(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(step: Any) -> Any:
        raise RuntimeError("no triton here\nand more")

    monkeypatch.setattr(bench_compare, "compiled", fails)
    status, rows = script()
    assert status == 0
    assert (rows["compile"]["reason"], rows["compile"]["tokens_s"]) == ("RuntimeError: no triton here", "")


def test_without_a_compiler_the_others_are_measured(script: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def fails(folder: Path) -> Path:
        raise ToolchainError("there is no g++ in PATH")

    monkeypatch.setattr(bench_compare, "build_cpp", fails)
    status, rows = script()
    assert (status, list(rows)) == (1, VARIANTS)
    assert "there is no g++" in rows["cpp"]["reason"]
    assert "there is no g++" in capsys.readouterr().err
    assert all(row["tokens_s"] for name, row in rows.items() if name != "cpp")


def test_wrong_tokens_are_not_timed(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = run_cpp
    monkeypatch.setattr(bench_compare, "run_cpp", lambda *given: ([0, *right(*given)[0][1:]], 1.0))
    monkeypatch.setattr(Loop, "_next", lambda self, ids: ids[:, -1:])
    status, rows = script()
    assert status == 1
    wrong = {name for name, row in rows.items() if not row["tokens_s"] and row["reason"].startswith("wrong: ")}
    assert wrong == {"cpp", "eager_dynamic", "eager_static", "compile"}


def test_an_engine_that_fails_is_a_failure(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise QcutError("broken")

    monkeypatch.setattr(bench_compare.qcut, "quantize", fails)
    status, rows = script()
    assert (status, rows["qcut_w8a16"]["reason"]) == (1, "QcutError: broken")


def test_noise_is_no_figure(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_compare, "decode_us", lambda *_: Timing.of([-9.0, 5.0, 6.0], "wall"))
    _, rows = script()
    assert "took no longer than one" in rows["qcut"]["reason"]
    assert [name for name, row in rows.items() if row["tokens_s"]] == ["cpp"]


def test_after_its_time_nothing_is_begun(script: Any) -> None:
    status, rows = script("--time-budget", "-1")
    assert status == 0
    assert {row["reason"] for name, row in rows.items() if name != "cpp"} == {"out of time"}


def test_unknown_cases_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_compare.main(["--cases", "tiny,huge"])
    assert "huge is not one of llama2c-288, llama2c-512, tiny" in capsys.readouterr().err
