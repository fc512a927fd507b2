"""Steps whose attention asks the L2 for more or less of the output projection's weight, engines in turns.

    python .gpu-asks.py [--models a,b] [--budgets 0,4,8,16,32] [--batches 1,8] [--rounds 6] [--no-after]

Variants: bytes asked for in MB; and ``after``, the default budget asked for after the wait for the predecessor instead
of before it. Budgets that ask a model for the same bytes are measured once. Tokens of all variants must be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

import qcut
from benchmarks.bench_engine import CASES, NEW, PROMPT, build, decode_us, prompts_of
from qcut.cuda import attention as attention_cuda
from qcut.cuda import codebook, gemm, native
from qcut.cuda.plans import PlanCache, watched_loads
from qcut.engine import attention

MODELS = "llama-3-8b-codebook4,llama-3-8b-int8,gpt2-large-int8"
emit = attention_cuda.emit_attention_append


def emit_after(desc):
    """The same kernel with the question after the wait."""
    source = emit(desc)
    if not (desc.ahead and desc.settled):
        return source
    header = Path("emitters/include/qcut/decoder/attention/append.cuh").read_text().replace("#pragma once", "")
    (line,) = (line for line in header.splitlines(True) if "ahead.ask()" in line)
    wait = "      wait_for_dependencies();\n"
    assert header.count(f"{{\n{wait}") == 1
    header = header.replace(line, "").replace(f"{{\n{wait}", f"{{\n{wait}{line}")
    name = source.name + "_after"
    text = source.text.replace("#include <qcut/decoder/attention/append.cuh>\n", header).replace(source.name, name)
    return replace(source, name=name, entry=name, text=text)


def engine_of(model, budget: int, after: bool, batches: list[int], prompts: dict, new: int):
    """An engine whose steps are captured, and its tokens."""
    attention.ASKED_BYTES = budget << 20
    attention_cuda._attention_plans = PlanCache()
    attention_cuda.emit_attention_append = emit_after if after else emit
    engine = qcut.Engine(model, batch=max(batches), context=PROMPT + NEW)
    with watched_loads() as loaded:
        tokens = [engine.generate(prompts[batch], new) for batch in batches]
    kernels = sorted({name for name in loaded if "attention_append" in name})
    attention_cuda.emit_attention_append = emit
    asked = [parts for parts in engine._asked(1) if parts is not None]
    size = asked[0].numel() if asked else 0
    return engine, tokens, size, kernels


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--budgets", default="0,4,8,16,32")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--no-after", action="store_true")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    batches = [int(b) for b in options.batches.split(",")]
    cuda = options.device == "cuda"
    gemm.has_cutlass = codebook.has_cutlass = lambda: False
    if cuda:
        native.library()
        print(torch.cuda.get_device_name(), flush=True)
    rows = []
    for name in options.models.split(","):
        start = time.perf_counter()
        case = replace(CASES[name], prefill={}, first={}, decode=dict.fromkeys(batches, 0.0))
        model, new, length = build(case, options.device), NEW if cuda else 4, PROMPT if cuda else 8
        prompts = {batch: prompts_of(case.vocabulary, batch, length) for batch in batches}
        variants, sizes = {}, set()
        wanted = [(f"{mb} MB", int(mb), False) for mb in options.budgets.split(",")]
        if not options.no_after:
            wanted.append(("16 MB after", 16, True))
        first = None
        for label, budget, after in wanted:
            engine, tokens, size, kernels = engine_of(model, budget, after, batches, prompts, new)
            first = first or tokens
            same = "same tokens" if tokens == first else "OTHER TOKENS"
            known = not after and size in sizes
            print(f"{name} {label}: asks for {size / 2**20:.2f} MiB a layer, {same}{', as before' * known}", flush=True)
            for kernel in kernels:
                print(f"    {kernel}")
            if known:
                continue
            sizes.add(size)
            variants[label] = engine
        print(f"  ready after {time.perf_counter() - start:.0f} s", flush=True)
        for batch in batches:
            found: dict[str, list[float]] = {label: [] for label in variants}
            for turn in range(options.rounds):
                order = list(variants)
                for label in order[turn % len(order) :] + order[: turn % len(order)]:
                    found[label].append(decode_us(variants[label], prompts[batch], new, 1).median_us)
            base = found[next(iter(found))]
            for label, us in found.items():
                gain = statistics.median(b - a for a, b in zip(us, base, strict=True))
                row = {"model": name, "batch": batch, "asked": label, "us": round(statistics.median(us), 1)}
                row |= {"least": round(min(us), 1), "most": round(max(us), 1), "gain": round(gain, 1)}
                rows.append(row)
                print("  " + "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        del model, variants, engine
        if cuda:
            torch.cuda.empty_cache()
    if out := os.environ.get("OUT"):
        Path(out, "asks.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
