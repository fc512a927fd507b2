"""Steps with norms folded into the int8 products around them, beside steps with kernels for norms, engines in turns.

A step is timed as in `bench_engine`: the time of generating many tokens less that of one, by the host's clock. The two
engines take turns, so that both see the same clocks.

    python benchmarks/bench_folding.py [--cases gpt2-large-int8,llama-3-8b-int8] [--batches 1,2,3]
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import qcut
from benchmarks import harness
from benchmarks.bench_engine import CASES, NEW, PROMPT, build, decode_us, prompts_of
from benchmarks.harness import Timing
from qcut.engine import decoder

KEY = ("case", "batch", "norms")
TURNS, QUICK_TURNS = 8, 2
KINDS = {"kernels": False, "folded": True}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. A CPU runs the tiny models."""
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--cases", default="gpt2-large-int8,llama-3-8b-int8", help="of bench_engine, comma-separated")
    parser.add_argument("--batches", default="1", help="sequences at once; engines fold for one alone otherwise")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    batches = [int(batch) for batch in options.batches.split(",")]
    decoder.FOLDED_ROWS = max(batches)
    results = harness.Results("bench_folding", harness.environment())
    table = []
    with torch.no_grad():
        for name in options.cases.split(","):
            case = replace(CASES[name], prefill={}, first={}, decode=dict.fromkeys(batches, 0.0))
            model = build(case, options.device)
            prompt, new = (PROMPT, NEW) if options.device == "cuda" else (8, 4)
            for batch in batches:
                found = in_turns(model, prompts_of(case.vocabulary, batch, prompt), new, quick=options.quick)
                for kind, samples in found.items():
                    timing = Timing.of(samples, "wall")
                    results.add(timing, case=name, batch=batch, norms=kind, device=options.device)
                    table.append([name, batch, kind, timing.median_us, batch / timing.median_us * 1e6])
            del model
            results.write_csv(options.out, KEY)
    print(harness.table(["model", "batch", "norms", "us a step", "tokens/s"], table))
    print(f"rows in {results.write_csv(options.out, KEY)}")
    return 0


def in_turns(
    model: torch.nn.Module, prompts: list[list[int]], new: int, *, quick: bool = False
) -> dict[str, list[float]]:
    """Microseconds of steps of either engine, the median of each turn."""
    context = len(prompts[0]) + new
    engines = {
        kind: qcut.Engine(model, batch=len(prompts), context=context, fold_norms=fold) for kind, fold in KINDS.items()
    }
    found: dict[str, list[float]] = {kind: [] for kind in engines}
    for turn in range(QUICK_TURNS if quick else TURNS):
        for kind in sorted(engines, reverse=turn % 2 == 1):
            found[kind].append(decode_us(engines[kind], prompts, new, 1).median_us)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
