"""4-bit codebook layers and few-token W8A16, kernel by kernel and whole, against float16 ``nn.Linear``.

``kernel`` rows time only the product, on rotated tokens; ``layer`` and ``prompt`` rows time a whole `qcut.Linear`,
with its rotation. All variants run in CUDA graphs over copies of the weights that together exceed the L2. A ``plain``
kernel starts after its predecessor has ended; a ``pdl`` kernel may start before (programmatic dependent launch), as
kernels of layers do. Results are compared with a float64 product of the same indices before anything is timed. Prompts
reach the GPU's power limit: each variant of a prompt runs by itself until the GPU's clock has settled.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import qcut
from benchmarks import harness
from benchmarks.harness import Timing, Variant
from benchmarks.layers.gemm import require_close
from benchmarks.layers.shapes import Shape
from qcut.dispatch import codebook as codebook_dispatch
from qcut.dispatch import gemm as dispatch
from qcut.dispatch.buckets import m_bucket
from qcut.emitters.core.source import DType
from qcut.layers.rotations import RotationSpec, rotation_for
from qcut.numerics.codebook import products as codebook_numerics
from qcut.numerics.codebook.layout import Geometry
from qcut.schemes import Codebook, parse_scheme
from qcut.tuning.timing import CudaClock

NK = ((14336, 4096), (4096, 14336), (4096, 4096), (1280, 1280), (5120, 1280))
DECODE_TOKENS = (1, 4, 8, 16, 32, 64)
PROMPTS = ((256, 14336, 4096), (1024, 14336, 4096), (4096, 14336, 4096), (4096, 4096, 4096), (4096, 5120, 1280))
SETTLE_US = 300_000.0
"""For prompts, which reach the GPU's power limit: see `qcut.tuning.timing.measure`."""
FEW_TOKENS = 16
MAX_CACHED = 5
"""Layers kept with their copies, for the next number of tokens."""
KERNEL_TARGETS = {
    ("codebook4", 1, 14336, 4096): (10.3, 9.2),
    ("codebook4", 16, 14336, 4096): (14.5, 13.0),
    ("codebook4", 64, 14336, 4096): (21.0, 20.0),
    ("codebook4", 1, 4096, 14336): (12.2, 11.5),
    ("codebook4", 1, 4096, 4096): (5.0, 4.3),
    ("codebook4", 1, 1280, 1280): (2.4, 1.6),
    ("w8a16", 1, 14336, 4096): (16.5, 15.3),
    ("w8a16", 16, 14336, 4096): (18.5, 18.0),
}
"""Target microseconds of the kernel: plain, with dependent launch."""
LAYER_TARGETS = {
    ("codebook4", 1, 14336, 4096): 11.5,
    ("codebook4_int8", 4096, 14336, 4096): 400.0,
    ("codebook4", 4096, 14336, 4096): 720.0,
    ("codebook4_int8", 256, 14336, 4096): 40.0,
}


def target_us(part: str, variant: str, shape: Shape) -> float:
    """Target in microseconds, or NaN."""
    scheme, _, launch = variant.partition(":")
    key = (scheme, shape.m, shape.n, shape.k)
    if part == "kernel":
        return KERNEL_TARGETS.get(key, (math.nan, math.nan))[launch == "pdl"]
    return LAYER_TARGETS.get(key, math.nan)


def weight_bytes(scheme: str, n: int, k: int) -> float:
    """Bytes of a layer's weights and norms as kernels read them: float16, one to a slot."""
    one = parse_scheme(scheme)
    if not isinstance(one, Codebook):
        return one.weight_bytes(n, k)
    return n * k * (one.bits / 8 + 2 / Geometry(k, one.group_columns(k), one.rotation).slot)


def float_layer(n: int, k: int, *, bias: bool = True) -> nn.Linear:
    """A float16 layer with weights of a usual size."""
    linear = nn.Linear(k, n, bias=bias, dtype=torch.float16, device="cuda")
    nn.init.normal_(linear.weight, std=k**-0.5)
    return linear


def copies_of(layer: nn.Module, nbytes: float) -> list[Any]:
    """Return the layer and as many copies as together exceed the L2."""
    return [layer, *(copy.deepcopy(layer) for _ in range(harness.rotation(int(nbytes)) - 1))]


