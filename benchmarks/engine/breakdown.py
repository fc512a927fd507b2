"""Step breakdown: each kernel's time by itself, the time that it adds to the step, and the bytes that it must read.

A step is captured as a CUDA graph, and timed whole, without one kind of kernel, and with only this kind. The kind of a
kernel is its name and its input: its weight, its part of the cache, or, for a kernel that reads neither, the input of
the next kernel. *Alone* is the time of a graph with only this kind minus that of an empty graph; since kernels overlap
the skipped nodes, it is a lower bound for small kernels. *Added* is the time of the step minus that of a step without
the kind; for a kind of one kernel the noise of a step limits it. Kernels that start early overlap others, and add less
than their time by themselves. *Beyond memory* is the added time minus the time in which memory delivers the bytes.

    python benchmarks engine breakdown [--cases llama-3-8b-codebook4,...] [--batches 1,8]
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

import qcut
from benchmarks import harness
from benchmarks.engine.step_graph import Node, StepGraph
from benchmarks.engine.steps import CASES, NEW, PROMPT, build, prompts_of
from benchmarks.harness import CEILINGS, Timing
from benchmarks.publish import plots
from benchmarks.publish.engines import STEP, named

KEY = ("case", "batch", "role")
LAUNCHES, ROUNDS = 16, 5
SMALLEST = 1 << 12
"""Bytes of a tensor that names a kernel which reads it: smaller ones are scales, signs and counters."""


class Memory(NamedTuple):
    """Memory that a step reads.

    Attributes:
        start, end: addresses.
        name: of the module, digits as ``*``.
        nbytes: bytes of it that a step reads.
    """

    start: int
    end: int
    name: str
    nbytes: float


class Role(NamedTuple):
    """Kernels of a step that do the same in every layer.

    Attributes:
        name: the kernel, and its input.
        indices: of its nodes in the graph.
        nbytes: of weights and cache that all these nodes read.
    """

    name: str
    indices: tuple[int, ...]
    nbytes: float


class Entry(NamedTuple):
    """The times of a role.

    Attributes:
        role: the kernels.
        alone_us, added_us: microseconds of one kernel: by itself, and added to the step.
    """

    role: Role
    alone_us: float
    added_us: float


class Graph(Protocol):
    """The part of `StepGraph` that `breakdown` needs."""

    nodes: Sequence[Node]

    def time_us(self, chosen: set[int]) -> float:
        """Microseconds of a launch with some nodes."""


def weights_of(model: Any) -> list[Memory]:
    """A model's parameters and buffers in memory: layers that share memory are one, named by the first."""
    found: dict[int, Memory] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        found.setdefault(start, Memory(start, start + len(storage), general(name), float(len(storage))))
    return list(found.values())


def cache_of(engine: qcut.Engine, layers: int, sequences: int, tokens: float) -> list[Memory]:
    """The cache of each layer; a step reads so many tokens of so many sequences of it."""
    found = []
    for index in range(layers):
        for part in engine.cache.layer(index):
            if part is not None:
                batch, _, places, *_ = part.shape
                start = part.data_ptr()
                used = part.nbytes * sequences / batch * tokens / places
                found.append(Memory(start, start + part.nbytes, "cache", used))
    return found


def general(name: str) -> str:
    """A tensor's name without layers' numbers and without the tensor: the module that holds it."""
    module = re.sub(r"(?<=\.)\d+(?=\.)", "*", name).rpartition(".")[0]
    return module.rpartition("*.")[2]


def roles_of(nodes: Sequence[Node], memory: Iterable[Memory]) -> list[Role]:
    """Group kernels by their names and their inputs; in the order of their first node."""
    known = sorted(memory)
    names: list[str] = []
    sizes: list[float] = []
    for node in nodes:
        read = {place for word in node.words if (place := _holding(known, word)) is not None}
        sizes.append(0.0 if "embed" in node.name else sum(place.nbytes for place in read))
        large = [place for place in read if place.end - place.start >= SMALLEST]
        names.append(max(large, key=lambda place: place.nbytes).name if large else "")
    following = "the end"
    for index in range(len(names) - 1, -1, -1):
        following = names[index] or following
        names[index] = f"{nodes[index].name}: {names[index] or f'before {following}'}"
    return [
        Role(name, indices, sum(sizes[index] for index in indices))
        for name in dict.fromkeys(names)
        if (indices := tuple(index for index, other in enumerate(names) if other == name))
    ]


def _holding(known: Sequence[Memory], address: int) -> Memory | None:
    return next((place for place in known if place.start <= address < place.end), None)


def breakdown(graph: Graph, roles: Sequence[Role]) -> tuple[float, list[Entry]]:
    """Microseconds of a step, and the times of each role."""
    everything = set(range(len(graph.nodes)))
    nothing = graph.time_us(set())
    steps, entries = [], []
    for role in roles:
        own, count = set(role.indices), len(role.indices)
        alone = (graph.time_us(own) - nothing) / count
        steps.append(graph.time_us(everything))  # next to the step without the kind, since clocks drift
        entries.append(Entry(role, alone, (steps[-1] - graph.time_us(everything - own)) / count))
    return statistics.median(steps), entries


