"""The tuner on a real GPU: small searches of every family, the table they leave, and what dispatch makes of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from qcut import jit
from qcut.backends.cuda.launch.plans import target
from qcut.dispatch import gemm as dispatch
from qcut.dispatch import tables as tuned
from qcut.dispatch.gemm import Choice
from qcut.emitters.families import family
from qcut.tuning import search as tuning
from qcut.tuning.bench import CudaBench
from qcut.tuning.journal import Journal
from qcut.tuning.search import Task
from qcut.tuning.timing import CheckError

TASKS = (
    Task("int8_mma", "s8", "tnt", 64, 384, 512),
    Task("int8_mma", "f16", "ntn", 64, 384, 512),
    Task("int8_wmma", "f16", "tnt", 64, 384, 512),
    Task("int8_dp4a", "s8", "nnt", 64, 384, 512),
    Task("int8_dp4a", "f16", "ttn", 33, 129, 257),
    Task("int8_cutlass", "s8", "tnt", 64, 384, 512),
    Task("int8_cutlass", "halves", "tnt", 60, 384, 512),
    Task("int8_mma", "halves", "tnt", 57, 129, 272),
)
LIMIT = 3


@pytest.fixture(scope="module")
def bench() -> CudaBench:
    return CudaBench()


@pytest.fixture(scope="module")
def built(bench: CudaBench) -> None:
    """Every candidate at once, in parallel."""
    sources = {}
    for task in TASKS:
        for tile in tuning.candidates(task, bench.target, LIMIT):
            source = dispatch.emit(Choice(task.family, tile), task.problem, bench.target.arch)
            sources[source.name] = source
    for name, result in jit.build_many(sources.values(), progress=False).items():
        assert not isinstance(result, Exception), f"{name}: {result}"


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    tuned.forget()
    yield
    tuned.forget()


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_search_finds_a_kernel_and_resumes_without_a_launch(task: Task, bench: CudaBench, tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl") as journal:
        (first,) = tuning.tune([task], bench, journal, limit=LIMIT)
        (again,) = tuning.tune([task], bench, journal, limit=LIMIT, build=lambda *_, **__: pytest.fail("built again"))
    assert first.complete
    assert first.wrong == ()
    assert first.row is not None
    assert first.row.time_us > 0.5  # how much more depends on who else uses the GPU
    assert (again.row, again.measured) == (first.row, 0)
    family(task.family).validate(task.problem, first.row.tile, bench.target.arch)


@pytest.mark.usefixtures("built")
def test_dispatch_runs_what_was_tuned(bench: CudaBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = TASKS[1]
    with Journal(tmp_path / "journal.jsonl") as journal:
        (result,) = tuning.tune([task], bench, journal, limit=LIMIT)
    monkeypatch.setenv("QCUT_CACHE_DIR", str(tmp_path))  # after the search: its kernels are cached where all are
    path = tuned.user_path(bench.target.name)
    assert path is not None
    assert result.row is not None
    tuned.write(path, tuned.Table(bench.target.name, (result.row,)))
    choice = dispatch.select_gemm(task.problem, task.m, task.n, task.k, target(torch.cuda.current_device()))
    assert (choice.family, choice.tile, choice.tuned_us) == ("int8_mma", result.row.tile, round(result.row.time_us, 3))


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("task", [TASKS[0], TASKS[3]], ids=lambda task: task.name)
def test_one_wrong_element_is_seen(task: Task, bench: CudaBench) -> None:
    tile = tuning.candidates(task, bench.target, LIMIT)[0]
    choice = Choice(task.family, tile)
    source = dispatch.emit(choice, task.problem, bench.target.arch)
    variant = bench.variant(task, "x", choice, source, jit.build(source))
    assert variant.check is not None
    variant.check()
    expected = bench._for(task).expected
    row, column = expected.shape[0] - 1, expected.shape[1] - 1
    right = expected[row, column].clone()
    expected[row, column] = right + 1 if int(right) < 127 else right - 1
    with pytest.raises(CheckError, match=f"1 of {expected.numel()} elements differ"):
        variant.check()
    expected[row, column] = right
    variant.check()


@pytest.mark.usefixtures("built")
def test_every_copy_of_the_weights_is_read(bench: CudaBench) -> None:
    task = TASKS[0]
    tile = tuning.candidates(task, bench.target, LIMIT)[0]
    choice = Choice(task.family, tile)
    source = dispatch.emit(choice, task.problem, bench.target.arch)
    variant = bench.variant(task, "x", choice, source, jit.build(source))
    operands = bench._for(task)
    assert variant.copies == len(operands.b) > 1
    results = []
    for i in (0, 1, variant.copies - 1):
        variant.call(i)
        results.append(operands.d.clone())
    torch.cuda.synchronize()
    assert torch.equal(results[0], operands.expected)
    assert not torch.equal(results[1], results[0])
    assert not torch.equal(results[2], results[1])


def test_the_command_tunes_and_writes_the_users_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from qcut.cli import main as cli

    monkeypatch.setenv("QCUT_CACHE_DIR", str(tmp_path))
    words = ["tune", "--family", "mma", "--shape", "64x256x256", "--types", "s8", "--limit", "2"]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    name = torch.cuda.get_device_name()
    wanted = ("int8_mma", 64, 256, 256)
    rows = [row for row in tuned.table_for(name).rows if (row.family, row.m, row.n, row.k) == wanted]
    assert len(rows) == 1
    assert rows[0].tile.name in said
    assert math.isfinite(rows[0].time_us)
    assert cli.main(words) == 0
    assert "going on with" in capsys.readouterr().out
