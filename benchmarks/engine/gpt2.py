"""GPT-2 Large with random weights, its linear layers swapped by `qcut.quantize`: prefill speed and peak memory.

Weights are random, because speed does not depend on their values; nothing is downloaded. Both models run
eagerly through transformers, as a user calls them. A scheme may also name layers of bitsandbytes.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import time
from typing import Any

import torch
from torch import Tensor, nn

import qcut
from benchmarks import harness
from benchmarks.harness import CheckError, Variant
from benchmarks.layers import device_kernels
from benchmarks.layers.libraries import PEERS
from benchmarks.layers.linear import EPILOGUES
from benchmarks.layers.shapes import GPT2_LARGE_NK

BATCH, PROMPT = 8, 1024
MEMORY_TOKENS = 256
TO_REACH = {"w8a8": (1.5, 0.90), "w8a8_static": (1.5, 0.90), "codebook4": (None, 0.55)}
"""Prefill speed over float16, and peak memory in GB, by the scheme of the linear layers."""
MIN_COSINE = {8: 0.99, 4: 0.9}
"""Between the logits of the float16 and the quantized model, by bits of a weight: a wrong layer gives far less."""


def gpt2_large() -> nn.Module:
    """Transformers' GPT-2 Large in float16 on the GPU, randomly initialized."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("cuda"):
            model = GPT2LMHeadModel(GPT2Config(n_embd=1280, n_layer=36, n_head=20))
    finally:
        torch.set_default_dtype(torch.float32)
    model.tie_weights()
    return model.eval()  # type: ignore[no-any-return]


def tokens(batch: int, length: int) -> Tensor:
    """Random token ids."""
    return torch.randint(0, 50257, (batch, length), generator=torch.Generator().manual_seed(length)).cuda()


def quantized(model: nn.Module, scheme: str) -> nn.Module:
    """A quantized copy; a static scheme is calibrated on random tokens.

    ``codebook4/w8a16`` quantizes the token embedding, tied to the classifier, by the second scheme.
    """
    scheme, _, embeddings = scheme.partition("/")
    calibration = None
    if scheme == "w8a8_static":
        calibration = qcut.calibrate(model, [tokens(2, MEMORY_TOKENS)], progress=False)
    copied = copy.deepcopy(model)
    if scheme in PEERS:
        return with_layers_of(copied, scheme)
    report = qcut.quantize(
        copied, scheme, calibration=calibration, embeddings=embeddings or None, prebuild=(), progress=False
    )
    if len(report.layers) < 4 * 36:
        raise CheckError(f"{len(report.layers)} layers quantized instead of {4 * 36}")
    return copied


def with_layers_of(model: nn.Module, peer: str) -> nn.Module:
    """The model, with another library's layers in place of its own."""
    for path, layer in [*model.named_modules()]:
        if type(layer).__name__ == "Conv1D":
            k, n = layer.weight.shape
            linear = nn.Linear(k, n, dtype=torch.float16, device="cuda")
            linear.load_state_dict({"weight": layer.weight.t(), "bias": layer.bias})
            made: Any = PEERS[peer].build(linear)
            model.set_submodule(path, made)
    return model


def check_logits(reference: Tensor, got: Tensor, bits: int = 8) -> None:
    """Raise `CheckError` unless the logits' cosine is near 1; NaN raises."""
    cosine = nn.functional.cosine_similarity(reference.double().flatten(), got.double().flatten(), dim=0).item()
    if not cosine > MIN_COSINE[bits]:
        raise CheckError(f"logits have cosine {cosine:.4f} with float16's; allowed above {MIN_COSINE[bits]}")


def peak_gb(model: Any) -> dict[str, float]:
    """Peak allocated memory in GB, batch 1: one forward pass of 256 tokens, and generation up to 256 tokens.

    Both hold the workspace that torch gives cuBLAS (``CUBLAS_WORKSPACE_CONFIG``); its size is a third figure.
    """
    prompt = tokens(1, MEMORY_TOKENS)
    length = {"max_length": MEMORY_TOKENS, "min_length": MEMORY_TOKENS}
    peaks = {}
    for name, run in (
        ("forward", lambda: model(prompt, use_cache=True)),
        ("generate", lambda: model.generate(prompt[:, :32], do_sample=False, pad_token_id=0, **length)),
    ):
        for _ in range(2):  # the first run also builds kernels
            gc.collect()
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            run()
            torch.cuda.synchronize()
        peaks[name] = torch.cuda.max_memory_allocated() / 1e9
    held = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return peaks | {"workspace": (held - torch.cuda.memory_allocated()) / 1e9}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--schemes",
        default="w8a8,w8a8_static",
        help="next to fp16: layers' schemes, each with /embeddings' or not; or bitsandbytes_nf4, bitsandbytes_int8",
    )


