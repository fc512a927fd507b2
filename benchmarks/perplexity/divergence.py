"""How far predictions of quantized models are from the float model's, by scheme and by other libraries' rounding.

    python benchmarks perplexity divergence --models-dir DIR --text FILE

A row has the mean Kullback-Leibler divergence of a position and its 99.9 % quantile, in nats, the share of positions
with the same most probable token, the perplexity, and the bits of a weight with all that a file stores of it: scales,
zero points, minima and tables. Layers of attention, MLPs and experts are quantized; embeddings, norms and the
classifier stay in float. qcut's schemes run as they are, quantized tokens included; the dequantized weights of others
(`benchmarks/perplexity/roundings.py`) compute in float. Ranges, fits and refinement see text that the model writes.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

import qcut
from benchmarks.harness import Results, environment, list_of, model_options, script, served_dtype
from benchmarks.perplexity.models import Evaluated, divergence_columns, own_text
from benchmarks.perplexity.roundings import ROUNDINGS
from benchmarks.publish.markdown import markdown
from qcut.errors import UnsupportedError
from qcut.layers.experts.opening import opened
from qcut.models.evaluation import compare_logits, logits_of
from qcut.models.modules import weight_nk
from qcut.models.selection import find_layers
from qcut.schemes import FP8, SCHEME_NAMES, parse_scheme

FITTED = ("codebook4", "codebook4_pairs", "codebook3", "codebook2")
"""Schemes that are measured fitted and refined, too."""
SUFFIXES = ("_fitted", "_refined")
SCHEMES = (
    *(name for name in SCHEME_NAMES if not parse_scheme(name).is_float),
    *("codebook4_g32", "codebook4_pairs_g32"),  # of as many bits as other formats have
)
OURS = tuple(name + suffix for name in SCHEMES for suffix in ("", *(SUFFIXES if name in FITTED else ())))
METHODS = (*OURS, *ROUNDINGS)
KEY = ("model", "method")
COLUMNS = ("model", "method", "bits", "divergence", "divergence_999", "same_top_percent", "perplexity")


def scheme_of(method: str) -> str:
    """The scheme of a method of qcut's; another method as it is."""
    return next((method.removesuffix(suffix) for suffix in SUFFIXES if method.endswith(suffix)), method)


def has_float_tokens(method: str) -> bool:
    """Whether only weights are quantized."""
    scheme = None if method in ROUNDINGS else parse_scheme(scheme_of(method))
    return scheme is None or not (scheme.int8_products or (isinstance(scheme, FP8) and scheme.tokens != "float"))


class Subject(Evaluated):
    """A float model, its logits of all windows, which stay in memory, and the text that it writes itself."""

    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        super().__init__(path, options, served_dtype(options.device))
        self.batches = self.windows.to(options.device).split(1)
        self.logits = [logits_of(self.model, ids) for ids in self.batches]

    @cached_property
    def own(self) -> tuple[torch.Tensor, ...]:
        """Batches of text of the model."""
        count, vocabulary = self.options.calibration_windows, self.model.config.vocab_size
        return own_text(self.model, count, self.options.window, vocabulary).split(self.options.refine_batch)

    @cached_property
    def moments(self) -> Any:
        """Curvatures that codebooks are fitted to."""
        return qcut.collect_curvature(self.model, self.own, progress=self.progress)

    @cached_property
    def calibration(self) -> qcut.Calibration:
        """Ranges of static schemes."""
        return qcut.calibrate(self.model, self.own, progress=self.progress)

    def made(self, methods: list[str]) -> Iterator[tuple[str, nn.Module, float]]:
        """Of every method, its name, the model under it, and the bits of a weight."""
        for name in methods:
            if name in ROUNDINGS:
                model = copy.deepcopy(self.model)
                bits = rounded(model, name)
                yield name, model, bits
        for scheme in SCHEMES:
            plain, fitted, refined = (scheme + suffix for suffix in ("", *SUFFIXES))
            if plain in methods:
                yield plain, *self.quantized(scheme)
            if fitted in methods or refined in methods:
                model, bits = self.quantized(scheme, second_moments=self.moments)
                if fitted in methods:
                    yield fitted, model, bits
                if refined in methods:
                    qcut.refine(model, self.model, self.own, steps=self.options.refine_steps, progress=self.progress)
                    yield refined, model, bits

    def quantized(self, scheme: str, **more: Any) -> tuple[nn.Module, float]:
        """A copy under a scheme of qcut's, and its bits of a weight."""
        model = copy.deepcopy(self.model)
        calibration = self.calibration if parse_scheme(scheme).needs_range else None
        report = qcut.quantize(model, scheme, calibration=calibration, progress=self.progress, **more)
        weights = sum(layer.out_features * layer.in_features for layer in report.layers)
        stored = [entry for layer in report.layers for entry in model.get_submodule(layer.name).stored().items()]  # type: ignore[operator]
        return model, 8 * sum(entry.nbytes for key, entry in stored if key != "bias") / weights


