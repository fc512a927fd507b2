"""Attention of prompts: qcut's kernels over float16 and int8 caches, and torch's scaled dot product attention.

Every variant reads the same values. torch's back ends that refuse a shape are left out. Operations are those that the
mask leaves: two products of every query with every position that it attends to.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from benchmarks import harness
from benchmarks.harness import CheckError, Timing, Variant
from qcut.numerics import int8 as numerics


@dataclass(frozen=True)
class Shape:
    """Prompts of one size.

    Attributes:
        batch: sequences.
        tokens: of each.
        heads: queries of a token.
        kv_heads: keys of a token.
        head: columns of a head.
    """

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head: int

    @property
    def operations(self) -> float:
        """Additions and multiplications that the mask leaves."""
        return 2.0 * self.batch * self.heads * self.head * self.tokens * (self.tokens + 1)

    @property
    def scale(self) -> float:
        """Of scores."""
        return float(self.head**-0.5)


LLAMA, GPT2_LARGE = (32, 8, 128), (20, 20, 64)
SHAPES = (
    *(Shape(1, tokens, *LLAMA) for tokens in (256, 1024, 4096, 16384)),
    Shape(1, 256, *GPT2_LARGE),
    Shape(8, 1024, *GPT2_LARGE),
    Shape(1, 4096, 16, 8, 256),
)
MARK = Shape(1, 4096, *LLAMA)
"""Here qcut shall be no slower than torch's fastest back end."""
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
NAMES = ("qcut", "qcut int8", "sdpa", *BACKENDS)


@dataclass
class Problem:
    """Operands of one shape.

    Attributes:
        shape: see `Shape`.
        q: ``[batch tokens, heads, head]``.
        kv: keys and values, ``[2, batch, kv_heads, tokens, head]``.
        stored: int8 keys and values, and their scales.
        starts: zeros, int32 ``[batch]``.
        lengths: tokens, int32 ``[batch]``.
    """

    shape: Shape
    q: Tensor
    kv: Tensor
    stored: tuple[Tensor, Tensor]
    starts: Tensor
    lengths: Tensor


def problem_of(shape: Shape, device: str) -> Problem:
    """Random operands, float16 on a GPU."""
    generator = torch.Generator(device).manual_seed(shape.tokens)
    dtype = torch.float16 if device == "cuda" else torch.float32

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device).to(dtype)

    kv = random(2, shape.batch, shape.kv_heads, shape.tokens, shape.head)
    q8, scale = numerics.quantize_per_token_ref(kv.reshape(-1, shape.head).float(), shape.head)
    starts = torch.zeros(shape.batch, dtype=torch.int32, device=device)
    q = random(shape.batch * shape.tokens, shape.heads, shape.head)
    return Problem(shape, q, kv, (q8.view(kv.shape), scale.view(kv.shape[:-1])), starts, starts + shape.tokens)


def ours(problem: Problem, stored: tuple[Tensor, Tensor] | None, _: int = 0) -> Tensor:
    """qcut's kernel, on int8 keys and values if given."""
    shape = problem.shape
    keys, values = problem.kv if stored is None else stored[0]
    scales = (None, None) if stored is None else tuple(stored[1])
    places = (problem.starts, problem.lengths, shape.scale, shape.tokens)
    out: Tensor = torch.ops.qcut.prompt_attention(problem.q, keys, values, *scales, *places)
    return out


def sdpa(problem: Problem, backend: SDPBackend | None, _: int = 0) -> Tensor:
    """torch's scaled dot product attention, of the back end that torch chooses or of another."""
    q = problem.q.unflatten(0, (problem.shape.batch, -1)).transpose(1, 2)
    keys, values = problem.kv
    with nullcontext() if backend is None else sdpa_kernel(backend):
        mixed = F.scaled_dot_product_attention(
            q, keys, values, is_causal=True, scale=problem.shape.scale, enable_gqa=True
        )
    return mixed.transpose(1, 2).flatten(0, 1)


