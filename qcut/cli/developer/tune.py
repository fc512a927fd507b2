"""``qcut tune``: measures tiles on this GPU, writes the table that dispatch reads, and merges tables."""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from qcut import jit
from qcut.cli.command import Answer, Command
from qcut.common.progress import print_above
from qcut.dispatch import tables as tuned
from qcut.emitters.families import CUTLASS_FAMILIES, FAMILIES, INT8_CUTLASS, SPELLINGS, W8A16_CUTLASS
from qcut.errors import CheckpointError, ConfigError, DeviceError
from qcut.schemes import padded_k

if TYPE_CHECKING:
    from qcut.dispatch.gpus import Target
    from qcut.tuning.search import Bench, Result, Task

_ARGUMENTS = f"""\
--family {"|".join((*SPELLINGS, W8A16_CUTLASS.name))}, again
    kernel family to tune; may be repeated (default: every int8 family that can be built here)
--shape MxNxK ...: shape
    sizes of GEMMs (default: none)
--model DIR, again
    tune for the layers of a model: a folder with a config.json, or a preset such as gpt2-large or llama-3-8b (default:
    none)
--tokens M ...: positive = 16,64,256,1024,4096
    numbers of tokens M to tune --model's layers for (default: 16 64 256 1024 4096)
--layouts ABD ...: layouts = tnt
    memory orders of A, B, D: t row-major, n column-major (default: tnt)
--types f16|s8|halves ... = f16,s8
    element types of D; halves is f16 of int16 tokens, M of them (default: f16 s8)
--limit N: positive
    build at most N tiles for each GEMM and family (default: 48)
--time-budget S: positive_float
    stop measuring after S seconds (default: never)
--jobs N: positive
    compilers at a time (default: one per core)
| --resume
    use what earlier runs measured (the default)
| --fresh
    measure everything anew
--out FILE: Path
    update this table (default: the user's own)
--merge FILE ...: Path
    take in the rows of these tables (default: none)
"""

FIELDS = {
    "table": "path of the table",
    "rows": "how many rows the table has now",
    "gemms": "list of {name, tile, time_us, tiles, measured, left_out}: the fastest tile and its time, null if none "
    "could be timed; of how many tiles; how many were measured now; those left out, with the reason",
    "unfinished": "how many GEMMs the time budget left; the same command goes on with them",
}