def rounded(model: nn.Module, name: str) -> float:
    """Round the weights of a model in a format of others, in place; returns its bits of a weight.

    Raises:
        UnsupportedError: experts are copied to be linear layers, so that their weights cannot be written.
    """
    bits = weights = 0
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with opened(model):
        for layer, module in find_layers(model).items():
            weight = weight_nk(module)
            if weight.untyped_storage().data_ptr() not in own:
                raise UnsupportedError(f"{layer}: its weight is a copy of the model's; allowed: experts in one piece")
            found = ROUNDINGS[name][1](weight.float())
            weight.copy_(found.weight)
            bits, weights = bits + found.bits, weights + weight.numel()
    return bits / weights


def measure(path: Path, args: argparse.Namespace, results: Results) -> None:
    """One model: a row for every method, and one for the float model."""
    subject = Subject(path, args)

    def add(method: str, model: nn.Module, bits: float) -> None:
        found = compare_logits(
            (ids, wanted, logits_of(model, ids)) for ids, wanted in zip(subject.batches, subject.logits, strict=True)
        )
        calibrated = method.endswith(SUFFIXES) or (method in SCHEMES and parse_scheme(method).needs_range)
        refined = method.endswith(SUFFIXES[1])
        row: dict[str, object] = {"bench": results.bench, "model": path.name, "method": method}
        row |= {"by": "others" if method in ROUNDINGS else "qcut" if method in OURS else ""}
        row |= {"bits": round(bits, 4), **divergence_columns(found), "perplexity": round(found.perplexity, 4)}
        row |= {"change_percent": round(100 * (found.perplexity / found.reference_perplexity - 1), 3)}
        row |= {**subject.columns(), "calibration_windows": args.calibration_windows if calibrated else ""}
        row |= {
            "refine_steps": args.refine_steps if refined else "",
            "refine_batch": args.refine_batch if refined else "",
        }
        results.rows.append(row | {"seconds": round(time.perf_counter() - start, 1)})
        results.write_csv(args.out, KEY)  # an interrupted run keeps its rows
        print(" ".join(f"{row[column]}" for column in COLUMNS), file=sys.stderr, flush=True)

    start = time.perf_counter()
    dtype = next(subject.model.parameters()).dtype
    add(str(dtype).removeprefix("torch."), subject.model, 8 * dtype.itemsize)
    start = time.perf_counter()
    for method, model, bits in subject.made(args.methods):
        add(method, model, bits)
        start = time.perf_counter()


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--methods", type=list_of(METHODS), default=",".join(METHODS), help="[all]")
    options.add_argument("--calibration-windows", type=int, default=64, help="of the model's own text [64]")
    options.add_argument("--refine-steps", type=int, default=450)
    options.add_argument("--refine-batch", type=int, default=8, help="windows of a step [8]")


@script(model_options, add_options)
def main(args: argparse.Namespace) -> int:
    """Measure every model under every method, and write rows and a table."""
    results = Results("divergence", environment())
    for path in args.models:
        measure(path, args, results)
    print(markdown(COLUMNS, [[str(row[column]) for column in COLUMNS] for row in results.rows]))
    print(f"{results.env}; rows in {args.out}")
    return 0
