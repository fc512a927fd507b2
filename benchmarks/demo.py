"""Every scheme on one model: quality, speed and memory against the float model. ``make demo`` runs it.

    python benchmarks/demo.py                                       # the embedded checkpoint
    python benchmarks/demo.py --model openai-community/gpt2-large --text book.txt --json result.json
    python benchmarks/demo.py --schemes codebook4+4_int8            # any codebook that qcut.Codebook can name

Perplexity is measured on the first windows of the text. The ranges of static schemes, the hybrid plan and the fit of
codebooks come from later windows. Every variant starts from the same float model. Variants with the same schemes in all
layers compute the same: they are timed once.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import math
import os
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not here: transformers imports `kernels`

import qcut
from qcut.checkpoints.pretrained import load_pretrained
from qcut.conversion.planning.costs import LayerSize
from qcut.conversion.quantize import model_bytes
from qcut.errors import CheckpointError, QcutError
from qcut.models.evaluation import language_reference, perplexity, windows_of
from qcut.schemes import parse_scheme

os.environ.setdefault("QCUT_BUILD", "wait")  # its figures are of the best kernels

EMBEDDED = Path(__file__).resolve().parents[1] / "models" / "gpt2-5m"
SCHEMES = {
    "w8a16": "int8 weights, 16-bit activations",
    "w8a8": "int8 weights and activations, scales per token measured on the fly",
    "w8a8_static": "the same with one calibrated range per layer",
    "smooth": "w8a8_static after moving outliers into the weights (SmoothQuant, alpha 0.5)",
    "codebook4": "4-bit indices into a codebook, rotated groups of 128 columns, 16-bit activations",
    "codebook4_fit": "codebook4 fitted to the loss's curvature by the weights, in place of rounding",
    "hybrid": "each layer the cheapest scheme within the quality budget, static ranges by the method that loses least",
}
OTHERS = "or another codebook: codebook3, codebook2, codebook4+4, codebook4_int8, codebook4_g64_qr, int4, …"
SMOOTH_ALPHA = 0.5
SPEED_PROMPT = 16
"""Tokens of the prompt in front of the timed generation."""
PEAK_LABEL = {
    True: "torch.cuda.max_memory_allocated over prompt and generation, weights included",
    False: "the whole process's resident set, Python, torch and the reference's temporaries included",
}
RELATIVE_COST = {"w8a8_static": 1.0, "w8a8": 1.05, "w8a16": 2.0, "fp16": 2.1}
"""Of schemes; those that a plan chooses among."""


def int8_first(layer: LayerSize, scheme: str) -> float:
    """Cost model of a plan that keeps as many layers as possible on the int8 path, whatever their size.

    The cost of a layer is its multiplications, doubled without int8 tensor cores: the ratio of layers that fill a GPU.
    The time of layers as small as the embedded checkpoint's is only launches and traffic; by time
    (`--objective time`), all of them would stay in float.
    """
    return layer.out_features * layer.in_features * RELATIVE_COST[scheme]


_STARTED = time.monotonic()


def say(text: str) -> None:
    """Print the next step and the time since the start on standard error."""
    print(f"[{time.monotonic() - _STARTED:4.0f} s] {text}", file=sys.stderr, flush=True)


class DemoError(Exception):
    """An error that the user can correct: a missing file, package or argument."""


@dataclass(frozen=True)
class Limits:
    """The amounts of text, tokens and repetitions that are measured."""

    eval_windows: int
    calibration_windows: int
    plan_windows: int
    prompt_batch: int
    new_tokens: int
    repeats: int


FULL = Limits(60, 32, 8, prompt_batch=8, new_tokens=128, repeats=5)
QUICK = Limits(40, 8, 2, prompt_batch=1, new_tokens=8, repeats=1)


@dataclass
class Speed:
    """What layers of the same schemes have in common."""

    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    model_mb: float
    peak_mb: float


@dataclass
class Result:
    """One row of the table; the baseline has no report."""

    scheme: str
    perplexity: float
    change_percent: float
    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    model_mb: float
    peak_mb: float
    layers: dict[str, int]


@dataclass
class Setup:
    """The model, text and settings that all variants share."""

    name: str
    text: str
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    evaluation: torch.Tensor
    calibration: torch.Tensor
    limits: Limits


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Quantize a GPT-2; compare perplexity, tokens/s and memory before and after.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="schemes:\n" + "\n".join(f"  {name:14} {what}" for name, what in SCHEMES.items()) + "\n" + OTHERS,
    )
    parser.add_argument("--model", default=str(EMBEDDED), help="checkpoint directory or hub name [models/gpt2-5m]")
    parser.add_argument("--text", type=Path, help="UTF-8 text file [the Python language reference of this CPython]")
    parser.add_argument("--schemes", default=",".join(SCHEMES), help="comma-separated [all]")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--window", type=int, default=512, help="tokens per window [512]")
    parser.add_argument("--eval-windows", type=int, help=f"windows for perplexity [{FULL.eval_windows}]")
    parser.add_argument("--budget", type=float, default=0.003, help="loss the hybrid may cost, relative [0.003]")
    parser.add_argument("--objective", choices=("int8", "time", "memory"), default="int8", help="of the plan [int8]")
    parser.add_argument("--prompt", default="The with statement", help="start of the sample")
    parser.add_argument("--quick", action="store_true", help="small limits, for a machine without a GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured to FILE")
    args = parser.parse_args(argv)
    args.schemes = [name.strip() for name in args.schemes.split(",") if name.strip()]
    unknown = sorted(name for name in set(args.schemes) - set(SCHEMES) if not is_codebook(name))
    if unknown:
        parser.error(f"unknown scheme {', '.join(unknown)}: choose from {', '.join(SCHEMES)}; {OTHERS}")
    if args.window < 2:
        parser.error(f"--window {args.window}: at least 2 tokens are needed to predict one")
    if args.eval_windows is not None and args.eval_windows < 1:
        parser.error(f"--eval-windows {args.eval_windows}: at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device (try --device cpu)")
    return args


def is_codebook(name: str) -> bool:
    """Whether this is the name of a codebook scheme."""
    try:
        return isinstance(parse_scheme(name), qcut.Codebook)
    except QcutError:
        return False


def load_model(name: str, dtype: torch.dtype, device: torch.device | None = None) -> tuple[Any, Any]:
    """A causal language model, on the CPU by default, and its tokenizer."""
    try:
        return load_pretrained(name, dtype=dtype, device=device or torch.device("cpu"))
    except CheckpointError as error:
        raise DemoError(f"--model {error}") from error


def prepare(args: argparse.Namespace) -> Setup:
    """Cut the text into an evaluation and a calibration part that share no window."""
    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    limits = QUICK if args.quick else FULL
    label = "the Python language reference (pydoc_data.topics)" if args.text is None else str(args.text)
    try:
        text = language_reference() if args.text is None else args.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DemoError(f"--text {args.text}: {error}") from error
    model, tokenizer = load_model(args.model, dtype)
    positions = getattr(model.config, "max_position_embeddings", args.window)
    if args.window > positions:
        raise DemoError(f"--window {args.window}: this model has {positions} positions")
    tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    if tokens.numel() < 2 * args.window:
        raise DemoError(
            f"{label}: {tokens.numel()} tokens; calibration and evaluation need {args.window} each (--window)"
        )
    windows = windows_of(tokens, args.window)
    # Of a short text a quarter is left to calibrate on.
    held_out = min(args.eval_windows or limits.eval_windows, max(1, len(windows) * 3 // 4))
    rest = windows[held_out : held_out + limits.calibration_windows]
    return Setup(args.model, label, tokenizer, device, dtype, windows[:held_out], rest, limits)


def median_seconds(function: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median wall time of a call after one warm-up, the device idle at both ends."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    function()
    times = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        function()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def reset_peak(device: torch.device) -> None:
    """Start a new memory peak: the GPU's, or without a GPU the process's, if Linux permits."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError, AttributeError):
        # Memory of freed tensors that glibc keeps would count for the next model.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def peak_mb(device: torch.device) -> float:
    """Megabytes at the peak since `reset_peak`: of the GPU's allocator, or resident in the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    return math.nan


@torch.no_grad()
def speed_of(model: Any, setup: Setup) -> Speed:
    """The speed of a prompt and of a greedy generation, and the memory peak over the two."""
    device, limits, window = setup.device, setup.limits, setup.evaluation.shape[1]
    prompt = setup.evaluation[: limits.prompt_batch]
    short = prompt[:1, :SPEED_PROMPT]
    new_tokens = min(limits.new_tokens, model.config.max_position_embeddings - short.shape[1])
    context = max(window, short.shape[1] + new_tokens)
    engine = qcut.Engine(model, batch=len(prompt), context=context)

    def read_prompt() -> object:
        return engine.prefill(prompt)

    def generate() -> object:
        return engine.generate(short, new_tokens)

    read_prompt()
    reset_peak(device)
    prompt_seconds = median_seconds(read_prompt, device, limits.repeats)
    generate_seconds = median_seconds(generate, device, limits.repeats)
    return Speed(
        prompt_tokens_per_s=prompt.numel() / prompt_seconds,
        generated_tokens_per_s=new_tokens / generate_seconds,
        model_mb=model_bytes(model) / 1e6,
        peak_mb=peak_mb(device),
    )


class Measuring:
    """Measures variants, and keeps the speeds of those that compute the same."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._speeds: dict[frozenset[tuple[str, str]], Speed] = {}
        self.rows: list[Result] = []

    def add(self, name: str, model: Any, schemes: dict[str, str]) -> None:
        """Add the row of a model; the first is the baseline, and has no schemes.

        Args:
            name: of the row.
            model: on the device.
            schemes: of the quantized layers, by their name.
        """
        tokens, window = self._setup.evaluation.flatten(), self._setup.evaluation.shape[1]
        value = perplexity(model, tokens, window=window, progress=sys.stderr.isatty())
        same = frozenset(schemes.items())
        if same not in self._speeds:
            self._speeds[same] = speed_of(model, self._setup)
        baseline = self.rows[0].perplexity if self.rows else value
        row = Result(
            scheme=name,
            perplexity=value,
            change_percent=100 * (value / baseline - 1),
            layers=dict(Counter(schemes.values())),
            **asdict(self._speeds[same]),
        )
        self.rows.append(row)
        say(f"{name}: perplexity {value:.3f}, {row.prompt_tokens_per_s:,.0f} tokens/s of a prompt")


