"""Every writer of qcut that replaces files or appends to one, with the means to see what a killed one has left."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache as remembered
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import qcut
from qcut.checkpoints.formats.llama2c.files import load_llama2c, save_llama2c
from qcut.checkpoints.formats.turboquant.format import Config as TurboquantConfig
from qcut.checkpoints.formats.turboquant.writer import quantize_model, save_turboquant
from qcut.conversion.calibration.calibrate import Calibration
from qcut.conversion.planning.plan import LayerPlan, Plan
from qcut.dispatch import tables
from qcut.emitters.core.source import KernelSource, Param
from qcut.emitters.gemm.problem import TileConfig
from qcut.tuning.journal import Journal
from tests.fuzz.formats import model_state
from tests.support.llama2c_oracle import llama
from tests.support.zoo import tiny_hf, tiny_lm, token_batches

builder = import_module("qcut.jit.build")

VERSIONS = 3
"""A writer writes version 1, 2, 3, 1, …: a lost write, one that came too late and a mixture can be distinguished."""


@dataclass(frozen=True)
class Writer:
    """A writer.

    Attributes:
        name: for the command line.
        write: write version ``i`` into the folder, however often that was done before.
        found: what a reader makes of the folder.
        version: what a reader makes of version ``i`` where nobody was killed.
        counts_up: each write adds to what is there, so that versions do not come round.
        ignore: files that are no leftovers whenever they appear: locks.
        end: close what `write` holds open.
    """

    name: str
    write: Callable[[Path, int], None]
    found: Callable[[Path], Any]
    version: Callable[[int], Any]
    counts_up: bool = False
    ignore: re.Pattern[str] = field(default=re.compile(r".*lock"))
    end: Callable[[], None] = lambda: None

    def listing(self, folder: Path) -> list[str]:
        """The names of the files below a folder, random parts made equal."""
        names = (str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())
        return sorted(re.sub(r"[0-9a-f]{8,}", "*", name) for name in names if not self.ignore.fullmatch(name))


def _version(i: int) -> int:
    return (i - 1) % VERSIONS + 1


# ── checkpoints ──────────────────────────────────────────────────────────────────────────────────


@remembered
def _model(version: int) -> Any:
    model = tiny_hf("gpt2")
    model.config.dtype = torch.float32  # which saving notes, as transformers does
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(version)
    qcut.quantize(model, "w8a16", include=["*c_attn", "*c_fc"], fuse=version != 2, allow_growth=True, progress=False)
    qcut.quantize(
        model, "codebook4" if version == 3 else "w8a8", include=["*mlp.c_proj"], allow_growth=True, progress=False
    )
    return model


def _save(folder: Path, i: int) -> None:
    qcut.save(_model(_version(i)), folder, max_shard_bytes=20_000)


def _load(folder: Path) -> Any:
    return model_state(qcut.load(folder, progress=False))


@remembered
def _turboquant_model(version: int) -> Any:
    model = tiny_hf("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(version)
    quantize_model(model, TurboquantConfig(group_size=16, seed=40 + version), progress=False)
    return model


def _save_turboquant(folder: Path, i: int) -> None:
    save_turboquant(_turboquant_model(_version(i)), folder)


@remembered
def _w8a8_model(version: int) -> Any:
    model = tiny_hf("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(version)
    qcut.quantize(model, allow_growth=True, progress=False)
    return model


def _save_compressed_tensors(folder: Path, i: int) -> None:
    qcut.save_compressed_tensors(_w8a8_model(_version(i)), folder)


def _load_tensors(folder: Path) -> Any:
    return _load(folder)["tensors"]


@remembered
def _llama(version: int) -> Any:
    model = llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(version)
    return model


def _save_llama2c(folder: Path, i: int) -> None:
    save_llama2c(_llama(_version(i)), folder / "model.bin")


def _load_llama2c(folder: Path) -> Any:
    return model_state(load_llama2c(folder / "model.bin"))["tensors"]


# ── calibrations, plans, tables ──────────────────────────────────────────────────────────────────


@remembered
def _calibration(version: int) -> Calibration:
    model: nn.Module = tiny_lm()
    return qcut.calibrate(model, token_batches(count=version), sample_size=2048, progress=False)


def _calibration_state(calibration: Calibration) -> Any:
    parts = {
        name: (s.tokens, s.lo.tolist(), s.hi.tolist(), s.sample.tolist()) for name, s in calibration.layers.items()
    }
    return parts, [pair.to_json() for pair in calibration.pairs]


def _plan(version: int) -> Plan:
    layers = {f"layer.{i}": LayerPlan("w8a8", 64 * version, 64, cost={"w8a8": float(version)}) for i in range(200)}
    return Plan(layers, 0.01 * version, "perplexity", "time", None, 0.0, 0.1, version)


GPU = "NVIDIA Test 1"


def _table(version: int) -> tables.Table:
    tile = TileConfig((128, 128, 64), (64, 64, 64), 4)
    rows = [tables.Row("int8_mma", "s8", "tnt", m, 64 * version, 1280, tile, 5.0) for m in range(1, 100)]
    return tables.Table(GPU, tuple(rows), {"driver": str(version)})


def _table_path(folder: Path) -> Path:
    return folder / "tuned" / tables.file_name(GPU)


# ── the journal ──────────────────────────────────────────────────────────────────────────────────

_journals: dict[Path, Journal] = {}


def _append(folder: Path, i: int) -> None:
    """Append one fact, the journal held open as a tuner does."""
    path = folder / "journal.jsonl"
    if path not in _journals:
        _journals[path] = Journal(path)
    _journals[path].add(f"task {i}", kernel="kernel" * 20, us=i + 0.5)


def _close_journals() -> None:
    while _journals:
        _journals.popitem()[1].close()


def _facts(folder: Path) -> Any:
    with Journal(folder / "journal.jsonl") as journal:
        return [journal.get(key) for key in sorted(journal._facts, key=lambda key: int(key.split()[1]))]


# ── kernels ──────────────────────────────────────────────────────────────────────────────────────


def _kernel(i: int) -> KernelSource:
    text = f'extern "C" __global__ void kernel(int* out) {{ *out = {i}; }}\n'
    return KernelSource(f"kernel_{i}", text, "kernel", (Param("out", "i32*"),), "sm_80", block=32)


def _cubin(i: int) -> bytes:
    return i.to_bytes(4, "little") * (1 << 18)


@contextlib.contextmanager
def _compiler() -> Iterator[list[str]]:
    """A compiler that gives a MiB at once, so that it is the writing that is killed; and what it was asked for."""
    asked: list[str] = []

    def compile_text(source: KernelSource, *, device: bool = True) -> tuple[bytes, None, str]:
        asked.append(source.name)
        return _cubin(int(source.name.split("_")[1])), None, "said nothing"

    with mock.patch.object(builder, "compile_text", compile_text):
        yield asked


@contextlib.contextmanager
def _cache_at(folder: Path) -> Iterator[None]:
    builder._memory.clear()
    with mock.patch.dict(os.environ, {"QCUT_CACHE_DIR": str(folder)}):
        yield
    builder._memory.clear()


def _build(folder: Path, i: int) -> None:
    with _cache_at(folder), _compiler():
        builder.build(_kernel(i))


def _build_with_nvrtc(folder: Path, i: int) -> None:
    with _cache_at(folder):
        builder.build(_kernel(i))


def _kernels(folder: Path, cubin_of: Callable[[int], bytes]) -> list[int]:
    """The kernels in the cache, without gaps from the first; each is whole, and no compiler is asked for it."""
    found = []
    with _cache_at(folder):
        for i in range(1, 1_000_000):
            source = _kernel(i)
            entry = builder.cache.read(source.name, builder.device_fingerprint(source))
            if entry is None:
                return found
            assert entry.blobs["cubin"] == cubin_of(i), f"the entry of kernel {i} holds another"
            found.append(i)
    raise AssertionError("there is no end")


@remembered
def _reference(i: int) -> bytes:
    cubin: bytes = builder.compile_source(_kernel(i)).cubin
    return cubin


WRITERS = {
    one.name: one
    for one in (
        Writer("save", _save, _load, lambda i: model_state(_model(_version(i)))),
        Writer("save_turboquant", _save_turboquant, _load, lambda i: model_state(_turboquant_model(_version(i)))),
        Writer(
            "save_compressed_tensors",
            _save_compressed_tensors,
            _load_tensors,
            lambda i: model_state(_w8a8_model(_version(i)))["tensors"],
        ),
        Writer("save_llama2c", _save_llama2c, _load_llama2c, lambda i: model_state(_llama(_version(i)))["tensors"]),
        Writer(
            "calibration",
            lambda folder, i: _calibration(_version(i)).save(folder),
            lambda folder: _calibration_state(Calibration.load(folder)),
            lambda i: _calibration_state(_calibration(_version(i))),
        ),
        Writer(
            "plan",
            lambda folder, i: _plan(_version(i)).save(folder / "plan.json"),
            lambda folder: Plan.load(folder / "plan.json"),
            lambda i: _plan(_version(i)),
        ),
        Writer(
            "tuned table",
            lambda folder, i: tables.write(_table_path(folder), _table(_version(i))) and None,
            lambda folder: (tables.read(_table_path(folder)).rows, tables.read(_table_path(folder)).environment),
            lambda i: (_table(_version(i)).rows, _table(_version(i)).environment),
        ),
        Writer(
            "journal",
            _append,
            _facts,
            lambda i: [{"key": f"task {j}", "kernel": "kernel" * 20, "us": j + 0.5} for j in range(1, i + 1)],
            counts_up=True,
            end=_close_journals,
        ),
        Writer("build", _build, lambda folder: _kernels(folder, _cubin), lambda i: [*range(1, i + 1)], counts_up=True),
        Writer(
            "build with NVRTC",
            _build_with_nvrtc,
            lambda folder: _kernels(folder, _reference),
            lambda i: [*range(1, i + 1)],
            counts_up=True,
        ),
    )
}
