"""Costs and savings of schemes: perplexity through `qcut.Engine`, bytes of weights, a layer's time on few tokens.

    python benchmarks perplexity sizes --models DIR DIR --text FILE

Perplexity is measured with the layers that would serve, in their own arithmetic (float16 on a GPU, float32 without
one). Some schemes are measured again with keys and values in fewer bits, which shows the cost of the cache. Fits
see text that the model itself writes, and none of the evaluated text. Times need a GPU.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qcut
from benchmarks import harness
from benchmarks.demo import EMBEDDED
from benchmarks.harness import Results, Variant
from benchmarks.layers.codebook import NK, calls, copies_of, float_layer, reference_of
from benchmarks.layers.gemm import require_close
from benchmarks.perplexity.codebooks import int4
from benchmarks.perplexity.models import Evaluated, own_text
from qcut.conversion.calibration.curvature import collect_curvature
from qcut.engine.kv_cache.cache import KV_DTYPES, KVDtype
from qcut.models.modules import tensor_key, weight_nk
from qcut.models.selection import find_layers
from qcut.numerics.codebook import rotation

REFERENCE = "int4_asymmetric"
"""Weights in 4-bit integers with zero points: not a scheme of qcut's, dequantized to be compared with."""
SCHEMES = {
    "w8a8": "int8 weights and tokens",
    "int16x8": "int8 weights, int16 tokens",
    "w8a16": "int8 weights",
    "fp8": "8-bit floats (e4m3), a scale for each row",
    "fp8_blocks": "8-bit floats (e4m3), a scale for 128 rows and 128 columns",
    "fp8_dynamic": "8-bit floats (e4m3) for weights and tokens",
    "codebook4": "4 bits, rounded",
    "codebook4_fit": "4 bits, fitted",
    "codebook4+4": "two passes of 4 bits, rounded",
    "codebook3": "3 bits, rounded",
    "codebook3_fit": "3 bits, fitted",
    "codebook2": "2 bits, rounded",
    "codebook2_fit": "2 bits, fitted",
    "int4": "4-bit integers in groups of 128, symmetric",
    REFERENCE: "4-bit integers in groups of 128, with zero points",
    "mxfp4": "4-bit floats, a power of two for 32 columns (MXFP4)",
    "nvfp4": "4-bit floats, an e4m3 scale for 16 columns (NVFP4)",
}
CACHED = ("float", "w8a8", "codebook4")
"""Measured with every other cache too; ``float`` is the model as it is."""
BATCH = 8
TOKENS = (1, 16)
TIMED = tuple(name for name in SCHEMES if name != REFERENCE and not name.endswith("_fit"))
GROUP = 128


# ── quality ──────────────────────────────────────────────────────────────────────────────────────


def tensor_bytes(layers: Iterable[nn.Module]) -> int:
    """Bytes that layers keep, with their biases; a shared tensor counts once."""
    tensors = [t for layer in layers for t in (*layer.parameters(), *layer.buffers())]
    return sum({tensor_key(t): t.nbytes for t in tensors}.values())


def int4_bytes(layer: nn.Module) -> int:
    """Bytes of a layer in 4-bit integers: for each row and group a float16 scale and a zero point of 4 bits."""
    n, k = weight_nk(layer).shape
    groups = len(rotation.groups(k, GROUP))
    bias = layer._parameters.get("bias")
    return math.ceil(n * (k / 2 + 2.5 * groups)) + (0 if bias is None else bias.nbytes)


class Subject(Evaluated):
    """A float model, the text of its measurements, and curvatures of its loss if schemes are fitted."""

    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        super().__init__(path, options, harness.served_dtype(options.device))
        self.moments: Mapping[str, qcut.Curvature] = {}
        if any(name.endswith("_fit") for name in options.schemes):
            say(f"{path.name}: {options.calibration_windows} windows of its own text")
            own = own_text(self.model, options.calibration_windows, options.window, self.model.config.vocab_size)
            self.moments = collect_curvature(self.model, own.split(BATCH), progress=self.progress)

    def quantized(self, scheme: str) -> tuple[Any, int]:
        """Return a quantized copy, and the bytes of its linear layers."""
        model = copy.deepcopy(self.model)
        layers = find_layers(model)
        if scheme == "float":
            return model, tensor_bytes(map(model.get_submodule, layers))
        if scheme == REFERENCE:
            for layer in layers.values():
                weight_nk(layer).copy_(int4(weight_nk(layer).float(), symmetric=False))
            return model, sum(map(int4_bytes, layers.values()))
        moments = self.moments if scheme.endswith("_fit") else None
        rows, bar = BATCH * self.windows.shape[1], sys.stderr.isatty()
        qcut.quantize(model, scheme.removesuffix("_fit"), second_moments=moments, prebuild=(rows,), progress=bar)
        return model, tensor_bytes(map(model.get_submodule, layers))

    def by_engine(self, model: nn.Module, kv_cache: KVDtype) -> tuple[float, float]:
        """Return the perplexity of all windows, each by itself, and the cache's bytes per token."""
        window = self.windows.shape[1]
        engine = qcut.Engine(model, batch=BATCH, context=window, kv_cache=kv_cache)
        total = sum(float(nll.double().sum()) for batch in self.windows.split(BATCH) for nll in engine.score(batch))
        return math.exp(total / (len(self.windows) * (window - 1))), engine.cache.nbytes / (BATCH * (window + 1))


