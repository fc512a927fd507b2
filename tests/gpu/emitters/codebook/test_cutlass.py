"""CUTLASS's products with codebook weights of one norm a row, launched directly: bitwise, with guards around D."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from qcut import jit
from qcut.emitters.codebook.cutlass import MENU
from qcut.emitters.codebook.problem import BOOK_PARAMS, CodebookProblem
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.families import CODEBOOK_CUTLASS
from qcut.emitters.gemm.problem import TileConfig
from qcut.numerics.codebook import layout as codebook_layout
from qcut.numerics.codebook import lloyd_max
from qcut.numerics.codebook.layout import Geometry
from tests.gpu.support.launching import Guarded
from tests.gpu.support.oracles import DEVICE, TORCH_DTYPE, Gemm, assert_same, full_range

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("wgmma exists only on sm_90a", allow_module_level=True)

PLAIN = Epilogue(DType.F16, "per_token", "per_channel", bias=True)
EPILOGUES = (
    Epilogue(DType.F32, "per_token", "per_channel"),
    Epilogue(DType.BF16, "per_token", "per_channel", bias=True, activation=Activation.SILU),
)
LARGE = MENU[-1]
SHAPES = (
    (1, 16, 1),
    (7, 64, 2),
    (8, 208, 3),
    (65, 256, 9),
    (130, 528, 4),
    (256, 16, 11),
    (257, 520, 2),
    (300, 384, 40),
)
"""M, N, units: tiles and their neighbours, fewer units than stages and many more, N inside a tile and over several."""


def source(epilogue: Epilogue, tile: TileConfig) -> KernelSource:
    problem = CodebookProblem(DType.S8, 4, 1, epilogue, 8, row_norm=True)
    return CODEBOOK_CUTLASS.emit(problem, tile, "sm_90a")


def cases() -> Iterator[KernelSource]:
    yield from (source(PLAIN, tile) for tile in MENU)
    yield from (source(epilogue, LARGE) for epilogue in EPILOGUES)


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    built = jit.build_many(cases(), progress=False)
    errors = [result for result in built.values() if isinstance(result, Exception)]
    assert not errors, errors[0]


def check(epilogue: Epilogue, tile: TileConfig, m: int, n: int, units_k: int, values: Tensor | None = None) -> None:
    """Random operands; rows of zeros, and of norms far apart. Rows of the last block that are no tokens hold 127."""
    gen = torch.Generator().manual_seed(m)
    geometry = Geometry(128 * units_k, 128 * units_k)
    indices = torch.randint(0, 16, (n, geometry.k), generator=gen, dtype=torch.uint8)
    norms = (torch.rand(n, 1, generator=gen) + 0.5).half()
    norms[1], norms[2], norms[3] = 0, 2.0**-14, 65504
    values = lloyd_max.codebook(4).half() if values is None else values
    packed = codebook_layout.pack_norms(norms, codebook_layout.row_exponents(norms), geometry)
    units = codebook_layout.pack_units(indices, 4, geometry)
    fold = codebook_layout.fold_scales(packed, values)
    weight = codebook_layout.int8_weight(units, 4, packed, values, fold)[:n]
    gemm = Gemm.of(epilogue, full_range(m, geometry.k, seed=m), weight, m)
    gemm.args["col_scale"][1] = 0
    blocks = codebook_layout.to_blocks(gemm.a)
    if m % 8:
        blocks[:, -1, m % 8 :] = 127
    problem_params: dict[str, Any] = {
        "x": blocks,
        "units": units,
        "norms": packed,
        "fold": fold,
        "m": m,
        "n": n,
        "units_k": units_k,
        "ldd": n + 8,
        **{p.name: int(w) for p, w in zip(BOOK_PARAMS, values.view(torch.int32), strict=True)},
        **{p.name: gemm.args[p.name] for p in epilogue.params()},
        "sm_count": torch.cuda.get_device_properties(0).multi_processor_count,
        "swizzle": 1,
        "raster": 0,
        "splits": 1,
        "workspace": 0,
    }
    on_device = {key: v.to(DEVICE) if isinstance(v, Tensor) else v for key, v in problem_params.items()}
    kernel_source = source(epilogue, tile)
    kernel = jit.load(jit.build(kernel_source), kernel_source, torch.cuda.current_device())
    results = []
    for _ in range(2):
        d = Guarded(m, n + 8, TORCH_DTYPE[epilogue.out])
        on_device["d"] = d.tensor
        arguments = [on_device[p.name] for p in kernel_source.params]
        numbers = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
        kernel.launch((1, 1, 1), numbers, torch.cuda.current_stream().cuda_stream)
        results.append(d.take(n) + 0.0)  # a zero may have either sign
    assert_same(results[0], results[1])
    gemm.check(results[0])


@pytest.mark.parametrize("tile", MENU, ids=lambda t: t.name)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_tiles(tile: TileConfig, shape: tuple[int, int, int]) -> None:
    check(PLAIN, tile, *shape)


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=lambda e: e.name)
def test_epilogues(epilogue: Epilogue) -> None:
    for m, units in ((1, 3), (129, 2), (300, 8)):
        check(epilogue, LARGE, m, 336, units)


def test_codebooks_are_arguments() -> None:
    for seed in range(4):
        values = torch.randn(16, generator=torch.Generator().manual_seed(seed)).sort().values.half()
        check(PLAIN, LARGE, 130, 144, 3, values)
