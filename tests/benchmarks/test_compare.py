"""Ways to run a llama2.c file, on the CPU: the C++ program, transformers' loops, and what is refused."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import qcut
from benchmarks.engine import compare, cpu_program
from benchmarks.engine.compare import CASES, TOLERANCE, TOLERANCE_16, Loop, check, shortfall, write_random
from benchmarks.engine.cpu_program import FLAGS, SOURCE, run_cpp
from benchmarks.harness import CheckError, read_rows
from qcut.errors import QcutError
from tests.support.llama2c_oracle import CASES as FILES
from tests.support.llama2c_oracle import Sizes, make


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cpu_program.build_cpp(tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.bin"
    write_random(CASES["tiny"], path)
    return path


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
        (lambda path: path.write_bytes(path.read_bytes()[:20]), "no header"),
        (lambda path: path.unlink(), "cannot be opened"),
        (lambda path: header(path, n_layers=0), "a size of the header is 0"),
        (lambda path: header(path, n_kv_heads=3), "heads do not divide"),
    ],
)
def test_the_program_refuses_a_corrupt_file(damage: Any, message: str, program: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    make(path, FILES["the sample's sizes"])
    assert run_cpp(program, path, [1], 2, 1)
    damage(path)
    with pytest.raises(QcutError, match=f"model.bin: .*{message}"):
        run_cpp(program, path, [1], 2, 1)


@pytest.mark.parametrize("context", [None, 40])
def test_loops_give_the_engines_tokens(context: int | None, tiny: Path) -> None:
    model = qcut.load_llama2c(tiny)
    prompts = [[1, 2, 3], [9, 8, 7]]
    engine = qcut.Engine(model, context=40)
    with torch.no_grad():
        loop = Loop(model, context)
        for prompt in (*prompts, prompts[0]):
            assert loop.generate([prompt], 30) == engine.generate([prompt], 30)


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


def test_every_way_gets_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "mine.bin", FILES["the sample's sizes"])
    words = ["--cases", "tiny", "--files", str(tmp_path / "mine.bin"), "--device", "cpu", "--quick"]
    assert compare.main([*words, "--time-budget", "-1", "--out", str(tmp_path)]) == 0
    rows = read_rows(tmp_path / "bench_compare.csv")
    ways = ["qcut", "cpp", "eager_dynamic", "eager_static", "qcut_w8a16", "compile"]
    for case in ("tiny", "mine"):
        own = [row for row in rows if row["case"] == case]
        assert list(dict.fromkeys(row["variant"] for row in own)) == ways
        assert all((row["variant"] == "cpp") == bool(row["tokens_s"]) for row in own)  # the others had no time
        assert {row["reason"] for row in own} == {"", "out of time"}
    assert "0 wrong" in capsys.readouterr().out
