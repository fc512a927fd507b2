"""What a persistent step would pay for an exchange: all CTAs make a vector together, and each of them gets all of it.

A kernel whose CTAs stay for the whole step replaces launches by exchanges, five in a layer. This times the exchange
alone, stage after stage, in the forms that it can have:

    counter   a CTA stores its words and adds to a counter; all wait for the counter and read the vector
    flags     the same, with a flag for each CTA
    packets   each word has its stage beside it, and CTAs read until all words are of theirs

Each CTA reads the vector from the L2; or, in a cluster of 2, 4 or 8, its share of it, which it gives to the others: by
multicast, and packets by remote stores. Results are checked against the host's, word by word, and what every CTA got by
a sum over all stages. A CTA that waits too long gives up, and that form has no row.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from benchmarks.harness import CheckError, Timing
from qcut import jit
from qcut.emitters.core.source import KernelSource, Param
from qcut.emitters.core.text import flag, kernel_source

DEVICE_CODE = Path(__file__).with_name("exchange.cuh")
ARCH = "sm_90a"
THREADS = 512
SMEM_BYTES = 120 << 10
"""More than half of a multiprocessor's: each CTA has one to itself, as one with a ring of weights would."""
COLUMNS = (1280, 3840, 4096, 5120, 6144, 14336)
"""Of 16 bits, two to a word."""
QUICK_COLUMNS = (1280, 14336)
LAYERS = {"GPT-2 Large": (1280, 3840, 1280, 1280, 5120), "Llama-3-8B": (4096, 6144, 4096, 4096, 14336)}
"""Columns that pass in a layer: into the first product, attention, its projection, the MLP, and within it."""
STAGES, CHECKED_STAGES = 1000, 40
ROUNDS, QUICK_ROUNDS = 11, 3
KEY = ("gpu", "form", "cluster", "columns")

Words = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Form:
    """A form of the exchange.

    Attributes:
        arrival: ``counter``, ``flags``, ``packets`` or ``none``.
        cluster: CTAs that share a reading; 1: each reads all.
    """

    arrival: str
    cluster: int = 1

    def source(self, columns: int, checked: bool) -> KernelSource:
        """The kernel for a vector."""
        pointers = {"words": "uint32_t", "packets": "unsigned long long", "arrived": "uint32_t"}
        pointers |= {"result": "uint32_t", "sums": "uint32_t", "failed": "uint32_t"}
        params = (
            *(Param(name, "ptr", f"{type_}*") for name, type_ in pointers.items()),
            Param("stages", "i32"),
            Param("base", "i32"),
        )
        arguments = ", ".join([*pointers, "stages", "static_cast<uint32_t>(base)"])
        arrival = f"qcut::Arrival::k{self.arrival.capitalize()}"
        options = f"{arrival}, {flag(self.cluster > 1)}, {self.cluster}, {columns // 2}, {flag(checked)}"
        return kernel_source(
            f"exchange_{self.arrival}_c{self.cluster}_n{columns}" + "_checked" * checked,
            ARCH,
            params,
            f'static_assert(qcut::kExchangeThreads == {THREADS}, "threads of the launch");',
            f"qcut::exchange<{options}>(qcut::Exchange{{{arguments}}});",
            device_code=DEVICE_CODE.read_text(),
            block=THREADS,
            waits=False,
            smem_bytes=max(SMEM_BYTES, 4 * columns),
            cluster=self.cluster,
        )


FORMS = (
    Form("none"),
    *(Form(arrival) for arrival in ("counter", "flags", "packets")),
    *(Form(arrival, cluster) for arrival in ("counter", "flags", "packets") for cluster in (2, 4, 8)),
)


def first_words(words: int) -> Words:
    """The vector of stage 0."""
    return np.arange(words, dtype=np.uint32) * np.uint32(2654435761)


def after(x: Words, stage: int) -> Words:
    """The vector after a stage."""
    other = np.roll(x, -(1 + stage * 97))
    turned = other << np.uint32(7) | other >> np.uint32(25)
    return (x * np.uint32(1664525) + turned + np.uint32(stage)).astype(np.uint32)


def vectors(words: int, stages: int) -> tuple[Words, int]:
    """The vector after all stages, and the sum that each CTA has of all that it got."""
    x, total, weights = first_words(words), 0, 2 * np.arange(words, dtype=np.uint32) + 1
    for stage in range(stages):
        x = after(x, stage)
        total += int((x * weights).sum(dtype=np.uint64))
    return x, total % (1 << 32)


