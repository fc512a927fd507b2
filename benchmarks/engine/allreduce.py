"""All-reduce of float16 over the GPUs of one host, by size, in a CUDA graph and launched one by one.

    torchrun --nproc-per-node 4 benchmarks engine allreduce

Each process has a GPU of its own. Sums are checked before they are timed. A sample is the time of many all-reduces in a
row, of the slowest process; all processes start it together. NVLink's multicast is off (``NCCL_NVLS_ENABLE=0``).
`benchmarks/scaling` reads the rows.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.harness import CheckError, Clock, Timing

SIZES = tuple(1 << bits for bits in range(13, 27))
"""Bytes: 8 KB, one row of 4,096 columns, to 64 MB."""
QUICK_SIZES = SIZES[::4]
ROUNDS, QUICK_ROUNDS = 15, 5
SAMPLE_BYTES = 256 << 20
"""Of all sums of one sample together, within `CALLS`."""
CALLS = (10, 100)
KEY = ("gpu", "gpus", "bytes", "variant")
"""Rows of other GPUs, and of other numbers of them, stay."""
GRAPH, EAGER = "graph", "eager"
TIMEOUT = datetime.timedelta(minutes=2)
"""Timeout of a process after another one has ended."""
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def calls_of(size: int) -> int:
    """All-reduces in one sample: a function of the size only, so that all processes agree."""
    least, most = CALLS
    return max(least, min(most, SAMPLE_BYTES // size))


def bus_gb_s(gpus: int, size: int, us: float) -> float:
    """Gigabytes a second out of each GPU, of the 2 (n − 1) / n of the sum's bytes that each must send."""
    return 2 * (gpus - 1) / gpus * size / us / 1e3


def slowest(values: list[float], device: torch.device) -> list[float]:
    """The largest of all processes, element by element."""
    found = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [float(value) for value in found.tolist()]


def check(buffer: torch.Tensor) -> None:
    """Raise `CheckError` unless every element of this process's sum is right.

    Process r adds (r + 1) times a pattern of 0 to 7. All sums are integers that float16 holds up to 22 processes.
    """
    ranks, pattern = dist.get_world_size(), torch.arange(buffer.numel(), device=buffer.device) % 8
    buffer.copy_(pattern * (dist.get_rank() + 1))
    dist.all_reduce(buffer)
    wanted = pattern * (ranks * (ranks + 1) // 2)
    if not torch.equal(buffer.long(), wanted):
        wrong = int((buffer.long() != wanted).sum())
        raise CheckError(f"{wrong} of {buffer.numel()} sums of {ranks} processes are wrong")


def timed(
    buffer: torch.Tensor, variant: str, rounds: int, clock: Clock, barrier: Callable[[], object] | None = None
) -> Timing:
    """Microseconds of one all-reduce, of the slowest process.

    Args:
        buffer: is summed in place.
        variant: `GRAPH` or `EAGER`.
        rounds: samples.
        clock: of this process.
        barrier: after it, all processes start a sample; ``dist.barrier`` unless given.

    Raises:
        RuntimeError: the clock cannot capture a graph.
    """
    calls = calls_of(buffer.nbytes)

    def body() -> None:
        for _ in range(calls):
            dist.all_reduce(buffer)

    clock.warm_up(body)
    replay = clock.capture(body) if variant == GRAPH else body
    clock.warm_up(replay)
    samples = []
    for _ in range(rounds):
        (barrier or dist.barrier)()
        samples.append(clock.time_us(replay) / calls)
    return Timing.of(slowest(samples, buffer.device), variant)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: gloo, to try the script")
    parser.add_argument("--sizes", nargs="+", type=int, metavar="BYTES", help="even numbers, instead of 8 KB to 64 MB")


@harness.script(harness.timing_options, add_options)
def main(options: argparse.Namespace) -> int:
    """Run the benchmark; 1 if a sum was wrong, 2 without GPUs or without torchrun."""
    if options.device == "cuda":
        harness.require_gpu()
    if missing := [name for name in TORCHRUN if name not in os.environ]:
        raise argparse.ArgumentTypeError(f"no {', '.join(missing)}: start it by torchrun --nproc-per-node N")
    if int(os.environ["WORLD_SIZE"]) < 2:
        raise argparse.ArgumentTypeError("one process has nothing to add up: torchrun --nproc-per-node 2 or more")
    if odd := [size for size in options.sizes or () if size <= 0 or size % 2]:
        raise argparse.ArgumentTypeError(f"--sizes {odd[0]}: a positive even number of bytes, of float16")
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
        torch.cuda.set_device(device)
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device, timeout=TIMEOUT)
    else:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        return run(options, device)
    finally:
        dist.destroy_process_group()


def run(options: argparse.Namespace, device: torch.device) -> int:
    """Measure, print and write everything; the first process prints and writes."""
    results = harness.Results("bench_allreduce", harness.environment())
    gpus, first = dist.get_world_size(), dist.get_rank() == 0
    clock: Clock = harness.CudaClock() if device.type == "cuda" else harness.WallClock(device)
    library = ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else ""  # type: ignore[no-untyped-call]
    backend = f"{dist.get_backend()} {library}".strip()
    variants = (GRAPH, EAGER) if device.type == "cuda" else (EAGER,)
    deadline = time.monotonic() + options.time_budget
    sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    lines: list[list[object]] = []
    failures = 0
    for size in sizes:
        # Processes decide together: one that continued by itself would wait for ever.
        if slowest([float(time.monotonic() > deadline)], device)[0]:
            break
        buffer = torch.empty(size // 2, dtype=torch.float16, device=device)
        wrong = ""
        try:
            check(buffer)
        except CheckError as error:
            wrong = str(error)
        if slowest([float(bool(wrong))], device)[0]:
            failures += 1
            print(f"WRONG {size} bytes: {wrong or 'another process says so'}", file=sys.stderr)
            continue
        buffer.zero_()
        for variant in variants:
            timing = timed(buffer, variant, QUICK_ROUNDS if options.quick else ROUNDS, clock)
            rate = round(bus_gb_s(gpus, size, timing.median_us), 2)
            columns = {"gpus": gpus, "bytes": size, "variant": variant, "backend": backend, "bus_gb_s": rate}
            results.add(timing, **columns)
            lines.append([gpus, size, variant, timing.median_us, timing.p20_us, timing.p80_us, rate])
    if first:
        path = results.write_csv(options.out, KEY)
        print(harness.table(["GPUs", "bytes", "variant", "median us", "p20", "p80", "GB/s out"], lines))
        print(f"{len(lines)} of {len(sizes) * len(variants)} measured, {failures} wrong sums; rows in {path}")
    return 1 if failures else 0