@harness.script(harness.timing_options, add_options, gpu=True)
def main(options: argparse.Namespace) -> int:
    with torch.no_grad():
        return run(options, [s for s in options.schemes.split(",") if s])


def prefill(model: Any, ids: Tensor, keep: int, _: int = 0) -> Tensor:
    """Logits of the last ``keep`` positions (0: all), the cache filled."""
    return model(ids, use_cache=True, logits_to_keep=keep).logits  # type: ignore[no-any-return]


def verdict(figure: float, limit: float | None, *, at_least: bool) -> str:
    """Return whether a target is reached; nothing if there is no target."""
    if limit is None:
        return ""
    reached = figure >= limit if at_least else figure <= limit
    return f" (to reach {limit:.2f}: {'reached' if reached else 'NOT reached'})"


def run(options: argparse.Namespace, schemes: list[str]) -> int:
    """Measure, print and write everything."""
    deadline = time.monotonic() + options.time_budget
    epilogues = [EPILOGUES[s] for s in schemes if s in EPILOGUES]
    sizes = (1, 32, MEMORY_TOKENS, 2 * MEMORY_TOKENS, BATCH * PROMPT)
    device_kernels.prebuild((e, m, n, k) for e in epilogues for m in sizes for n, k in GPT2_LARGE_NK)
    results = harness.Results("bench_model", harness.environment())
    memory: dict[str, dict[str, float]] = {}
    speed: dict[tuple[str, str, str], float] = {}
    failures = 0
    model = gpt2_large()
    memory["fp16"] = peak_gb(model)
    check_ids, ids = tokens(2, MEMORY_TOKENS), tokens(BATCH, PROMPT)
    reference = prefill(model, check_ids, 0).cpu()
    for scheme in schemes:
        swapped = quantized(model, scheme)
        try:
            bits = PEERS[scheme].kind.bits if scheme in PEERS else 4 if scheme.startswith("codebook") else 8
            check_logits(reference, prefill(swapped, check_ids, 0).cpu(), bits)
        except CheckError as error:
            print(f"WRONG {scheme}: {error}")
            failures += 1
            continue
        clock = harness.CudaClock()
        for keep, what in ((1, "last"), (0, "all")):
            variants = [
                Variant(name, functools.partial(prefill, m, ids, keep), graph=False)
                for name, m in (("fp16", model), (scheme, swapped))
            ]
            rounds = 5 if options.quick else 15
            timings = harness.measure(variants, clock, rounds=rounds, deadline=deadline)
            for name, timing in timings.items():
                rate = BATCH * PROMPT / timing.median_us * 1e6
                speed[name, what, scheme] = rate
                results.add(timing, variant=name, logits=what, beside=scheme, tokens_s=round(rate))
        del clock, variants
        model.cpu()  # so that the quantized model's peak is its own
        memory[scheme] = peak_gb(swapped)
        del swapped
        model.cuda()
    for name, peaks in memory.items():
        figures = {f"{what}_peak_gb": round(gb, 4) for what, gb in peaks.items()}
        results.rows.append({"bench": results.bench, "variant": name, **figures})
    path = results.write_csv(options.out)
    print(harness.table(["model", "logits", "beside", "tokens/s"], [(n, w, b, v) for (n, w, b), v in speed.items()]))
    header = [
        "model",
        f"peak GB: forward of {MEMORY_TOKENS}",
        f"generation to {MEMORY_TOKENS}",
        "of it cuBLAS workspace",
    ]
    print(harness.table(header, [(name, *(f"{v:.3f}" for v in peaks.values())) for name, peaks in memory.items()]))
    print(f"rows in {path}")
    for scheme in schemes:
        if (scheme, "last", scheme) in speed:
            ratio = speed[scheme, "last", scheme] / speed["fp16", "last", scheme]
            peak = memory[scheme]["generate"]
            speedup, most_gb = TO_REACH.get(scheme.partition("/")[0], (None, None))
            print(
                f"{scheme}: prefill {BATCH}x{PROMPT} {ratio:.2f}x fp16{verdict(ratio, speedup, at_least=True)}; "
                f"peak {peak:.3f} GB{verdict(peak, most_gb, at_least=False)}"
            )
    return 1 if failures else 0