def _shape(text: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    sizes = tuple(map(int, match.groups())) if match else ()
    if not sizes or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not MxNxK, three whole numbers from 1 up")
    return sizes[0], sizes[1], sizes[2]


def _layouts(text: str) -> str:
    flags = text.lower().replace("1", "t").replace("0", "n")
    if not re.fullmatch("[tn]{3}", flags):
        raise argparse.ArgumentTypeError(f"{text!r} is not three of t (row-major) and n (column-major): A, B, D")
    return flags


COMMAND = Command(
    "tune",
    _ARGUMENTS,
    {"shape": _shape, "layouts": _layouts},
    help="find the fastest tile for given GEMMs on this GPU, and write the table that dispatch reads",
    description="Measures which tile is the fastest for given int8 products on this GPU, and writes the table\n"
    "from which qcut chooses afterwards: $QCUT_CACHE_DIR/tuned/GPU.json (default ~/.cache/qcut). Each tile is\n"
    "checked bitwise first. Measurements are kept in a journal: a run that was stopped goes on where it was. The\n"
    "exit status is 1 if a kernel computed something wrong.",
    example="qcut tune --model gpt2-large --tokens 512 4096",
    fields=FIELDS,
)


def run(arguments: argparse.Namespace, bench: Callable[[], Bench] | None = None) -> Answer:
    """Run the command.

    Args:
        arguments: the parsed command line.
        bench: factory of the bench; None: the current CUDA device.

    Raises:
        ConfigError: nothing to do, or the table cannot be written.
        DeviceError: there is no GPU.
    """
    shapes = _shapes(arguments)
    if not shapes and not arguments.merge:
        raise ConfigError("tune: nothing to do; give --shape MxNxK, --model DIR, or --merge FILE")
    merged = tuned.merge(tuned.read(path) for path in arguments.merge) if arguments.merge else None
    device = (bench or _cuda_bench)() if shapes else None
    gpu = device.target.name if device else merged.gpu if merged else ""
    path = arguments.out or tuned.user_path(gpu)
    if path is None:
        raise ConfigError("tune: there is no home directory for the table; set QCUT_CACHE_DIR or give --out FILE")
    if path.is_dir():
        raise ConfigError(f"tune: --out {path}: there is a folder of that name; allowed: a file")
    book = _Book(path, gpu)
    if merged is not None:
        book.take(merged)
    if device is None:
        return _answer(book, [], 0)
    return _tune(arguments, shapes, device, book)


def _shapes(arguments: argparse.Namespace) -> list[tuple[int, int, int]]:
    shapes = list(arguments.shape or ())
    if arguments.model:
        layers = [shape for model in arguments.model for shape in layer_shapes(model)]
        shapes += [(m, n, k) for n, k in layers for m in arguments.tokens]
    return list(dict.fromkeys(shapes))


def _cuda_bench() -> Bench:
    import torch

    if not torch.cuda.is_available():
        raise DeviceError("tune: measuring needs a CUDA device, and torch finds none here; --merge works without one")
    from qcut.tuning.bench import CudaBench

    return CudaBench()


class _Book:
    """The table being written; each row is saved as soon as it is measured."""

    def __init__(self, path: Path, gpu: str) -> None:
        self.path, self._table = path, tuned.Table(gpu)
        if path.exists():
            try:
                self._table = tuned.read(path)
            except ConfigError as error:
                print(f"qcut: not used: {error}", file=sys.stderr)
        if self._table.gpu != gpu:
            raise ConfigError(f"{path}: a table of {self._table.gpu}; these rows are of {gpu}")
        for note in self._table.notes:
            if "ignored" in note:
                print(f"qcut: {note}", file=sys.stderr)

    def take(self, other: tuned.Table) -> None:
        """Merge tables of other runs; the faster row wins."""
        before = {row.key: row for row in self._table.rows}
        self._write(tuned.merge([self._table, other]))
        changed = sum(before.get(row.key) != row for row in self._table.rows)
        for note in other.notes:
            print(note)
        print(f"{changed} rows taken into {self.path}, which has {len(self._table.rows)}")

    def put(self, result: Result, environment: dict[str, str]) -> None:
        """Replace a row by a result. A result cut short by the time budget replaces only a slower row."""
        if result.row is not None:
            new = tuned.Table(self._table.gpu, (result.row,), environment)
            self._write(tuned.overlay(self._table, new) if result.complete else tuned.merge([self._table, new]))

    def _write(self, table: tuned.Table) -> None:
        if (kept := tuned.write(self.path, table)) is not None:
            print(f"qcut: what {self.path} held and was not used is kept as {kept}", file=sys.stderr)
        self._table = table

    @property
    def rows(self) -> int:
        """Number of rows of the table."""
        return len(self._table.rows)

    def __str__(self) -> str:
        return f"{self.path} has {len(self._table.rows)} rows"


def _tune(arguments: argparse.Namespace, shapes: list[tuple[int, int, int]], device: Bench, book: _Book) -> Answer:
    from qcut.tuning import search as tuning
    from qcut.tuning import timing
    from qcut.tuning.journal import Journal

    tasks, refused = _tasks(arguments, shapes, device.target)
    for line in refused:
        print(line)
    base = tuned.user_path(device.target.name) or arguments.out
    facts = vars(timing.environment(device.target.name))
    path = base.with_name(base.name.removesuffix(".json") + ".journal.jsonl")
    limit = arguments.limit or tuning.DEFAULT_LIMIT
    with Journal(path, fresh=arguments.fresh) as journal:
        if len(journal):
            print(f"going on with {len(journal)} measurements of {path}")
        results = tuning.tune(
            tasks,
            device,
            journal,
            limit=limit,
            deadline=time.monotonic() + (arguments.time_budget or math.inf),
            jobs=arguments.jobs,
            progress=sys.stderr.isatty(),
            report=print_above,
            done=lambda result: book.put(result, facts),
        )
    print(_summary(results))
    unfinished = len(tasks) - sum(result.complete for result in results)
    if unfinished:
        print(f"time budget spent: {unfinished} of {len(tasks)} GEMMs unfinished; the same command goes on with them")
    print(book)
    return _answer(book, results, unfinished)


def _answer(book: _Book, results: list[Result], unfinished: int) -> Answer:
    gemms = [
        {
            "name": result.task.name,
            "tile": result.row and result.row.tile.name,
            "time_us": result.row and result.row.time_us,
            "tiles": result.tiles,
            "measured": result.measured,
            "left_out": result.left_out,
        }
        for result in results
    ]
    data = {"table": str(book.path), "rows": book.rows, "gemms": gemms, "unfinished": unfinished}
    return Answer(data, status=1 if any(result.wrong for result in results) else 0)


def _tasks(
    arguments: argparse.Namespace, shapes: list[tuple[int, int, int]], target: Target
) -> tuple[list[Task], list[str]]:
    """The GEMMs to tune, and a message per combination without a tile."""
    from qcut.tuning import search as tuning

    families = [SPELLINGS.get(name, name) for name in arguments.family or ()]
    if not families:
        families = [name for name in FAMILIES if name != INT8_CUTLASS.name or jit.is_toolchain_available("nvcc")]
    tasks, refused = [], []
    for m, n, k in shapes:
        for name in dict.fromkeys(families):
            for layouts in dict.fromkeys(arguments.layouts):
                for out in dict.fromkeys(arguments.types):
                    task = tuning.Task(name, out, layouts, m, n, k)
                    if tuning.candidates(task, target, 1):
                        tasks.append(task)
                    else:
                        refused.append(f"{task.name}: the family has no tile for it")
    return tasks, refused


def _summary(results: list[Result]) -> str:
    lines = [f"{'GEMM':<34} {'us':>9} {'TOPS':>7}  tile, of how many; measured now"]
    for result in results:
        t, row = result.task, result.row
        if row is None:
            lines.append(f"{t.name:<34} {'-':>9} {'-':>7}  none of {result.tiles} tiles could be timed")
        else:
            tops = 2e-6 * t.m * t.n * t.k / row.time_us
            walk = f" swizzle {row.swizzle} raster {row.raster}" if t.family in CUTLASS_FAMILIES else ""
            counts = f"of {result.tiles}; {result.measured}"
            lines.append(f"{t.name:<34} {row.time_us:9.2f} {tops:7.0f}  {row.tile.name}{walk}, {counts}")
        for name, reason in result.left_out.items():
            lines.append(f"{'':<8}left out {name}: {reason}")
    return "\n".join(lines)


# ── sizes (N, K) of a model's linear layers, from a preset's name or a checkpoint directory ─────────

PRESETS: dict[str, tuple[tuple[int, int], ...]] = {
    "gpt2": ((2304, 768), (768, 768), (3072, 768), (768, 3072)),
    "gpt2-large": ((3840, 1280), (1280, 1280), (5120, 1280), (1280, 5120)),
    "gpt2-xl": ((4800, 1600), (1600, 1600), (6400, 1600), (1600, 6400)),
    "llama-3.2-1b": ((2048, 2048), (512, 2048), (8192, 2048), (2048, 8192)),
    "llama-3-8b": ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)),
    "mistral-7b": ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)),
}
"""(out_features, in_features) of the layers of one block, without the head, which stays in float."""


