"""The int8 GEMM with its whole dequant epilogue, against cuBLASLt's best of 8 and the float GEMMs.

qcut computes ``(acc - zero_point[m] * colsum[n]) * row_scale[m] * col_scale[n] + bias[n]`` and rounds
to float16 (bfloat16) or requantizes to int8; cuBLASLt's int8 GEMM multiplies by one number. Kernels
that are not in the cache are compiled, in parallel, before anything is timed.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from benchmarks import harness
from benchmarks.harness import CheckError, Timing, Variant
from benchmarks.layers import device_kernels
from benchmarks.layers.shapes import CLAIM_MIN_TOKENS, Shape, gemm_shapes
from benchmarks.publish import plots
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.source import DType
from qcut.tuning.cublaslt import CublasLtError, Int8Matmul

OUTPUTS = {"s8": torch.int8, "f16": torch.float16, "bf16": torch.bfloat16}
TARGETS = {"s8": (1.05, 0.85), "f16": (1.0, 0.75), "bf16": (1.0, 0.75)}
"""Geometric mean and worst ratio to reach against cuBLASLt over M >= 64."""
BASELINE = "cublaslt_s8"
EPILOGUES = {
    output: Epilogue(dtype, row_scale="per_token", col_scale="per_channel", zero_point="per_token", bias=True)
    for output, dtype in (("s8", DType.S8), ("f16", DType.F16), ("bf16", DType.BF16))
}


@dataclass
class Operands:
    """int8 operands of one shape, the epilogue's vectors, and the exact sums."""

    a: Tensor
    b: list[Tensor]
    zero_point: Tensor
    colsum: Tensor
    row_scale: Tensor
    col_scale: Tensor
    bias: Tensor
    acc: Tensor
    out_inv_scale: float = 40.0
    out_zero_point: int = 3

    @classmethod
    def random(cls, shape: Shape, device: str = "cuda", copies: int | None = None) -> Operands:
        """Full-range int8 and scales that bring results to about one; ``b`` holds equal copies to rotate over."""
        generator = torch.Generator(device).manual_seed(shape.m + shape.n + shape.k)
        m, n, k = shape.m, shape.n, shape.k

        def integers(*size: int, dtype: torch.dtype = torch.int8) -> Tensor:
            return torch.randint(-128, 128, size, generator=generator, dtype=dtype, device=device)

        def uniform(size: int, scale: float) -> Tensor:
            return (torch.rand(size, generator=generator, device=device) + 0.5) * scale

        a, b = integers(m, k), integers(n, k)
        copies = harness.rotation(b.nbytes) if copies is None else copies
        return cls(
            a,
            [b, *(b.clone() for _ in range(copies - 1))],
            integers(m, dtype=torch.int32),
            b.sum(1, dtype=torch.int32),
            uniform(m, 1 / 74),
            uniform(n, 1 / (74 * math.sqrt(k))),
            torch.randn(n, generator=generator, device=device),
            # Every partial sum is an integer under 2**31: float64 is exact in any order.
            (a.double() @ b.double().t()).to(torch.int32),
        )

    def expected(self, dtype: torch.dtype) -> Tensor:
        """The epilogue on the exact sums, one float32 operation at a time."""
        v = (self.acc - self.zero_point[:, None] * self.colsum).float()
        v = v * self.row_scale[:, None] * self.col_scale + self.bias
        if dtype is torch.int8:
            return (torch.round(v.double() * self.out_inv_scale) + self.out_zero_point).clamp(-128, 127).to(torch.int8)
        return v.to(dtype)

    def qcut(self, dtype: torch.dtype) -> Callable[[int], Tensor]:
        """The operator on weight copy ``i``, everything fused."""

        def call(i: int) -> Tensor:
            return torch.ops.qcut.gemm_s8(
                self.a,
                self.b[i],
                zero_point=self.zero_point,
                colsum=self.colsum,
                row_scale=self.row_scale,
                col_scale=self.col_scale,
                bias=self.bias,
                out_dtype=dtype,
                out_inv_scale=self.out_inv_scale if dtype is torch.int8 else 1.0,
                out_zero_point=self.out_zero_point if dtype is torch.int8 else 0,
            )

        return call


def require_equal(got: Tensor, expected: Tensor) -> None:
    """Raise `CheckError` unless every element agrees."""
    if got.shape != expected.shape or got.dtype is not expected.dtype:
        raise CheckError(f"{got.dtype} {tuple(got.shape)} instead of {expected.dtype} {tuple(expected.shape)}")
    wrong = (got != expected).sum().item()
    if wrong:
        raise CheckError(f"{wrong} of {got.numel()} elements differ")