@torch.no_grad()
def sample(model: Any, setup: Setup, prompt: str, new_tokens: int = 40) -> str:
    """The prompt and its continuation, sampled with a fixed seed."""
    ids = setup.tokenizer(prompt)["input_ids"]
    sampling = qcut.Sampling(temperature=0.8, top_k=40)
    (generated,) = qcut.Engine(model).generate([ids], new_tokens, sampling=sampling)
    return str(setup.tokenizer.decode([*ids, *generated.tokens], skip_special_tokens=True))


def fresh_model(setup: Setup) -> Any:
    """The float model on the device, loaded again so that nothing of an earlier variant stays in memory."""
    gc.collect()
    return load_model(setup.name, setup.dtype, setup.device)[0]


def quantized(
    name: str,
    setup: Setup,
    calibration: qcut.Calibration | None,
    plan: qcut.Plan | None,
    moments: Mapping[str, qcut.Curvature] | None,
) -> tuple[Any, dict[str, str]]:
    """A fresh model quantized as the row `name` of the table, and its layers' schemes by name."""
    model = fresh_model(setup)
    if name == "hybrid" and plan is not None:
        return model, qcut.quantize(model, plan, calibration=calibration, progress=False).schemes
    if name == "codebook4_fit":
        return model, qcut.quantize(model, "codebook4", second_moments=moments, progress=False).schemes
    scheme, alpha = ("w8a8_static", SMOOTH_ALPHA) if name == "smooth" else (name, None)
    return model, qcut.quantize(model, scheme, calibration=calibration, smooth=alpha, progress=False).schemes


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the float model and every variant; returns the content of ``--json``."""
    say("reading the model and the text, which imports transformers first")
    setup = prepare(args)
    device = setup.device
    gpu = device.type == "cuda"
    cpu = f"{platform.machine()} CPU (torch threads: {torch.get_num_threads()})"
    machine = torch.cuda.get_device_name(device) if gpu else cpu
    print(f"model    {setup.name}")
    print(f"device   {machine}" + ("" if gpu else ": the CPU reference, the GPU kernels' integers without their speed"))
    print(f"text     {setup.text}")
    held_out, after = len(setup.evaluation), len(setup.calibration)
    print(
        f"         perplexity on {held_out} windows of {args.window} tokens, calibration on {after} after them\n",
        flush=True,
    )

    baseline_name = str(setup.dtype).removeprefix("torch.").replace("float", "fp")
    measuring = Measuring(setup)
    say(f"the model in {baseline_name}: perplexity and speed")
    model = fresh_model(setup)
    measuring.add(baseline_name, model, {})
    samples = {baseline_name: sample(model, setup, args.prompt)}
    batches = setup.calibration.to(device).split(4)
    progress = sys.stderr.isatty()
    calibration = plan = moments = None
    if "codebook4_fit" in args.schemes:
        say(f"curvature of the loss on {after} windows, for codebook4_fit")
        moments = qcut.collect_curvature(model, batches, progress=progress)
    if {"w8a8_static", "smooth", "hybrid"} & set(args.schemes):
        say(f"ranges of the layers' inputs on {after} windows, for static schemes")
        calibration = qcut.calibrate(model, batches, progress=progress)
    if "hybrid" in args.schemes:
        say(f"a scheme for each layer by the loss on {setup.limits.plan_windows} windows, for hybrid")
        some = setup.calibration[: setup.limits.plan_windows].to(device).split(1)
        what: Any = {"candidates": tuple(RELATIVE_COST)}
        what |= {"cost": int8_first} if args.objective == "int8" else {"objective": args.objective}
        plan = qcut.plan(model, some, budget=args.budget, calibration=calibration, progress=progress, **what)
    del model
    for i, name in enumerate(args.schemes):
        say(f"{name}, {i + 1} of {len(args.schemes)}: {SCHEMES.get(name, 'a codebook')}")
        model, schemes = quantized(name, setup, calibration, plan, moments)
        measuring.add(name, model, schemes)
        if name == args.schemes[-1]:
            samples[name] = sample(model, setup, args.prompt)
        del model

    print_table(measuring.rows, gpu)
    if plan is not None:
        print(f"\nhybrid, measured on {setup.limits.plan_windows} windows of the calibration text:\n{plan}")
    for name, text in samples.items():
        print(f"\nsample, {name}: {' '.join(text.split())}")
    return {
        "qcut": qcut.__version__,
        "torch": torch.__version__,
        "device": machine,
        "model": setup.name,
        "dtype": str(setup.dtype).removeprefix("torch."),
        "text": setup.text,
        "window": args.window,
        "windows": {"evaluation": held_out, "calibration": after},
        "limits": asdict(setup.limits),
        "peak_memory_is": PEAK_LABEL[gpu],
        "results": [asdict(row) for row in measuring.rows],
        "plan": None if plan is None else plan.to_json(),
        "samples": samples,
    }


def print_table(rows: list[Result], gpu: bool) -> None:
    """One line per variant, the float model first."""
    head = ("scheme", "perplexity", "change", "prompt tok/s", "gen. tok/s", "model MB", "peak MB", "layers")
    cells = [
        (
            row.scheme,
            f"{row.perplexity:.3f}",
            f"{row.change_percent:+.2f} %" if row.layers else "",
            f"{row.prompt_tokens_per_s:,.0f}",
            f"{row.generated_tokens_per_s:,.1f}",
            f"{row.model_mb:,.1f}",
            f"{row.peak_mb:,.0f}",
            ", ".join(f"{count} {name}" for name, count in row.layers.items()) or "float",
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in (head, *cells)) for i in range(len(head))]
    for line in (head, *cells):
        texts = [text.rjust(width) for text, width in zip(line[1:-1], widths[1:-1], strict=True)]
        print("  ".join([line[0].ljust(widths[0]), *texts, line[-1]]))
    print()
    for row in rows:
        if row.scheme in SCHEMES:
            print(f"{row.scheme:14} {SCHEMES[row.scheme]}")
    print("\nrows with the same schemes in all layers compute the same, and are timed once")
    print(f"peak MB is {PEAK_LABEL[gpu]}")


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        result = run(args)
        if args.json is not None:
            scratch = args.json.with_name(args.json.name + ".tmp")
            scratch.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
            scratch.replace(args.json)
    except (DemoError, QcutError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
