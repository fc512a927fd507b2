"""Quality of quantized mixtures of experts: perplexity, divergence and routes, against the float model.

    python benchmarks perplexity mixtures --models-dir DIR --text FILE

Whole models are quantized and run as they are. Besides the perplexity, a row has how far the predictions are from the
float model's (mean Kullback-Leibler divergence and its 99.9 % quantile, and the share of positions with the same most
probable token), how many routes of tokens change, and the perplexity where every token goes to the experts that the
float model chose for it, with their weights. Codebooks are fitted to text that the model itself writes.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import qcut
from benchmarks.harness import Results, environment, list_of, model_options, script, served_dtype
from benchmarks.perplexity.models import Evaluated, divergence_columns, own_text
from benchmarks.publish.markdown import markdown
from qcut.layers.experts.opening import opened
from qcut.models.evaluation import compare_logits, logits_of, perplexity_of, token_nll

VARIANTS: dict[str, tuple[str, bool]] = {
    "w8a16": ("w8a16", False),
    "w8a8": ("w8a8", False),
    "int16x8": ("int16x8", False),
    "int4": ("int4", False),
    "codebook4": ("codebook4", False),
    "codebook4_fitted": ("codebook4", True),
    "codebook4_int8": ("codebook4_int8", False),
    "codebook4_int8_fitted": ("codebook4_int8", True),
    "codebook3": ("codebook3", False),
    "codebook3_fitted": ("codebook3", True),
    "plan": ("", False),
    "plan_fitted": ("", True),
}
"""By name, the scheme of all layers (none for a plan within ``--bits``), and whether codebooks are fitted."""

Routes = dict[str, list[tuple[Tensor, Tensor]]]
"""By name of the experts, the indices and weights of every call."""


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--variants", type=list_of(VARIANTS), default=",".join(VARIANTS), help="[all]")
    options.add_argument("--calibration-windows", type=int, default=128, help="that codebooks are fitted to [128]")
    options.add_argument("--plan-windows", type=int, default=8, help="windows that layers are tried on [8]")
    options.add_argument("--bits", type=float, default=4.13, help="bits a weight that a plan may have [4.13]")


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The experts of a model by name, in float or quantized."""
    with opened(model) as found:
        names = list(found.experts)
    return {name: model.get_submodule(name) for name in names}