def require_close(got: Tensor, expected: Tensor, limit: float) -> None:
    """Raise `CheckError` unless the relative error of the whole is under ``limit``; NaN never passes."""
    error = ((got.double() - expected).norm() / expected.norm()).item()
    if not error < limit:
        raise CheckError(f"relative error {error:.2e}, allowed {limit:.0e}")


def qcut_variants(data: Operands, outputs: list[str]) -> list[Variant]:
    """The operator, one variant per output type, checked bitwise."""

    def variant(output: str) -> Variant:
        dtype = OUTPUTS[output]
        call = data.qcut(dtype)
        return Variant(f"qcut_{output}", call, len(data.b), lambda: require_equal(call(0), data.expected(dtype)))

    return [variant(output) for output in outputs]


def cublaslt_variant(shape: Shape, data: Operands, clock: harness.Clock) -> tuple[Variant, str]:
    """Int8 to int8 by cuBLASLt with the fastest of its eight heuristics, and that algorithm's configuration."""
    gemm = Int8Matmul(shape.m, shape.n, shape.k)
    out = torch.empty(shape.m, shape.n, dtype=torch.int8, device="cuda")
    alpha = 40 / (74**2 * math.sqrt(shape.k))

    def run(algorithm: int, i: int) -> None:
        gemm.run(data.a, data.b[i], out, alpha, algorithm)

    def time_us(algorithm: int) -> float:
        run(algorithm, 0)  # an algorithm that cannot run raises here
        candidate = Variant("algorithm", lambda i: run(algorithm, i), len(data.b))
        return harness.measure([candidate], clock, rounds=5, target_us=500)["algorithm"].median_us

    best = gemm.best(time_us)

    def check() -> None:
        out.fill_(-77)
        run(best, 0)
        error = (out.double() - (data.acc.double() * alpha).clamp(-128, 127)).abs().max().item()
        if not error <= 0.5 + 1e-4:  # float32's own rounding of values up to 128, ties either way
            raise CheckError(f"off by {error}")

    return Variant(BASELINE, lambda i: run(best, i), len(data.b), check), gemm.describe(best)


def library_variants(shape: Shape, data: Operands, copies: int | None = None) -> list[Variant]:
    """``torch._int_mm`` and the float16, bfloat16 and float8 GEMMs of cuBLAS."""
    variants = []
    if shape.m > 16:  # torch._int_mm takes no fewer than 17 rows

        def int_mm(i: int) -> Tensor:
            return torch._int_mm(data.a, data.b[i].t())

        variants.append(Variant("int_mm", int_mm, len(data.b), lambda: require_equal(int_mm(0), data.acc)))

    x = torch.randn(shape.m, shape.k, device="cuda")
    w = torch.randn(shape.n, shape.k, device="cuda")

    def float_variant(name: str, dtype: torch.dtype) -> Variant:
        a, b = x.to(dtype), w.to(dtype)
        weights = [b, *(b.clone() for _ in range((copies or harness.rotation(b.nbytes)) - 1))]
        one = torch.ones((), device="cuda")

        def call(i: int) -> Tensor:
            if dtype is torch.float8_e4m3fn:
                return torch._scaled_mm(
                    a, weights[i].t(), scale_a=one, scale_b=one, out_dtype=torch.float16, use_fast_accum=True
                )
            return torch.mm(a, weights[i].t())

        return Variant(
            name, call, len(weights), lambda: require_close(call(0), a.double() @ weights[0].double().t(), 1e-2)
        )

    variants += [float_variant("fp16", torch.float16), float_variant("bf16", torch.bfloat16)]
    if torch.cuda.get_device_capability() >= (8, 9):
        variants.append(float_variant("fp8", torch.float8_e4m3fn))
    return variants


def add_rows(
    results: harness.Results, shape: Shape, timings: dict[str, Timing], kernel: dict[str, str]
) -> dict[str, float]:
    """One CSV row per variant; returns each variant's speed over cuBLASLt's."""
    baseline = timings.get(BASELINE)
    ratios = {}
    for name, timing in timings.items():
        operand = 16 if name in ("fp16", "bf16") else 8
        out = {"qcut_s8": 8, BASELINE: 8, "int_mm": 32}.get(name, 16)
        moved = shape.bytes_moved(operand, operand, out)
        ratios[name] = baseline.median_us / timing.median_us if baseline else math.nan
        x_cublaslt = round(ratios[name], 4)
        results.add_gemm(timing, shape, name, moved, operand, x_cublaslt=x_cublaslt, kernel=kernel.get(name, ""))
    return ratios


