"""What cost models know of a GPU: known machines, those the driver describes, and choices that follow from them."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from qcut.dispatch import codebook, gemm
from qcut.dispatch.attention import select_attention
from qcut.dispatch.buckets import m_bucket
from qcut.dispatch.gpus import GPUS, Target, target_for, target_named
from qcut.dispatch.heuristics import best_tile
from qcut.dispatch.heuristics.attention import cycles
from qcut.dispatch.machines import (
    CLUSTER_SIZES,
    MACHINES,
    MULTIPROCESSORS,
    Machine,
    Rates,
    balance_ratio,
    machine_for,
)
from qcut.dispatch.tables import tile_to_json
from qcut.emitters.attention.mma import AttentionMma
from qcut.emitters.core.arch import ARCHITECTURES
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.source import DType
from qcut.emitters.families import CODEBOOK_STREAM, INT8_STREAM
from qcut.emitters.gemm.problem import GemmProblem
from qcut.emitters.stream.w8a8 import W8A8Problem
from tests.support import GOLDEN

H200, ANY_SM90 = target_named("NVIDIA H200"), Target("sm_90a", 132)
DIGESTS = GOLDEN / "h200_choices.json"
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (1280, 1280), (5120, 1280), (1024, 4096), (333, 1008))
TOKENS = (1, 3, 8, 16, 24, 32, 64, 128, 512, 2048)


# ── an H200's choices stay ───────────────────────────────────────────────────────────────────────


def choices(gpu: Target) -> Iterator[tuple[str, str]]:
    """Kind and text of every choice of a grid, only by models."""
    for x, int8, head, queries, batch, kv_heads, context in itertools.product(
        (DType.F16, DType.BF16), (False, True), (64, 128), (1, 4, 12), (1, 4, 32), (1, 8, 32), (100, 2048, 8192, 65536)
    ):
        cache = DType.S8 if int8 else x
        sizes = {"batch": batch, "kv_heads": kv_heads, "context": context}
        desc, parts = select_attention(x, cache, head, queries, gpu, **sizes)
        yield "attention", f"{desc.name} {parts}"
    for (n, k), m in itertools.product(SHAPES, TOKENS):
        for x, bits, slots in ((DType.F16, 4, 1), (DType.S8, 4, 1), (DType.F16, 2, 4), (DType.S8, 3, 2)):
            problem = codebook.problem_of(x, bits, slots, DType.F16, True, "none", False, gemm.alignment_of(n))
            yield "codebook", text(codebook.select(problem, m_bucket(m), n, -(-k // 128), gpu))
        epilogue = Epilogue(DType.F16, "none", "per_channel", bias=True)
        w8a16 = GemmProblem(a=DType.F16, epilogue=epilogue, alignment_k=8)
        yield "w8a16", text(gemm.select_w8a16(w8a16, m, n, k, gpu))
        if m <= 8:
            rows = Epilogue(DType.F16, "per_token", "per_channel", bias=True)
            tile = best_tile(INT8_STREAM, W8A8Problem("rows", DType.F16, rows), m, n, k, gpu)
            yield "int8_stream", json.dumps(tile_to_json(tile))
        for out, cutlass in itertools.product(("f16", "s8"), (True, False)):
            problem = gemm.problem_of(m, n, k, out=out)
            yield "gemm", text(gemm.select_gemm(problem, m, n, k, gpu, cutlass=cutlass))


def text(choice: Any) -> str:
    return f"{choice.family} {json.dumps(tile_to_json(choice.tile))}"


def test_h200_gets_the_kernels_measured_on_it():
    """A model's change that moves a choice must be measured; then the digests are written anew."""
    found: dict[str, list[str]] = {}
    for kind, choice in choices(ANY_SM90):
        found.setdefault(kind, []).append(choice)
    digests = {kind: [len(all_), hashlib.sha256("\n".join(all_).encode()).hexdigest()] for kind, all_ in found.items()}
    assert digests == json.loads(DIGESTS.read_text())


# ── machines ─────────────────────────────────────────────────────────────────────────────────────


def test_architectures_have_a_multiprocessor_and_known_gpu():
    assert set(MULTIPROCESSORS) == set(ARCHITECTURES) == {gpu.arch for gpu in GPUS}


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_known_gpus_are_within_what_is_built(gpu: Target):
    machine = gpu.machine
    assert machine.source == "data sheet"
    assert machine.sm_count == gpu.sm_count
    assert 1.3 < machine.ghz < 2.7
    assert 200 < machine.gb_s <= 8000
    # No multiprocessor reads more than it can when all of them read.
    assert machine.gb_s / machine.sm_count < machine.sm_bytes_per_ns
    assert [machine.clusters_at_once(size) * size <= gpu.sm_count for size in CLUSTER_SIZES] == [True] * 4