def product_variants(layers: list[Any], x: Tensor, reference: Tensor, tolerance: float) -> list[Variant]:
    """Only the product, on rotated tokens: plain and with dependent launch."""
    scheme = layers[0].scheme
    m = len(x)
    launches: dict[str, list[Callable[[], None]]] = {"plain": [], "pdl": []}
    outs = [torch.empty((m, layers[0].out_features), dtype=x.dtype, device="cuda") for _ in layers]
    if scheme.name == "w8a16":
        launch = functools.partial(_w8a16_launch, x=x)
    else:
        blocks, scale = rotated(layers[0], x)
        launch = functools.partial(_codebook_launch, blocks=blocks, scale=scale, m=m)
    for pdl, name in ((False, "plain"), (True, "pdl")):
        launches[name] = [launch(layer, out, pdl) for layer, out in zip(layers, outs, strict=True)]

    def variant(name: str) -> Variant:
        def check() -> None:
            launches[name][0]()
            torch.cuda.synchronize()
            require_close(outs[0], reference, tolerance)

        return Variant(name, lambda i: launches[name][i](), len(layers), check)

    return [variant("plain"), variant("pdl")]


def rotated(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens in the form that the layer's product reads."""
    spec = RotationSpec(layer.kind, layer.group_size, layer.in_features, layer.scheme.seeds)
    tokens = torch.int8 if layer.int8 else x.dtype
    operands = rotation_for(spec).operands(x.dtype, x.device)
    result: tuple[Tensor, Tensor] = torch.ops.qcut.rotate_tokens(
        x, operands, spec.kind, spec.group_size, spec.seeds, tokens
    )
    return result


def _launcher(plan: Any, m: int, args: tuple[Any, ...], keep: list[Any]) -> Callable[[], None]:
    def launch(keep: list[Any] = keep) -> None:  # the tensors behind the addresses live as long as this
        plan.launch(m, args, torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()))

    return launch


def _codebook_launch(
    layer: Any, out: Tensor, pdl: bool, *, blocks: Tensor, scale: Tensor | None, m: int
) -> Callable[[], None]:
    n = layer.out_features
    x = DType.S8 if blocks.dtype is torch.int8 else DType.F16
    problem = codebook_problem(layer, bias=False)
    units = layer.units.shape[1]
    plan = _plan(problem, m_bucket(m), n, units, pdl)
    fold = (layer.fold.data_ptr(),) if x is DType.S8 else ()
    scales = (scale.data_ptr(),) if x is DType.S8 and scale is not None else ()
    operands = (blocks.data_ptr(), layer.units.data_ptr(), layer.packed_norms.data_ptr(), *fold, out.data_ptr())
    args = (*operands, m, n, units, n, *_book(layer, blocks.dtype), *scales, layer.col_scale.data_ptr())
    return _launcher(plan, m, args, [blocks, scale, layer, out])


def _book(layer: Any, tokens: torch.dtype) -> tuple[int, ...]:
    return codebook_numerics.pack_book(layer.codebook, torch.float16 if tokens is torch.int8 else tokens)


def codebook_problem(layer: Any, bias: bool, rotates: DType | None = None) -> Any:
    """Return the problem of a layer's product on float16 tokens, rotated by the kernel or beforehand."""
    x = DType.S8 if layer.scheme.activation == "int8" else DType.F16
    slots, alignment = layer.packed_norms.shape[2], dispatch.alignment_of(layer.out_features)
    options = {"rotates": rotates, "pairs": layer.scheme.pairs}
    return codebook_dispatch.problem_of(
        x, layer.scheme.bits, slots, DType.F16, bias, "none", False, alignment, **options
    )


def w8a16_problem(n: int, k: int, bias: bool) -> Any:
    """Return the problem of a W8A16 layer's product on float16 tokens."""
    from qcut.backends.cuda.linear import linear_problem

    return linear_problem(DType.F16, n, k, bias, "none", "w8a16")


@functools.cache
def _plan(problem: Any, m: int, n: int, units: int, pdl: bool) -> Any:
    from qcut.backends.cuda.codebook import gemm_spec
    from qcut.backends.cuda.launch.plans import target

    device = torch.cuda.current_device()
    return gemm_spec(problem, m, n, units, target(device), early=pdl).load(device)


@functools.cache
def _w8a16_plan(problem: Any, m: int, n: int, k: int, pdl: bool) -> Any:
    from qcut.backends.cuda.gemm import w8a16_spec
    from qcut.backends.cuda.launch.plans import target

    device = torch.cuda.current_device()
    return w8a16_spec(problem, m, n, k, target(device), pdl=pdl).load(device)


