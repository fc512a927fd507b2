"""vLLM's steps and prompts on two GPUs, and of a larger model, predicted from those of a small model on one.

This checks what `benchmarks.scaling.model` says of tensor parallelism, with vLLM around qcut's layers: products have
the time of their size by the laws of `bench_cliff.py`, the classifier that of a float16 product, attention its time on
one GPU over the GPUs, all-reduces are measured, and whatever else a layer takes it takes on every GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench_vllm import PROMPT, SHAPES
from benchmarks.reporting.rows import Row, Rows
from benchmarks.reporting.serving import ATTENTION, SHAPE, TWO_GPUS, kernel_ms
from benchmarks.scaling.check import Check
from benchmarks.scaling.laws import FLOAT, Curve, ProductLaw, all_reduce_curves, product_laws
from benchmarks.scaling.model import Shape

BASE = SHAPE
"""The shape whose rows on one GPU the others are predicted from."""


@dataclass(frozen=True)
class Terms:
    """What of vLLM's time is known, for one kind of GPU.

    Attributes:
        laws: scheme → tokens → law of products.
        attention_us: of `BASE` on the one GPU whose kernels were read, by what and batch; the mean over methods.
        all_reduce: GPUs → microseconds by bytes.
    """

    laws: Mapping[str, Mapping[int, ProductLaw]]
    attention_us: Mapping[tuple[str, int], float]
    all_reduce: Mapping[int, Curve]

    @classmethod
    def read(cls, rows: Rows, gpu: str) -> Terms:
        """Fit and collect.

        Args:
            rows: of all results; those of products are in `TWO_GPUS`.
            gpu: the name of the GPUs there.
        """
        found: dict[tuple[str, int], list[float]] = {}
        for (_, kind), cells in kernel_ms(rows).items():
            for (what, batch), ms in cells.items() if kind == ATTENTION else ():
                found.setdefault((what, int(batch)), []).append(1e3 * ms)
        attention = {cell: statistics.mean(us) for cell, us in found.items()}
        return cls(product_laws(Rows(rows.folder / TWO_GPUS), gpu), attention, all_reduce_curves(rows))

    def known_us(self, shape: Shape, scheme: str, what: str, batch: int, gpus: int) -> float:
        """Microseconds of products, classifier, attention and all-reduces together."""
        tokens = PROMPT if what == "prompt" else batch
        base = shape_of(BASE)
        layer = sum(self.laws[scheme][tokens].us(n, k) for n, k in shape.products(gpus))
        # A step reads the keys of its heads of keys; a prompt multiplies for each query.
        heads = shape.heads / base.heads if what == "prompt" else shape.kv_heads / base.kv_heads
        attention = self.attention_us[what, batch] * shape.layers / base.layers * heads / gpus
        head = self.laws[FLOAT][batch].us(shape.vocabulary // gpus, shape.hidden)
        exchanged = 2 * self.all_reduce[gpus].at(2.0 * tokens * shape.hidden) if gpus > 1 else 0.0
        return (layer + exchanged) * shape.layers + attention + head


def shape_of(name: str) -> Shape:
    """A shape of `bench_vllm.py`."""
    width, hidden, blocks, heads, kv_heads, vocabulary = SHAPES[name]
    return Shape(name, blocks, width, heads, kv_heads, hidden, vocabulary)


def predictions(folder: Path) -> list[Check]:
    """Every row but those of `BASE` on one GPU, beside its prediction; none where there are no rows.

    Args:
        folder: of results.
    """
    measured = Rows(folder / TWO_GPUS).of("bench_vllm")
    if not measured:
        return []
    terms = Terms.read(Rows(folder), measured[0]["gpu"])
    times = {_key(row): float(row["median_us"]) for row in measured}
    base, found = shape_of(BASE), []
    for (name, method, what, batch, gpus), us in times.items():
        start = times.get((BASE, method, what, batch, 1))
        if start is None or (name, gpus) == (BASE, 1):
            continue
        scheme, shape = method.removeprefix("qcut-"), shape_of(name)
        rest = start - terms.known_us(base, scheme, what, batch, 1)
        predicted = terms.known_us(shape, scheme, what, batch, gpus) + rest * shape.layers / base.layers
        found.append(Check(f"{name}, {method}", what, batch, gpus, us, predicted))
    return sorted(found, key=lambda one: (one.what == "prompt", not one.case.startswith(BASE), one.case, one.batch))


def _key(row: Row) -> tuple[str, str, str, int, int]:
    return row["shape"], row["method"], row["what"], int(row["batch"]), int(row["gpus"])