def checked(name: str, call: functools.partial[Tensor], problem: Problem) -> None:
    """Raise `CheckError` unless the last tokens' results are near those of float64; NaN raises."""
    shape = problem.shape
    keys, values = problem.kv.double()
    if name == "qcut int8":
        keys, values = problem.stored[0].double() * problem.stored[1][..., None].double()
    tokens = min(16, shape.tokens)
    last = torch.arange(shape.tokens - tokens, shape.tokens, device=keys.device)
    q = problem.q.unflatten(0, (shape.batch, -1))[:, last].double().transpose(1, 2)
    group = shape.heads // shape.kv_heads
    scores = q @ keys.repeat_interleave(group, 1).transpose(2, 3) * shape.scale
    hidden = torch.arange(shape.tokens, device=keys.device) > last[:, None]
    want = scores.masked_fill(hidden, -math.inf).softmax(-1) @ values.repeat_interleave(group, 1)
    got = call(0).unflatten(0, (shape.batch, -1))[:, last].double().transpose(1, 2)
    error = (got - want).abs().max().item() / want.abs().max().item()
    if not error <= 5e-3:
        raise CheckError(f"{name}: off by {error:.2e} of the largest; allowed 5e-3")


def variants_of(problem: Problem) -> list[Variant]:
    """The ways to compute a problem that this machine has."""
    calls: dict[str, functools.partial[Tensor]] = {
        "qcut": functools.partial(ours, problem, None),
        "qcut int8": functools.partial(ours, problem, problem.stored),
        "sdpa": functools.partial(sdpa, problem, None),
    }
    if problem.q.is_cuda:
        for name, backend in BACKENDS.items():
            call = functools.partial(sdpa, problem, backend)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # each reason to refuse is one
                    call(0)
            except RuntimeError:
                print(f"no {name} for {problem.shape}", file=sys.stderr)
                continue
            calls[name] = call
    return [Variant(name, call, 1, functools.partial(checked, name, call, problem)) for name, call in calls.items()]


@harness.script(harness.timing_options, harness.device_option)
def main(options: argparse.Namespace) -> int:
    """Run the benchmark; 1 if a result was wrong. On a CPU results are only checked."""
    device = options.device
    shapes = SHAPES if device == "cuda" else (Shape(2, 40, 4, 2, 16), Shape(1, 17, 3, 3, 8))
    results = harness.Results("bench_prompt_attention", harness.environment())
    clock = harness.CudaClock() if device == "cuda" else None
    deadline = time.monotonic() + options.time_budget
    times: dict[Shape, dict[str, Timing]] = {}
    failures = 0
    for shape in shapes:
        if time.monotonic() > deadline:
            print(f"out of time before {shape}", file=sys.stderr)
            break
        variants = variants_of(problem_of(shape, device))
        if clock is None:
            failures += len(harness.checked(variants, print)[1])
            continue
        rounds = 5 if options.quick else 15
        times[shape], wrong = harness.timed(str(shape), variants, clock, options, deadline, rounds=rounds)
        failures += wrong
        for name, timing in times[shape].items():
            tflops = shape.operations / timing.median_us / 1e6
            results.add(timing, variant=name, **vars(shape), tflops=round(tflops, 1))
        results.write_csv(options.out)
    if clock is None:
        print(f"{len(shapes)} shapes checked, {failures} wrong; nothing timed on a CPU")
        return 1 if failures else 0
    report(times)
    print(f"rows in {results.write_csv(options.out)}")
    return 1 if failures else 0


def report(times: dict[Shape, dict[str, Timing]]) -> None:
    """Print the table and whether the target is reached."""
    rows = []
    for shape, found in times.items():
        us = [found[name].median_us if name in found else math.nan for name in NAMES]
        rows.append([*vars(shape).values(), *us, *(shape.operations / t / 1e6 for t in us[:2])])
    header = ["batch", "tokens", "heads", "kv_heads", "head", *(f"{n} us" for n in NAMES)]
    print(harness.table([*header, *(f"{n} TFLOP/s" for n in NAMES[:2])], rows))
    found = times.get(MARK, {})
    if "qcut" in found and len(found) > 2:
        best = min(timing.median_us for name, timing in found.items() if not name.startswith("qcut"))
        ratio = best / found["qcut"].median_us
        verdict = "reached" if ratio >= 1 else "NOT reached"
        print(f"{MARK.tokens} tokens: {ratio:.2f} x torch's fastest attention (to reach 1: {verdict})")