def _w8a16_launch(layer: Any, out: Tensor, pdl: bool, *, x: Tensor) -> Callable[[], None]:
    (m, k), n = x.shape, layer.out_features
    plan = _w8a16_plan(w8a16_problem(n, k, bias=False), m_bucket(m), n, k, pdl)
    args = (x.data_ptr(), layer.qweight.data_ptr(), out.data_ptr(), m, n, k, k, layer.qweight.shape[1], n)
    return _launcher(plan, m, (*args, layer.weight_scale.data_ptr()), [x, layer, out])


def reference_of(layer: Any, x: Tensor) -> Tensor:
    """float64 product of the tokens with the layer's dequantized weight, without its bias."""
    return x.double() @ layer.dequantized_weight().to(x.device).double().t()


def kernel_name(layer: Any, m: int, *, whole: bool) -> str:
    """Procedural name of the product for so many tokens, by itself or in the whole layer, with its bias."""
    from qcut.backends.cuda.launch.plans import target

    gpu, n, k = target(torch.cuda.current_device()), layer.out_features, layer.in_features
    if layer.scheme.name == "w8a16":
        w8a16 = w8a16_problem(n, k, whole)
        return dispatch.emit(dispatch.select_w8a16(w8a16, m_bucket(m), n, k, gpu), w8a16, gpu.arch).name
    problem = codebook_problem(layer, whole, DType.F16 if whole and m == 1 and layer._rotates_one else None)
    choice = codebook_dispatch.select(problem, m_bucket(m), n, layer.units.shape[1], gpu)
    return codebook_dispatch.emit(choice, problem, gpu.arch).name


def tolerance_of(scheme: str) -> float:
    """Largest relative error of a whole result against the same indices in float64.

    float16 tokens, codebook and result: a few of their roundings; int8 tokens: 4.5 / 127 / sqrt(12) on each side.
    """
    return 0.02 if scheme.endswith("int8") else 2e-3


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schemes", nargs="*", default=["codebook4", "codebook4_int8", "w8a16"])
    parser.add_argument("--parts", nargs="*", default=["kernel", "layer", "prompt"])


@harness.script(harness.timing_options, add_options, gpu=True)
def main(options: argparse.Namespace) -> int:
    torch.manual_seed(0)
    results = harness.Results("bench_codebook", harness.environment())
    clock = CudaClock()
    deadline = time.monotonic() + options.time_budget
    tokens = (1, 16, 64) if options.quick else DECODE_TOKENS
    shapes = [Shape(m, n, k) for n, k in (NK[:1] if options.quick else NK) for m in tokens]
    prompts = [Shape(*sizes) for sizes in PROMPTS]
    work = [(part, s) for part in ("kernel", "layer") for s in shapes]
    work += [(part, s) for s in prompts for part in ("kernel", "prompt")]
    failures = 0
    cached: dict[tuple[str, int, int], list[Any]] = {}
    for part, shape in work:
        if part not in options.parts:
            continue
        if time.monotonic() > deadline:
            print("out of time", file=sys.stderr)
            break
        m, n, k = shape.m, shape.n, shape.k
        variants: list[Variant] = []
        names: dict[str, str] = {}
        x = torch.randn(m, k, device="cuda").half()
        if part != "kernel":
            floats = copies_of(float_layer(n, k), 2.0 * n * k)
            variants.append(Variant("fp16", calls(floats, x), len(floats)))
        for scheme in options.schemes:
            if scheme == "w8a16" and shape in prompts:
                continue
            key = (scheme, n, k)
            if key not in cached:
                if len(cached) >= MAX_CACHED:
                    cached.clear()
                layer = qcut.Linear.from_float(float_layer(n, k), scheme)
                cached[key] = copies_of(layer, weight_bytes(scheme, n, k))
            layers = cached[key]
            reference = reference_of(layers[0], x)
            tolerance = tolerance_of(scheme)
            if part == "kernel":
                for variant in product_variants(layers, x, reference, tolerance):
                    variant.name = f"{scheme}:{variant.name}"
                    variants.append(variant)
                    names[variant.name] = kernel_name(layers[0], m, whole=False)
            else:
                call = calls(layers, x)
                bias = layers[0].bias.double()
                check = functools.partial(_check, call, reference + bias, tolerance)
                variants.append(Variant(scheme, call, len(layers), check))
                names[scheme] = kernel_name(layers[0], m, whole=True)
        settle_us = SETTLE_US if shape in prompts else 0.0
        label = f"{part} {shape.name}"
        timings, wrong = harness.timed(label, variants, clock, options, deadline, settle_us=settle_us)
        failures += wrong
        add_rows(results, part, shape, timings, names)
    path = results.write_csv(options.out)
    print(table(results.rows))
    print(f"\n{summary(results.rows)}\n{failures} wrong results; {len(results.rows)} rows in {path}")
    return 1 if failures else 0


