"""The tuner without a GPU: what it tries, what it leaves out and why, and that a killed run loses nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from qcut.dispatch import tables as tuned
from qcut.dispatch.gpus import Target
from qcut.emitters.core.source import KernelSource
from qcut.emitters.families import FAMILIES, INT8_MMA, family
from qcut.emitters.gemm.problem import GemmProblem
from qcut.errors import BuildError, ConfigError, DeviceError
from qcut.jit import Binary, Resources, build_many
from qcut.tuning import search as tuning
from qcut.tuning.journal import Journal
from qcut.tuning.search import Task, candidates, tune
from tests.support import ROOT
from tests.support.fakes.bench import A100, GOOD, H200, TASK, FakeBench, fake_build


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("QCUT_CACHE_DIR", str(tmp_path))
    tuned.forget()
    yield tmp_path / "tuned"
    tuned.forget()


def journal(folder: Path, fresh: bool = False) -> Journal:
    return Journal(folder / "journal.jsonl", fresh=fresh)


def run(bench: FakeBench, folder: Path, tasks: tuple[Task, ...] = (TASK,), **options: object) -> list[tuning.Result]:
    with journal(folder) as book:
        return tune(tasks, bench, book, **{"build": fake_build, "report": lambda line: None, **options})


# ── candidates ───────────────────────────────────────────────────────────────────────────────────


def test_w8a16_is_tuned_on_16_bit_tokens(folder: Path) -> None:
    task = Task("w8a16_cutlass", "f16", "tnt", 4096, 1280, 1280)
    assert task.problem.a.value == "f16"
    tiles = candidates(task, H200)
    assert len(tiles) >= 4
    for refused in (
        replace(task, out="s8"),
        replace(task, layouts="ttt"),
        replace(task, k=1288),
        replace(task, n=1284),
    ):
        assert candidates(refused, H200) == []
    assert candidates(task, A100) == []
    (result,) = run(FakeBench(), folder, (task,), limit=4)
    assert result.complete
    assert result.row is not None
    assert result.row.swizzle * 10 + result.row.raster != 0


def test_int16_tokens_are_tuned_in_halves(folder: Path) -> None:
    task = Task("int8_cutlass", "halves", "tnt", 1020, 4096, 4096)
    assert task.problem.epilogue.halves
    assert task.rows == 2048
    assert replace(task, out="f16").rows == 1020
    tiles = candidates(task, H200)
    assert len(tiles) >= 16
    for tile in tiles:
        family("int8_cutlass").validate(task.problem, tile, H200.arch)
    assert candidates(replace(task, family="int8_mma"), A100)
    for refused in (
        replace(task, layouts="ttt"),
        replace(task, family="int8_mma", layouts="ntn"),
        replace(task, family="int8_dp4a"),
        replace(task, family="w8a16_cutlass"),
    ):
        assert candidates(refused, H200) == []
    (result,) = run(FakeBench(), folder, (replace(task, family="int8_mma"),), limit=4)
    assert result.row is not None
    assert (result.row.out, result.row.m) == ("halves", 1020)
    table = tuned.Table(H200.name, (result.row,))
    assert tuned.parse(tuned.to_text(table), "t.json").rows[0].place == ("halves", "tnt", 4096, 4096)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("target", [H200, A100], ids=lambda t: t.arch)
def test_candidates_are_legal_few_and_deterministic(name: str, target: Target) -> None:
    task = replace(TASK, family=name)
    tiles = candidates(task, target, 20)
    assert 1 <= len(tiles) <= 20
    assert len(set(tiles)) == len(tiles)
    for tile in tiles:
        family(name).validate(task.problem, tile, target.arch)
    assert candidates(task, target, 20) == tiles


def shape_of(tile: object) -> tuple[int, ...]:
    return (tile.bm, tile.bn, tile.wm, tile.wn)


def test_large_space_is_cut_to_best_and_sample() -> None:
    task = replace(TASK, family="int8_dp4a", m=4096)
    everything = candidates(task, H200, 10**6)
    some = candidates(task, H200, 40)
    assert len(everything) > 100
    assert len(set(some)) == 40
    assert some[0] == everything[0]
    order = {tile: i for i, tile in enumerate(everything)}
    sure, drawn = some[:30], some[30:]
    for part in (sure, drawn):
        assert [order[tile] for tile in part] == sorted(order[tile] for tile in part)
    shapes = Counter(map(shape_of, sure))
    assert max(shapes.values()) == tuning.PER_SHAPE
    # Whatever the model likes better than the last of them was passed over for its shape.
    for tile in everything[: order[sure[-1]]]:
        assert tile in sure or shapes[shape_of(tile)] == tuning.PER_SHAPE
    assert order[drawn[-1]] > order[sure[-1]]
    assert candidates(replace(task, n=2560), H200, 40)[30:] != drawn


def test_families_have_no_tiles_for_unsupported_problems() -> None:
    assert candidates(replace(TASK, family="int8_cutlass", layouts="ntn"), H200) == []
    assert candidates(replace(TASK, family="int8_cutlass", n=1281), H200) == []
    assert candidates(replace(TASK, layouts="ntn", n=1281), H200)


@pytest.mark.parametrize(
    ("resources", "reason"),
    [
        (GOOD, ""),
        (None, ""),
        (replace(GOOD, spill_store_bytes=8, spill_load_bytes=4), "spills 12 bytes a thread"),
        (replace(GOOD, stack_bytes=16), "16 bytes of local memory"),
        (replace(GOOD, smem_bytes=240_000), "do not fit an SM"),
        (replace(GOOD, registers=255), ""),
    ],
)
def test_binaries_are_pruned_by_what_they_use(resources: Resources | None, reason: str) -> None:
    tile = INT8_MMA.menu(GemmProblem(), "sm_90a")[0]
    source = INT8_MMA.emit(GemmProblem(), tile, "sm_90a")
    binary = Binary(source.name, source.entry, source.arch, "", b"", None, "", resources)
    assert reason in tuning.unfit(binary, source)
    assert bool(reason) == bool(tuning.unfit(binary, source))


def test_kernel_of_too_many_registers_does_not_fit() -> None:
    source = replace(INT8_MMA.emit(GemmProblem(), INT8_MMA.menu(GemmProblem(), "sm_80")[0], "sm_80"), block=512)
    binary = fake_build([source], resources=replace(GOOD, registers=168))[source.name]
    assert "512 threads of 168 registers" in tuning.unfit(binary, source)


def test_binaries_are_judged_by_the_compilers_report() -> None:
    tile = INT8_MMA.menu(GemmProblem(), "sm_80")[0]
    source = INT8_MMA.emit(GemmProblem(), tile, "sm_80")
    binary = build_many([source], progress=False)[source.name]
    assert isinstance(binary, Binary)
    assert binary.resources is not None
    assert tuning.unfit(binary, source) == ""
    text = re.sub(r"__launch_bounds__\(\d+\)", "__maxnreg__(32)", source.text)
    spilling = replace(source, text=text, name="spilling")
    squeezed = build_many([spilling], progress=False)["spilling"]
    assert isinstance(squeezed, Binary), squeezed
    assert "spills" in tuning.unfit(squeezed, spilling)


# ── the search ───────────────────────────────────────────────────────────────────────────────────


def test_fastest_tile_wins_after_one_measurement_each(folder: Path) -> None:
    bench = FakeBench()
    (result,) = run(bench, folder)
    tiles = candidates(TASK, H200)
    fastest = min((f"{tile.name} swizzle 1 raster 0" for tile in tiles), key=bench.cost)
    assert result.complete
    assert result.row is not None
    assert f"{result.row.tile.name} swizzle 1 raster 0" == fastest
    assert result.row.time_us == pytest.approx(bench.cost(fastest))
    assert result.tiles == len(tiles)
    assert result.measured == len(tiles) + min(len(tiles), tuning.FINALISTS)
    again = FakeBench()
    (same,) = run(again, folder, build=lambda *_, **__: pytest.fail("everything is in the journal"))
    assert (same.row, same.measured, again.launched) == (result.row, 0, [])


def test_cutlass_finalists_try_every_walk(folder: Path) -> None:
    bench = FakeBench(cost=lambda name: 5.0 if name.endswith("swizzle 4 raster 2") else 9.0 + len(name) / 100)
    (result,) = run(bench, folder, tasks=(replace(TASK, family="int8_cutlass"),))
    assert result.row is not None
    assert (result.row.swizzle, result.row.raster) == (4, 2)
    finals = tuning.FINALISTS * (1 + len(tuning.WALKS))
    assert len(bench.launched) == result.tiles + finals


def test_unbuildable_spilling_and_wrong_tiles_are_not_timed(folder: Path) -> None:
    tiles = [tile.name for tile in candidates(TASK, H200)]
    broken, spilling, wrong = tiles[:3]
    bench = FakeBench()
    bench.wrong = {wrong}
    said = []

    def build(sources: list[KernelSource], **_: object) -> dict[str, Binary | BuildError]:
        found: dict[str, Binary | BuildError] = dict(fake_build(sources))
        for source in sources:
            if source.name.endswith(f"_{spilling}"):
                found |= fake_build([source], resources=replace(GOOD, spill_load_bytes=4))
            if source.name.endswith(f"_{broken}"):
                found[source.name] = BuildError("no\nlog", kernel=source.name)
        return found

    (result,) = run(bench, folder, build=build, report=said.append)
    assert set(result.left_out) == {broken, spilling, wrong}
    assert result.left_out[spilling] == "spills 4 bytes a thread"
    assert result.left_out[broken].startswith("does not compile")
    assert result.wrong == (wrong,)
    assert len(said) == 1
    assert said[0].startswith("WRONG qcut_int8_mma_")
    assert {name.split()[0] for name in bench.launched} == set(tiles) - {broken, spilling}
    (again,) = run(FakeBench(), folder, build=build)
    assert (again.left_out, again.wrong, again.measured) == (result.left_out, result.wrong, 0)


def test_kernel_that_crashed_the_gpu_is_skipped_afterwards(folder: Path) -> None:
    tiles = [tile.name for tile in candidates(TASK, H200)]
    bench = FakeBench()
    bench.astray = {tiles[1]}
    with pytest.raises(DeviceError, match="the same command again goes on without this kernel"):
        run(bench, folder)
    (result,) = run(FakeBench(), folder)
    assert result.left_out == {tiles[1]: "failed: an illegal memory access was encountered"}
    assert result.row is not None


def test_deadline_leaves_a_provisional_row(folder: Path) -> None:
    ticks = iter(range(10**6))
    tasks = (replace(TASK, family="int8_dp4a", m=4096), TASK)
    bench = FakeBench()
    results = run(bench, folder, tasks=tasks, deadline=4, now=lambda: next(ticks))
    assert [result.complete for result in results] == [False]
    assert results[0].row is not None
    assert 0 < results[0].measured < results[0].tiles
    whole = run(FakeBench(), folder, tasks=tasks)
    assert [result.complete for result in whole] == [True, True]
    assert whole[0].measured == whole[0].tiles + tuning.FINALISTS - results[0].measured


# ── the journal ──────────────────────────────────────────────────────────────────────────────────


def test_journal_drops_half_written_and_foreign_lines(folder: Path) -> None:
    with journal(folder) as book:
        book.add("one", us=1.5)
        book.add("two", us=2.5)
        book.add("one", us=1.25)
    path = folder / "journal.jsonl"
    path.write_bytes(path.read_bytes() + b'not json\n[1]\n{"us": 3}\n{"key": "three", "us": 3.')
    with journal(folder) as book:
        assert (len(book), book.skipped) == (2, 4)
        assert book.get("one") == {"key": "one", "us": 1.25}
        assert book.get("three") is None
        book.add("three", us=3.5)
    with journal(folder) as book:
        assert (len(book), book.skipped) == (3, 3)
        assert book.get("three") == {"key": "three", "us": 3.5}


def test_fresh_journal_keeps_the_old_one(folder: Path) -> None:
    with journal(folder) as book:
        book.add("one", us=1.5)
    with journal(folder, fresh=True) as book:
        assert len(book) == 0
        book.add("two", us=2.5)
    assert json.loads((folder / "journal.jsonl.old").read_text())["key"] == "one"
    with journal(folder) as book:
        assert book.get("one") is None
        assert book.get("two") is not None


def test_one_journal_serves_one_process_at_a_time(folder: Path) -> None:
    with journal(folder), pytest.raises(ConfigError, match="another process is tuning"):
        journal(folder)
    journal(folder).close()


CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.tuning import test_search as t
bench = t.FakeBench(pause_s=0.01)
for result in t.run(bench, Path(sys.argv[2]), tasks=t.KILLED):
    print(result.measured, result.row, flush=True)
"""
KILLED = (replace(TASK, family="int8_dp4a", m=4096), TASK)


