"""What `qcut gemm` computes with: data, the exact check, kernels by name, cuBLAS's terms."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from qcut import errors
from qcut.cli.developer.gemm import check
from qcut.cli.developer.gemm.report import Request
from qcut.dispatch.gemm import Choice
from qcut.dispatch.gpus import Target
from qcut.emitters.core.source import EmitError
from qcut.emitters.families import FAMILIES, family
from qcut.emitters.gemm.problem import GemmProblem
from qcut.tuning import cublaslt

H200 = Target("sm_90a", 132, "NVIDIA H200")
LAYOUTS = ["".join(flags) for flags in itertools.product("tn", repeat=3)]

# ── data and check ───────────────────────────────────────────────────────────────────────────────


def test_results_spread_over_int8_at_the_default_scale() -> None:
    for k in (1, 16, 4096):
        request = Request(200, 200, k)
        got = check.product(request, *check.operands(request, "cpu"), None).double()
        assert 30 < got.std() < 50
        assert got.max() > 100
        saturated = got.abs().ge(127).double().mean()
        assert saturated < 0.02
        assert k == 1 or saturated > 0


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_operands_lie_in_memory_as_the_flags_say(layouts: str) -> None:
    request = Request(5, 7, 9, layouts)
    a, b = check.operands(request, "cpu")
    assert (a.shape, b.shape) == ((5, 9), (7, 9))
    assert a.stride() == ((9, 1) if layouts[0] == "t" else (1, 5))
    assert b.stride() == ((1, 7) if layouts[1] == "t" else (9, 1))
    assert check.product(request, a, b, None).stride() == ((7, 1) if layouts[2] == "t" else (1, 5))
    again = check.operands(request, "cpu")
    assert all(torch.equal(x, y) for x, y in zip(again, (a, b), strict=True))
    assert not torch.equal(check.operands(Request(5, 7, 9, layouts, seed=1), "cpu")[0], a)


@pytest.mark.parametrize("k", [1, 300, 131_071])
def test_blocks_are_exact_and_cover_everything(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    monkeypatch.setattr(check, "_BLOCK_BYTES", 8 * k * 3)
    monkeypatch.setattr(check, "_MAX_BLOCK", 4)
    a, b = torch.full((7, k), -128, dtype=torch.int8), torch.randint(-128, 128, (5, k), dtype=torch.int8)
    sums = torch.zeros(7, 5, dtype=torch.float64)
    for rows, columns, block in check.exact_blocks(a, b):
        assert block.shape[0] <= 4
        sums[rows, columns] += block
    assert np.array_equal(sums.numpy(), a.numpy().astype(np.int64) @ b.numpy().astype(np.int64).T)


def test_the_check_rounds_half_to_even_once() -> None:
    a = torch.tensor([[1], [3], [5], [-1], [-3], [100]], dtype=torch.int8)
    b = torch.ones(1, 1, dtype=torch.int8)
    got = torch.tensor([[0], [2], [2], [0], [-2], [50]], dtype=torch.int8)
    assert check.wrong_elements(got, a, b, Request(6, 1, 1, scale=0.5)) == 0
    assert check.wrong_elements(got + 1, a, b, Request(6, 1, 1, scale=0.5)) == 6


# ── kernels and tiles ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_tiles_are_found_by_the_names_they_print(name: str, arch: str) -> None:
    problem, wanted = GemmProblem(), family(name)
    tiles = list(wanted.search_space(problem, arch))
    for tile in (*wanted.menu(problem, arch), tiles[-1]):
        found = check.find_tile(wanted, tile.name, problem, arch)
        assert found == tile
        assert tile.name in wanted.emit(problem, found, arch).name
    with pytest.raises(errors.ConfigError, match=f"tile '7x7x7' is none of the .* {name} tiles on {arch}: ") as caught:
        check.find_tile(wanted, "7x7x7", problem, arch)
    assert wanted.default_tiles(GemmProblem(), arch)[0].name in str(caught.value)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_can_be_asked_for(name: str) -> None:
    problem = GemmProblem()
    sizes = {"m": 300, "n": 512, "k": 640}
    choice = check.select(Request(**sizes, family=name), problem, 320, H200, True)
    assert choice.family == name
    assert choice.reason
    tile = family(name).menu(problem, "sm_90a")[0]
    forced = check.select(Request(**sizes, family=name, tile=tile.name), problem, 320, H200, True)
    assert forced == Choice(name, tile, reason="asked for")


def test_a_family_that_cannot_serve_says_why() -> None:
    with pytest.raises(EmitError, match="tnt"):
        check.select(Request(4, 4, 4, family="int8_cutlass"), GemmProblem(layout_a="column"), 16, H200, True)


# ── cuBLASLt's terms ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_cublas_computes_the_product_from_column_major_memory(layouts: str) -> None:
    m, n, k = 5, 7, 3
    rng = np.random.default_rng(0)
    a, b = rng.integers(-9, 9, (m, k)), rng.integers(-9, 9, (k, n))
    memory = [matrix.ravel(order="C" if flag == "t" else "F") for matrix, flag in zip((a, b), layouts, strict=False)]
    operations, stored, swapped = cublaslt.column_major(m, n, k, layouts)
    left, right = (
        flat.reshape(shape, order="F") for flat, shape in zip(memory[::-1] if swapped else memory, stored, strict=False)
    )
    left, right = (
        x.T if operation == cublaslt.CUBLAS_OP_T else x for x, operation in zip((left, right), operations, strict=True)
    )
    out = left @ right
    assert out.shape == stored[2]
    assert np.array_equal(out.ravel(order="F").reshape((m, n), order="C" if layouts[2] == "t" else "F"), a @ b)
    tensor_core_form = (cublaslt.CUBLAS_OP_T, cublaslt.CUBLAS_OP_N)
    assert (operations == tensor_core_form) == (layouts[:2] == "tn")
