"""Perplexity of plans within a budget of bits a weight, against one scheme for all layers.

    python benchmarks perplexity plans --models-dir DIR --text FILE

The weights of the attention and MLP layers are replaced by their dequantized values, and the model computes in float32,
as in ``perplexity/codebooks.py``. Layers are tried on the Python language reference, and codebooks are fitted to text
that the model itself writes: neither is the evaluated text. Bits count indices or integers, norms, and scales of rows.
Uniform schemes with groups of 32 and 16 columns have the bits of plans between the others.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import qcut
from benchmarks.harness import Results, environment, model_options, read_rows, script
from benchmarks.perplexity.codebooks import as_float, on
from benchmarks.perplexity.models import Evaluated, Processes, fit_option, own_text
from benchmarks.publish import plots
from benchmarks.publish.markdown import markdown
from qcut.conversion.planning.budget import WITHIN_COST, Budget
from qcut.conversion.planning.costs import LayerSize, stored_cost
from qcut.conversion.planning.measure import SearchSpace
from qcut.conversion.planning.planner import plan_within
from qcut.models.modules import weight_nk
from qcut.models.selection import find_layers
from qcut.numerics.codebook.passes import quantize_weight
from qcut.numerics.codebook.quantizer import dequantize
from qcut.schemes import parse_scheme

BITS = (2.5, 3.0, 3.125, 3.5, 4.125, 4.5, 5.0)
UNIFORM = (*WITHIN_COST, "codebook2_g32", "codebook2_g16", "codebook3_g32", "codebook4_g32", "codebook4_g16")
WEIGHTS = ("rounded", "fitted")
PLAN = "plan"
KEY = ("model", "weights", "scheme", "allowed", "measure", "apart")
"""Columns that name a row."""


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--weights", nargs="+", choices=WEIGHTS, default=WEIGHTS, help="how codebooks are made [all]")
    options.add_argument("--bits", nargs="+", type=float, default=BITS, help="bits a weight that plans may have")
    options.add_argument("--uniform", nargs="+", default=UNIFORM, help="schemes for all layers, to compare with")
    options.add_argument("--measure", choices=("model", "gradient", "layer"), default="model")
    options.add_argument("--apart", action="store_true", help="let q, k, v and gate, up have different schemes")
    options.add_argument("--plan-windows", type=int, default=8, help="windows that layers are tried on [8]")
    options.add_argument("--calibration-windows", type=int, default=128, help="windows that codebooks are fitted to")
    fit_option(options)


class Subject(Evaluated):
    """A float model, its texts, and the rows about it."""

    def __init__(self, path: Path, args: argparse.Namespace, results: Results) -> None:
        super().__init__(path, args)
        self.results = results
        self.tried = self.reference(args.plan_windows).split(8)
        self.layers = find_layers(self.model)
        self.float = {name: weight_nk(module).clone() for name, module in self.layers.items()}
        self.moments: Mapping[str, qcut.Curvature] | None = None
        self.passes: dict[tuple[str, str], Any] = {}
        if "fitted" in args.weights:
            own = own_text(self.model, args.calibration_windows, args.window, self.model.config.vocab_size)
            self.moments = qcut.collect_curvature(self.model, own.split(8), progress=self.progress)
        self.baseline = self.perplexity(batch_size=32)

    def search_space(self, weights: str) -> tuple[SearchSpace, dict[tuple[str, str], Tensor]]:
        """All layers under all candidates, as float layers of dequantized weights; and these by scheme and name."""
        space = SearchSpace(
            self.model,
            self.tried,
            [parse_scheme(name) for name in WITHIN_COST],
            calibration=None,
            second_moments=self.moments if weights == "fitted" else None,
            measure=self.options.measure,
            together=not self.options.apart,
            sensitivity_batches=None,
            include=None,
            skip=("lm_head",),
            progress=self.progress,
            passes=self.passes if weights == "fitted" else None,
        )
        space.check(Budget.of(None, max(self.options.bits), None, None, None))
        space.quantize()
        made = {}
        for group in space.groups:
            for scheme, layers in group.layers.items():
                for name in layers:
                    stand_in: Any = as_float(layers[name])
                    layers[name] = stand_in
                    made[scheme, name] = stand_in.weight
        return space, made

    def weight(self, name: str, scheme: str, weights: str) -> Tensor:
        """A layer's dequantized weight under a scheme."""
        fitted = weights == "fitted" and parse_scheme(scheme).takes_second_moments
        if fitted and (scheme, name) in self.passes:
            return dequantize(self.passes[scheme, name])
        moment = self.moments[name] if fitted and self.moments is not None else None
        layer = qcut.Linear.from_float(self.layers[name], scheme, second_moment=moment, name=name)
        return layer.dequantized_weight()

    def fit(self, schemes: Iterable[str], processes: Processes) -> None:
        """Fit all layers under schemes, which `Subject.search_space` and `Subject.weight` then take."""
        wanted = [parse_scheme(scheme) for scheme in schemes]
        moments = self.moments or {}
        keys = [(s, name) for s in wanted if s.takes_second_moments for name in moments]
        calls = [(self.float[name].cpu(), s, moments[name].to("cpu")) for s, name in keys]
        found = processes.map(fitted, calls)
        for (s, name), passes in zip(keys, found, strict=True):
            self.passes[s.name, name] = on(passes, self.options.device)

    def put(self, weights: dict[str, Tensor]) -> None:
        """Replace the model's weights by others, or by its own if there are none."""
        for name, module in self.layers.items():
            weight_nk(module).copy_(weights.get(name, self.float[name]))

    def row(self, scheme: str, weights: str, **columns: object) -> None:
        """Evaluate, and add a row."""
        start = time.perf_counter()
        value = self.perplexity(batch_size=32)
        change = round(100 * (value / self.baseline - 1), 3)
        row = {"bench": self.results.bench, "model": self.name, "weights": weights, "scheme": scheme, **columns}
        row |= {"perplexity": round(value, 4), "change_percent": change, "measure": self.options.measure}
        row |= {"apart": int(self.options.apart), "plan_windows": self.options.plan_windows}
        row |= {**self.columns(), "seconds": round(time.perf_counter() - start, 1)}
        self.results.rows.append(row)
        self.results.write_csv(self.options.out, KEY)  # an interrupted run keeps its rows
        print(f"{self.name} {weights} {scheme} {columns['bits']}: {change:+.3f} %", file=sys.stderr, flush=True)