def test_killed_run_loses_and_repeats_nothing(folder: Path) -> None:
    path = folder / "journal.jsonl"
    command = [sys.executable, "-c", CHILD, str(ROOT), str(folder)]
    counts = []
    for kill_at in (1500, 6000):
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ.copy())
        limit = time.monotonic() + 120
        while time.monotonic() < limit and child.poll() is None:
            if path.exists() and path.stat().st_size > kill_at:
                break
            time.sleep(0.005)
        child.send_signal(signal.SIGKILL)
        _, errors = child.communicate()
        assert child.returncode == -signal.SIGKILL, errors.decode()
        with journal(folder) as book:
            counts.append(len(book))
    assert 0 < counts[0] < counts[1]
    before = path.read_text()
    bench = FakeBench()
    results = run(bench, folder, tasks=KILLED)
    assert path.read_text().startswith(before[: before.rindex("\n") + 1])
    tiles = [len(candidates(task, H200)) for task in KILLED]
    assert sum(result.measured for result in results) == sum(tiles) + 2 * tuning.FINALISTS - counts[-1]
    # The same rows as of a run that nobody stopped.
    assert [result.row for result in results] == [r.row for r in run(FakeBench(), folder / "calm", tasks=KILLED)]
    keys = [json.loads(line)["key"] for line in path.read_text().splitlines()]
    assert len(set(keys)) == len(keys)
