"""The cost model: occupancy, and an order of tiles that everybody would agree with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qcut.dispatch import cost_model as gemm_model
from qcut.dispatch.cost_model import estimate, occupancy
from qcut.dispatch.gpus import Target, target_named
from qcut.emitters.families import family
from qcut.emitters.gemm.problem import GemmProblem, TileConfig

H200 = target_named("NVIDIA H200")


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "smem_bytes", "ctas"),
    [
        ("sm_90a", 128, 128, 0, 4),
        ("sm_90a", 128, 32, 0, 16),
        ("sm_90a", 32, 16, 0, 32),
        ("sm_90a", 256, 64, 100_000, 2),
        ("sm_90a", 256, 64, 232_448, 1),
        ("sm_90a", 256, 64, 233_000, 0),
        ("sm_86", 512, 32, 0, 3),
        ("sm_80", 128, 255, 0, 2),
        ("sm_80", 100, 16, 0, 16),
    ],
)
def test_occupancy(arch: str, threads: int, registers: int, smem_bytes: int, ctas: int) -> None:
    assert occupancy(arch, threads, registers, smem_bytes) == ctas


def raw(tile: TileConfig, m: int, n: int, k: int, target: Target = H200, name: str = "int8_mma") -> gemm_model.Estimate:
    return estimate(name, GemmProblem(), tile, m, n, k, target)


def test_the_model_orders_what_everybody_would() -> None:
    large = TileConfig((128, 128, 64), (64, 64, 64), 4)
    small = TileConfig((16, 64, 128), (16, 16, 128), 5)
    # Many rows want large tiles, few rows small ones.
    assert raw(large, 4096, 4096, 4096).cycles < raw(small, 4096, 4096, 4096).cycles
    assert raw(small, 16, 4096, 4096).cycles < raw(large, 16, 4096, 4096).cycles
    # Where tiles leave most of the GPU idle, splitting K pays; where they fill it, it does not.
    assert raw(replace(small, splits=4), 16, 1024, 16384).cycles < raw(small, 16, 1024, 16384).cycles
    assert raw(large, 4096, 4096, 4096).cycles < raw(replace(large, splits=4), 4096, 4096, 4096).cycles
    # More work takes longer, and never less than the instructions do.
    cycles = [raw(large, m, 4096, 4096).cycles for m in (64, 512, 4096, 32768)]
    assert cycles == sorted(cycles)
    assert cycles[-1] > 32768 * 4096 * 4096 / (132 * 4096)
    # A deeper pipeline hides more.
    assert raw(small, 16, 4096, 4096).cycles <= raw(replace(small, stages=2), 16, 4096, 4096).cycles
    # wmma's loads cost it some of mma's rate.
    assert raw(large, 4096, 4096, 4096).cycles < raw(large, 4096, 4096, 4096, name="int8_wmma").cycles


def test_the_last_wave_counts() -> None:
    tile = TileConfig((128, 128, 64), (64, 64, 64), 4)
    fits = raw(tile, 128, 128, 4096).ctas_per_sm * H200.sm_count
    whole, one_more = (raw(tile, 128 * count, 128, 4096) for count in (fits, fits + 1))
    assert (whole.waves, one_more.waves > 1) == (1.0, True)
    assert whole.cycles < one_more.cycles < 2 * whole.cycles


def test_memory_bounds_the_time_and_not_the_order() -> None:
    tile = TileConfig((16, 64, 128), (16, 16, 128), 5)
    found = raw(tile, 1, 65536, 4096)
    assert found.time_us >= 65536 * 4096 / 4.8e12 * 1e6
    assert found.cycles > 0


def test_dp4a_is_slower_if_products_bound_the_time() -> None:
    simt = family("int8_dp4a")
    best = min(
        estimate("int8_dp4a", GemmProblem(), tile, 4096, 4096, 4096, H200).cycles
        for tile in simt.default_tiles(GemmProblem(), "sm_90a")
    )
    mma = raw(TileConfig((128, 128, 64), (64, 64, 64), 4), 4096, 4096, 4096).cycles
    assert 3 * mma < best
    assert best > 4096**3 / (132 * 256)
