"""Perplexity of rotated codebook weights and of 4-bit integers against the float model.

    python benchmarks perplexity codebooks --models-dir DIR --text FILE

The weights of the attention and MLP layers are replaced by their dequantized values, and the model computes in float32:
the rows show only the loss by the weights. Embeddings and the LM head stay in float. Calibrated fits see text that the
model itself writes, sampled token by token. This text contains none of the evaluated text and is nearer to the model's
inputs than a text of another kind (``--calibration reference`` takes the Python language reference instead, and so does
``--text reference``). Refined variants are tuned on more of it, whole models at a time, with norms and biases.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qcut
from benchmarks.harness import Results, environment, list_of, model_options, script
from benchmarks.perplexity import roundings
from benchmarks.perplexity.models import Evaluated, Processes, fit_option, own_text
from benchmarks.publish.markdown import markdown
from qcut.conversion.calibration.curvature import collect_curvature
from qcut.conversion.calibration.second_moments import collect_second_moments
from qcut.conversion.refine import CODE_RATE
from qcut.layers.codebook import CodebookLinear
from qcut.models.evaluation import compare
from qcut.models.modules import weight_nk
from qcut.models.selection import find_layers
from qcut.numerics.codebook.fitting.curvature import Curvature
from qcut.numerics.codebook.fitting.fit import DAMPING, fit
from qcut.numerics.codebook.quantizer import RotatedCodebook, dequantize, quantize, quantize_plain

GROUP = 128
REFINE_STEPS = 450
REFINE_BATCH = 8
OWN_AT_ONCE = 1024
RESIDUAL_SEED = 1042
APART = 16  # of so many windows to refine on, one is set apart to judge by
REFINED = "refined"


def nearest(bits: int, in_pairs: bool = False) -> Fit:
    """Rounds to nearest."""
    return lambda w, given, seed, damping: (quantize(w, bits, seed=seed, in_pairs=in_pairs),)


def fitted(bits: int, in_pairs: bool = False) -> Fit:
    """Fits one residual stage to the curvature, or only to the second moment of inputs."""

    def fit_one(w: Tensor, given: Curvature | None, seed: int, damping: float) -> Passes:
        assert given is not None
        options: dict[str, Any] = {"seed": seed, "damping": damping, "in_pairs": in_pairs}
        return (fit(w, given.inputs, bits, output_moment=given.outputs, **options),)

    return fit_one


def two_passes(w: Tensor, given: Curvature | None, seed: int, damping: float) -> Passes:
    """Two residual stages of 4 bits, the second fitted if there is a moment or curvature."""
    first = quantize(w, 4, seed=seed)
    if given is None:
        return first, quantize(w, 4, before=[first], seed=RESIDUAL_SEED)
    options: dict[str, Any] = {"before": [first], "seed": RESIDUAL_SEED, "damping": damping}
    return first, fit(w, given.inputs, 4, output_moment=given.outputs, **options)


Passes = Sequence[RotatedCodebook] | Tensor
"""A weight's codebooks, or the weight as it is after rounding."""
Fit = Callable[[Tensor, Curvature | None, int, float], Passes]

VARIANTS: dict[str, tuple[str, Fit]] = {
    "int4": (
        "4-bit integers, asymmetric, to nearest",
        lambda w, given, seed, damping: roundings.int4(w, symmetric=False).weight,
    ),
    "int4_symmetric": (
        "4-bit integers, symmetric, to nearest",
        lambda w, given, seed, damping: (quantize_plain(w, 4, group_size=GROUP, levels="steps"),),
    ),
    "codebook4": ("to nearest", nearest(4)),
    "codebook4_inputs": ("fitted to inputs", fitted(4)),
    "codebook4_curvature": ("fitted to the loss's curvature", fitted(4)),
    "codebook4_refined": ("fitted to the loss's curvature, then refined as a whole", fitted(4)),
    "codebook4_pairs": ("pairs, to nearest", nearest(4, in_pairs=True)),
    "codebook4_pairs_inputs": ("pairs, fitted to inputs", fitted(4, in_pairs=True)),
    "codebook4_pairs_curvature": ("pairs, fitted to the loss's curvature", fitted(4, in_pairs=True)),
    "codebook4_pairs_refined": (
        "pairs, fitted to the loss's curvature, then refined as a whole",
        fitted(4, in_pairs=True),
    ),
    "codebook4_4": ("two residual stages", two_passes),
    "codebook4_4_curvature": ("two residual stages, the second fitted to the loss's curvature", two_passes),
    "codebook3": ("to nearest", nearest(3)),
    "codebook3_inputs": ("fitted to inputs", fitted(3)),
    "codebook3_curvature": ("fitted to the loss's curvature", fitted(3)),
    "codebook3_refined": ("fitted to the loss's curvature, then refined as a whole", fitted(3)),
    "codebook2": ("to nearest", nearest(2)),
    "codebook2_inputs": ("fitted to inputs", fitted(2)),
    "codebook2_curvature": ("fitted to the loss's curvature", fitted(2)),
    "codebook2_refined": ("fitted to the loss's curvature, then refined as a whole", fitted(2)),
}


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--variants", type=list_of(VARIANTS), default=",".join(VARIANTS), help="[all]")
    options.add_argument("--calibration", choices=("own", "reference"), default="own", help="text [own]")
    options.add_argument("--calibration-windows", type=int, default=256)
    options.add_argument("--damping", type=float, default=DAMPING, help=f"of the calibrated fits [{DAMPING}]")
    options.add_argument("--seed", type=int, default=42, help="of the rotations [42]")
    options.add_argument("--refine-windows", type=int, default=768, help="that refined variants are tuned on")
    options.add_argument("--refine-steps", type=int, default=REFINE_STEPS, help=f"of refined variants [{REFINE_STEPS}]")
    options.add_argument("--refine-batch", type=int, default=REFINE_BATCH, help=f"windows of a step [{REFINE_BATCH}]")
    options.add_argument(
        "--code-rates", type=float, nargs="+", default=[CODE_RATE], help="of refined ones, to choose of"
    )
    fit_option(options)


