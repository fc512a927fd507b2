"""The command `qcut tune` without a GPU: the table it writes, what it merges, what it refuses."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from qcut.cli import main as cli
from qcut.cli.command import Answer, Parser, UsageError
from qcut.cli.developer import tune as tune_command
from qcut.dispatch import gemm as dispatch
from qcut.dispatch import tables as tuned
from qcut.emitters.gemm.problem import TileConfig
from qcut.errors import CheckpointError, ConfigError
from qcut.tuning import search as tuning
from qcut.tuning.search import candidates
from tests.support import ROOT
from tests.support.fakes.bench import H200, TASK, FakeBench, fake_build


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("QCUT_CACHE_DIR", str(tmp_path))
    tuned.forget()
    yield tmp_path / "tuned"
    tuned.forget()


def answer(*words: str, bench: FakeBench | None = None) -> Answer:
    parser = Parser()
    tune_command.COMMAND.add_to(parser.add_subparsers(), tune_command.run)
    arguments = parser.parse_args(["tune", *words])
    return tune_command.run(arguments, (lambda: bench) if bench else None)


def command(*words: str, bench: FakeBench | None = None) -> int:
    found = answer(*words, bench=bench)
    assert set(found.data) == set(tune_command.FIELDS)
    return found.status


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning.tune, "__kwdefaults__", {**tuning.tune.__kwdefaults__, "build": fake_build})


@pytest.mark.usefixtures("built")
def test_the_command_writes_the_table_that_dispatch_reads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer("--family", "mma", "--shape", "256x1280x1280", "--types", "s8", bench=FakeBench())
    assert found.status == 0
    said = capsys.readouterr()
    rows = [row for row in tuned.users(H200.name).rows if row in tuned.table_for(H200.name).rows]
    assert [(row.family, row.m, row.n, row.k, row.out) for row in rows] == [("int8_mma", 256, 1280, 1280, "s8")]
    assert rows[0].tile.name in said.out
    assert [(gemm["tile"], gemm["time_us"]) for gemm in found.data["gemms"]] == [(rows[0].tile.name, rows[0].time_us)]
    assert str(folder / "nvidia_h200.json") in said.out
    problem = dispatch.problem_of(256, 1280, 1280, out="s8")
    choice = dispatch.select_gemm(problem, 256, 1280, 1280, H200, cutlass=False)
    assert (choice.family, choice.tile) == ("int8_mma", rows[0].tile)
    assert choice.reason == "tuned; not cutlass: no nvcc or g++"
    table = json.loads((folder / "nvidia_h200.json").read_text())
    assert set(table["environment"]) == {"gpu", "driver", "cuda", "torch", "commit"}


@pytest.mark.usefixtures("built")
def test_the_command_resumes_and_starts_afresh(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--family", "mma", "--shape", "256x1280x1280", "--types", "f16")
    assert command(*words, bench=FakeBench()) == 0
    again = FakeBench()
    assert command(*words, bench=again) == 0
    assert again.launched == []
    assert "going on with" in capsys.readouterr().out
    fresh = FakeBench()
    assert command(*words, "--fresh", bench=fresh) == 0
    assert fresh.launched


@pytest.mark.usefixtures("built")
def test_command_fails_for_wrong_kernels_and_unknown_families(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench = FakeBench()
    bench.wrong = {candidates(TASK, H200)[0].name}
    words = ["--family", "mma", "--family", "cutlass", "--layouts", "tnt", "0n1", "--shape", "256x1280x1280"]
    assert command(*words, "--types", "s8", bench=bench) == 1
    said = capsys.readouterr()
    assert "wrong: 3 of 9 elements differ" in said.out
    assert "cutlass 256x1280x1280 nnt s8: the family has no tile for it" in said.out
    assert "WRONG qcut_int8_mma" in said.err


def test_a_folder_is_no_table(tmp_path: Path) -> None:
    table, out = tmp_path / "table.json", tmp_path / "out"
    tuned.write(table, tuned.Table("NVIDIA Test"))
    out.mkdir()
    with pytest.raises(ConfigError, match=r"--out .*out: there is a folder of that name; allowed: a file"):
        command("--merge", str(table), "--out", str(out))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "table.json"]


def test_the_command_merges_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tile = TileConfig((128, 128, 64), (64, 64, 64), 4)
    slow = tuned.Row("int8_mma", "s8", "tnt", 64, 1280, 1280, tile, 5.0)
    fast, other = replace(slow, time_us=4.0), replace(slow, m=16)
    paths = [tmp_path / f"{i}.json" for i in range(3)]
    for path, row in zip(paths, (slow, fast, other), strict=True):
        tuned.write(path, tuned.Table("NVIDIA Test", (row,)))
    output = tmp_path / "new" / "table.json"
    assert command("--merge", *map(str, paths), "--out", str(output)) == 0
    assert set(tuned.read(output).rows) == {fast, other}
    assert "2 rows taken into" in capsys.readouterr().out
    found = answer("--merge", *map(str, paths)).data
    assert (found["rows"], found["gemms"], found["unfinished"]) == (2, [], 0)
    assert set(tuned.table_for("NVIDIA Test").rows) == {fast, other}
    with pytest.raises(ConfigError, match="nothing to do"):
        command()
    with pytest.raises(ConfigError, match="there is no such file"):
        command("--merge", str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    "words",
    [
        *("--shape 12x13", "--shape 0x1x1", "--layouts tt --shape 1x1x1", "--layouts xyz", "--family fast"),
        *("--types f32", "--tokens 0", "--time-budget -1", "--resume --fresh"),
    ],
)
def test_wrong_options_are_refused(words: str) -> None:
    with pytest.raises(UsageError):
        command(*words.split())


def test_models_give_shapes(tmp_path: Path) -> None:
    assert tune_command.layer_shapes("gpt2") == [(2304, 768), (768, 768), (3072, 768), (768, 3072)]
    found = tune_command.layer_shapes(str(ROOT / "models" / "gpt2-5m"))
    assert sorted(found) == [(256, 256), (256, 1024), (768, 256), (1024, 256)]
    with pytest.raises(ConfigError, match="neither a directory nor one of gpt2, "):
        tune_command.layer_shapes("gpt9")
    with pytest.raises(CheckpointError, match=r"there is no config\.json"):
        tune_command.layer_shapes(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "unheard of"}')
    with pytest.raises(CheckpointError, match="no causal language model"):
        tune_command.layer_shapes(str(tmp_path))


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="says what a machine without a GPU says")
def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--shape", "16x16x16"]) == 1
    assert "measuring needs a CUDA device" in capsys.readouterr().err
