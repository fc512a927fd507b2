"""vLLM's steps and prompts on several GPUs, and of a larger model, predicted from those of a small model on one.

This checks what `benchmarks.scaling.model` says of tensor parallelism, with vLLM around qcut's layers: products have
the time of their size by the laws of `layers/crossover.py`, the classifier that of a float16 product, attention its
time on one GPU over the GPUs, all-reduces are measured, and whatever else a layer takes it takes on every GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine.vllm import PROMPT, SHAPES
from benchmarks.publish.rows import Row, Rows
from benchmarks.publish.serving import ATTENTION, HOSTS, SHAPE, kernel_ms, short_name
from benchmarks.scaling.check import Check
from benchmarks.scaling.laws import FLOAT, Curve, ProductLaw, all_reduce_curves, product_laws, product_us
from benchmarks.scaling.model import Shape

BASE = SHAPE
"""The shape that predicts the others from its rows on one GPU."""


@dataclass(frozen=True)
class Terms:
    """What of vLLM's time is known, for one kind of GPU.

    Attributes:
        laws: scheme → tokens → law of products.
        attention_us: of `BASE` on the one GPU with profiled kernels, by what and batch; the mean over methods.
        all_reduce: GPUs → microseconds by bytes.
    """

    laws: Mapping[str, Mapping[int, ProductLaw]]
    attention_us: Mapping[tuple[str, int], float]
    all_reduce: Mapping[int, Curve]

    @classmethod
    def read(cls, rows: Rows, products: Rows, gpu: str) -> Terms:
        """Fit and collect.

        Args:
            rows: of all results.
            products: those of products.
            gpu: the name of the GPUs that computed the products.
        """
        found: dict[tuple[str, int], list[float]] = {}
        for (_, kind), cells in kernel_ms(rows).items():
            for (what, batch), ms in cells.items() if kind == ATTENTION else ():
                found.setdefault((what, int(batch)), []).append(1e3 * ms)
        attention = {cell: statistics.mean(us) for cell, us in found.items()}
        return cls(product_laws(products, gpu), attention, all_reduce_curves(rows))

    def known_us(self, shape: Shape, scheme: str, what: str, batch: int, gpus: int) -> float:
        """Microseconds of products, classifier, attention and all-reduces together."""
        tokens = PROMPT if what == "prompt" else batch
        base = shape_of(BASE)
        layer = sum(product_us(self.laws[scheme], tokens, n, k) for n, k in shape.products(gpus))
        # A step reads the keys of its heads of keys; a prompt multiplies for each query.
        heads = shape.heads / base.heads if what == "prompt" else shape.kv_heads / base.kv_heads
        attention = self.attention_us[what, batch] * shape.layers / base.layers * heads / gpus
        head = product_us(self.laws[FLOAT], batch, shape.vocabulary // gpus, shape.hidden)
        exchanged = 2 * self.all_reduce[gpus].at(2.0 * tokens * shape.hidden) if gpus > 1 else 0.0
        return (layer + exchanged) * shape.layers + attention + head


def shape_of(name: str) -> Shape:
    """A shape of `engine/vllm.py`."""
    sizes = SHAPES[name]
    dense = (sizes.blocks, sizes.width, sizes.heads, sizes.kv_heads, sizes.hidden, sizes.vocabulary)
    if sizes.experts is None:
        return Shape(name, *dense)
    return Shape(name, *dense, experts=sizes.experts, head_size=min(128, sizes.width // 2))


def predictions(folder: Path) -> list[Check]:
    """Rows of dense models and schemes with laws, but `BASE` on one GPU, next to their predictions; none without rows.

    Args:
        folder: of results.
    """
    found = [check for host in HOSTS for check in _of_host(folder, folder / host)]
    return sorted(found, key=lambda one: (one.what == "prompt", not one.case.startswith(BASE), one.case, one.batch))


def _of_host(folder: Path, host: Path) -> Iterator[Check]:
    measured = Rows(host).of("bench_vllm")
    gpu = measured[0]["gpu"] if measured else ""
    # One GPU's times are in the folder of the several GPUs, or with all other rows.
    for alone in (Rows(host), Rows(folder)):
        rows = alone.of("bench_vllm", shape=BASE, gpus="1", gpu=gpu)
        if starts := {_key(row): float(row["median_us"]) for row in rows}:
            break
    else:
        return
    terms = Terms.read(Rows(folder), alone, gpu)
    base = shape_of(BASE)
    for row in measured:
        name, method, what, batch, gpus = _key(row)
        start, scheme, shape = starts.get((BASE, method, what, batch, 1)), method.removeprefix("qcut-"), shape_of(name)
        # A dense model on one GPU says nothing of a mixture's layers inside vLLM.
        if start is None or scheme not in terms.laws or (name, gpus) == (BASE, 1) or shape.experts is not None:
            continue
        rest = start - terms.known_us(base, scheme, what, batch, 1)
        predicted = terms.known_us(shape, scheme, what, batch, gpus) + rest * shape.layers / base.layers
        yield Check(f"{name}, {method}, {short_name(gpu)}", what, batch, gpus, float(row["median_us"]), predicted)


def _key(row: Row) -> tuple[str, str, str, int, int]:
    return row["shape"], row["method"], row["what"], int(row["batch"]), int(row["gpus"])
