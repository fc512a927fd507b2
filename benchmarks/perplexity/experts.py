"""Perplexity of mixtures with experts fitted to few tokens, by what stands for tokens that an expert did not see.

    python benchmarks perplexity experts --models-dir DIR --models qwen3moe-12m --text FILE

Only the experts are quantized; attention and all else stays in float32. Calibrated fits see text that the model itself
writes. Of every number of tokens, moments are collected once. Rules: ``nearest`` rounds without moments; ``own`` takes
each expert's own moment; ``all`` the mean of all experts of a projection; ``mean`` draws the own one to that mean; and
``shrunk``, as `qcut.collect_second_moments` does, to that mean where channels mean the same to all experts, and to a
multiple of the identity where not. What an expert is drawn to counts as ``prior`` tokens for each column.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

import qcut
from benchmarks.harness import Results, environment, list_of, model_options, script
from benchmarks.perplexity.models import Evaluated, divergence_columns, own_text
from qcut.conversion.calibration.moments import Moments, shrunk
from qcut.numerics.codebook.fitting.curvature import Curvature, as_curvature

EXPERTS = ["*.experts"]
PRIORS = (0.25, 1.0, 4.0)
RULES: dict[str, tuple[bool, tuple[float, ...]]] = {
    "own": (False, (0.0,)),
    "all": (False, (1e9,)),
    "mean": (False, PRIORS),
    "shrunk": (True, PRIORS),
}
"""Whether channels inside of experts are distinguished from those of tokens, and the priors."""
KEY = ("model", "fit", "scheme", "rule", "prior", "tokens")


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--tokens", type=list_of(), default="512,2048,16384", help="of calibration [512,2048,16384]")
    options.add_argument("--schemes", type=list_of(), default="codebook4,codebook3", help="[codebook4,codebook3]")
    options.add_argument("--fits", type=list_of(("inputs", "curvature")), default="inputs,curvature", help="[both]")
    options.add_argument("--rules", type=list_of(RULES), default=",".join(RULES), help="besides nearest [all]")


def by_rule(collected: Moments[Any], rule: str, prior: float) -> dict[str, Curvature]:
    """Moments of experts under a rule, of those that were collected without one (``prior=0``)."""
    stacks: dict[str, list[str]] = {}
    for name in collected:
        stacks.setdefault(name.rpartition(".")[0], []).append(name)
    found: dict[str, Curvature] = {}
    for stack, names in stacks.items():
        counts = [collected.tokens[name] for name in names]
        parts = [as_curvature(collected[name]) for name in names]
        up, apart = stack.endswith(".up"), RULES[rule][0]

        def drawn(moments: Iterable[Tensor | None], common: bool, counts: list[int] = counts) -> list[Any]:
            sums = [one * n if one is not None and n else None for one, n in zip(moments, counts, strict=True)]
            return shrunk(sums, counts, common, prior) if any(s is not None for s in sums) else sums

        inputs = drawn((part.inputs for part in parts), up or not apart)
        outputs = drawn((part.outputs for part in parts), not up or not apart)
        found |= {name: Curvature(h, g) for name, h, g in zip(names, inputs, outputs, strict=True)}
    return found


def measure(path: Path, args: argparse.Namespace, results: Results) -> None:
    """One model: the float model, and its experts under every rule, a row each."""
    text = Evaluated(path, args)
    baseline = text.perplexity()

    def add(fit: str, scheme: str, rule: str, prior: float, tokens: int, moments: Mapping[str, Any] | None) -> None:
        start = time.perf_counter()
        model = copy.deepcopy(text.model)
        if scheme != "float32":
            qcut.quantize(model, scheme, include=EXPERTS, second_moments=moments, progress=text.progress)
        found = text.compared(model)
        row = {"bench": results.bench, "model": path.name, "fit": fit, "scheme": scheme, "rule": rule, "prior": prior}
        row |= {"tokens": tokens, "perplexity": round(found.perplexity, 4)}
        row |= {"change_percent": round(100 * (found.perplexity / baseline - 1), 3), **divergence_columns(found)}
        row |= {"least": min(counts, default=""), "median": sorted(counts)[len(counts) // 2] if counts else ""}
        results.rows.append(row | text.columns() | {"seconds": round(time.perf_counter() - start, 1)})
        results.write_csv(args.out, KEY)  # an interrupted run keeps its rows
        what = f"{path.name} {fit} {scheme} {rule} {prior} {tokens}"
        print(f"{what}: {found.perplexity:.3f}, {found.divergence:.5f}", file=sys.stderr, flush=True)

    counts: list[int] = []
    add("", "float32", "", 0.0, 0, None)
    for scheme in args.schemes:
        add("", scheme, "nearest", 0.0, 0, None)
    most = max(map(int, args.tokens))
    own = own_text(text.model, -(-most // args.window), args.window, text.model.config.vocab_size).flatten()
    for fit in args.fits:
        collect: Any = qcut.collect_second_moments if fit == "inputs" else qcut.collect_curvature
        for tokens in map(int, args.tokens):
            batches = own[:tokens].view(-1, min(tokens, args.window)).split(1)
            collected = collect(text.model, batches, EXPERTS, prior=0.0, progress=text.progress)
            counts = [count for name, count in collected.tokens.items() if ".up." in name]
            for scheme in args.schemes:
                for rule in args.rules:
                    for prior in RULES[rule][1]:
                        add(fit, scheme, rule, prior, tokens, by_rule(collected, rule, prior))


@script(model_options, add_options)
def main(args: argparse.Namespace) -> int:
    """Evaluate every model under every rule, and write rows."""
    results = Results("expert_quality", environment())
    for path in args.models:
        measure(path, args, results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
