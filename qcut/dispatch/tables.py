"""Tables of tuned kernels: which tile was fastest for which GEMM on which GPU.

A GPU has one JSON file shipped with qcut, and over it the user's own, ``$QCUT_CACHE_DIR/tuned/{gpu}.json``. A GPU
without a shipped file may start from that of a similar GPU (`start_of`). A table
states for which version of each family it was measured; rows of another version, and files that cannot be read, are
ignored, and `Table.notes` holds the reason. Writing loses nothing: a new file is renamed into place, and an old file
that was not understood is kept next to it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from qcut.common import schema
from qcut.common.files import make_directory, write_text
from qcut.common.schema import JSON_BYTES, parse_json, read_bytes
from qcut.dispatch.gpus import Target
from qcut.dispatch.machines import MACHINES, balance_ratio
from qcut.emitters.core.source import EmitError
from qcut.emitters.families import CUTLASS_FAMILIES, SPELLINGS, TUNED_FAMILIES, family
from qcut.errors import ConfigError
from qcut.jit import cache as kernel_cache

SCHEMA = 2
OUTPUTS = ("f16", "s8", "halves")
"""Classes of D: ``f16`` stands for every type wider than a byte, ``halves`` for these if tokens are int16."""
LAYOUTS = tuple(a + b + d for a in "tn" for b in "tn" for d in "tn")

ALIKE = 1.5
"""Ratio of two GPUs' products per byte of memory up to which one starts from the other's table."""
_EXTENT = schema.integer(0, 1 << 20)
_SIZE = schema.integer(1)
_HEAD = schema.record({"schema": schema.anything()}, more=True)
_TABLE = schema.record(
    {
        "versions": schema.table(schema.text()),
        "gpu": schema.text(),
        "choices": schema.items(schema.record({"family": schema.text()}, more=True)),
    },
    {"environment": (schema.table(schema.text()), {})},
    more=True,
)
_ROW = schema.record(
    {
        "family": schema.text(),
        "out": schema.text(choices=OUTPUTS),
        "layouts": schema.text(choices=LAYOUTS),
        "m": _SIZE,
        "n": _SIZE,
        "k": _SIZE,
        "tile": schema.anything(),
        "time_us": schema.number(least=5e-324),
        "swizzle": schema.integer(1, 64),
        "raster": schema.integer(0, 2),
        "splits": schema.integer(1, 64),
    }
)

Key = tuple[str, str, str, int, int, int]


@dataclass(frozen=True)
class Row:
    """The fastest kernel of one family for one GEMM.

    Attributes:
        family: one of `qcut.emitters.families.TUNED_FAMILIES`.
        out: one of `OUTPUTS`.
        layouts: of A, B and D, as `GemmProblem.layouts`.
        m: rows of D, and of A except with int16 tokens, in halves.
        n: columns of B and D.
        k: summed over.
        tile: the family's tile.
        time_us: the kernel's median time in µs.
        swizzle: see `qcut.dispatch.heuristics.Choice`.
        raster: see `qcut.dispatch.heuristics.Choice`.
        splits: see `qcut.dispatch.heuristics.Choice`.
        tuned_on: another GPU, if its row is a start for this one; empty for a GPU's own row.
    """

    family: str
    out: str
    layouts: str
    m: int
    n: int
    k: int
    tile: Any
    time_us: float
    swizzle: int = 1
    raster: int = 0
    splits: int = 1
    tuned_on: str = ""

    @property
    def key(self) -> Key:
        """The fields that identify a row: of two rows with the same key, one replaces the other."""
        return (self.family, self.out, self.layouts, self.m, self.n, self.k)

    @property
    def place(self) -> tuple[str, str, int, int]:
        """The fields by which dispatch looks rows up: ``out``, ``layouts``, ``n`` and ``k``."""
        return (self.out, self.layouts, self.n, self.k)


@dataclass(frozen=True)
class Table:
    """The tuned rows of one GPU that are valid for this version of qcut.

    Attributes:
        gpu: the GPU's name as the driver reports it.
        rows: rows, at most one per `Row.key`.
        environment: versions with which the rows were measured: driver, CUDA, torch, commit.
        notes: one line for each file that was read and each part that was ignored, with the reason.
        partial: whether something was ignored.
    """

    gpu: str
    rows: tuple[Row, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    partial: bool = False


@cache
def versions() -> dict[str, str]:
    """By family, the version that its rows depend on: its own, and for CUTLASS kernels the CUTLASS package's too."""
    try:
        package = f", nvidia-cutlass {metadata.version('nvidia-cutlass')}"
    except metadata.PackageNotFoundError:
        package = ", nvidia-cutlass is not installed"
    return {name: f"{family(name).version}{package * (name in CUTLASS_FAMILIES)}" for name in TUNED_FAMILIES}


# ── one file ─────────────────────────────────────────────────────────────────────────────────────


def tile_to_json(tile: Any) -> dict[str, Any]:
    """The fields of a tile that differ from their defaults."""
    out = {}
    for f in dataclasses.fields(tile):
        value = getattr(tile, f.name)
        if value != f.default:
            out[f.name] = list(value) if isinstance(value, tuple) else value
    return out