def calls(layers: list[Any], x: Tensor) -> Callable[[int], Tensor]:
    """Return a call per layer, each on its own tensor: layers share the rotation of a common tensor."""
    tokens = [x.clone() for _ in layers]

    def call(i: int) -> Tensor:
        return layers[i](tokens[i])  # type: ignore[no-any-return]

    return call


def _check(call: Callable[[int], Tensor], reference: Tensor, tolerance: float) -> None:
    require_close(call(0), reference, tolerance)


def bytes_moved(part: str, scheme: str, shape: Shape) -> float:
    """Weights and norms, tokens and results, each once; rotated int8 tokens have one byte a column."""
    m, n, k = shape.m, shape.n, shape.k
    weights = 2.0 * n * k if scheme == "fp16" else weight_bytes(scheme, n, k)
    token_bytes = 1 if part == "kernel" and scheme.endswith("int8") else 2
    return weights + m * (token_bytes * k + 2 * n)


def add_rows(
    results: harness.Results, part: str, shape: Shape, timings: dict[str, Timing], names: dict[str, str]
) -> None:
    """One CSV row per variant."""
    for name, timing in timings.items():
        scheme = name.partition(":")[0]
        moved, bits = bytes_moved(part, scheme, shape), 8 if scheme.endswith("int8") else 16
        target = target_us(part, name, shape)
        results.add_gemm(timing, shape, name, moved, bits, part=part, target_us=target, kernel=names.get(name, ""))


def table(rows: list[dict[str, Any]]) -> str:
    """All rows, with their share of the H200's read bandwidth."""
    header = ["part", "M", "N", "K", "variant", "µs", "GB/s", "% of 4.48 TB/s", "to reach"]
    columns = ("part", "m", "n", "k", "variant", "median_us", "gb_s")
    return harness.table(header, ([*(r[c] for c in columns), r["gb_s"] / 44.8, r["target_us"]] for r in rows))


def summary(rows: list[dict[str, Any]]) -> str:
    """Targets and measured figures, and whole layers against float16."""
    lines, aimed, reached = [], 0, 0
    for row in rows:
        if math.isnan(row["target_us"]):
            continue
        is_reached = row["median_us"] <= row["target_us"]
        aimed, reached = aimed + 1, reached + is_reached
        where = f"{row['part']} {row['m']}x{row['n']}x{row['k']} {row['variant']}"
        verdict = "reached" if is_reached else "NOT reached"
        lines.append(f"{where}: {row['median_us']:.4g} us (to reach {row['target_us']:g}): {verdict}")
    lines.append(f"{reached} of {aimed} figures reached")
    for (part, scheme), ratios in speedups(rows).items():
        worst = min(ratios, key=lambda shape: ratios[shape])
        lines.append(
            f"{part} {scheme}: {harness.geomean(ratios.values()):.3f}x float16 (geometric mean of {len(ratios)}), "
            f"worst {ratios[worst]:.3f}x at {worst.name}"
        )
    return "\n".join(lines)


def speedups(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], dict[Shape, float]]:
    """Part and scheme → shape → float16's time over a whole layer's; rows as measured or as the CSV has them."""
    times: dict[tuple[str, Shape], dict[str, float]] = {}
    for row in rows:
        if row["part"] != "kernel":
            key = row["part"], Shape(int(row["m"]), int(row["n"]), int(row["k"]))
            times.setdefault(key, {})[row["variant"]] = float(row["median_us"])
    ratios: dict[tuple[str, str], dict[Shape, float]] = {}
    for (part, shape), found in times.items():
        for scheme in found.keys() - {"fp16"} if "fp16" in found else ():
            ratios.setdefault((part, scheme), {})[shape] = found["fp16"] / found[scheme]
    return dict(sorted(ratios.items()))