def summary(ratios: dict[Shape, dict[str, float]], outputs: list[str]) -> str:
    """Geometric mean and worst ratio to cuBLASLt over M >= 64, with their targets."""
    lines = []
    for output in outputs:
        key = f"qcut_{output}"
        over = {
            s: r[key] for s, r in ratios.items() if s.m >= CLAIM_MIN_TOKENS and not math.isnan(r.get(key, math.nan))
        }
        if not over:
            lines.append(f"{output} output: nothing measured against cuBLASLt with M >= {CLAIM_MIN_TOKENS}")
            continue
        mean, worst = harness.geomean(over.values()), min(over, key=lambda s: over[s])
        want_mean, want_worst = TARGETS[output]
        verdict = "reached" if mean >= want_mean and over[worst] >= want_worst else "NOT reached"
        lines.append(
            f"{output} output, {len(over)} shapes with M >= {CLAIM_MIN_TOKENS}: geometric mean {mean:.3f}x cuBLASLt "
            f"(to reach {want_mean}), worst {over[worst]:.3f}x at {worst.name} (to reach {want_worst}): {verdict}"
        )
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--outputs", type=harness.list_of(OUTPUTS), default="s8,f16", help="output types of qcut's GEMM: s8, f16, bf16"
    )
    parser.add_argument("--no-names", action="store_true", help="do not profile the libraries' kernel names")


@harness.script(harness.timing_options, add_options, gpu=True)
def main(options: argparse.Namespace) -> int:
    outputs = options.outputs
    results = harness.Results("bench_gemm", harness.environment())
    shapes = gemm_shapes(options.quick)
    chosen = device_kernels.prebuild((EPILOGUES[o], s.m, s.n, s.k) for s in shapes for o in outputs)
    clock = harness.CudaClock()
    deadline = time.monotonic() + options.time_budget
    ratios: dict[Shape, dict[str, float]] = {}
    table: list[list[object]] = []
    columns = [BASELINE, *(f"qcut_{o}" for o in outputs), "int_mm", "fp16", "bf16", "fp8"]
    failures = 0
    for shape in shapes:
        if time.monotonic() > deadline:
            break
        report = functools.partial(print, f"{shape.name}:")
        data = Operands.random(shape)
        variants = qcut_variants(data, outputs) + library_variants(shape, data)
        kernel = {f"qcut_{o}": chosen[EPILOGUES[o], shape.m, shape.n, shape.k] for o in outputs}
        try:
            baseline, kernel[BASELINE] = cublaslt_variant(shape, data, clock)
            variants.insert(0, baseline)
        except CublasLtError as error:
            report(str(error))
        timings, wrong = harness.timed(shape.name, variants, clock, options, deadline)
        failures += wrong
        ratios[shape] = add_rows(results, shape, timings, kernel)
        times = [timings[c].median_us if c in timings else math.nan for c in columns]
        speeds = [ratios[shape].get(f"qcut_{o}", math.nan) for o in outputs]
        table.append([shape.m, shape.n, shape.k, *times, *speeds])
    path = results.write_csv(options.out)
    if not options.no_names:
        for shape in ratios:
            device_kernels.name_rows(
                results, shape, library_variants(shape, Operands.random(shape, copies=1), copies=1)
            )
        results.write_csv(options.out)
    plots.ratios(
        options.out / "bench_gemm",
        [s.name for s in ratios],
        {f"qcut → {o}": [r.get(f"qcut_{o}", math.nan) for r in ratios.values()] for o in outputs}
        | {f"cuBLAS {f}": [r.get(f, math.nan) for r in ratios.values()] for f in ("fp16", "fp8")},
        f"int8 GEMM, dequant epilogue fused, on {results.env.gpu}",
        "speed relative to cuBLASLt int8 → int8 (best of 8)",
    )
    print(harness.table(["M", "N", "K", *(f"{c} µs" for c in columns), *(f"{o} ×" for o in outputs)], table))
    print(f"{len(ratios)} of {len(shapes)} shapes measured, {failures} wrong results; rows in {path}")
    print(summary(ratios, outputs))
    return 1 if failures else 0
