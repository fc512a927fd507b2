"""Kernels of int16 tokens, launched directly: bitwise the CPU's quantization and int64 sums; guards around outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics import best_tile
from qcut.emitters.core.epilogue import ACTIVATIONS, Activation, Epilogue
from qcut.emitters.core.family import Family
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.decoder.quantize import QuantizePerToken
from qcut.emitters.families import INT8_CUTLASS, INT8_MMA, INT8_STREAM, INT8_WMMA
from qcut.emitters.gemm import mma
from qcut.emitters.gemm.cutlass.tiles import tile as tile_of
from qcut.emitters.gemm.problem import K_MAX, GemmProblem, TileConfig
from qcut.emitters.stream.w8a8 import Tokens, W8A8Problem, W8A8Tile
from qcut.numerics import int8, int16
from qcut.schemes import padded_k
from tests.gpu.emitters.decoder.test_quantize import LAYOUTS, tokens
from tests.gpu.support.launching import SENTINEL, Guarded, arch, launch, strided
from tests.gpu.support.oracles import DEVICE, TORCH_DTYPE, assert_same, full_range

F16, BF16, F32, S8 = DType.F16, DType.BF16, DType.F32, DType.S8
PLAIN = Epilogue(F16, row_scale="per_token", col_scale="per_channel", bias=True, halves=True)
EPILOGUES = (
    PLAIN,
    replace(PLAIN, out=BF16, bias=False, residual=True),
    replace(PLAIN, out=F32, row_scale="none", activation=Activation.RELU),
    Epilogue(S8, col_scale="per_tensor", halves=True),
    replace(PLAIN, activation=Activation.ANY),
)
NAMED = "relu"
"""The activation that a launch names, of kernels that have any."""
ROWS = (1, 7, 8, 9, 33, 129)
SMALL = TileConfig((16, 64, 128), (16, 16, 128), 5)
LARGE = TileConfig((128, 128, 64), (64, 64, 64), 3)
KINDS: tuple[Tokens, ...] = ("none", "given", "rows", "floats")


def int16_tokens(m: int, k: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), int16.LARGEST + 1, (m, k), generator=generator, dtype=torch.int16)


class Case:
    """One product of int16 tokens on the CPU's side, with its epilogue's arguments."""

    def __init__(self, epilogue: Epilogue, q: Tensor, b: Tensor, row_scale: Tensor | None = None) -> None:
        self.epilogue, self.q, self.b = epilogue, q, b
        (m, k), n = q.shape, len(b)
        generator = torch.Generator().manual_seed(m + n)
        spread = 19_000 * 74 * k**0.5
        out = TORCH_DTYPE[epilogue.out]
        if row_scale is None:
            row_scale = torch.rand(m, generator=generator) + 0.5
        self.args: dict[str, Any] = {
            "row_scale": row_scale if epilogue.row_scale != "none" else None,
            "col_scale": (torch.rand(n, generator=generator) + 0.5) / spread,
            "bias": torch.randn(n, generator=generator) if epilogue.bias else None,
            "activation": NAMED if epilogue.activation is Activation.ANY else epilogue.activation.value,
            "residual": torch.randn(m, n, generator=generator).to(out) if epilogue.residual else None,
            "out_dtype": out,
        }
        if epilogue.col_scale == "per_tensor":
            self.args["col_scale"] = float(torch.tensor(25 / spread))
        if epilogue.out is S8:
            self.args |= {"out_inv_scale": 2.0, "out_zero_point": 3}

    def value(self, name: str) -> Any:
        """What a kernel is given for an argument of the epilogue."""
        if name == "tokens":
            return len(self.q)
        return ACTIVATIONS.index(NAMED) if name == "activation" else self.args[name]

    def expected(self) -> Tensor:
        return int8.epilogue_ref(int16.sums_ref(self.q, self.b).float(), **self.args)

    def tiled(self, family: Family[GemmProblem, TileConfig], tile: TileConfig, *, alignment_n: int = 16) -> None:
        """Launch a tiled kernel twice, rows of A and B apart; rows of tokens past m hold anything."""
        (m, k), n = self.q.shape, len(self.b)
        source: KernelSource = family.emit(GemmProblem(epilogue=self.epilogue, alignment_n=alignment_n), tile, arch())
        blocks = int16.in_blocks(self.q)
        for token in range(m, len(blocks) // 2):
            at = token // 8 * 16 + token % 8
            blocks[at] = blocks[at + 8] = 77
        a, b, ldd = strided(blocks, k + 16), strided(self.b, k + 32), n + alignment_n
        values: list[Any] = []
        for param in self.epilogue.params():
            value = strided(self.args["residual"], ldd) if param.name == "residual" else self.value(param.name)
            values.append(value.to(DEVICE) if isinstance(value, Tensor) else value)
        results = []
        for _ in range(2):
            d = Guarded(m, ldd, self.args["out_dtype"])
            launch(
                source,
                family.grid(tile, n)(len(blocks)),
                a,
                b,
                d.tensor,
                len(a),
                n,
                k,
                a.stride(0),
                b.stride(0),
                ldd,
                *values,
            )
            results.append(d.take(n))
        assert_same(results[0], results[1])
        assert_same(results[0], self.expected())

    def hosted(self, tile: TileConfig) -> None:
        """Launch a kernel of CUTLASS's twice."""
        (m, k), n = self.q.shape, len(self.b)
        source = INT8_CUTLASS.emit(GemmProblem(epilogue=self.epilogue), tile, arch())
        blocks, ldd = int16.in_blocks(self.q), n + 16
        a, b = strided(blocks, k + 16), strided(self.b, k + 32)
        given = (self.value(param.name) for param in self.epilogue.params())
        vectors = [value.to(DEVICE) if isinstance(value, Tensor) else value for value in given]
        sm_count = torch.cuda.get_device_properties(0).multi_processor_count
        results = []
        for raster in (1, 2):
            d = Guarded(m, ldd, self.args["out_dtype"])
            sizes = (len(a), n, k, a.stride(0), b.stride(0), ldd)
            launch(source, (1, 1, 1), a, b, d.tensor, *sizes, *vectors, sm_count, 2, raster, 1, 0)
            results.append(d.take(n))
        assert_same(results[0], results[1])
        assert_same(results[0], self.expected())


