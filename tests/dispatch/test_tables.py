"""Tables of tuned kernels: what is read, what is ignored and why, what merging keeps, what writing never loses."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from qcut.dispatch import tables as tuned
from qcut.dispatch.gpus import Target, target_named
from qcut.dispatch.machines import Rates
from qcut.dispatch.tables import Row, Table
from qcut.emitters.core.source import INCLUDE_DIR, KernelSource
from qcut.emitters.families import FAMILIES, INT8_MMA, family
from qcut.emitters.gemm.problem import GemmProblem, TileConfig
from qcut.errors import ConfigError
from qcut.jit.build import header_digests
from tests.support import GOLDEN

GPU = "NVIDIA Test 1"
TILE = TileConfig((128, 128, 64), (64, 64, 64), 4)
ROW = Row("int8_mma", "s8", "tnt", 64, 1280, 1280, TILE, 5.0)
DIGESTS = GOLDEN / "family_digests.json"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("QCUT_CACHE_DIR", str(tmp_path))
    tuned.forget()
    yield tmp_path / "tuned"
    tuned.forget()


def path() -> Path:
    found = tuned.user_path(GPU)
    assert found is not None
    return found


def test_tables_survive_the_file() -> None:
    simt = family("int8_dp4a").default_tiles(GemmProblem(), "sm_80")[0]
    rows = (
        ROW,
        replace(ROW, family="int8_dp4a", layouts="ntn", tile=simt),
        replace(ROW, m=16, tile=replace(TILE, splits=4)),
    )
    table = Table(GPU, rows, {"driver": "1"})
    assert tuned.write(path(), table) is None
    read = tuned.read(path())
    assert set(read.rows) == set(rows)
    assert (read.gpu, read.environment, read.partial) == (GPU, {"driver": "1"}, False)
    assert tuned.to_text(read) == path().read_text()
    assert set(tuned.table_for(GPU).rows) == set(rows)
    assert [p.name for p in path().parent.iterdir()] == ["nvidia_test_1.json"]


def test_gpu_names_become_file_names() -> None:
    assert tuned.file_name("NVIDIA H200") == "nvidia_h200.json"
    assert tuned.file_name(" ../GeForce/RTX 4090 ") == ".._geforce_rtx_4090.json"
    assert tuned.table_for("").rows == ()
    assert tuned.table_for("NVIDIA Nothing").notes == ()


def test_the_shipped_table_is_believed_whole() -> None:
    table = tuned.shipped("NVIDIA H200")
    assert len(table.rows) >= 76
    assert not table.partial, table.notes
    assert {row.family for row in table.rows} <= set(FAMILIES)


def test_the_users_rows_lie_over_the_shipped_ones() -> None:
    before = {row.key: row for row in tuned.table_for("NVIDIA H200").rows}
    shipped = next(iter(before.values()))
    mine = replace(shipped, time_us=shipped.time_us * 2, swizzle=8)
    where = tuned.user_path("NVIDIA H200")
    assert where is not None
    tuned.write(where, Table("NVIDIA H200", (mine,)))
    after = {row.key: row for row in tuned.table_for("NVIDIA H200").rows}
    assert after == {**before, mine.key: mine}


def test_rows_of_another_version_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = TileConfig((128, 128, 128), schedule="pingpong")
    cutlass = Row("int8_cutlass", "f16", "tnt", 64, 1280, 1280, tile, 4.0, 2, 1)
    tuned.write(path(), Table(GPU, (ROW, cutlass)))
    now = tuned.versions()
    monkeypatch.setattr(tuned, "versions", lambda: {**now, "int8_mma": "99"})
    tuned.forget()
    table = tuned.table_for(GPU)
    assert table.rows == (cutlass,)
    assert table.partial
    assert f"ignored 1 rows of int8_mma: tuned for {now['int8_mma']}, this is 99" in " ".join(table.notes)
    monkeypatch.setattr(tuned, "versions", lambda: {**now, "int8_cutlass": "1, nvidia-cutlass 5.0"})
    tuned.forget()
    assert tuned.table_for(GPU).rows == (ROW,)
    assert "nvidia-cutlass 5.0" in " ".join(tuned.table_for(GPU).notes)


def test_old_spellings_of_families_are_read() -> None:
    text = tuned.to_text(Table(GPU, (ROW,)))
    assert '"int8_mma"' in text
    assert tuned.parse(text.replace('"int8_mma"', '"mma"'), "old.json").rows == (ROW,)


def test_rows_of_another_version_may_hold_unknown_tiles() -> None:
    data = json.loads(tuned.to_text(Table(GPU, (ROW,))))
    data["choices"].append({**data["choices"][0], "family": "forgotten", "tile": {"what": 1}})
    table = tuned.parse(json.dumps(data), "t.json")
    assert table.rows == (ROW,)
    assert "t.json: ignored 1 rows of forgotten: tuned for an unstated version, this is no family" in table.notes


def damaged(**changes: object) -> str:
    data = json.loads(tuned.to_text(Table(GPU, (ROW,))))
    row = {key: value for key, value in changes.items() if key in data["choices"][0]}
    data["choices"][0].update(row)
    data.update({key: value for key, value in changes.items() if key not in row})
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not readable as JSON"),
        ("[]", "an object"),
        ("{}", "'schema' is missing"),
        (damaged()[:-40], "not readable as JSON"),
        (damaged(schema=1), "schema 1; this qcut reads 2"),
        (damaged(choices=[1]), "found 1; allowed: an object"),
        (damaged(m=0), "a whole number from 1"),
        (damaged(m=True), "found True; allowed: a whole number"),
        (damaged(n=1.5), "found 1.5; allowed: a whole number"),
        (damaged(time_us=0), "'time_us': found 0"),
        (damaged(time_us=float("nan")), "found the number NaN"),
        (damaged(out="f64"), "one of f16, s8"),
        (damaged(layouts="tt"), "'layouts': found 'tt'; allowed: one of"),
        (damaged(tile={"threadblock_shape": [1, 2, 3], "depth": 4}), "no tile of family 'int8_mma'"),
        (damaged(tile=[]), "no tile of family 'int8_mma'"),
        (damaged(tile={"threadblock_shape": "abc"}), "'threadblock_shape': found 'abc'; allowed: a list of 3"),
        (
            damaged(tile={"threadblock_shape": [1, 2, "3"]}),
            "'threadblock_shape[2]': found '3'; allowed: a whole number",
        ),
        (
            damaged(tile={"threadblock_shape": [1, 2, 3], "schedule": "late"}),
            "found 'late'; allowed: one of multistage",
        ),
        (damaged(splits=-1), "'splits': found -1"),
        ("[" * 100_000, "objects within one another"),
        (damaged(versions=[]), "'versions': found []; allowed: an object"),
    ],
)
def test_damaged_tables_are_noted_and_kept_when_replaced(text: str, reason: str) -> None:
    path().parent.mkdir(parents=True)
    path().write_text(text)
    with pytest.raises(ConfigError, match=re.escape(reason)):
        tuned.read(path())
    table = tuned.table_for(GPU)
    assert table.rows == ()
    assert reason in table.notes[0]
    assert str(path()) in table.notes[0]
    kept = tuned.write(path(), Table(GPU, (ROW,)))
    assert kept is not None
    assert kept.read_text() == text
    assert tuned.table_for(GPU).rows == (ROW,)
    path().write_text(text)
    again = tuned.write(path(), Table(GPU, (ROW,)))
    assert again not in (None, kept)


def test_table_with_ignored_rows_is_kept_when_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.write(path(), Table(GPU, (ROW,)))
    old = path().read_text()
    monkeypatch.setattr(tuned, "versions", lambda: {**dict.fromkeys(FAMILIES, "2")})
    kept = tuned.write(path(), Table(GPU, (ROW,)))
    assert kept is not None
    assert kept.read_text() == old


def test_binary_files_and_other_gpus_tables_are_ignored() -> None:
    path().parent.mkdir(parents=True)
    path().write_bytes(b"\xff\xfe\x00")
    assert "not readable as JSON" in tuned.table_for(GPU).notes[0]
    path().write_text(tuned.to_text(Table("NVIDIA Other", (ROW,))))
    tuned.forget()
    assert tuned.table_for(GPU).rows == ()
    assert tuned.table_for(GPU).notes == (f"ignored a table of NVIDIA Other under the name of {GPU}",)


def test_error_names_a_directory_that_cannot_be_written(folder: Path) -> None:
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("a file where the directory should be")
    with pytest.raises(ConfigError, match=re.escape(str(path()))):
        tuned.write(path(), Table(GPU, (ROW,)))


def test_a_write_that_fails_leaves_the_old_table(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.write(path(), Table(GPU, (ROW,)))
    old = path().read_text()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        tuned.write(path(), Table(GPU, ()))
    assert path().read_text() == old
    assert list(path().parent.iterdir()) == [path()]


def test_merging_keeps_the_fastest_of_each_key() -> None:
    slow, fast = replace(ROW, time_us=9.0), replace(ROW, time_us=2.0, tile=replace(TILE, stages=3))
    other = replace(ROW, out="f16")
    merged = tuned.merge([Table(GPU, (ROW, other), {"driver": "1"}), Table(GPU, (slow,)), Table(GPU, (fast,))])
    assert set(merged.rows) == {fast, other}
    assert merged.environment == {"driver": "1"}
    equal = replace(fast, swizzle=8)
    assert tuned.merge([Table(GPU, (fast,)), Table(GPU, (equal,))]).rows == (fast,)
    with pytest.raises(ConfigError, match="NVIDIA Other"):
        tuned.merge([Table(GPU, (ROW,)), Table("NVIDIA Other", (ROW,))])
    with pytest.raises(ConfigError, match="these are of none"):
        tuned.merge([])


# ── versions ─────────────────────────────────────────────────────────────────────────────────────


def code_digest(source: KernelSource) -> str:
    """Digest of a kernel's text and of qcut's headers under it, comments, layout and the kernel's name aside."""
    parts = [source.text.replace(source.name, "NAME")]
    parts += [(INCLUDE_DIR / name).read_text() for name in sorted(header_digests(source))]
    code = re.sub(r"//[^\n]*|/\*.*?\*/", " ", "\n".join(parts), flags=re.DOTALL)
    return hashlib.sha256(" ".join(code.split()).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", FAMILIES)
def test_changed_device_code_needs_a_decision_about_tables(name: str) -> None:
    kind = family(name)
    digest = code_digest(kind.emit(GemmProblem(), kind.default_tiles(GemmProblem(), "sm_90a")[-1], "sm_90a"))
    stated = json.loads(DIGESTS.read_text())[name]
    assert stated == {"version": kind.version, "digest": digest}, (
        f"the device code of {name} changed. If that can move which of its tiles is fastest, raise its number in "
        f"emitters/families.py: tables measured before are then ignored. Either way write "
        f'"{name}": {json.dumps({"version": kind.version, "digest": digest})} into {DIGESTS.name}'
    )


def test_the_digest_ignores_comments_and_sees_code() -> None:
    source = INT8_MMA.emit(GemmProblem(), TILE, "sm_90a")
    digest = code_digest(source)
    assert code_digest(replace(source, text="// why\n/* more\n */\n" + source.text + "\n\n")) == digest
    assert code_digest(replace(source, text=source.text + "int x;")) != digest


# ── tables of similar GPUs ───────────────────────────────────────────────────────────────────────


H200, H100 = target_named("NVIDIA H200"), target_named("NVIDIA H100 80GB HBM3")


def test_a_similar_gpu_starts_from_a_shipped_table() -> None:
    own = tuned.shipped("NVIDIA H200").rows
    assert tuned.start_of(H100) == "NVIDIA H200"
    table = tuned.table_on(H100)
    assert {replace(row, tuned_on="") for row in table.rows} == set(own)
    assert {row.tuned_on for row in table.rows} == {"NVIDIA H200"}
    assert f"{len(own)} rows tuned for NVIDIA H200, used as a start for NVIDIA H100 80GB HBM3" in table.notes[-1]
    assert tuned.table_on(H200) == tuned.table_for("NVIDIA H200")


@pytest.mark.parametrize(
    "gpu",
    [
        Target("sm_90a", 132),  # no GPU in particular
        target_named("NVIDIA H100 PCIe"),  # fewer SMs: other waves
        Target("sm_90a", 78, "NVIDIA H20", Rates(1.98, 4000.0, 60 << 20)),
        Target("sm_90a", 132, "NVIDIA Slow", Rates(1.98, 2500.0, 50 << 20)),  # more products to a byte
        target_named("NVIDIA A100-SXM4-80GB"),
        target_named("NVIDIA B200"),
    ],
    ids=lambda gpu: gpu.name or gpu.arch,
)
def test_gpu_without_a_similar_one_has_the_model(gpu: Target) -> None:
    assert tuned.start_of(gpu) == ""
    assert tuned.table_on(gpu).rows == ()


def test_unknown_gpu_is_similar_by_its_drivers_figures() -> None:
    assert tuned.start_of(Target("sm_90a", 132, "NVIDIA H800", Rates(1.98, 3350.0, 50 << 20))) == "NVIDIA H200"


def test_own_rows_leave_no_start_at_their_sizes() -> None:
    """Times of two GPUs do not compare: another family's faster row of the other GPU must not win."""
    start = next(row for row in tuned.shipped("NVIDIA H200").rows if row.family == "int8_cutlass")
    mine = replace(ROW, out=start.out, layouts=start.layouts, m=start.m, n=start.n, k=start.k, time_us=1e6)
    file = tuned.user_path(H100.name)
    assert file is not None
    tuned.write(file, Table(H100.name, (mine,)))
    rows = tuned.rows_for(H100)
    assert rows[mine.place] == (mine,)
    assert sum(map(len, rows.values())) > 50
    assert tuned.table_for(H100.name).rows == (mine,)  # what `qcut tune` keeps holds no other GPU's rows


def test_gpu_with_a_shipped_table_needs_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    real = tuned.shipped
    mine = Table(H100.name, (ROW,))
    monkeypatch.setattr(tuned, "shipped", lambda gpu: mine if gpu == H100.name else real(gpu))
    assert tuned.table_on(H100).rows == (ROW,)
