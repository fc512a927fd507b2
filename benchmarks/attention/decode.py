"""Attention of one new token over a cache: qcut's kernel, torch's scaled dot product attention, and matmul and softmax.

Every variant reads the same values; copies of the cache rotate, so that short ones are not read from the L2 cache. The
floor is the keys' and values' bytes at the GPU's measured bandwidth.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from benchmarks import harness
from benchmarks.harness import CEILINGS, CheckError, Timing, Variant, rotation
from benchmarks.publish import plots
from qcut.numerics import int4
from qcut.numerics import int8 as numerics

CONTEXTS = (64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
HEADS, KV_HEADS, HEAD = 32, 8, 128
BATCHES = (1, 8)
MARK = (8, 8192, 75.0)
"""Batch, context, and the share of the bandwidth in percent to reach there."""
PACKED_MARK = (8, 32768, 80.0)
"""The same for keys and values of 4 bits."""
NAMES = ("qcut", "qcut int8", "qcut int4", "sdpa", "naive")
OURS = NAMES[:3]


@dataclass
class Problem:
    """Operands of one size.

    Attributes:
        q: ``[batch, heads, D]``.
        kv: keys and values of each copy, ``[2, batch, kv_heads, context, D]``.
        stored: int8 keys and values of each copy, and their scales. They have fewer bytes and at least as many copies.
        packed: the same in 4 bits, and their words, for rotated queries.
        turned: ``[batch, heads, D]``, q rotated like 4-bit keys.
        positions: the last position of each sequence, int32.
        counters: zeros, int32, one for each query. Without counters a graph would zero its own at each launch.
    """

    q: Tensor
    kv: list[Tensor]
    stored: list[tuple[Tensor, Tensor]]
    packed: list[tuple[Tensor, Tensor]]
    turned: Tensor
    positions: Tensor
    counters: Tensor

    @property
    def copies(self) -> int:
        """Operand sets that calls rotate over."""
        return len(self.kv)


def problem_of(batch: int, context: int, heads: int, kv_heads: int, head: int, device: str) -> Problem:
    """Random operands, float16 on a GPU."""
    generator = torch.Generator(device).manual_seed(context)
    dtype = torch.float16 if device == "cuda" else torch.float32

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    packed_bytes = batch * kv_heads * context * head
    copies = rotation(packed_bytes) if device == "cuda" else 1
    kv, stored, packed = [], [], []
    for _ in range(copies):
        values = random(2, batch, kv_heads, context, head)
        q8, scale = numerics.quantize_per_token_ref(values.reshape(-1, head).float(), head)
        kv.append(values)
        stored.append((q8.view(values.shape), scale.view(values.shape[:-1])))
        codes, words = packed_rows(values.reshape(-1, head))
        packed.append((codes.view(*values.shape[:-1], -1), words.view(values.shape[:-1])))
    positions = torch.full((batch,), context - 1, dtype=torch.int32, device=device)
    counters = torch.zeros(batch * heads, dtype=torch.int32, device=device)
    q = random(batch, heads, head)
    return Problem(q, kv, stored, packed, int4.rotate(q).to(dtype), positions, counters)


def packed_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and words of rows ``[R, D]``, some at a time: the reference has several float32 copies of its rows."""
    parts = [int4.quantize_rows_ref(int4.rotate(part)) for part in rows.split(1 << 18)]
    codes, words = zip(*parts, strict=True)
    return torch.cat(codes), torch.cat(words)


def ours(problem: Problem, i: int) -> Tensor:
    """The kernel on float keys and values."""
    keys, values = problem.kv[i]
    out: Tensor = torch.ops.qcut.decode_attention(
        problem.q, keys, values, None, None, problem.positions, problem.q.shape[2] ** -0.5, problem.counters
    )
    return out


def ours_int8(problem: Problem, i: int) -> Tensor:
    """The kernel on int8 keys and values."""
    (keys, values), scales = problem.stored[i]
    out: Tensor = torch.ops.qcut.decode_attention(
        problem.q, keys, values, *scales, problem.positions, problem.q.shape[2] ** -0.5, problem.counters
    )
    return out


def ours_int4(problem: Problem, i: int) -> Tensor:
    """The kernel on keys and values of 4 bits."""
    (keys, values), words = problem.packed[i]
    out: Tensor = torch.ops.qcut.decode_attention(
        problem.turned, keys, values, *words, problem.positions, problem.q.shape[2] ** -0.5, problem.counters
    )
    return out


def sdpa(problem: Problem, i: int) -> Tensor:
    """Run torch's scaled dot product attention for one query after the whole context."""
    keys, values = problem.kv[i]
    return F.scaled_dot_product_attention(problem.q[:, :, None], keys, values, enable_gqa=True)[:, :, 0]


def naive(problem: Problem, i: int) -> Tensor:
    """Two matrix products with a softmax between, the scores in memory."""
    keys, values = problem.kv[i]
    q = problem.q.unflatten(1, (keys.shape[1], -1))
    scores = (q @ keys.transpose(2, 3)).float() * q.shape[-1] ** -0.5
    return (scores.softmax(-1).to(q.dtype) @ values).flatten(1, 2)


