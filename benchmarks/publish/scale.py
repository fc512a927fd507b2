"""Predict how fast a Llama or a mixture runs on 1 to 64 H200s: every layout of the GPUs, with what its step has.

    python benchmarks publish scale --model 70B --scheme codebook4 --gpus 8 --sequences 64 --context 2048

No GPU is needed: `benchmarks.scaling` predicts from the rows in ``benchmarks/results``. `publish/tables.py` writes
docs/scale.md, which says how, what is checked and what is assumed.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import RESULTS, table
from benchmarks.publish.rows import Rows
from benchmarks.scaling.check import calibrated
from benchmarks.scaling.laws import CACHES, SCHEMES, Primitives
from benchmarks.scaling.model import LLAMAS, MIXTURES, prompt, room, served

MOST_GPUS = 64
HEADER = (
    *("replicas", "GPUs a layer", "stages", "step ms", "tokens/s", "tokens/s GPU", "first token ms", "room"),
    *("products", "attention", "rest", "head", "all-reduce", "send", "bubble"),
)
SHAPES = {shape.name: shape for shape in (*LLAMAS, *MIXTURES)}


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--model", choices=SHAPES, default="70B")
    options.add_argument("--scheme", choices=SCHEMES, default="codebook4")
    options.add_argument("--gpus", type=int, default=8, help=f"1 to {MOST_GPUS} [8]")
    options.add_argument("--sequences", type=int, default=64, help="of all replicas together [64]")
    options.add_argument("--context", type=int, default=2048, help="tokens of a sequence [2048]")
    options.add_argument("--prompt", type=int, default=2048, help="tokens before the first token [2048]")
    options.add_argument("--cache", choices=CACHES, default="float", help="keys and values in float16 or int8 [float]")
    options.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")


@harness.script(add_options)
def main(args: argparse.Namespace) -> int:
    """Print the layouts, the fastest first; 1 if none has enough memory."""
    for name in ("gpus", "sequences", "context", "prompt"):
        if not 1 <= getattr(args, name) <= (MOST_GPUS if name == "gpus" else math.inf):
            raise argparse.ArgumentTypeError(f"--{name} {getattr(args, name)}: 1 or more, and at most {MOST_GPUS} GPUs")
    rows = Rows(args.results)
    primitives, shape = calibrated(Primitives.read(rows), rows), SHAPES[args.model]
    found = list(served(primitives, shape, args.scheme, args.sequences, args.context, args.gpus, args.cache))
    if not found:
        print(f"{args.gpus} GPUs lack memory for {args.sequences} sequences of {args.context} tokens", file=sys.stderr)
        return 1
    lines: list[list[object]] = []
    for one in sorted(found, key=lambda one: -one.tokens_s_gpu):
        layout, time = one.layout, one.time
        first = prompt(primitives, shape, args.scheme, 1, args.prompt, layout)
        rates = (time.us / 1e3, one.tokens_s_gpu * args.gpus, one.tokens_s_gpu, first.us / 1e3)
        held = room(shape, args.scheme, args.context, layout, args.cache) * layout.replicas
        parts = (time.products_us, time.attention_us, time.rest_us, time.head_us, time.all_reduce_us, time.send_us)
        milliseconds = (us / 1e3 for us in (*parts, time.bubble_us))
        lines.append([layout.replicas, layout.tp, layout.pp, *rates, held, *milliseconds])
    print(table(HEADER, lines))
    print("The last columns are the step's terms, ms. docs/scale.md lists the checks of the model.")
    if assumed := sorted({one.layout.tp for one in found if primitives.assumed(one.layout.tp)}):
        print(f"All-reduces over {', '.join(map(str, assumed))} GPUs are assumed.")
    return 0