class _Timed:
    """A `StepGraph` with all launches starting at the same position of the sequences."""

    def __init__(self, graph: StepGraph, before: Callable[[], object]) -> None:
        self.nodes: Sequence[Node] = graph.nodes
        self._graph, self._before = graph, before

    def time_us(self, chosen: set[int]) -> float:
        return self._graph.time_us(chosen, self._before, LAUNCHES, ROUNDS)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", default="llama-3-8b-codebook4,llama-3-8b-int8,gpt2-large-int8", help="of CASES")
    parser.add_argument("--batches", default="1,8", help="sequences at once, comma-separated")


@harness.script(harness.timing_options, add_options, gpu=True, time_budget=300.0)
def main(options: argparse.Namespace) -> int:
    deadline = time.monotonic() + options.time_budget
    results = harness.Results("bench_breakdown", harness.environment())
    ceiling = CEILINGS.get(results.env.gpu)
    for name in options.cases.split(","):
        model = build(CASES[name], "cuda")
        for batch in (int(word) for word in options.batches.split(",")):
            if time.monotonic() > deadline:
                print(f"out of time before {name} of {batch}", file=sys.stderr)
                break
            step, entries = measured(model, CASES[name].layers, CASES[name].vocabulary, batch)
            add_rows(results, name, batch, step, entries, ceiling.read_bytes if ceiling else math.nan)
            print(summary(results.rows, name, batch))
            results.write_csv(options.out, KEY)
        del model
        torch.cuda.empty_cache()
    draw(options.out)
    return 0


def measured(model: Any, layers: int, vocabulary: int, batch: int) -> tuple[float, list[Entry]]:
    """Capture and time a step of a model at the mean position of the steps of `engine/steps.py`."""
    context = PROMPT + NEW
    engine = qcut.Engine(model, batch=batch, context=context)
    engine.prefill(prompts_of(vocabulary, batch, PROMPT))
    tokens = torch.zeros(batch, dtype=torch.int64)
    lengths = [PROMPT + NEW // 2] * batch
    loop = engine.runner.decode_loop(tokens, lengths)
    starts: Tensor = torch.tensor(lengths, dtype=torch.int32)
    graph = StepGraph(loop.launch)
    memory = [*weights_of(model), *cache_of(engine, layers, batch, lengths[0] + LAUNCHES / 2)]
    return breakdown(_Timed(graph, lambda: loop.start(tokens, starts)), roles_of(graph.nodes, memory))


def add_rows(
    results: harness.Results, case: str, batch: int, step: float, entries: Sequence[Entry], read_bytes: float
) -> None:
    """A row for each role, and one for the step with the sums."""
    for role, alone, added in entries:
        floor = role.nbytes / len(role.indices) / read_bytes * 1e6
        columns = {"count": len(role.indices), "added_us": round(added, 3), "floor_us": round(floor, 3)}
        timing = Timing.of([alone])
        results.add(timing, case=case, batch=batch, role=role.name, gb=round(role.nbytes / 1e9, 4), **columns)
    nbytes = sum(entry.role.nbytes for entry in entries)
    columns = {"count": 1, "added_us": round(sum(e.added_us * len(e.role.indices) for e in entries), 3)}
    columns |= {"floor_us": round(nbytes / read_bytes * 1e6, 3)}
    results.add(Timing.of([step]), case=case, batch=batch, role=STEP, gb=round(nbytes / 1e9, 4), **columns)


def summary(rows: Sequence[Mapping[str, object]], case: str, batch: int) -> str:
    """A table of one step: microseconds of one kernel, and of all kernels of a role together."""
    lines: list[list[object]] = []
    for row in rows:
        if (row["case"], row["batch"]) == (case, batch):
            count, alone, added, floor = (float(str(row[c])) for c in ("count", "median_us", "added_us", "floor_us"))
            lines.append([str(row["role"])[:72], int(count), alone, added, floor, count * (added - floor)])
    header = [f"{case} of {batch}", "kernels", "alone us", "added us", "memory us", "beyond memory, all"]
    return harness.table(header, lines)


def draw(folder: Path) -> None:
    """A plot for each model and batch: the time that each role adds to the step, its memory limit, and its own time."""
    path = folder / "bench_breakdown.csv"
    rows = harness.read_rows(path) if path.is_file() else []
    for case, batch in dict.fromkeys((row["case"], row["batch"]) for row in rows):
        parts: dict[str, dict[str, float]] = {}
        alone: dict[str, float] = {}
        here = [row for row in rows if (row["case"], row["batch"]) == (case, batch)]
        for row in here:
            if row["role"] == STEP:
                continue
            count = int(row["count"])
            floor, added = (count * float(row[column]) for column in ("floor_us", "added_us"))
            label = f"{count} × {named(row['role'])}"
            parts[label] = {"memory delivers": min(floor, max(added, 0.0)), "memory idle": max(added - floor, 0.0)}
            alone[label] = count * float(row["median_us"])
        (step,) = (row for row in here if row["role"] == STEP)
        title = (
            f"{case}, {batch} at once:\na step of {float(step['median_us']):,.0f} µs, "
            f"{float(step['floor_us']):,.0f} of memory"
        )
        plots.stacks(folder / "breakdown" / f"{case}-{batch}", parts, {"alone": alone}, title, "µs added to the step")
