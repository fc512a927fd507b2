"""Computes one int8 product on random operands, checks it against exact sums, and times it and cuBLASLt.

Operands are uniform over all 256 values of int8.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from qcut.cli.developer.gemm.report import Baseline, Report, Request
from qcut.dispatch import gemm as dispatch
from qcut.dispatch.cost_model import estimate
from qcut.dispatch.gemm import Choice
from qcut.dispatch.gpus import Target
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.family import Family
from qcut.emitters.core.source import DType
from qcut.emitters.families import INT8_DP4A, family
from qcut.emitters.gemm.problem import GemmProblem
from qcut.errors import ConfigError, DeviceError
from qcut.jit.waiting import no_fallbacks
from qcut.ops.gemm import GemmS8Op, gemm_s8
from qcut.tuning import timing
from qcut.tuning.cublaslt import CublasLtError, Int8Matmul
from qcut.tuning.timing import Variant

_BLOCK_BYTES = 1 << 28
_MAX_BLOCK = 4096
_NAMED_TILES = 8


@dataclass(frozen=True)
class Gpu:
    """The GPU of a request: its kernels, its clock, and its cuBLASLt.

    Attributes:
        target: architecture, multiprocessors and name.
        has_cutlass: whether nvcc and g++ are installed.
        gemm_s8: computes a product with a kernel.
        clock: times replays.
        copies: number of copies of an operand, given its bytes, that together exceed the L2.
        matmul: cuBLASLt's int8 product.
        device: the torch device of the operands.
    """

    target: Target
    has_cutlass: bool
    gemm_s8: Callable[[GemmS8Op, Choice], Tensor]
    clock: timing.Clock
    copies: Callable[[int], int] = timing.rotation
    matmul: Callable[..., Any] = Int8Matmul
    device: str = "cuda"


def current_gpu() -> Gpu | None:
    """The current CUDA device, or None if there is no GPU."""
    if not torch.cuda.is_available():
        return None
    from qcut.backends.cuda.gemm import gemm_s8, has_cutlass
    from qcut.backends.cuda.launch.plans import target

    return Gpu(target(torch.cuda.current_device()), has_cutlass(), gemm_s8, timing.CudaClock())


@no_fallbacks()  # so that the timed kernel is the reported one
def run(request: Request) -> Report:
    """Compute, check and time a request on the current GPU; without a GPU, compute and check it on the CPU.

    Raises:
        QcutError: the GPU or a tile's name is unknown, its memory does not suffice, or the kernel cannot be built.
        EmitError: the family or tile that was asked for cannot serve the problem.
    """
    try:
        gpu = current_gpu()
        _check_size(request, gpu is None)
        return _on_cpu(request) if gpu is None else _on_gpu(request, gpu)
    except torch.OutOfMemoryError as error:
        sizes = f"{request.m} x {request.n} x {request.k}"
        raise DeviceError(f"{sizes} does not fit the GPU's memory: {str(error).splitlines()[0]}") from None


_BEYOND_ANY_GPU = 1 << 42


def _check_size(request: Request, on_cpu: bool) -> None:
    """Refuse sizes that exceed memory: torch's errors vary, and a CPU may overcommit."""
    m, n, k = request.m, request.n, request.k
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if on_cpu else _BEYOND_ANY_GPU
    if (needed := m * k + n * k + m * n) > limit:
        raise DeviceError(f"{m} x {n} x {k} needs {needed / 2**30:.3g} GiB; the memory has {limit / 2**30:.3g} GiB")


def _on_cpu(request: Request) -> Report:
    a, b = operands(request, "cpu")
    report = Report(request, "cpu", "reference")
    report.notes.append("no CUDA device: the CPU's reference ran, and nothing is timed")
    if request.family:
        report.notes.append("kernels are for GPUs: --kernel and --tile chose nothing")
    got = product(request, a, b)
    if request.check:
        report.wrong = wrong_elements(got, a, b, request)
    return report


