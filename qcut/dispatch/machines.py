"""Describes GPUs for cost models: what an architecture's multiprocessor computes, and one GPU's clock and memory.

Sources: NVIDIA's data sheets and architecture white papers (clocks, bandwidths, L2, products per second), and the CUDA
C++ Programming Guide, "Arithmetic Instructions" and "Compute Capabilities" (limits of a multiprocessor). Shared memory
and registers are in `qcut.emitters.core.arch`.

Kernels were measured only on an H200. Times of the models are those of an H200, by what they depend on:
the memory's bandwidth, the memory's latency, or the multiprocessor's clock. A `Machine` converts each kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qcut.emitters.core.arch import clusters_at_once

CLUSTER_SIZES = (1, 2, 4, 8)
"""CTAs of a portable cluster that models choose from."""


@dataclass(frozen=True)
class Multiprocessor:
    """What all GPUs of an architecture have in common.

    Attributes:
        tensor_macs: dense int8 multiply-accumulates a cycle of the fastest tensor-core instruction qcut emits.
        shares: share of ``tensor_macs`` that the instructions of each family reach.
        threads: most resident threads.
        ctas: most resident CTAs.
    """

    tensor_macs: int
    shares: Mapping[str, float]
    threads: int
    ctas: int


# wgmma reads operands from shared memory; mma.sync spends issue slots on ldmatrix; wmma takes 16 columns of K a time.
# On Hopper mma.sync converts e4m3 to 16 bits first.
_HOPPER = {"int8_cutlass": 1.0, "int8_mma": 0.8, "int8_wmma": 0.27, "fp8_mma": 0.3}
_AMPERE = {"int8_cutlass": 0.9, "int8_mma": 0.85, "int8_wmma": 0.6, "fp8_mma": 0.85}
MULTIPROCESSORS = {
    "sm_80": Multiprocessor(2048, _AMPERE, 2048, 32),
    "sm_86": Multiprocessor(1024, _AMPERE, 1536, 16),
    "sm_89": Multiprocessor(1024, _AMPERE, 1536, 24),
    "sm_90a": Multiprocessor(4096, _HOPPER, 2048, 32),
    "sm_100": Multiprocessor(2048, _AMPERE, 2048, 32),
    "sm_120": Multiprocessor(1024, _AMPERE, 1536, 24),
}
"""The multiprocessor of each architecture."""

_H200_GHZ = 1.75
_H200_SM_GB_S = 4800 / 132
_H200_MMA_MACS = 4096 * _HOPPER["int8_mma"]
# An SM reads 40 bytes a cycle while few others read.
_SM_BYTES_PER_CYCLE = 40
# Share of the data sheet's bandwidth that kernels reach: 4.48 of 4.8 TB/s.
_REACHED = 14 / 15
# GPUs without a stated clock under load hold nine tenths of their highest one, as an H200 does (1.75 of 1.98 GHz).
_HELD_CLOCK = 0.9


@dataclass(frozen=True)
class Rates:
    """What the driver states about a GPU; 0 for a number that the driver does not state.

    Attributes:
        ghz: highest clock of the multiprocessors.
        gb_s: bandwidth of the memory in 10⁹ bytes a second.
        l2_bytes: size of the L2.
    """

    ghz: float = 0.0
    gb_s: float = 0.0
    l2_bytes: int = 0

    @classmethod
    def of(cls, clock_khz: int, memory_khz: int, bus_bits: int, l2_bytes: int) -> Rates:
        """The rates of what `qcut.jit.device.rates` returns."""
        return cls(clock_khz / 1e6, 2 * memory_khz * bus_bits / 8 / 1e6, l2_bytes)


@dataclass(frozen=True)
class Machine:
    """One GPU, as cost models see it.

    Attributes:
        arch: architecture kernels are compiled for.
        sm_count: multiprocessors.
        ghz: clock under load in GHz.
        sm_gb_s: the memory's bandwidth as data sheets state it, in 10⁹ bytes a second for each multiprocessor.
        l2_mib: size of the L2 in MiB.
        half_rate: whether products of 16-bit values with float32 sums run at half the architecture's rate, as on
            GeForce GPUs.
        source: where clock and bandwidth come from, for messages.
    """

    arch: str
    sm_count: int
    ghz: float
    sm_gb_s: float
    l2_mib: int
    half_rate: bool = False
    source: str = field(default="data sheet", compare=False)

    def __str__(self) -> str:
        rates = f"{self.ghz:.2f} GHz, {self.gb_s:,.0f} GB/s, L2 of {self.l2_mib} MiB"
        return f"{self.sm_count} SMs at {rates} ({self.source})"

    @property
    def sm(self) -> Multiprocessor:
        """The architecture's multiprocessor."""
        return MULTIPROCESSORS[self.arch]

    @property
    def gb_s(self) -> float:
        """The whole memory's bandwidth in 10⁹ bytes a second."""
        return self.sm_gb_s * self.sm_count

    @property
    def dram_bytes(self) -> float:
        """Bytes that kernels read or write in a cycle, all multiprocessors together."""
        return self.gb_s * _REACHED / self.ghz

    @property
    def bandwidth(self) -> float:
        """Bandwidth of a multiprocessor, relative to an H200's, by time."""
        return self.sm_gb_s / _H200_SM_GB_S

    @property
    def cycle_bandwidth(self) -> float:
        """Bandwidth of a multiprocessor, relative to an H200's, by cycle."""
        return self.bandwidth / self.clock

    @property
    def clock(self) -> float:
        """Clock, relative to an H200's. A wait for the memory takes as many more cycles."""
        return self.ghz / _H200_GHZ

    @property
    def sm_bytes_per_ns(self) -> float:
        """Bytes per ns that one multiprocessor reads at most."""
        return _SM_BYTES_PER_CYCLE * self.ghz

    def mma_macs(self, bits: int) -> float:
        """Multiply-accumulates a cycle of ``mma.sync`` on values of 8 or 16 bits, relative to an H200's."""
        macs = self.sm.tensor_macs * self.sm.shares["int8_mma"] / _H200_MMA_MACS
        return macs / 2 if self.half_rate and bits == 16 else macs

    def clusters_at_once(self, size: int) -> int:
        """Clusters of ``size`` CTAs, one CTA to an SM, that run at once."""
        return clusters_at_once(size, self.sm_count)