def run_mma(case: Case, tile: TileConfig, **options: Any) -> None:
    case.tiled(INT8_MMA, tile, **options)


# ── quantizing ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("x", [F16, BF16, F32], ids=lambda x: x.value)
@pytest.mark.parametrize(("threads", "vectors"), LAYOUTS)
def test_tokens_are_quantized(threads: int, vectors: int, x: DType) -> None:
    size = 128 // x.bits
    for aligned in (True, False):
        desc = QuantizePerToken(x, arch(), threads, vectors, aligned, halves=True)
        full = desc.row_elements if vectors else 2 * threads * size + size
        for m, k in ((1, full), (8, full - 1), (21, full // 2 + 3)):
            data = tokens(m, k, TORCH_DTYPE[x])
            k_padded = padded_k(k) if aligned else k
            if vectors and k_padded > full:
                continue
            on_device = strided(data, k + (-k % size + size if aligned else 1), 0 if aligned else 1)
            rows = int16.rows_of_blocks(m)
            q, scale = Guarded(rows, k_padded, torch.int8), Guarded(1, m, torch.float32)
            sizes = (on_device.stride(0), m, k, k_padded)
            launch(desc.emit(), desc.grid(m, k_padded), on_device, q.tensor, scale.tensor, *sizes)
            want, want_scale = int16.quantize_tokens_ref(data, k_padded)
            want = int16.in_blocks(want)
            for token in range(m, rows // 2):
                at = token // 8 * 16 + token % 8
                want[at] = want[at + 8] = SENTINEL  # not written
            assert_same(q.take(k_padded), want)
            assert_same(scale.take(m)[0], want_scale)


# ── tiled kernels ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tile", INT8_MMA.default_tiles(GemmProblem(), "sm_90a"), ids=lambda t: t.name)
def test_tiles(tile: TileConfig) -> None:
    if not mma.CONSTRAINTS[-1].holds(GemmProblem(epilogue=PLAIN), tile, arch()):
        pytest.skip(f"{tile.name} needs more shared memory than {arch()} has")
    for n, k in ((16, 16), (304, 272)):
        for m in ROWS:
            run_mma(Case(PLAIN, int16_tokens(m, k, m), full_range(n, k, seed=n)), tile)


@pytest.mark.parametrize("tile", [SMALL, LARGE, replace(SMALL, splits=8)], ids=lambda t: t.name)
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=lambda e: e.name)
def test_epilogues(epilogue: Epilogue, tile: TileConfig) -> None:
    for m in ROWS:
        run_mma(Case(epilogue, int16_tokens(m, 400, m), full_range(336, 400, seed=m)), tile)
    run_mma(Case(epilogue, int16_tokens(17, 144), full_range(127, 144)), tile, alignment_n=1)


def test_wmma() -> None:
    for tile in INT8_WMMA.default_tiles(GemmProblem(), arch())[:2]:
        for m in (1, 9, 70):
            case = Case(PLAIN, int16_tokens(m, 272, m), full_range(144, 272, seed=m))
            case.tiled(INT8_WMMA, tile)


@pytest.mark.parametrize("value", [int16.LARGEST, -int16.LARGEST, -(2**15)])
def test_the_longest_sums(value: int) -> None:
    k = K_MAX // 16 * 16
    q, b = torch.full((9, k), value, dtype=torch.int16), torch.full((64, k), -128, dtype=torch.int8)
    b[::2] = 127
    for epilogue in (PLAIN, EPILOGUES[2]):
        run_mma(Case(epilogue, q, b), SMALL)


@pytest.mark.parametrize(
    ("schedule", "tile", "epilogue"),
    [
        ("pingpong", "128x160x128 c2x1", PLAIN),
        ("pingpong", "128x160x128 c2x1", replace(PLAIN, activation=Activation.ANY)),
        ("cooperative", "128x256x128 c2x1", replace(PLAIN, out=BF16, bias=False, activation=Activation.RELU)),
        ("warp_specialized", "64x112x256", replace(PLAIN, out=F32, row_scale="none")),
    ],
    ids=["pingpong", "pingpong_any", "cooperative", "warp_specialized"],
)
def test_cutlass(schedule: Any, tile: str, epilogue: Epilogue) -> None:
    if arch() != "sm_90a":
        pytest.skip(f"{arch()} has no wgmma")
    for m, n, k in ((1, 16, 16), (9, 176, 144), (129, 336, 1040), (70, 1024, 272)):
        case = Case(epilogue, int16_tokens(m, k, m), full_range(n, k, seed=n))
        case.hosted(tile_of(schedule, tile))


# ── few tokens ───────────────────────────────────────────────────────────────────────────────────


class Few:
    """Rows of floats, and what the kernel of few tokens must make of them."""

    def __init__(self, problem: W8A8Problem, m: int, n: int, k: int) -> None:
        self.problem, self.k = problem, k
        self.x = torch.randn(m, k + 8, generator=torch.Generator().manual_seed(m + k)).to(TORCH_DTYPE[problem.x])
        self.x[:, k:] = float("nan")
        self.b = torch.zeros(n, padded_k(k), dtype=torch.int8)
        self.b[:, :k] = full_range(n, k, seed=n)

    def run(self, tile: W8A8Tile, *, pdl: bool = False) -> None:
        problem, rows, (m, n) = self.problem, self.x[:, : self.k], (len(self.x), len(self.b))
        q, row_scale = int16.quantize_tokens_ref(rows, self.b.shape[1])
        case = Case(problem.epilogue, q, self.b, row_scale)
        a, k = (self.x, self.k) if problem.quantizes else (int16.in_blocks(q), self.b.shape[1])
        ldd = n + 8
        given: dict[str, Any] = {
            "a": a,
            "b": self.b,
            "m": 0,
            "tokens": m,
            "n": n,
            "k": k,
            "lda": a.stride(0),
            "ldd": ldd,
        }
        given |= {"ldb": self.b.stride(0), "a_absmax": rows.float().abs().amax(1)}
        given |= {key: value for key, value in case.args.items() if value is not None}
        on_device = {key: v.to(DEVICE) if isinstance(v, Tensor) else v for key, v in given.items()}
        want = case.expected()
        for _ in range(2):
            d, absmax = Guarded(m, ldd, TORCH_DTYPE[problem.epilogue.out]), Guarded(1, m, torch.float32)
            absmax.tensor.fill_(0)
            on_device |= {"d": d.tensor, "absmax": absmax.tensor}
            arguments = [on_device[param.name] for param in problem.params()]
            launch(INT8_STREAM.emit(problem, tile, arch()), INT8_STREAM.grid(tile, n)(m), *arguments, pdl=pdl)
            assert_same(d.take(n), want)
            noted = torch.zeros(m)
            if problem.absmax:
                int8.raise_absmax(noted, want)
            assert_same(absmax.take(m)[0], noted)


def chosen(problem: W8A8Problem, m: int, n: int, k: int) -> W8A8Tile:
    """What the model of the memory chooses, for two SMs: several row tiles for each."""
    return best_tile(INT8_STREAM, problem, m, n, k, Target(arch(), 2))


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_few_tokens(kind: Tokens, m: int) -> None:
    problem = W8A8Problem(kind, F16, PLAIN, absmax=True)
    for n, k in ((200, 640), (40, 5121)):
        problem = replace(problem, aligned=k % 8 == 0)
        Few(problem, m, n, k).run(chosen(problem, m, n, k))


@pytest.mark.parametrize("kind", KINDS)
def test_few_tokens_in_rounds(kind: Tokens) -> None:
    problem = W8A8Problem(kind, F16, PLAIN, absmax=True)
    for sizes in ((2, 4, 1, 2, 4), (5, 3, 2, 3, 2), (1, 1, 1, 1, 8), (2, 5, 1, 2, 8)):
        Few(problem, 2, 150, 3000).run(W8A8Tile(*sizes), pdl=True)


@pytest.mark.parametrize("x", [BF16, F32], ids=lambda x: x.value)
@pytest.mark.parametrize("kind", KINDS)
def test_few_tokens_of_other_types(kind: Tokens, x: DType) -> None:
    for aligned in (True, False):
        problem = W8A8Problem(kind, x, replace(PLAIN, out=x, bias=False), aligned)
        Few(problem, 3, 100, 520).run(chosen(problem, 3, 100, 520))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, 1e-7, 65504.0])
def test_few_tokens_without_a_usual_scale(bad: float) -> None:
    for kind in KINDS:
        case = Few(W8A8Problem(kind, F16, PLAIN), 3, 64, 256)
        case.x[1, :256] = bad
        case.run(chosen(case.problem, 3, 64, 256))
