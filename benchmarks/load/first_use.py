"""The first use of a model on a machine that has built nothing yet: from `qcut.quantize` to the tokens of a prompt.

A process of its own, with an empty kernel cache, makes a model with random weights, quantizes it, and continues a
prompt of 256 tokens. Times are by the wall clock. nvcc builds further kernels in the background, and the benchmark
continues with prompts until these kernels run. ``--starts`` measures the CPU time of processes that only start instead.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks import harness
from benchmarks.harness import Timing

PROMPT, NEW = 256, 16
SHAPES = {"gpt2-large": (1280, 36, 20, 50257, 1024), "tiny": (64, 2, 2, 96, 512)}
"""Width, blocks, heads, vocabulary and positions of a GPT-2."""
REPEATS = 5
STARTS = {
    "import torch": "import torch",
    "qcut.Linear": "import qcut; qcut.Linear",
    "quantize and forward on the CPU": "import torch, qcut; m = torch.nn.Sequential(torch.nn.Linear(64, 64)).eval(); "
    "qcut.quantize(m, 'w8a8', progress=False); m(torch.zeros(1, 64))",
}
"""Programs of ``--starts``; all are compared with the first."""
START_ROUNDS = 7


class Clock:
    """Seconds since it was made, and the longest time between two looks after the first."""

    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.longest = 0.0

    def look(self) -> float:
        """Seconds since the start."""
        now = time.perf_counter()
        self.longest = max(self.longest, now - self.last)
        self.last = now
        return now - self.start


def first_use(shape: str, scheme: str, device: str, settle_s: float) -> dict[str, float]:
    """Quantize a model and generate, in this process.

    Args:
        shape: one of `SHAPES`.
        scheme: of the linear layers.
        device: ``cuda`` or ``cpu``.
        settle_s: most seconds to wait for kernels that are built in the background.

    Returns:
        Seconds: of `quantize`, of `Engine`, of the prompt, from the start of `quantize` to the last token, of the
        longest wait after `quantize`, and until all kernels had taken over; and milliseconds of a prompt before and
        after.
    """
    started = time.perf_counter()
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import qcut

    width, blocks, heads, vocabulary, positions = SHAPES[shape]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float16 if device == "cuda" else torch.float32)
    with torch.device(device):
        sizes = {
            "n_embd": width,
            "n_layer": blocks,
            "n_head": heads,
            "vocab_size": vocabulary,
            "n_positions": positions,
        }
        model: Any = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval()
    torch.set_default_dtype(torch.float32)
    prompt = torch.randint(0, vocabulary, (PROMPT,)).tolist()
    settle = torch.cuda.synchronize if device == "cuda" else lambda: None
    settle()
    print(f"imports and model {time.perf_counter() - started:.2f}", file=sys.stderr, flush=True)

    found: dict[str, float] = {}

    def note(name: str, value: float) -> None:
        found[name] = value
        print(f"{name} {value:.2f}", file=sys.stderr, flush=True)

    clock = Clock()
    qcut.quantize(model, scheme, progress=sys.stderr.isatty())
    settle()
    note("quantize_s", clock.look())
    clock.longest = 0.0
    engine = qcut.Engine(model)
    settle()
    note("engine_s", clock.look() - found["quantize_s"])
    tokens: list[float] = []
    engine.generate([prompt], NEW, on_token=lambda *_: tokens.append(clock.look()))
    note("prompt_s", tokens[0] - found["quantize_s"] - found["engine_s"])
    note("total_s", tokens[-1])
    note("longest_wait_s", clock.longest)

    def prompt_ms() -> float:
        times = []
        for _ in range(REPEATS):
            settle()
            start = time.perf_counter()
            engine.generate([prompt], 1)
            times.append(time.perf_counter() - start)
        return sorted(times)[REPEATS // 2] * 1e3

    note("prompt_before_ms", prompt_ms())
    complete = qcut.wait_for_kernels(settle_s)
    note("take_over_s", clock.look() if complete else float("nan"))
    note("prompt_after_ms", prompt_ms() if complete else float("nan"))
    return found


def in_a_process(options: argparse.Namespace, mode: str) -> dict[str, float]:
    """`first_use` in a new process with an empty kernel cache; ``mode`` is ``QCUT_BUILD``'s."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:  # compilers may still end
        command = harness.command(__name__, "--child", options.device)
        command += ["--shape", options.shape, "--scheme", options.scheme, "--settle", str(options.settle)]
        surroundings = os.environ | {"QCUT_CACHE_DIR": cache, "QCUT_BUILD": mode}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=surroundings, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def cpu_seconds(program: str) -> float:
    """User and system time of a Python process that runs a program."""
    process = subprocess.Popen([sys.executable, "-c", program], env=_with_bytecode(), cwd=harness.ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, program)
    return usage.ru_utime + usage.ru_stime


def _with_bytecode() -> dict[str, str]:
    """The environment of a process that reads compiled modules, as an installation does."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def starts() -> str:
    """The table of ``--starts``: the programs are interleaved, after a warm-up round."""
    times: dict[str, list[float]] = {name: [] for name in STARTS}
    for turn in range(START_ROUNDS + 1):
        for name in sorted(STARTS, reverse=bool(turn % 2)):
            seconds = cpu_seconds(STARTS[name])
            if turn:
                times[name].append(seconds)
    medians = {name: statistics.median(found) for name, found in times.items()}
    base = next(iter(medians.values()))
    rows = [
        [name, f"{median:.2f}", f"{min(times[name]):.2f}", f"{median / base:.2f}"] for name, median in medians.items()
    ]
    return harness.table(["process", "CPU s", "least", "x torch"], rows)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="gpt2-large")
    parser.add_argument("--scheme", default="w8a8")
    parser.add_argument("--modes", default="background", help="values of QCUT_BUILD, comma-separated")
    parser.add_argument(
        "--settle", type=float, default=300.0, help="most seconds to wait for kernels in the background"
    )
    harness.device_option(parser)
    parser.add_argument("--starts", action="store_true", help="CPU time of processes that import qcut, on any machine")
    parser.add_argument("--child", metavar="DEVICE", help=argparse.SUPPRESS)


@harness.script(harness.timing_options, add_options)
def main(options: argparse.Namespace) -> int:
    """Run the benchmark; on a CPU there is nothing to build."""
    if options.child:
        print(json.dumps(first_use(options.shape, options.scheme, options.child, options.settle)))
        return 0
    if options.starts:
        print(starts())
        return 0

    from qcut.jit import packs

    results = harness.Results("bench_first_use", harness.environment())
    rows = []
    for mode in options.modes.split(","):
        found = {name: round(value, 3) for name, value in in_a_process(options, mode).items()}
        timing = Timing.of([found["total_s"] * 1e6], "wall")
        built = "pack" if any(packs.FOLDER.glob("*.qpack")) else mode
        labels = {"shape": options.shape, "scheme": options.scheme, "device": options.device, "build": built}
        results.add(timing, **labels, cores=len(os.sched_getaffinity(0)), **found)
        rows.append([built, *found.values()])
    path = results.write_csv(options.out)
    print(harness.table(["build", *found], rows))
    print(f"rows in {path}")
    return 0