def _on_gpu(request: Request, gpu: Gpu) -> Report:
    from qcut.backends.cuda.gemm import gemm_problem
    from qcut.backends.cuda.launch.plans import m_bucket

    a, b = operands(request, gpu.device)
    problem = gemm_problem(a, b, Epilogue(DType.S8, wrap=request.wrap), request.out_layout)
    choice = select(request, problem, m_bucket(request.m), gpu.target, gpu.has_cutlass)
    name = dispatch.emit(choice, problem, gpu.target.arch).name
    report = Report(request, gpu.target.name, name, choice)
    kernel = (lambda call: gpu.gemm_s8(call, choice)) if request.family else None
    got = product(request, a, b, kernel)
    if request.check:
        report.wrong = wrong_elements(got, a, b, request)
        if report.wrong:
            report.notes.append("a wrong result is not timed")
            return report
    del got
    copies = [b, *(b.clone() for _ in range(gpu.copies(b.nbytes) - 1))]
    variants = [Variant("qcut", lambda i: product(request, a, copies[i], kernel), len(copies))]
    baseline = _cublaslt(request, a, copies, gpu, report.notes.append) if request.compare else None
    if baseline:
        variants.append(baseline[0])
    timings = timing.measure(variants, gpu.clock, report=report.notes.append)
    report.timing = timings["qcut"]
    if baseline:
        variant, algorithm, layouts = baseline
        report.baseline = Baseline(algorithm, layouts, timings[variant.name])
    return report


# ── the product ──────────────────────────────────────────────────────────────────────────────────


def operands(request: Request, device: str) -> tuple[Tensor, Tensor]:
    """Random int8 operands: A ``[M, K]`` and B's transpose ``[N, K]``, in the memory order that the layouts name."""
    generator = torch.Generator(device).manual_seed(request.seed)

    def matrix(rows: int, along_k: bool) -> Tensor:
        shape = (rows, request.k) if along_k else (request.k, rows)
        q = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8, device=device)
        return q if along_k else q.t()

    return matrix(request.m, request.layouts[0] == "t"), matrix(request.n, request.layouts[1] == "n")


def product(request: Request, a: Tensor, b: Tensor, kernel: Callable[[GemmS8Op], Tensor] | None = None) -> Tensor:
    """The result C, int8 ``[M, N]``, computed by `qcut.gemm_s8`, or by ``kernel`` where one is given."""
    options: dict[str, Any] = {
        "out_dtype": torch.int8,
        "out_inv_scale": request.factor,
        "out_layout": request.out_layout,
        "wrap": request.wrap,
    }
    if kernel is None:
        return gemm_s8(a, b, **options, tensor_cores=request.tensor_cores)
    return kernel(GemmS8Op(a, b, **options))


def select(request: Request, problem: GemmProblem, rows: int, target: Target, cutlass: bool) -> Choice:
    """The kernel that a request names, or the one dispatch chooses if the request names none.

    Args:
        request: names the family and the tile, or leaves them open.
        problem: types, layouts, alignments and epilogue of the product.
        rows: M, rounded up as launch plans round it.
        target: the GPU.
        cutlass: whether nvcc and g++ are there.

    Raises:
        ConfigError: the family has no tile of that name.
        EmitError: the family cannot serve the problem.
    """
    sizes = (rows, request.n, request.k)
    tensor_cores = request.tensor_cores and request.family != INT8_DP4A.name
    chosen = dispatch.select_gemm(problem, *sizes, target, cutlass=cutlass, tensor_cores=tensor_cores)
    if request.family is None:
        return chosen
    wanted = family(request.family)
    if request.tile:
        return Choice(wanted.name, find_tile(wanted, request.tile, problem, target.arch), reason="asked for")
    if chosen.family == wanted.name:
        return chosen
    menu = wanted.menu(problem, target.arch)
    if not menu:
        wanted.validate(problem, next(iter(wanted.default_tiles(problem, target.arch))), target.arch)

    def cycles(tile: Any) -> float:
        return estimate(wanted.name, problem, tile, *sizes, target).cycles

    return Choice(wanted.name, min(menu, key=cycles), reason="family asked for, tile by model")


