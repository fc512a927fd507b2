"""Perplexity of quantized models against their float originals, with and without injected outliers.

    python benchmarks perplexity schemes --models-dir DIR --text FILE

Baseline: the same model in float16 (float32 without a GPU). Ranges and plans come from the Python language reference,
which is not the evaluated text. The outlier experiment multiplies the gain (and bias) of three channels of every norm
by 60 and divides the weights' columns that read these channels by 60. In exact arithmetic the model stays the same, but
its activations then have outliers, by which per-token int8 loses.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import qcut
from benchmarks import harness
from benchmarks.demo import RELATIVE_COST, int8_first
from benchmarks.harness import Results, environment, list_of, model_options, script, table
from benchmarks.perplexity.models import Evaluated
from qcut.models.modules import weight_nk
from qcut.schemes import parse_scheme

SCHEMES = {
    "w8a16": "int8 weights only",
    "int16x8": "int16 tokens, dynamic scales",
    "w8a8": "dynamic scales per token",
    "w8a8_rotated": "the same after a rotation of groups of 128 columns",
    "w8a8_static": "one range per layer, min/max",
    "static_mse": "one range per layer, least squared error",
    "smooth": "min/max ranges after smoothing, alpha 0.5",
    "hybrid": "a plan within the budget, as much on the int8 path as that allows",
    "smooth_hybrid": "smoothing, then a plan within the budget",
}
CONDITIONS = ("plain", "outliers")
OUTLIER_CHANNELS = 3
OUTLIER_FACTOR = 60.0
SMOOTH_ALPHA = 0.5


def add_options(options: argparse.ArgumentParser) -> None:
    schemes = "; ".join(f"{name}: {what}" for name, what in SCHEMES.items())
    options.add_argument("--schemes", type=list_of(SCHEMES), default=",".join(SCHEMES), help=f"{schemes} [all]")
    options.add_argument("--conditions", type=list_of(CONDITIONS), default=",".join(CONDITIONS), help="[both]")
    options.add_argument("--calibration-windows", type=int, default=32)
    options.add_argument("--plan-windows", type=int, default=8)
    options.add_argument("--budget", type=float, default=0.003, help="loss a plan may cost, relative [0.003]")


@torch.no_grad()
def inject_outliers(model: torch.nn.Module, calibration: qcut.Calibration, seed: int = 0) -> None:
    """Scale three channels of every norm by 60 and the columns of its readers by 1/60, in place.

    The channels differ from norm to norm. `calibration.pairs` says which layers read which norm; the model should be
    float32, so that the round trip costs nothing measurable.
    """
    generator = torch.Generator().manual_seed(seed)
    for pair in calibration.pairs:
        norm = model.get_submodule(pair.norm)
        channels = torch.randperm(norm.get_parameter("weight").numel(), generator=generator)[:OUTLIER_CHANNELS]
        for parameter in norm.parameters():
            parameter[channels] *= OUTLIER_FACTOR
        for name in pair.layers:
            weight_nk(model.get_submodule(name))[:, channels] /= OUTLIER_FACTOR


class Subject(Evaluated):
    """A float model under one condition, with the calibration that its quantized copies share."""

    def __init__(self, path: Path, condition: str, args: argparse.Namespace) -> None:
        super().__init__(path, argparse.Namespace(**{**vars(args), "device": "cpu"}))
        windows = self.reference(args.calibration_windows)
        self.batches = windows.split(4)
        self.plan_batches = windows[: args.plan_windows].split(1)
        if condition == "outliers":
            inject_outliers(self.model, self.calibrate(self.model, self.batches[:1]))
        self.model = self.model.to(device=args.device, dtype=harness.served_dtype(args.device))
        self.calibration = self.calibrate(self.model, self.batches)

    @staticmethod
    def calibrate(model: torch.nn.Module, batches: Any) -> qcut.Calibration:
        """Min/max ranges and per-channel statistics over the batches."""
        return qcut.calibrate(model, batches, progress=sys.stderr.isatty())

    def quantized(self, scheme: str) -> tuple[torch.nn.Module, dict[str, str]]:
        """A quantized copy, and the scheme of each layer."""
        model = copy.deepcopy(self.model)
        calibration = self.calibration
        if scheme == "smooth_hybrid":
            calibration = calibration.copy()
            qcut.smooth(model, calibration, alpha=SMOOTH_ALPHA)
        plan: str | qcut.Plan = "w8a8_static" if scheme in ("smooth", "static_mse") else scheme
        if scheme.endswith("hybrid"):
            plan = qcut.plan(
                model,
                self.plan_batches,
                budget=self.options.budget,
                calibration=calibration,
                candidates=tuple(RELATIVE_COST),
                cost=int8_first,
                progress=sys.stderr.isatty(),
            )
        if scheme == "static_mse":
            calibration = dataclasses.replace(calibration, method="mse")
        report = qcut.quantize(
            model, plan, calibration=calibration, smooth=SMOOTH_ALPHA if scheme == "smooth" else None, progress=False
        )
        return model, plan.schemes if isinstance(plan, qcut.Plan) else report.schemes


def measure(path: Path, condition: str, args: argparse.Namespace, results: Results) -> None:
    """One model under one condition: the baseline and every scheme, a row each."""
    subject = Subject(path, condition, args)
    baseline = subject.perplexity()
    for scheme in ("float16" if args.device == "cuda" else "float32", *args.schemes):
        start = time.perf_counter()
        value = baseline
        schemes: dict[str, str] = {}
        if scheme in SCHEMES:
            model, schemes = subject.quantized(scheme)
            value = subject.perplexity(model)
            del model
        off = [name for name, chosen in schemes.items() if not parse_scheme(chosen).int8_products]
        results.rows.append(
            {
                "bench": results.bench,
                "model": path.name,
                "condition": condition,
                "scheme": scheme,
                "perplexity": round(value, 4),
                "change_percent": round(100 * (value / baseline - 1), 3),
                "layers": len(schemes),
                "off_int8": len(off),
                "off_int8_layers": " ".join(f"{name}={schemes[name]}" for name in off) if "hybrid" in scheme else "",
                **subject.columns(),
                "budget": args.budget if "hybrid" in scheme else "",
                "seconds": round(time.perf_counter() - start, 1),
            }
        )
        print(f"{path.name} {condition} {scheme}: {value:.3f}", file=sys.stderr, flush=True)


def save(results: Results, directory: Path) -> Path:
    """Write ``quality.csv`` and ``quality.json``; returns the former."""
    csv = results.write_csv(directory)
    facts = {"environment": dataclasses.asdict(results.env), "rows": results.rows}
    csv.with_suffix(".json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return csv


@script(model_options, add_options)
def main(args: argparse.Namespace) -> int:
    """Evaluate every model under every condition and scheme, and write rows and a table."""
    results = Results("quality", environment())
    for path in args.models:
        for condition in args.conditions:
            measure(path, condition, args, results)
            csv = save(results, args.out)  # an interrupted run keeps its rows
    header = ("model", "condition", "scheme", "perplexity", "change_percent", "off_int8", "layers")
    print(
        table(header, [[f"{v:.3f}" if isinstance(v := row[c], float) else v for c in header] for row in results.rows])
    )
    for row in results.rows:
        if row["off_int8_layers"]:
            print(f"{row['model']} {row['condition']} {row['scheme']}: {row['off_int8_layers']}")
    print(f"{results.rows[0]['windows']} windows of {args.window} tokens of {args.text.name}; {results.env}; {csv}")
    return 0
