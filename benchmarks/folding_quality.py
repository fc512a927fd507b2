"""Perplexity of steps with norms folded into int8 products, beside steps with kernels for norms.

    python benchmarks/folding_quality.py --models-dir DIR --text FILE

Windows are read token by token through engines of the model in ``w8a8``, as prompts do not fold; the float model's
steps are beside. The error is the standard error over windows of the paired difference with steps that do not fold.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import qcut
from benchmarks.harness import Results, add_model_options, environment, table, with_models
from benchmarks.quality import tokens_of
from qcut.models.evaluation import windows_of
from qcut.process.progress import with_progress

KEY = ("model", "norms")


@torch.no_grad()
def by_steps(engine: qcut.Engine, windows: Tensor, bar: bool) -> Tensor:
    """Mean negative log-likelihood of each window ``[T]``, float64, of logits that steps give for all but the first."""
    found = []
    for batch in with_progress(windows.split(engine.batch), "windows", "batch", shown=bar):
        losses = []
        logits = engine.prefill(batch[:, :1])
        for following in batch[:, 1:].unbind(1):
            losses.append(F.cross_entropy(logits.double().cpu(), following, reduction="none"))
            logits = engine.decode(following)
        found.append(torch.stack(losses).mean(0))
    return torch.cat(found)


def measure(path: Path, args: argparse.Namespace, results: Results) -> None:
    """One model: rows of its float steps, of ``w8a8`` with kernels for norms, and of ``w8a8`` with folded norms."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    dtype = torch.float16 if args.device == "cuda" else torch.float32
    exact: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).to(args.device).eval()
    windows = windows_of(tokens_of(tokenizer, args.text.read_text(encoding="utf-8")), args.window, args.max_windows)
    model = copy.deepcopy(exact)
    qcut.quantize(model, "w8a8", allow_growth=True, prebuild=(), progress=False)
    losses: dict[str, Tensor] = {}
    for norms, (of, fold) in {"float": (exact, False), "kernels": (model, False), "folded": (model, True)}.items():
        losses[norms] = by_steps(qcut.Engine(of, context=args.window, fold_norms=fold), windows, sys.stderr.isatty())
        change = losses[norms] - losses["float" if norms == "kernels" else "kernels" if norms == "folded" else norms]
        results.rows.append(
            {
                "bench": results.bench,
                "model": path.name,
                "norms": norms,
                "perplexity": round(math.exp(losses[norms].mean()), 4),
                "change_percent": round(100 * math.expm1(change.mean()), 4),
                "error_percent": round(100 * float(change.std()) / len(change) ** 0.5, 4),
                "windows": len(windows),
                "window": args.window,
                "text": args.text.name,
                "dtype": str(dtype).removeprefix("torch."),
                "device": args.device,
            }
        )


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table and write rows."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(options)
    args = with_models(options, argv)
    results = Results("folding_quality", environment())
    for path in args.models:
        measure(path, args, results)
        results.write_csv(args.out, KEY)
    columns = ("model", "norms", "perplexity", "change_percent", "error_percent")
    print(table(list(columns), [[row[c] for c in columns] for row in results.rows]))
    print(f"rows in {results.write_csv(args.out, KEY)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