@contextmanager
def hooked(model: nn.Module, hook: Callable[[str], Callable[..., Any]]) -> Iterator[None]:
    """Let a hook see, and change, the arguments of all experts."""
    handles = [module.register_forward_pre_hook(hook(name)) for name, module in experts_of(model).items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def noting(routes: Routes) -> Callable[[str], Callable[..., Any]]:
    """Hooks that keep the routes of every call."""

    def for_name(name: str) -> Callable[..., Any]:
        return lambda _, args: routes.setdefault(name, []).append((args[1], args[2]))

    return for_name


def forcing(routes: Routes) -> Callable[[str], Callable[..., Any]]:
    """Hooks that give every call the routes of a float model."""
    calls = {name: iter(kept) for name, kept in routes.items()}

    def for_name(name: str) -> Callable[..., Any]:
        return lambda _, args: (args[0], *next(calls[name]))

    return for_name


@dataclass
class Routed:
    """What becomes of routes in a model that is compared with the float one.

    Attributes:
        forced: negative log-likelihood of the text under the model with the float model's routes.
        routes: routes compared.
        moved: of these, those that go to another expert.
    """

    forced: float = 0.0
    routes: int = 0
    moved: int = 0

    def logits(
        self, reference: nn.Module, model: nn.Module, batches: Iterable[Tensor]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Of every batch of token ids ``[B, T]``, the ids and the logits of both models, for `compare_logits`."""
        for ids in batches:
            wanted: Routes = {}
            found: Routes = {}
            with hooked(reference, noting(wanted)):
                target = logits_of(reference, ids)
            with hooked(model, forcing(wanted)):
                self.forced += token_nll(logits_of(model, ids), ids).double().sum().item()
            with hooked(model, noting(found)):
                logits = logits_of(model, ids)
            for name, calls in wanted.items():
                for (index, _), (other, _) in zip(calls, found[name], strict=True):
                    self.routes += index.numel()
                    self.moved += int((index[:, :, None] != other[:, None, :]).all(-1).sum())
            yield ids, target, logits


def measure(path: Path, args: argparse.Namespace, results: Results) -> None:
    """One model: a row for the float model and for every variant."""
    # Kernels of codebooks take 16-bit tokens.
    dtype = served_dtype(args.device)
    text, unchanged = Evaluated(path, args, dtype), str(dtype).removeprefix("torch.")
    model, bar = text.model, text.progress
    fitted = any(VARIANTS[name][1] for name in args.variants)
    moments, fewest = None, 0
    if fitted:
        own = own_text(model, args.calibration_windows, args.window, model.config.vocab_size)
        moments = qcut.collect_curvature(model, own.split(8), progress=bar)
        fewest = min(count for name, count in moments.tokens.items() if ".experts." in name)
    baseline = text.perplexity()
    for variant in (unchanged, *args.variants):
        start = time.perf_counter()
        row: dict[str, object] = {"bench": results.bench, "model": path.name, "variant": variant}
        if variant == unchanged:
            row |= {"perplexity": round(baseline, 4), "change_percent": 0.0}
        else:
            scheme, is_fitted = VARIANTS[variant]
            subject, given = copy.deepcopy(model), moments if is_fitted else None
            what: Any = scheme or qcut.plan(
                model, text.reference(args.plan_windows).split(8), bits=args.bits, second_moments=given, progress=bar
            )
            report = qcut.quantize(subject, what, second_moments=given, progress=bar)
            seconds = time.perf_counter() - start
            routed = Routed()
            found = compare_logits(routed.logits(model, subject, text.windows.to(args.device).split(8)))
            weights = sum(layer.out_features * layer.in_features for layer in report.layers)
            forced = perplexity_of(routed.forced, found.positions - len(text.windows))
            row |= {
                "perplexity": round(found.perplexity, 4),
                "change_percent": round(100 * (found.perplexity / baseline - 1), 3),
                "forced_change_percent": round(100 * (forced / baseline - 1), 3),
                "routes_changed_percent": round(100 * routed.moved / routed.routes, 3),
                **divergence_columns(found),
                "bits_per_weight": round(8 * sum(layer.bytes_after for layer in report.layers) / weights, 3),
                "quantize_seconds": round(seconds, 1),
                "calibration_windows": args.calibration_windows if is_fitted else "",
                "fewest_tokens_of_an_expert": fewest if is_fitted else "",
            }
        results.rows.append({**row, **text.columns()})
        results.write_csv(args.out, key=("model", "variant", "windows"))  # a run that is cut short keeps its rows
        print(f"{path.name} {variant}: {row['perplexity']} ({row['change_percent']} %)", file=sys.stderr, flush=True)


def report(results: Results) -> str:
    """The rows as Markdown."""
    keys = {
        "variant": "weights",
        "bits_per_weight": "bits",
        "perplexity": "perplexity",
        "change_percent": "change, %",
        "forced_change_percent": "with float routes, %",
        "routes_changed_percent": "routes changed, %",
        "divergence": "divergence",
        "same_top_percent": "same top token, %",
    }
    return markdown([*keys.values()], [[str(row.get(key, "")) for key in keys] for row in results.rows])


@script(model_options, add_options)
def main(args: argparse.Namespace) -> int:
    """Evaluate every model under every variant, and write rows and a table."""
    results = Results("mixture_quality", environment())
    for path in args.models:
        measure(path, args, results)
    print(report(results))
    print(f"{results.env}; rows in {args.out}")
    return 0