def measure_quality(path: Path, options: argparse.Namespace, results: Results) -> None:
    """Measure one model in float and under every scheme, with a row for each cache."""
    subject = Subject(path, options)
    dtype = str(subject.model.dtype).removeprefix("torch.")
    weights = sum(weight_nk(layer).numel() for layer in find_layers(subject.model).values())
    baseline = math.nan
    for scheme in ("float", *options.schemes):
        start = time.perf_counter()
        model, nbytes = subject.quantized(scheme)
        own = math.nan
        for kv_cache in KV_DTYPES if scheme in CACHED else KV_DTYPES[:1]:
            value, cache_bytes = subject.by_engine(model, kv_cache)
            baseline = value if math.isnan(baseline) else baseline
            own = value if math.isnan(own) else own
            results.rows.append(
                {
                    "bench": results.bench,
                    "model": subject.name,
                    "scheme": scheme,
                    "what": SCHEMES.get(scheme, dtype),
                    "kv_cache": kv_cache,
                    "perplexity": round(value, 4),
                    "change_percent": round(100 * (value / baseline - 1), 3),
                    "cache_percent": "" if kv_cache == "auto" else round(100 * (value / own - 1), 4),
                    "weights": weights,
                    "weight_bytes": nbytes,
                    "weight_bits": round(8 * nbytes / weights, 3),
                    "cache_bytes_token": round(cache_bytes),
                    "dtype": dtype,
                    **subject.columns(),
                    "calibration_windows": options.calibration_windows if scheme.endswith("_fit") else "",
                    "seconds": round(time.perf_counter() - start, 1),
                }
            )
            results.write_csv(options.out)  # an interrupted run keeps its rows
            say(f"{subject.name} {scheme}, cache {kv_cache}: {value:.3f} ({100 * (value / baseline - 1):+.2f} %)")


# ── times ────────────────────────────────────────────────────────────────────────────────────────


def measure_layers(options: argparse.Namespace, results: Results) -> int:
    """Time whole layers on few tokens, float16 and every scheme, and return the number of wrong results."""
    torch.manual_seed(0)
    clock, failures = harness.CudaClock(), 0
    layers: dict[str, nn.ModuleList] = {}
    schemes = [name for name in options.schemes if name in TIMED]
    for scheme in schemes:
        say(f"{scheme}: kernels of {len(NK)} shapes")
        layers[scheme] = nn.ModuleList(float_layer(n, k) for n, k in NK)
        bar = sys.stderr.isatty()
        qcut.quantize(layers[scheme], scheme, skip=(), allow_growth=True, prebuild=TOKENS, progress=bar)
    deadline = time.monotonic() + options.time_budget
    for i, (n, k) in enumerate(NK):
        floats = copies_of(float_layer(n, k), 2.0 * n * k)
        several = {scheme: copies_of(layers[scheme][i], tensor_bytes([layers[scheme][i]])) for scheme in schemes}
        for m in TOKENS:
            if time.monotonic() > deadline:
                say(f"out of time before {m} x {n} x {k}")
                return failures
            x = torch.randn(m, k, device=floats[0].weight.device).half()
            variants = [Variant("float", calls(floats, x), len(floats))]
            for scheme, copies in several.items():
                call = calls(copies, x)
                wanted = reference_of(copies[0], x) + copies[0].bias.double()
                limit = 0.03 if scheme == "w8a8" else 2e-3
                variants.append(Variant(scheme, call, len(copies), functools.partial(_check, call, wanted, limit)))
            timings, wrong = harness.timed(f"{m} x {n} x {k}", variants, clock, options, deadline)
            failures += wrong
            for name, timing in timings.items():
                nbytes = tensor_bytes([floats[0] if name == "float" else several[name][0]])
                x_float = round(timings["float"].median_us / timing.median_us, 4)
                results.add(timing, m=m, n=n, k=k, variant=name, weight_bytes=nbytes, x_float=x_float)
            results.write_csv(options.out)
            say(f"{m} x {n} x {k}: " + ", ".join(f"{name} {t.median_us:.2f}" for name, t in timings.items()))
    return failures


def _check(call: Callable[[int], Tensor], wanted: Tensor, limit: float) -> None:
    require_close(call(0), wanted, limit)


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


# ── the script ───────────────────────────────────────────────────────────────────────────────────


def add_quality_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models", nargs="+", type=harness.existing, default=[EMBEDDED], metavar="DIR", help="checkpoints"
    )
    parser.add_argument("--text", type=harness.existing, metavar="FILE", help="UTF-8 [the Python language reference]")
    parser.add_argument("--window", type=int, default=512, help="tokens per window [512]")
    parser.add_argument("--max-windows", type=int, help="evaluate on at most so many windows [all]")
    parser.add_argument("--calibration-windows", type=int, default=128)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parts", type=harness.list_of(("quality", "layers")), default="quality,layers", help="quality, layers or both"
    )
    parser.add_argument(
        "--schemes", type=harness.list_of(SCHEMES), default=",".join(SCHEMES), help="comma-separated [all]"
    )
    harness.device_option(parser)


def show(results: Results, *columns: str) -> None:
    """Print these columns of all rows."""
    print(harness.table(columns, [[row[column] for column in columns] for row in results.rows]))


@harness.script(harness.timing_options, add_quality_options, add_options)
def main(options: argparse.Namespace) -> int:
    """Measure; 1 if a layer was wrong or a model cannot be read. Without a GPU only perplexity."""
    failures, env = 0, harness.environment()
    if "quality" in options.parts:
        results = Results("report_quality", env)
        for path in options.models:
            measure_quality(path, options, results)
        show(results, "model", "scheme", "kv_cache", "perplexity", "change_percent", "weight_bits")
    if "layers" in options.parts and options.device == "cuda":
        results = Results("report_layers", env)
        failures = measure_layers(options, results)
        show(results, "m", "n", "k", "variant", "median_us", "x_float", "weight_bytes")
    elif "layers" in options.parts:
        print("layers are timed on a GPU: none of them was")
    print(f"{failures} wrong; rows in {options.out}")
    return 1 if failures else 0