def tile_from_json(family_name: str, data: Mapping[str, Any]) -> Any:
    """Read what `tile_to_json` wrote.

    Raises:
        ConfigError: there is no such family, or the data are not a tile of the family.
    """
    try:
        kind: Any = family(family_name).tile_type
    except (EmitError, TypeError) as error:
        raise ConfigError(f"{data!r} is no tile of family {family_name!r}: {error}") from None
    values = schema.conform(data, _tile_schema(kind), f"no tile of family {family_name!r}", ConfigError)
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


@cache
def _tile_schema(kind: Any) -> schema.Check:
    """What the fields of a class of tiles may be, from their annotations."""
    hints = get_type_hints(kind)
    fields: dict[str, schema.Check] = {}
    optional: dict[str, tuple[schema.Check, Any]] = {}
    for f in dataclasses.fields(kind):
        check = _field_check(hints[f.name])
        if f.default is dataclasses.MISSING:
            fields[f.name] = check
        else:
            optional[f.name] = check, f.default
    return schema.record(fields, optional)


def _field_check(hint: Any) -> schema.Check:
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        return schema.items(_field_check(parts[0]), len(parts))
    if get_origin(hint) is Literal:
        return schema.text(choices=get_args(hint))
    return {int: _EXTENT, bool: schema.boolean(), str: schema.text()}[hint]


def parse(text: str | bytes, where: str) -> Table:
    """Read a table.

    Args:
        text: contents of the file.
        where: path of the file, for messages.

    Returns:
        The valid rows, and notes on the others.

    Raises:
        ConfigError: the text is not JSON, or not a table of this schema.
    """
    data = parse_json(text.encode("utf-8", "replace") if isinstance(text, str) else text, where, ConfigError)
    data = schema.conform(data, _HEAD, where, ConfigError)
    if data["schema"] != SCHEMA:
        raise ConfigError(f"{where}: schema {data['schema']!r}; this qcut reads {SCHEMA}")
    data = schema.conform(data, _TABLE, where, ConfigError)
    stated = {_family_name(name): version for name, version in data["versions"].items()}
    gpu, environment = data["gpu"], data["environment"]
    families = [_family_name(row["family"]) for row in data["choices"]]
    # Rows of another version may describe tiles that no longer exist, so they are only counted.
    current = {name for name, version in versions().items() if stated.get(name) == version}
    rows = [_row(row, where) for row, name in zip(data["choices"], families, strict=True) if name in current]
    believed = {row.key: row for row in rows}
    notes = [f"{where}: {len(believed)} rows"] if believed else []
    for name in dict.fromkeys(families):
        if name not in current:
            was, now = stated.get(name, "an unstated version"), versions().get(name, "no family")
            notes.append(f"{where}: ignored {families.count(name)} rows of {name}: tuned for {was}, this is {now}")
    return Table(gpu, tuple(believed.values()), environment, tuple(notes), len(rows) < len(families))


def _family_name(name: str) -> str:
    """The family's name; old tables spell some families as command lines do."""
    return SPELLINGS.get(name, name)


def _row(data: Any, where: str) -> Row:
    data = schema.conform(data, _ROW, f"{where}: row {json.dumps(data)[:200]}", ConfigError)
    name = _family_name(data["family"])
    try:
        tile = tile_from_json(name, data["tile"])
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return Row(**{**data, "family": name, "tile": tile})


def to_text(table: Table) -> str:
    """A table as JSON with one row per line, so that two versions of a table can be compared by line."""

    def line(row: Row) -> str:
        head = {key: getattr(row, key) for key in ("family", "out", "layouts", "m", "n", "k")}
        walk = {"swizzle": row.swizzle, "raster": row.raster, "splits": row.splits}
        return json.dumps({**head, "tile": tile_to_json(row.tile), **walk, "time_us": round(row.time_us, 3)})

    stated = {name: version for name, version in versions().items() if any(r.family == name for r in table.rows)}
    facts = {"schema": SCHEMA, "gpu": table.gpu, "versions": stated, "environment": dict(table.environment)}
    head = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in facts.items())
    rows = ",\n".join(line(row) for row in sorted(table.rows, key=lambda row: row.key))
    return "{\n" + head + f',\n"choices": [\n{rows}\n]\n}}\n'


def read(path: Path) -> Table:
    """Read a table from a file.

    Raises:
        ConfigError: there is no such file, or it is no table (see `parse`).
    """
    return parse(read_bytes(path, JSON_BYTES, ConfigError), str(path))


def write(path: Path, table: Table) -> Path | None:
    """Write a table under a temporary name and rename it into place.

    Returns:
        The new path of the old file, if that was not fully understood and was kept; else None.

    Raises:
        ConfigError: the directory cannot be written.
    """
    try:
        make_directory(path.parent)
        aside = None
        if path.exists() and not _is_understood(path):
            aside = next(p for i in range(10**6) if not (p := path.with_name(f"{path.name}.kept{i}")).exists())
            path.replace(aside)
        write_text(path, to_text(table))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}") from error
    forget()
    return aside


