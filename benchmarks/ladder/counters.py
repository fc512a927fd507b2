"""Hardware counters of a few launches, read by Nsight Compute's ``ncu``. docs/kernel-notes/ladder.md explains them."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


class CountersError(Exception):
    """ncu is missing, not allowed, or without output; the message is ncu's own."""


@dataclass(frozen=True)
class Counter:
    """One column.

    Attributes:
        column: its name.
        metrics: ncu's names of the counter. Chips differ: the first name with a value counts.
    """

    column: str
    metrics: tuple[str, ...]


_ACTIVE = "avg.pct_of_peak_sustained_active"
_SECTORS = "smsp__sass_average_data_bytes_per_sector_mem_global_op"


def _conflicts(operation: str, *others: str) -> Counter:
    name = f"sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_{operation}.sum"
    return Counter(f"conflicts_{operation}", (f"smsp__{name}", f"sm__{name}", *others))


COUNTERS = (
    Counter("shared_wavefronts", ("memory_l1_wavefronts_shared",)),
    Counter("shared_wavefronts_ideal", ("memory_l1_wavefronts_shared_ideal",)),
    _conflicts("ld", "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum"),
    _conflicts("ldsm"),
    _conflicts("ldgsts"),
    _conflicts("st", "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum"),
    Counter("load_sector_pct", (f"{_SECTORS}_ld.pct",)),
    Counter("store_sector_pct", (f"{_SECTORS}_st.pct",)),
    Counter("warps_active_pct", (f"sm__warps_active.{_ACTIVE}",)),
    Counter(
        "tensor_active_pct",
        (
            f"sm__pipe_tensor_cycles_active.{_ACTIVE}",
            f"sm__pipe_tensor_op_imma_cycles_active.{_ACTIVE}",
            f"sm__inst_executed_pipe_tensor_op_imma.{_ACTIVE}",
        ),
    ),
    Counter("ncu_registers", ("launch__registers_per_thread",)),
)
METRICS = tuple(metric for counter in COUNTERS for metric in counter.metrics)
COLUMNS = ("bank_conflicts", *(counter.column for counter in COUNTERS))


def find() -> str:
    """Path of ncu.

    Raises:
        CountersError: it is not on PATH.
    """
    path = shutil.which("ncu")
    if path is None:
        raise CountersError("ncu is not on PATH")
    return path


def command(ncu: str, metrics: Sequence[str], log: Path, program: Sequence[str]) -> list[str]:
    """Return ncu's command line: launches between cudaProfilerStart and cudaProfilerStop, without clock control."""
    options = ["--clock-control", "none", "--profile-from-start", "off", "--csv", "--print-units", "base"]
    return [ncu, *options, "--metrics", ",".join(metrics), "--log-file", str(log), *program]


def profile(program: Sequence[str], timeout: float = 300.0) -> dict[str, dict[str, float]]:
    """Run a program under ncu, without the metrics that ncu does not know.

    Args:
        program: its command line.
        timeout: seconds; kernels run a dozen times each, and some passes are slow.

    Returns:
        As `parse`.

    Raises:
        CountersError: see there.
    """
    ncu, metrics = find(), METRICS
    while True:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "ncu.csv"
            try:
                line = command(ncu, metrics, log, program)
                done = subprocess.run(line, capture_output=True, text=True, timeout=timeout)
            except (OSError, subprocess.SubprocessError) as error:
                raise CountersError(f"ncu: {error}") from error
            text = log.read_text() if log.exists() else ""
        found = parse(text)
        if done.returncode == 0 and found:
            return found
        said = "\n".join((text, done.stdout, done.stderr))
        known = without_unknown(metrics, said)
        if len(known) in (0, len(metrics)):
            raise CountersError(_reason(said) or f"ncu ended with status {done.returncode}")
        metrics = known


def without_unknown(metrics: Sequence[str], said: str) -> tuple[str, ...]:
    """Return the metrics that ncu does not report as unknown; ncu names them with or without a suffix."""
    unknown = set(re.findall(r"Failed to find metric (?:regex:\^)?(\w+)", said))
    return tuple(metric for metric in metrics if metric.split(".")[0] not in unknown)


def parse(text: str) -> dict[str, dict[str, float]]:
    """Read ncu's CSV, one metric of one launch a line; other lines may come first.

    Returns:
        For each kernel's name, without its parameters, the metrics of its first launch that have a number.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    found: dict[str, dict[str, float]] = {}
    launches: dict[str, str] = {}
    for row in csv.DictReader(lines[start:]):
        name = (row.get("Kernel Name") or "").split("(")[0]
        metric, value = row.get("Metric Name"), _number(row.get("Metric Value"))
        if not name or not metric or launches.setdefault(name, row["ID"]) != row["ID"]:
            continue
        metrics = found.setdefault(name, {})
        if value is not None:
            metrics[metric] = value
    return found


def columns(metrics: Mapping[str, float]) -> dict[str, float]:
    """The columns of a row that have a value, and conflicts: wavefronts that shared memory took beyond the ideal."""
    row: dict[str, float] = {}
    for counter in COUNTERS:
        values = [metrics[metric] for metric in counter.metrics if metric in metrics]
        if values:
            row[counter.column] = values[0]
    if {"shared_wavefronts", "shared_wavefronts_ideal"} <= row.keys():
        row["bank_conflicts"] = row["shared_wavefronts"] - row["shared_wavefronts_ideal"]
    return row


def _number(text: str | None) -> float | None:
    plain = (text or "").replace(",", "")
    return float(plain) if re.fullmatch(r"-?\d+(\.\d*)?([eE][-+]?\d+)?", plain) else None


def _reason(said: str) -> str:
    """Return ncu's first complaint, or the last line of its output."""
    lines = [line for line in said.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("==ERROR==")), lines[-1] if lines else "")