def fitted(weight: Tensor, scheme: Any, moment: Any) -> Any:
    """A weight's residual stages under a scheme, fitted to a moment or curvature, or rounded without one."""
    return quantize_weight(weight, scheme, second_moment=moment)


@torch.no_grad()
def measure(subject: Subject, weights: str, processes: Processes) -> None:
    """Plans within every number of bits, and uniform schemes."""
    args = subject.options
    ahead = weights == "fitted" and args.fit_processes > 0
    if ahead:
        subject.fit(WITHIN_COST, processes)
    space, made = subject.search_space(weights)
    sizes = {name: LayerSize(name, len(w), w.shape[1], False, w.nbytes) for name, w in subject.float.items()}
    total = sum(weight.numel() for weight in subject.float.values())

    def uniform(scheme: str) -> None:
        stored = sum(stored_cost(size, scheme) for size in sizes.values())
        used = {n: made[scheme, n] if (scheme, n) in made else subject.weight(n, scheme, weights) for n in sizes}
        subject.put(used)
        subject.row(scheme, weights, allowed="", bits=round(8 * stored / total, 4), counts="")
        subject.put({})

    candidates = [scheme for scheme in args.uniform if scheme in WITHIN_COST]
    for scheme in candidates:
        uniform(scheme)
    space.measure()
    for bits in args.bits:
        start = time.perf_counter()
        plan = plan_within(space, Budget.of(None, bits, None, None, None))
        seconds = time.perf_counter() - start
        subject.put({name: made[scheme, name] for name, scheme in plan.schemes.items()})
        counts = ", ".join(f"{count} {scheme}" for scheme, count in sorted(plan.counts.items()))
        predicted = None if plan.predicted is None else round(100 * plan.predicted, 3)
        found = {"allowed": bits, "bits": round(plan.bits_of(plan.cost), 4), "counts": counts}
        found |= {"predicted_percent": predicted, "tried_percent": round(100 * plan.measured, 3)}
        subject.row(PLAN, weights, **found, plan_seconds=round(seconds, 1))
        subject.put({})
    others = [scheme for scheme in args.uniform if scheme not in candidates]
    if ahead:
        subject.fit(others, processes)
    for scheme in others:
        uniform(scheme)


def plot(rows: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Loss by bits of plans and of uniform schemes; narrower groups are only in the table."""
    series: dict[str, dict[float, float]] = {}
    for row in rows:
        kind = "plans" if row["scheme"] == PLAN else "uniform"
        change = float(str(row["change_percent"]))
        if change > 0 and float(str(row["bits"])) < 6 and "_g" not in str(row["scheme"]):
            series.setdefault(f"{row['model']}, {row['weights']}, {kind}", {})[float(str(row["bits"]))] = change
    ordered = {name: dict(sorted(points.items())) for name, points in series.items()}
    title = f"perplexity of mixed and of uniform schemes, {rows[0]['text']}"
    plots.curves(out / "plan_quality", ordered, title, "bits a weight, norms and scales counted", "loss in %")


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as Markdown, by bits: a column for each model and kind of weights."""
    columns = list(dict.fromkeys((str(row["model"]), str(row["weights"])) for row in rows))
    cells: dict[tuple[float, str], dict[tuple[str, str], str]] = {}
    for row in rows:
        at = round(float(row["bits"] if row["scheme"] != PLAN else row["allowed"]), 3), str(row["scheme"])
        cells.setdefault(at, {})[str(row["model"]), str(row["weights"])] = f"{float(row['change_percent']):+.2f} %"
    lines = [[f"{at[0]:.3f}", at[1], *(found.get(c, "–") for c in columns)] for at, found in sorted(cells.items())]
    return markdown(["bits", "", *(f"{model}, {weights}" for model, weights in columns)], lines)


@script(model_options, add_options)
def main(args: argparse.Namespace) -> int:
    """Evaluate every model under plans and uniform schemes, and write rows, a plot and a table."""
    results = Results("plan_quality", environment())
    with Processes(args.fit_processes) as processes:
        for path in args.models:
            subject = Subject(path, args, results)
            for weights in args.weights:
                measure(subject, weights, processes)
    rows = read_rows(args.out / f"{results.bench}.csv")
    plot(rows, args.out)
    print(f"{report(rows)}\n{results.env}; {args.out}")
    return 0