def _is_understood(path: Path) -> bool:
    try:
        return not read(path).partial
    except ConfigError:
        return False


# ── several ──────────────────────────────────────────────────────────────────────────────────────


def overlay(base: Table, over: Table) -> Table:
    """The rows of two tables; of two rows with the same key, that of ``over``."""
    rows = {row.key: row for row in (*base.rows, *over.rows)}
    notes, environment = (*base.notes, *over.notes), over.environment or base.environment
    return Table(over.gpu, tuple(rows.values()), environment, notes, base.partial or over.partial)


def merge(tables: Iterable[Table]) -> Table:
    """The rows of several tables of one GPU; of rows with the same key the fastest, of equally fast rows the first.

    Raises:
        ConfigError: there is no table, or they are of different GPUs.
    """
    tables = list(tables)
    if len(names := {table.gpu for table in tables}) != 1:
        raise ConfigError(f"tables of one GPU can be merged; these are of {sorted(names) or 'none'}")
    best: dict[Key, Row] = {}
    for row in (row for table in tables for row in table.rows):
        if row.key not in best or row.time_us < best[row.key].time_us:
            best[row.key] = row
    notes = tuple(note for table in tables for note in table.notes)
    environment = next((table.environment for table in tables if table.environment), {})
    return Table(tables[0].gpu, tuple(best.values()), environment, notes, any(table.partial for table in tables))


def file_name(gpu: str) -> str:
    """File name of a GPU's table: ``NVIDIA H200`` → ``nvidia_h200.json``."""
    return "".join(c if c.isalnum() or c in "-." else "_" for c in gpu.strip().lower()) + ".json"


def user_path(gpu: str) -> Path | None:
    """Where the user's table of a GPU lies, whether it exists or not; None without a cache directory."""
    base = kernel_cache.directory()
    return base / "tuned" / file_name(gpu) if base else None


def shipped(gpu: str) -> Table:
    """The table that comes with qcut; empty if there is none."""
    resource = resources.files("qcut.dispatch") / "tuned" / file_name(gpu)
    if not gpu.strip() or not resource.is_file():
        return Table(gpu)
    return _believed(gpu, lambda: parse(resource.read_text(encoding="utf-8"), f"shipped {resource.name}"))


def users(gpu: str) -> Table:
    """The user's table; empty if there is none."""
    path = user_path(gpu)
    if not gpu.strip() or path is None or not path.exists():
        return Table(gpu)
    return _believed(gpu, lambda: read(path))


def _believed(gpu: str, load: Callable[[], Table]) -> Table:
    try:
        table = load()
    except ConfigError as error:
        return Table(gpu, notes=(f"ignored {error}",), partial=True)
    if table.gpu.strip().lower() != gpu.strip().lower():
        return Table(gpu, notes=(f"ignored a table of {table.gpu} under the name of {gpu}",), partial=True)
    return table


@cache
def table_for(gpu: str) -> Table:
    """The table of a GPU's name: the shipped table with the user's rows over it.

    Files are read once per process; `forget` makes the next call read them again. A file that cannot be used raises
    nothing and becomes a note.
    """
    return overlay(shipped(gpu), users(gpu))


def start_of(target: Target) -> str:
    """For a GPU without a shipped table, the GPU that lends it one as a start; empty if there is none.

    A row's tile is the fastest for a number of waves, and for the ratio of products to memory bandwidth. Hence the
    other GPU has the same architecture and the same number of multiprocessors, and its products per byte of memory
    differ by at most `ALIKE`. Of several, the nearest by this ratio. Elsewhere the model chooses.
    """
    if not target.name.strip() or shipped(target.name).rows:
        return ""
    machine = target.machine
    near = {
        name: balance_ratio(machine, other)
        for name, other in MACHINES.items()
        if (other.arch, other.sm_count) == (machine.arch, machine.sm_count) and shipped(name).rows
    }
    return min((name for name, ratio in near.items() if ratio <= ALIKE), key=near.__getitem__, default="")


@cache
def table_on(target: Target) -> Table:
    """The table that dispatch uses on a GPU: that of its name, and around the user's own rows those of `start_of`."""
    own, start = table_for(target.name), start_of(target)
    if not start:
        return own
    # Times of two GPUs do not compare, so a size that was measured here has only rows of this GPU.
    measured = {row.place for row in own.rows}
    rows = [dataclasses.replace(row, tuned_on=start) for row in shipped(start).rows if row.place not in measured]
    note = f"{len(rows)} rows tuned for {start}, used as a start for {target.name}; `qcut tune` measures its own"
    return dataclasses.replace(own, rows=(*own.rows, *rows), notes=(*own.notes, note))


@cache
def rows_for(target: Target) -> dict[tuple[str, str, int, int], tuple[Row, ...]]:
    """The rows of `table_on` by `Row.place`."""
    rows: dict[tuple[str, str, int, int], tuple[Row, ...]] = {}
    for row in table_on(target).rows:
        rows[row.place] = (*rows.get(row.place, ()), row)
    return rows


def forget() -> None:
    """Forget all tables, so that the next call reads the files again."""
    for kept in (table_for, table_on, rows_for):
        kept.cache_clear()
