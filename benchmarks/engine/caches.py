"""Tokens per second of `qcut.Engine` by context and cache: keys and values in float, int8 and 4 bits.

A model of known shape with random weights reads a prompt that fills the context except the new tokens; a step is
timed as in ``engine/steps.py``, by generating many tokens less one, from the same cache each time. The result is
checked first: logits of a step against those of the float cache.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import torch

import qcut
from benchmarks import harness
from benchmarks.engine.steps import CASES, QUICK_ROUNDS, ROUNDS, build, cosine, prompts_of, wall_us
from benchmarks.harness import CheckError, Timing
from qcut.engine.kv_cache.cache import KV_DTYPES, KVDtype

NEW = 64
"""Tokens that are generated."""
CONTEXTS = {1: (512, 2048, 8192, 32768), 8: (512, 2048, 8192)}
"""By sequences; those of 8 at once are fewer, since prompts of all of them are read first."""
GUIDE = 64
"""Tokens of the prompt by which 4-bit keys are rounded."""
MIN_COSINE = {"auto": 0.9999, "int8": 0.998, "int8/int4": 0.95, "int4": 0.95}
"""Of the logits of a step and those that the float cache gives, in a model of one layer: more layers of random weights,
each a copy of the first, multiply what rounding does there."""
KEY = ("case", "cache", "batch", "context")


def step_us(engine: qcut.Engine, length: int, batch: int, new: int, rounds: int) -> Timing:
    """Microseconds of one step after ``length`` tokens, by the host's clock: of many tokens less those of one, divided.

    Each call goes on from the same ``length`` tokens of the cache.
    """
    last = [[0]] * batch
    one, many = (functools.partial(engine.generate, last, count, reuse_prefix=length) for count in (1, new))
    first = statistics.median(wall_us(one, rounds))
    return Timing.of([(us - first) / (new - 1) for us in wall_us(many, rounds)], "wall")


def engine_of(model: Any, batch: int, context: int, cache: KVDtype, vocabulary: int) -> qcut.Engine:
    """An engine with room for a context; a short prompt calibrates 4-bit keys, which suffices for timing."""
    guide = prompts_of(vocabulary, 1, min(GUIDE, context)) if cache == "int4" else None
    return qcut.Engine(model, batch=batch, context=context, kv_cache=cache, calibration_prompts=guide)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", choices=tuple(CASES), default="llama-3-8b-codebook4", help="of engine/steps.py")
    parser.add_argument("--contexts", help="tokens, comma-separated, for one sequence and for eight")
    parser.add_argument("--batches", default="1,8", help="sequences, comma-separated")
    harness.device_option(parser)


@harness.script(harness.timing_options, add_options, time_budget=300.0)
def main(options: argparse.Namespace) -> int:
    """Run the benchmark; 1 if a result was wrong. On a CPU a tiny model is only checked."""
    device = options.device
    deadline = time.monotonic() + options.time_budget
    results = harness.Results("bench_cache", harness.environment())
    given = None if options.contexts is None else tuple(map(int, options.contexts.split(",")))
    sizes = [(int(n), c) for n in options.batches.split(",") for c in given or CONTEXTS.get(int(n), CONTEXTS[8])]
    case, rounds = CASES[options.case], QUICK_ROUNDS if options.quick else ROUNDS
    longest = max(context for _, context in sizes)
    model, shallow = build(case, device, longest), build(replace(case, layers=1), device, longest)
    rows: list[list[object]] = []
    failures = 0
    for batch, context in sizes:
        new = min(NEW, context // 2)
        ids = torch.tensor(prompts_of(case.vocabulary, batch, context - new), device=device)
        want = None
        for cache in KV_DTYPES:
            if time.monotonic() > deadline:
                print(f"out of time before batch {batch}, context {context}, {cache}", file=sys.stderr)
                break
            try:
                engine = engine_of(shallow, batch, context, cache, case.vocabulary)
                engine.prefill(ids)
                logits = engine.decode(torch.zeros(batch, dtype=torch.int64))
                want = logits if want is None else want
                check(cache, logits, want)
            except CheckError as error:
                print(f"WRONG batch {batch}, context {context}: {error}")
                failures += 1
                continue
            if device == "cuda":
                engine = engine_of(model, batch, context, cache, case.vocabulary)
                engine.prefill(ids)
                timing = step_us(engine, context - new, batch, new, rounds)
                rate = batch / timing.median_us * 1e6
                size = engine.cache.nbytes / (engine.batch * (context + 1))
                columns = {"tokens_s": round(rate, 1), "bytes_token": round(size)}
                results.add(timing, case=options.case, cache=cache, batch=batch, context=context, **columns)
                rows.append([batch, context, cache, timing.median_us, rate, size])
                results.write_csv(options.out, KEY)
            del engine
            if device == "cuda":
                torch.cuda.empty_cache()
    if device != "cuda":
        print(f"{len(sizes) * len(KV_DTYPES)} results checked, {failures} wrong; nothing timed on a CPU")
        return 1 if failures else 0
    print(harness.table(["batch", "context", "cache", "step us", "tokens/s", "bytes a token"], rows))
    print(f"rows in {results.write_csv(options.out, KEY)}")
    return 1 if failures else 0


def check(cache: str, logits: torch.Tensor, want: torch.Tensor) -> None:
    """Raise `CheckError` unless logits are near those of the float cache; NaN raises."""
    found = cosine(logits, want)
    if not found >= MIN_COSINE[cache]:
        raise CheckError(f"{cache}: logits have cosine {found:.4f} with the float cache's; allowed {MIN_COSINE[cache]}")