def kind_of(variant: str) -> str:
    """What a variant is fitted to: ``inputs``, ``curvature``, or nothing."""
    kind = variant.rpartition("_")[2]
    return {"inputs": "inputs", "curvature": "curvature", REFINED: "curvature"}.get(kind, "")


def make(variant: str, weight: Tensor, given: Curvature | None, seed: int, damping: float) -> Passes:
    """A weight under a variant, on the weight's device."""
    return VARIANTS[variant][1](weight, given, seed, damping)


def on(passes: Passes, device: torch.device | str) -> Passes:
    """What `make` made, on a device."""
    if isinstance(passes, Tensor):
        return passes.to(device)
    moved: list[RotatedCodebook] = []
    for q in passes:
        tensors = {name: getattr(q, name).to(device) for name in ("indices", "norms", "values")}
        moved.append(replace(q, **tensors))
    return moved


def is_refined(variant: str) -> bool:
    """Whether a variant is tuned as a whole after it is fitted."""
    return variant.rpartition("_")[2] == REFINED


def refined(
    model: nn.Module, made: Mapping[str, Passes], windows: Tensor, args: argparse.Namespace, progress: bool
) -> tuple[nn.Module, dict[str, object]]:
    """A copy of the float model with refined codebook layers, as a float model, and the refinement.

    The best of the given rates is used: the one with predictions nearest to the float model's on separate windows.

    Returns:
        The model, and columns about it.
    """
    apart = max(1, len(windows) // APART)
    batches, held = windows[:-apart].split(args.refine_batch), windows[-apart:]
    best: tuple[float, float, nn.Module] | None = None
    before = 0.0
    for rate in args.code_rates:
        copied = copy.deepcopy(model)
        for name, passes in made.items():
            module = copied.get_submodule(name)
            assert not isinstance(passes, Tensor)
            copied.set_submodule(name, CodebookLinear.from_passes(passes, module._parameters.get("bias"), name=name))
        before = before or divergence(with_float_layers(copy.deepcopy(copied), made), model, held)
        torch.set_float32_matmul_precision("high")  # tuned, not measured
        done = qcut.refine(copied, model, batches, steps=args.refine_steps, code_rate=rate, progress=progress)
        torch.set_float32_matmul_precision("highest")
        after = divergence(with_float_layers(copied, made), model, held)
        print(f"{done}; rate {rate:g}: divergence {before:.5f} to {after:.5f}", file=sys.stderr, flush=True)
        if best is None or after < best[0]:
            best = after, rate, copied
    assert best is not None
    columns = {"code_rate": best[1], "divergence": round(best[0], 6), "divergence_fitted": round(before, 6)}
    return best[2], {"refine_batch": args.refine_batch, **columns}


def with_float_layers(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """The model with float layers in place of quantized ones, in place."""
    for name in names:
        model.set_submodule(name, as_float(model.get_submodule(name)))
    return model


def divergence(model: nn.Module, reference: nn.Module, windows: Tensor) -> float:
    """Mean divergence of a position's predictions from those of the float model, in nats."""
    sizes: dict[str, Any] = {"window": windows.shape[1], "batch_size": 8, "progress": False}
    return compare(model, reference, windows.flatten(), **sizes).divergence


def as_float(layer: Any) -> nn.Linear:
    """A float layer with the weights that a quantized one computes with."""
    made = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
    made.weight = nn.Parameter(layer.dequantized_weight(), requires_grad=False)
    if layer.bias is not None:
        made.bias = nn.Parameter(layer.bias, requires_grad=False)
    return made


def measure(path: Path, args: argparse.Namespace, results: Results, processes: Processes) -> None:
    """One model: the float model and every variant, a row each."""
    text = Evaluated(path, args)
    model, bar = text.model, text.progress
    layers = find_layers(model)
    originals = {name: weight_nk(module).clone() for name, module in layers.items()}
    given: dict[str, Mapping[str, Curvature]] = {"inputs": {}, "curvature": {}}
    to_refine = torch.empty(0)
    if any(kind_of(name) for name in args.variants):
        count = args.refine_windows if any(map(is_refined, args.variants)) else 0
        if args.calibration == "own":
            vocabulary = model.config.vocab_size
            windows = own_text(model, args.calibration_windows, args.window, vocabulary)
            sizes = [min(OWN_AT_ONCE, count - done) for done in range(len(windows), count, OWN_AT_ONCE)]
            texts = [own_text(model, size, args.window, vocabulary, seed=1 + i) for i, size in enumerate(sizes)]
            to_refine = torch.cat((windows, *texts))
        else:
            windows, to_refine = text.reference(args.calibration_windows), text.reference(count or 1)
        if any(kind_of(name) == "curvature" for name in args.variants):
            given["curvature"] = collect_curvature(model, windows.split(8), progress=bar)
        if any(kind_of(name) == "inputs" for name in args.variants):
            moments = collect_second_moments(model, windows.split(8), progress=bar)
            given["inputs"] = {name: Curvature(moment, None) for name, moment in moments.items()}
    baseline = 0.0
    for variant in ("float32", *args.variants):
        start = time.perf_counter()
        made: dict[str, Passes] = dict(originals)
        if variant != "float32":
            known = given[kind_of(variant)] if kind_of(variant) else {}
            where = "cpu" if args.fit_processes and known else args.device
            calls = [
                (variant, w.to(where), known[name].to(where) if known else None, args.seed, args.damping)
                for name, w in originals.items()
            ]
            found = processes.map(make, calls) if known else [make(*call) for call in calls]
            made = {name: on(passes, args.device) for name, passes in zip(originals, found, strict=True)}
        subject, about = refined(model, made, to_refine, args, bar) if is_refined(variant) else (model, {})
        for name, module in layers.items() if subject is model else ():
            weight = made[name]
            weight_nk(module).copy_(weight if isinstance(weight, Tensor) else dequantize(weight))
        seconds = time.perf_counter() - start
        value = text.perplexity(subject)
        for name, module in layers.items():
            weight_nk(module).copy_(originals[name])
        baseline = baseline or value
        change = 100 * (value / baseline - 1)
        results.rows.append(
            {
                "bench": results.bench,
                "model": path.name,
                "variant": variant,
                "what": VARIANTS[variant][0] if variant in VARIANTS else "",
                "perplexity": round(value, 4),
                "change_percent": round(change, 3),
                "group_size": GROUP,
                "seed": args.seed,
                **text.columns(),
                "damping": args.damping if kind_of(variant) else "",
                "calibration": args.calibration if kind_of(variant) else "",
                "calibration_windows": args.calibration_windows if kind_of(variant) else "",
                "refine_windows": len(to_refine) if is_refined(variant) else "",
                "refine_steps": args.refine_steps if is_refined(variant) else "",
                "quantize_seconds": round(seconds, 1),
                **about,
            }
        )
        # A run that is cut short keeps what it has measured.
        csv = results.write_csv(args.out, key=("model", "variant"))
        csv.with_suffix(".md").write_text(report(results), encoding="utf-8")
        print(
            f"{path.name} {variant}: {value:.3f} ({100 * (value / baseline - 1):+.2f} %)", file=sys.stderr, flush=True
        )


def report(results: Results) -> str:
    """The rows as Markdown: a line per variant, a column per model, and how they were measured."""
    models = list(dict.fromkeys(str(row["model"]) for row in results.rows))
    cells: dict[str, dict[str, str]] = {}
    what = {}
    for row in results.rows:
        variant = str(row["variant"])
        change = f"{row['perplexity']:.2f}" if variant == "float32" else f"{row['change_percent']:+.2f} %"
        cells.setdefault(variant, {})[str(row["model"])] = change
        what[variant] = str(row["what"])
    lines = [[variant, what[variant], *(found.get(model, "–") for model in models)] for variant, found in cells.items()]
    first = results.rows[0]
    return (
        f"Perplexity on {first['windows']} windows of {first['window']} tokens of {first['text']}, float32 with "
        f"dequantized weights (attention and MLP layers, groups of {GROUP}), Hadamard rotations of seed "
        f"{first['seed']}.\n\n{markdown(['weights', '', *models], lines)}\n"
    )


@script(model_options, add_options)
def main(args: argparse.Namespace) -> int:
    """Evaluate every model under every variant, and write rows and a table."""
    results = Results("codebook_quality", environment())
    with Processes(args.fit_processes) as processes:
        for path in args.models:
            measure(path, args, results, processes)
    print(report(results))
    print(f"{results.env}; rows in {args.out}")
    return 0