class Launch:
    """A form's kernel for a vector, and its memory.

    Attributes:
        ctas: of a launch: one for each multiprocessor, in as many whole clusters as are resident at once.
    """

    def __init__(self, form: Form, columns: int, checked: bool) -> None:
        source, device = form.source(columns, checked), torch.cuda.current_device()
        self._kernel = jit.load(jit.build(source), source, device)
        self.ctas = form.cluster * resident_clusters(self._kernel.function, source.smem_bytes, form.cluster)
        words = columns // 2
        sizes = (2 * words, 4 * words, self.ctas, words, self.ctas, 1)
        self._memory = [torch.zeros(size, dtype=torch.int32, device="cuda") for size in sizes]
        self._base = 0

    def __call__(self, stages: int) -> None:
        """Queue a launch."""
        args = (*(memory.data_ptr() for memory in self._memory), stages, self._base)
        self._kernel.launch((self.ctas, 1, 1), args, torch.cuda.current_stream().cuda_stream)
        self._base += stages

    def check(self, stages: int, want: Words, total: int | None) -> None:
        """Hold a launch of so many stages to the host's vector, and the CTAs' sums, where they add up, to its sum.

        Raises:
            CheckError: words are wrong, or CTAs have given up.
        """
        self._memory[4].zero_()
        self(stages)
        result, sums, failed = (memory.cpu().numpy().view(np.uint32) for memory in self._memory[3:])
        if failed[0]:
            raise CheckError(f"{failed[0]} threads waited too long")
        if wrong := int((result != want).sum()):
            raise CheckError(f"{wrong} of {len(want)} words are wrong after {stages} stages")
        if total is not None and (wrong := int((sums != total).sum())):
            raise CheckError(f"{wrong} of {self.ctas} CTAs got wrong words in {stages} stages")

    def timed(self, stages: int, rounds: int) -> Timing:
        """Microseconds of a stage."""
        samples = []
        for _ in range(rounds):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self(stages)
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) * 1e3 / stages)
        return Timing.of(samples, "events")


def resident_clusters(function: int, smem_bytes: int, cluster: int) -> int:
    """Clusters of a kernel that the GPU holds at once."""
    from cuda.bindings import driver

    if cluster == 1:
        return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    config, attribute = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = cluster, 1, 1
    config.gridDimX, config.gridDimY, config.gridDimZ = cluster, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = THREADS, 1, 1
    config.sharedMemBytes, config.attrs, config.numAttrs = smem_bytes, [attribute], 1
    status, count = driver.cuOccupancyMaxActiveClusters(driver.CUfunction(function), config)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise CheckError(f"cuOccupancyMaxActiveClusters: {status}")
    return int(count)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 1 where a result was wrong."""
    parser = harness.parser(__doc__ or "")
    options: argparse.Namespace = parser.parse_args(arguments)
    harness.require_gpu()
    if torch.cuda.get_device_capability() != (9, 0):
        parser.error("clusters and their copies are compiled for compute capability 9.0 alone")
    lengths = QUICK_COLUMNS if options.quick else COLUMNS
    sources = [form.source(columns, checked) for columns in lengths for form in FORMS for checked in (True, False)]
    for built in jit.build_many(sources, progress=sys.stderr.isatty()).values():
        if isinstance(built, Exception):
            raise built
    results, failures = harness.Results("bench_exchange", harness.environment()), 0
    deadline = time.monotonic() + options.time_budget
    medians: dict[Form, dict[int, float]] = {form: {} for form in FORMS}
    ctas: dict[Form, int] = {}
    for columns in lengths:
        (few, total), (many, _) = (vectors(columns // 2, stages) for stages in (CHECKED_STAGES, STAGES))
        for form in FORMS:
            if time.monotonic() > deadline:
                break
            try:
                launch = Launch(form, columns, False)
                if form.arrival != "none":
                    Launch(form, columns, True).check(CHECKED_STAGES, few, total)
                    launch.check(STAGES, many, None)
            except CheckError as error:
                failures += 1
                print(f"WRONG {form} of {columns}: {error}", file=sys.stderr)
                continue
            timing = launch.timed(STAGES, QUICK_ROUNDS if options.quick else ROUNDS)
            row = {"form": form.arrival, "cluster": form.cluster, "ctas": launch.ctas, "columns": columns}
            results.add(timing, **row)
            medians[form][columns], ctas[form] = timing.median_us, launch.ctas
    path = results.write_csv(options.out, KEY)
    lines = [
        [form.arrival, form.cluster, ctas.get(form, 0)]
        + [of.get(columns, math.nan) for columns in lengths]
        + [sum(of.get(columns, math.nan) for columns in layer) for layer in LAYERS.values()]
        for form, of in medians.items()
    ]
    print(harness.table(["form", "cluster", "CTAs", *map(str, lengths), *(f"layer {name}" for name in LAYERS)], lines))
    print(f"µs a stage; {failures} wrong; rows in {path}")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
