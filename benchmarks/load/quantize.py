"""Time and memory of quantizing a model: blocks of a Llama's linear layers with random weights.

``nearest`` rounds; ``fitted`` takes second moments of the inputs (here of random tokens) and feeds errors back. Peak
memory is the memory that `qcut.quantize` allocates beyond the float model. The quantized model counts: both models
exist until the end.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time

import torch
from torch import Tensor, nn

import qcut
from benchmarks import harness
from benchmarks.harness import Timing
from qcut.conversion.quantize import model_bytes

SIZES = {"7b": (4096, 11008, 32), "tiny": (128, 384, 2)}
"""Width, MLP width, blocks."""
MOMENT_TOKENS = 4096


class Block(nn.Module):
    """The linear layers of one decoder block, which is never called."""

    def __init__(self, width: int, hidden: int, dtype: torch.dtype, device: str) -> None:
        super().__init__()

        def linear(k: int, n: int) -> nn.Linear:
            return nn.Linear(k, n, bias=False, dtype=dtype, device=device)

        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (linear(width, width) for _ in range(4))
        self.gate_proj, self.up_proj = (linear(width, hidden) for _ in range(2))
        self.down_proj = linear(hidden, width)


def moments_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a second moment for every layer; layers of one width share a matrix."""
    shared: dict[int, Tensor] = {}
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            k = module.in_features
            if k not in shared:
                x = torch.randn(MOMENT_TOKENS, k, device=module.weight.device)
                shared[k] = x.t() @ x / MOMENT_TOKENS
            found[name] = shared[k]
    return found


def seconds_and_peak(size: str, scheme: str, fitted: bool, device: str) -> tuple[float, float, float]:
    """Seconds of `qcut.quantize`, GB of the float model, and GB allocated beyond it at most (NaN on a CPU)."""
    width, hidden, blocks = SIZES[size]
    dtype = torch.float16 if device == "cuda" else torch.float32
    model = nn.ModuleList(Block(width, hidden, dtype, device) for _ in range(blocks))
    before_gb = model_bytes(model) / 1e9
    moments = moments_of(model) if fitted else None
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    start = time.perf_counter()
    qcut.quantize(model, scheme, second_moments=moments, prebuild=(), progress=sys.stderr.isatty())
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak_gb = (torch.cuda.max_memory_allocated() - held) / 1e9 if device == "cuda" else float("nan")
    return seconds, before_gb, peak_gb


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=SIZES, default="7b")
    parser.add_argument("--schemes", default="codebook4,codebook4+4", help="comma-separated")
    parser.add_argument("--fits", default="nearest,fitted", help="comma-separated")
    harness.device_option(parser)


@harness.script(harness.timing_options, add_options, time_budget=600.0)
def main(options: argparse.Namespace) -> int:
    """Run the benchmark; a CPU does too."""
    device = options.device
    results = harness.Results("bench_quantize", harness.environment())
    rows = []
    deadline = time.monotonic() + options.time_budget
    for scheme, fit in itertools.product(options.schemes.split(","), options.fits.split(",")):
        if time.monotonic() > deadline:
            print("out of time", file=sys.stderr)
            break
        seconds, before_gb, peak_gb = seconds_and_peak(options.size, scheme, fit == "fitted", device)
        columns = {"float_gb": round(before_gb, 3), "peak_beyond_gb": round(peak_gb, 3)}
        columns["seconds"] = round(seconds, 2)
        timing = Timing.of([seconds * 1e6], "wall")
        results.add(timing, size=options.size, scheme=scheme, fit=fit, device=device, **columns)
        rows.append([options.size, scheme, fit, device, before_gb, peak_gb, seconds])
        results.write_csv(options.out)
        print(f"{scheme} {fit}: {seconds:.1f} s", flush=True)
    path = results.write_csv(options.out)
    print(harness.table(["model", "scheme", "fit", "device", "float GB", "GB beyond it", "seconds"], rows))
    print(f"rows in {path}")
    return 0