def layer_shapes(model: str, skip: tuple[str, ...] = ("lm_head",)) -> list[tuple[int, int]]:
    """The distinct sizes (N, padded K) of a model's linear layers.

    Args:
        model: a name of `PRESETS`, or a directory with a Hugging Face ``config.json``.
        skip: names to leave out: a layer's whole dotted name, or the end of it.

    Raises:
        ConfigError: ``model`` is neither a preset nor a directory.
        CheckpointError: the directory's model cannot be built, or has no linear layer.
    """
    if model in PRESETS:
        return [(n, padded_k(k)) for n, k in PRESETS[model]]
    directory = Path(model)
    if not directory.is_dir():
        raise ConfigError(f"model {model!r} is neither a directory nor one of {', '.join(PRESETS)}")
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory}: there is no config.json")
    shapes = {
        (n, padded_k(k)): None
        for name, (n, k) in _meta_layers(directory).items()
        if not any(name == s or name.endswith("." + s) for s in skip)
    }
    if not shapes:
        raise CheckpointError(f"{directory}: the model has no linear layer")
    return list(shapes)


def _meta_layers(directory: Path) -> dict[str, tuple[int, int]]:
    from qcut.checkpoints.detect import read_config
    from qcut.checkpoints.huggingface import causal_model
    from qcut.models.modules import is_linear, weight_nk

    path = directory / "config.json"
    model = causal_model(read_config(path), str(path))
    shapes = {}
    for name, module in model.named_modules():
        if is_linear(module):
            n, k = weight_nk(module).shape
            shapes[name] = (int(n), int(k))
    return shapes