def checked(name: str, call: functools.partial[Tensor], problem: Problem) -> None:
    """Raise `CheckError` unless a result is near that of float64; NaN raises."""
    keys, values = problem.kv[0].double()
    if name == "qcut int8":
        keys, values = problem.stored[0][0].double() * problem.stored[0][1][..., None].double()
    q = problem.q.double().unflatten(1, (keys.shape[1], -1))
    if name == "qcut int4":
        parts = zip(*problem.packed[0], strict=True)
        keys, values = (int4.rotate_back(int4.dequantize_rows_ref(*part)).double() for part in parts)
    want = ((q @ keys.transpose(2, 3) * q.shape[-1] ** -0.5).softmax(-1) @ values).flatten(1, 2)
    error = (call(0).double() - want).abs().max().item() / want.abs().max().item()
    if not error <= 5e-3:
        raise CheckError(f"{name}: off by {error:.2e} of the largest; allowed 5e-3")


def variants_of(problem: Problem) -> list[Variant]:
    """The ways to compute a problem."""
    calls = dict(zip(NAMES, (ours, ours_int8, ours_int4, sdpa, naive), strict=True))
    found = []
    for name, call in calls.items():
        bound = functools.partial(call, problem)
        found.append(Variant(name, bound, problem.copies, functools.partial(checked, name, bound, problem)))
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)), help="comma-separated")
    harness.device_option(parser)


@harness.script(harness.timing_options, add_options)
def main(options: argparse.Namespace) -> int:
    """Run the benchmark; 1 if a result was wrong. On a CPU results are only checked."""
    device = options.device
    heads, kv_heads, head = (HEADS, KV_HEADS, HEAD) if device == "cuda" else (4, 2, 32)
    results = harness.Results("bench_attention", harness.environment())
    ceiling = CEILINGS.get(results.env.gpu)
    clock = harness.CudaClock() if device == "cuda" else None
    deadline = time.monotonic() + options.time_budget
    contexts = [int(c) for c in options.contexts.split(",")]
    shares: dict[tuple[int, int, str], float] = {}
    times: dict[tuple[int, int], dict[str, Timing]] = {}
    failures = 0
    for batch in BATCHES:
        for context in contexts:
            if time.monotonic() > deadline:
                print(f"out of time before batch {batch}, context {context}", file=sys.stderr)
                break
            variants = variants_of(problem_of(batch, context, heads, kv_heads, head, device))
            if clock is None:
                failures += len(harness.checked(variants, print)[1])
                continue
            label = f"batch {batch}, context {context}"
            times[batch, context], wrong = harness.timed(label, variants, clock, options, deadline)
            failures += wrong
            for name, timing in times[batch, context].items():
                # int8 has a float32 scale for each head of a token, 4 bits a word of 16 bits.
                bytes_each = {"qcut int8": head + 4, "qcut int4": head // 2 + 2}.get(name, 2 * head)
                moved = 2 * batch * kv_heads * context * bytes_each
                share = 100 * moved / ceiling.read_bytes * 1e6 / timing.median_us if ceiling else math.nan
                shares[batch, context, name] = share
                columns = {
                    "heads": heads,
                    "kv_heads": kv_heads,
                    "head": head,
                    "gb_s": round(moved / timing.median_us / 1e3),
                }
                results.add(timing, variant=name, batch=batch, context=context, **columns, floor_pct=round(share, 1))
            results.write_csv(options.out)
    if clock is None:
        print(f"{len(BATCHES) * len(contexts) * len(NAMES)} results checked, {failures} wrong; nothing timed on a CPU")
        return 1 if failures else 0
    report(options.out, times, shares)
    print(f"rows in {results.write_csv(options.out)}")
    return 1 if failures else 0


def report(
    out: Path, times: dict[tuple[int, int], dict[str, Timing]], shares: dict[tuple[int, int, str], float]
) -> None:
    """Print the table and whether the target is reached, and draw the plot."""
    rows = []
    for (batch, context), found in times.items():
        cells = [found[n].median_us if n in found else math.nan for n in NAMES]
        rows.append([batch, context, *cells, *(shares.get((batch, context, n), math.nan) for n in OURS)])
    header = ["batch", "context", *(f"{n} us" for n in NAMES), *(f"{n} % of bandwidth" for n in OURS)]
    print(harness.table(header, rows))
    labels = [f"{batch} × {context}" for batch, context in times]
    naive_us = [found["naive"].median_us if "naive" in found else math.nan for found in times.values()]
    series = {
        name: [
            base / found[name].median_us if name in found else math.nan
            for base, found in zip(naive_us, times.values(), strict=True)
        ]
        for name in NAMES[:-1]
    }
    title = f"Attention of one token, {HEADS} heads of {HEAD}, {KV_HEADS} of keys: batch × context"
    plots.ratios(out / "bench_attention", labels, series, title, "speed, matmul and softmax = 1")
    for name, (batch, context, mark) in (("qcut", MARK), ("qcut int4", PACKED_MARK)):
        if (batch, context, name) in shares:
            share = shares[batch, context, name]
            verdict = "reached" if share >= mark else "NOT reached"
            reach = f"to reach {mark:.0f}: {verdict}"
            print(f"{name}, batch {batch}, context {context}: {share:.1f} % of the bandwidth ({reach})")
