"""Launches emitted kernels on torch's memory, with guard bytes around every output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from qcut import jit
from qcut.backends.cuda.launch import native
from qcut.emitters.core.source import KernelSource
from qcut.emitters.gemm.problem import GemmProblem, Layout
from qcut.jit.launch import QUERY_CAN_IMPLEMENT, QUERY_WORKSPACE_BYTES
from tests.gpu.support.oracles import DEVICE, TORCH_DTYPE, Gemm, assert_same

ARCHITECTURES = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100",
    (12, 0): "sm_120",
}
SENTINEL = 0x5A
GUARD = 256


def arch() -> str:
    return ARCHITECTURES[torch.cuda.get_device_capability()]


def launch(source: KernelSource, grid: tuple[int, int, int], *args: Tensor | int | float, pdl: bool = False) -> None:
    """Build if need be, then queue on the current stream; a tensor stands for its address."""
    kernel = jit.load(jit.build(source), source, torch.cuda.current_device())
    values = [a.data_ptr() if isinstance(a, Tensor) else a for a in args]
    kernel.launch(grid, values, torch.cuda.current_stream().cuda_stream, pdl)


class Guarded:
    """Memory for a ``[rows, stride]`` output with the sentinel in every byte, and guards on both sides."""

    def __init__(self, rows: int, stride: int, dtype: torch.dtype) -> None:
        self._bytes = rows * stride * dtype.itemsize
        self._all = torch.full((self._bytes + 2 * GUARD,), SENTINEL, dtype=torch.uint8, device=DEVICE)
        self.tensor = self._all[GUARD : GUARD + self._bytes].view(dtype).view(rows, stride)

    def take(self, columns: int) -> Tensor:
        """The first columns on the CPU; all bytes around and after them must still be the sentinel."""
        torch.cuda.synchronize()
        size = self.tensor.element_size()
        inside = self._all[GUARD : GUARD + self._bytes].view(len(self.tensor), -1)
        for outside in (self._all[:GUARD], self._all[GUARD + self._bytes :], inside[:, columns * size :]):
            assert bool((outside == SENTINEL).all()), "bytes outside of the output were written"
        return self.tensor[:, :columns].cpu()


def strided(x: Tensor, stride: int, offset: int = 0) -> Tensor:
    """The rows of x on the GPU, ``stride`` elements apart, ``offset`` elements off a 16-byte boundary.

    What lies between rows is NaN (127 for integers): a kernel that reads it as data shows.
    """
    filler = 127 if x.dtype is torch.int8 else float("nan")
    buffer = torch.full((len(x) * stride + offset + 64,), filler, dtype=x.dtype, device=DEVICE)
    view = buffer[offset : offset + len(x) * stride].view(len(x), stride)[:, : x.shape[1]]
    view.copy_(x)
    return view


def laid_out(x: Tensor, layout: Layout, stride: int, offset: int = 0) -> Tensor:
    """A matrix on the GPU with contiguous runs, rows or columns, ``stride`` elements apart, as `strided`."""
    return strided(x if layout == "row" else x.t(), stride, offset)


def launch_gemm(
    gemm: Gemm,
    problem: GemmProblem,
    source: KernelSource,
    ctas: tuple[int, int, int],
    *,
    x: Tensor | None = None,
    extra: int = 0,
    offset: int = 0,
    pdl: bool = False,
) -> Tensor:
    """Launch a raw GEMM twice into guarded memory; both results must agree.

    ``extra`` elements more than the problem's alignments ask for lie between runs; ``offset`` elements misalign the
    operands. ``x`` replaces the operand A of `gemm` by 16-bit floats: then B keeps to 16 bytes, as weights do.

    Returns:
        ``[M, N]`` on the CPU.
    """
    a, b = gemm.a if x is None else x, gemm.b
    (m, k), n = a.shape, b.shape[0]
    align_b = problem.alignment_k if x is None else 16

    def stride(length: int, alignment: int) -> int:
        return -(-length // alignment) * alignment + extra

    lda = stride(k if problem.layout_a == "row" else m, problem.alignment_k)
    ldb = stride(k if problem.layout_b == "column" else n, align_b) + (15 * extra if x is not None else 0)
    runs, length = (m, n) if problem.layout_d == "row" else (n, m)
    ldd = stride(length, problem.alignment_n)
    a = laid_out(a, problem.layout_a, lda, offset)
    b = laid_out(b.t(), problem.layout_b, ldb, offset if x is None else 0)
    values: list[Any] = []
    for param in problem.epilogue.params():
        value = float(gemm.args[param.name]) if param.kind == "f32" else gemm.args[param.name]
        if param.name == "residual":
            value = laid_out(value, problem.layout_d, ldd)
        values.append(value.to(DEVICE) if isinstance(value, Tensor) else value)
    results = []
    for _ in range(2):
        d = Guarded(runs, ldd, TORCH_DTYPE[problem.epilogue.out])
        launch(source, ctas, a, b, d.tensor, m, n, k, lda, ldb, ldd, *values, pdl=pdl)
        results.append(d.take(length))
    assert_same(results[0], results[1])
    return results[0] if problem.layout_d == "row" else results[0].t()


def launch_cutlass(
    gemm: Gemm, source: KernelSource, *, x: Tensor | None = None, extra: int = 0, splits: int = 1
) -> Tensor:
    """Launch a CUTLASS GEMM twice into guarded memory; both results must agree.

    ``extra`` elements more than needed lie between the rows of every matrix. ``x`` replaces the operand A of `gemm`.
    """
    a = gemm.a if x is None else x
    (m, k), n = a.shape, gemm.b.shape[0]
    a, b = strided(a, k + extra), strided(gemm.b, k + extra)
    ldd = n + extra
    values: list[Any] = []
    for param in gemm.epilogue.params():
        value = gemm.args[param.name]
        if param.name == "residual":
            value = strided(value, ldd)
        values.append(value.cuda() if isinstance(value, Tensor) else float(value) if param.kind == "f32" else value)
    kernel = jit.load(jit.build(source), source, torch.cuda.current_device())
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    results = []
    for _ in range(2):
        d = Guarded(m, ldd, TORCH_DTYPE[gemm.epilogue.out])
        args = [a, b, d.tensor, m, n, k, k + extra, k + extra, ldd, *values, sm_count, 1, 0, splits, 0]
        numbers = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]
        assert kernel.query(QUERY_CAN_IMPLEMENT, numbers) == 1
        workspace = torch.full(
            (kernel.query(QUERY_WORKSPACE_BYTES, numbers),), SENTINEL, dtype=torch.uint8, device=DEVICE
        )
        numbers[-1] = workspace.data_ptr() if len(workspace) else 0
        kernel.launch((1, 1, 1), numbers, torch.cuda.current_stream().cuda_stream)
        results.append(d.take(n))
    assert_same(results[0], results[1])
    return results[0]


@contextmanager
def left_to_python() -> Iterator[None]:
    """A block with operators served by Python; the C++ operators, if there are any, pass calls on."""
    library = native.library()
    if library is None:
        yield
        return
    library.leave_to_python(1)
    try:
        yield
    finally:
        library.leave_to_python(0)