def test_an_h200_is_the_unit():
    machine = H200.machine
    assert (machine.bandwidth, machine.cycle_bandwidth, machine.clock, machine.mma_macs(8)) == (1, 1, 1, 1)
    assert machine.dram_bytes == pytest.approx(2560)
    # Without a name, the multiprocessors of an architecture have the bandwidth of its first known GPU, however many.
    for count in (2, 9, 114, 132):
        assert Target("sm_90a", count).machine.cycle_bandwidth == 1
    assert target_named("NVIDIA H100 80GB HBM3").machine.bandwidth == pytest.approx(3350 / 4800)
    assert target_named("NVIDIA GeForce RTX 4090").machine.mma_macs(16) < Target("sm_89", 142).machine.mma_macs(16)


def test_the_driver_describes_a_gpu_that_nobody_knows():
    asked = []

    def driver() -> Rates:
        asked.append(True)
        return Rates.of(clock_khz=2_625_000, memory_khz=15_001_000, bus_bits=256, l2_bytes=64 << 20)

    gpu = target_for((12, 0), 84, "NVIDIA GeForce RTX 5080", driver)
    machine = gpu.machine
    assert machine.gb_s == pytest.approx(960, rel=1e-3)
    assert machine.ghz == pytest.approx(0.9 * 2.625)
    assert (machine.sm_count, machine.l2_mib, machine.half_rate) == (84, 64, True)
    assert "driver" in str(machine)
    assert hash(gpu) == hash(target_for((12, 0), 84, "NVIDIA GeForce RTX 5080", driver))
    asked.clear()
    assert target_for((9, 0), 132, "NVIDIA H200", driver) == H200
    assert not asked


@pytest.mark.parametrize("rates", [None, Rates(), Rates(1.5, 0.0), Rates(0.0, 900.0)])
def test_silent_driver_leaves_the_architectures_figures(rates: Rates | None):
    machine = machine_for("sm_89", 46, "NVIDIA Nobody Knows", rates)
    like = MACHINES["NVIDIA L4"]
    assert (machine.ghz, machine.sm_gb_s, machine.sm_count) == (like.ghz, like.sm_gb_s, 46)
    assert "NVIDIA L4" in str(machine)


def test_part_of_a_gpu_is_another_machine():
    """A part's multiprocessors do not have the whole memory, whatever the driver says of it."""
    whole = Rates.of(clock_khz=1_980_000, memory_khz=3_201_000, bus_bits=6144, l2_bytes=50 << 20)
    for name in ("NVIDIA H200", "NVIDIA H200 MIG 1g.18gb"):
        machine = machine_for("sm_90a", 16, name, whole)
        assert machine.sm_count == 16
        assert machine.sm_gb_s <= machine.sm_bytes_per_ns


def test_balance_is_symmetric():
    a, b = MACHINES["NVIDIA H200"], MACHINES["NVIDIA H100 PCIe"]
    assert balance_ratio(a, b) == balance_ratio(b, a) == pytest.approx(4800 / 132 / (2039 / 114))
    assert balance_ratio(a, a) == 1


# ── choices follow the machine ───────────────────────────────────────────────────────────────────


def with_rates(ghz: float, gb_s: float) -> Target:
    return Target("sm_90a", 132, "NVIDIA Unknown", Rates(ghz / 0.9, gb_s, 50 << 20))


def test_slower_memory_takes_longer_with_fewer_loads():
    """Reading takes longer; as fewer bytes on their way keep the memory busy, fewer parts and loads are asked for."""
    desc = AttentionMma.for_shape(DType.F16, DType.F16, 128, 4, "sm_90a", 1)
    problem = W8A8Problem("rows", DType.F16, Epilogue(DType.F16, "per_token", "per_channel", bias=True))
    times, parts, prefetch = [], [], []
    for gb_s in (8000, 4800, 2400, 1200, 600):
        gpu = with_rates(1.75, gb_s)
        times.append(cycles(desc, 16, 8, 8192, gpu))
        parts.append(select_attention(DType.F16, DType.F16, 256, 4, gpu, batch=1, kv_heads=1, context=2048)[1])
        prefetch.append(best_tile(INT8_STREAM, problem, 1, 50257, 1280, gpu).prefetch)
    assert times == sorted(times)
    assert (parts, prefetch) == (sorted(parts, reverse=True), sorted(prefetch, reverse=True))
    assert parts[0] > parts[-1]
    assert prefetch[0] > prefetch[-1]


def test_an_exchange_costs_less_beside_a_slower_memory():
    """In units of weights that are read meanwhile: so K is cut among more CTAs, or among as many."""
    problem = codebook.problem_of(DType.F16, 4, 1, DType.F16, True, "none", False, 16)

    def splits(m: int, n: int, units: int, *rates: tuple[float, float]) -> list[int]:
        return [best_tile(CODEBOOK_STREAM, problem, m, n, 128 * units, with_rates(*rate)).splits for rate in rates]

    by_clock = splits(8, 4096, 112, (1.0, 4800), (1.75, 4800), (3.0, 4800))
    by_memory = splits(1, 1280, 40, (1.75, 4800), (1.75, 2400), (1.75, 1200))
    for found in (by_clock, by_memory):
        assert found == sorted(found)
        assert found[0] < found[-1]


def test_a_machine_says_what_it_is():
    assert str(H200.machine) == "132 SMs at 1.75 GHz, 4,800 GB/s, L2 of 50 MiB (data sheet)"
    assert isinstance(H200.machine, Machine)