def find_tile(wanted: Family[Any, Any], name: str, problem: GemmProblem, arch: str) -> Any:
    """The tile called ``name`` in a family's menu or search space.

    Raises:
        ConfigError: the family has no such tile; the message lists some that exist.
    """
    names: dict[str, None] = {}
    for tile in chain(wanted.default_tiles(problem, arch), wanted.search_space(problem, arch)):
        if tile.name == name:
            return tile
        names[tile.name] = None
    some = ", ".join(list(names)[:_NAMED_TILES])
    raise ConfigError(f"tile {name!r} is none of the {len(names)} {wanted.name} tiles on {arch}: {some}, …")


# ── the check ────────────────────────────────────────────────────────────────────────────────────


def exact_blocks(a: Tensor, b: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Computes ``a @ b.T`` in blocks that fit memory; yields rows, columns and the block's sums.

    The sums are exact integers in float64: each is at most ``2**14 K < 2**31``, so any order of summation is exact.
    """
    extent = max(1, min(_MAX_BLOCK, _BLOCK_BYTES // (8 * a.shape[1])))
    for column in range(0, len(b), extent):
        columns = slice(column, column + extent)
        right = b[columns].double().t()
        for row in range(0, len(a), extent):
            rows = slice(row, row + extent)
            yield rows, columns, a[rows].double() @ right


def wrong_elements(got: Tensor, a: Tensor, b: Tensor, request: Request) -> int:
    """Counts the elements of C that differ from the exact result.

    The exact result is ``clamp(rne(f32(sum) * scale), -128, 127)``, or with ``wrap`` the low eight bits of the sum.
    """
    wrong = torch.zeros((), dtype=torch.int64, device=got.device)
    for rows, columns, sums in exact_blocks(a, b):
        if request.wrap:
            expected = (sums.long() + 128) % 256 - 128
        else:
            # The product of two float32 is exact in float64, so the only rounding is round_().
            expected = (sums.float().double() * request.factor).round_().clamp_(-128, 127)
        wrong += (got[rows, columns] != expected).sum()
    return int(wrong)


# ── cuBLASLt ─────────────────────────────────────────────────────────────────────────────────────


def _cublaslt(
    request: Request, a: Tensor, copies: list[Tensor], gpu: Gpu, note: Callable[[str], object]
) -> tuple[Variant, str, str] | None:
    """The fastest cuBLASLt algorithm, its description and its layouts; None, after a note, if cuBLASLt has none."""
    failure = ""
    for layouts in dict.fromkeys((request.layouts, "tnt")):
        try:
            return (*_cublaslt_variant(request, layouts, a, copies, gpu), layouts)
        except CublasLtError as error:
            failure = failure or str(error)
            if layouts != "tnt":
                note(f"{error}; compared with its tnt, A row-major, B column-major, C row-major")
    note(f"not compared: {failure}")
    return None


def _cublaslt_variant(request: Request, layouts: str, a: Tensor, copies: list[Tensor], gpu: Gpu) -> tuple[Variant, str]:
    m, n, k = request.m, request.n, request.k
    gemm = gpu.matmul(m, n, k, layouts=layouts)
    if layouts != request.layouts:
        a, copies = a.contiguous(), [b.contiguous() for b in copies]
    memory = torch.empty(m * n, dtype=torch.int8, device=a.device)
    alpha = request.default_scale if request.wrap else request.factor

    def run_algorithm(number: int, i: int) -> None:
        gemm.run(a, copies[i], memory, alpha, number)

    def time_us(number: int) -> float:
        run_algorithm(number, 0)  # raises here if the algorithm cannot run
        candidate = Variant("algorithm", lambda i: run_algorithm(number, i), len(copies))
        return timing.measure([candidate], gpu.clock, rounds=5, target_us=500)["algorithm"].median_us

    best = gemm.best(time_us)
    run_algorithm(best, 0)
    if request.check:
        out = memory.view(m, n) if layouts[2] == "t" else memory.view(n, m).t()
        for rows, columns, sums in exact_blocks(a, copies[0]):
            error = (out[rows, columns].double() - (sums * alpha).clamp_(-128, 127)).abs().max().item()
            if not error <= 0.5 + 1e-4:  # float32's own rounding of values up to 128, ties either way
                raise CublasLtError(f"cuBLASLt's result is off by {error}")
    return Variant("cublaslt", lambda i: run_algorithm(best, i), len(copies)), gemm.describe(best)