def _known(
    arch: str, sm_count: int, ghz: float, gb_s: float, l2_mib: int, name: str, half_rate: bool = False
) -> tuple[str, Machine]:
    return name, Machine(arch, sm_count, ghz, gb_s / sm_count, l2_mib, half_rate)


MACHINES: Mapping[str, Machine] = dict(
    (
        _known("sm_80", 108, 1.41, 2039, 40, "NVIDIA A100-SXM4-80GB"),
        _known("sm_80", 108, 1.41, 1555, 40, "NVIDIA A100-SXM4-40GB"),
        _known("sm_80", 108, 1.41, 1935, 40, "NVIDIA A100 80GB PCIe"),
        _known("sm_80", 108, 1.41, 1555, 40, "NVIDIA A100-PCIE-40GB"),
        _known("sm_86", 72, 1.70, 600, 6, "NVIDIA A10"),
        _known("sm_86", 84, 1.74, 696, 6, "NVIDIA A40"),
        _known("sm_86", 84, 1.80, 768, 6, "NVIDIA RTX A6000"),
        _known("sm_86", 82, 1.70, 936, 6, "NVIDIA GeForce RTX 3090", half_rate=True),
        _known("sm_89", 58, 2.04, 300, 48, "NVIDIA L4"),
        _known("sm_89", 142, 2.52, 864, 96, "NVIDIA L40S"),
        _known("sm_89", 142, 2.50, 960, 96, "NVIDIA RTX 6000 Ada Generation"),
        _known("sm_89", 128, 2.52, 1008, 72, "NVIDIA GeForce RTX 4090", half_rate=True),
        _known("sm_90a", 132, _H200_GHZ, 4800, 50, "NVIDIA H200"),
        _known("sm_90a", 132, _H200_GHZ, 4800, 50, "NVIDIA H200 NVL"),
        _known("sm_90a", 132, _H200_GHZ, 3350, 50, "NVIDIA H100 80GB HBM3"),
        _known("sm_90a", 132, _H200_GHZ, 3900, 50, "NVIDIA H100 NVL"),
        _known("sm_90a", 114, _H200_GHZ, 2039, 50, "NVIDIA H100 PCIe"),
        _known("sm_90a", 132, _H200_GHZ, 4000, 50, "NVIDIA GH200 480GB"),
        _known("sm_90a", 132, _H200_GHZ, 4900, 50, "NVIDIA GH200 144G HBM3e"),
        _known("sm_100", 148, 1.85, 8000, 126, "NVIDIA B200"),
        _known("sm_120", 170, 2.41, 1792, 96, "NVIDIA GeForce RTX 5090", half_rate=True),
    )
)
"""Known GPUs by the name that the driver reports; the first of an architecture stands for the architecture."""


def machine_for(arch: str, sm_count: int, name: str = "", rates: Rates | None = None) -> Machine:
    """The machine that cost models assume for a GPU.

    A known name has its data sheet's figures. Another GPU has those that the driver states, and if the driver states
    none, the clock and the bandwidth per multiprocessor of the first known GPU of the architecture.

    Args:
        arch: architecture kernels are compiled for.
        sm_count: multiprocessors; a known name with another number of them, such as a part of a GPU, is not known.
        name: the GPU's name as the driver reports it.
        rates: what the driver states.
    """
    known = MACHINES.get(name.strip())
    if known is not None and (known.arch, known.sm_count) == (arch, sm_count):
        return known
    like_name, like = next((name, machine) for name, machine in MACHINES.items() if machine.arch == arch)
    if rates is None or not (rates.ghz > 0 and rates.gb_s > 0):
        source = f"as {like_name}"
        return Machine(arch, sm_count, like.ghz, like.sm_gb_s, like.l2_mib, like.half_rate, source)
    ghz = rates.ghz * _HELD_CLOCK
    # The driver states the bandwidth of the whole memory for a part of a GPU, too.
    sm_gb_s = min(rates.gb_s / sm_count, _SM_BYTES_PER_CYCLE * ghz)
    return Machine(arch, sm_count, ghz, sm_gb_s, rates.l2_bytes >> 20, "GeForce" in name, "as its driver says")


def balance_ratio(a: Machine, b: Machine) -> float:
    """How far apart two GPUs of one architecture are in products per byte of memory: 1 if alike, or more."""
    ratio = a.cycle_bandwidth / b.cycle_bandwidth
    return max(ratio, 1 / ratio)
