"""Launch plans: which kernel serves which rows of which layer, built, loaded and ready to launch.

Between dispatch, which knows sizes, and the operators, which know tensors.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch

from qcut import jit
from qcut.config import padded_k
from qcut.cuda import native as _native
from qcut.dispatch import gemm as dispatch
from qcut.dispatch.codebook import bucket
from qcut.dispatch.gemm import Choice
from qcut.dispatch.gpus import Target, target_for
from qcut.dispatch.tiles.stream import int8_tile
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.family import Grid
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.families import INT8_CUTLASS, W8A16_MMA
from qcut.emitters.gemm.problem import GemmProblem, TileConfig
from qcut.emitters.stream import int8 as int8_cut
from qcut.emitters.stream import w8a8 as w8a8_decode
from qcut.emitters.stream.w8a8 import W8A8Problem, W8A8Tile, emit_w8a8_decode
from qcut.errors import LaunchError

DTYPES = {
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
    torch.float32: DType.F32,
    torch.int8: DType.S8,
    torch.int32: DType.S32,
}
TMA_ROWS = 64
"""Rows a layer's int8 operands have at least on sm_90a: a TMA box that hangs over the edge of A loads slower."""


Kind = Literal["dynamic", "static", "weight_only"]
lock = threading.RLock()
_QUERY_WORKSPACE_BYTES = 2


@cache
def target(device: int) -> Target:
    """The GPU behind a CUDA ordinal, as dispatch sees it."""
    properties = torch.cuda.get_device_properties(device)
    return target_for((properties.major, properties.minor), properties.multi_processor_count, properties.name)


@cache
def has_cutlass() -> bool:
    available = jit.is_toolchain_available("nvcc")
    if not available:
        warnings.warn(
            "qcut: nvcc or g++ is missing, so int8 GEMMs run on the raw kernels instead of CUTLASS's; "
            "`qcut doctor` says what to install",
            RuntimeWarning,
            stacklevel=2,
        )
    return available


def m_bucket(m: int) -> int:
    """Rows up to which one launch plan serves: 1, 8, 16, 32, 64, then four steps an octave.

    Every m in a bucket runs the same kernel, so that nearby batch sizes neither build nor choose anew.
    """
    return bucket(max(1, m))


class LaunchPlan:
    """A loaded kernel and what of its launch does not depend on the call.

    Attributes:
        min_rows: rows that the operands of a linear layer must have at least.
        needs_workspace: whether `launch` must be given device memory.
    """

    __slots__ = ("_grid", "_kernel", "_pdl", "_tail", "min_rows", "needs_workspace")

    def __init__(
        self,
        kernel: jit.Kernel,
        grid: Callable[[int], tuple[int, int, int]],
        *,
        tail: tuple[int, ...] = (),
        needs_workspace: bool = False,
        pdl: bool = False,
        min_rows: int = 1,
    ) -> None:
        if pdl and not kernel.waits:
            raise LaunchError(f"kernel {kernel.name}: never waits for its predecessor, and cannot start before")
        self._kernel, self._grid, self._tail, self._pdl = kernel, grid, tail, pdl
        self.needs_workspace = needs_workspace
        self.min_rows = min_rows

    @property
    def name(self) -> str:
        """Procedural name of the kernel."""
        return self._kernel.name

    def workspace_bytes(self, args: tuple[int | float, ...]) -> int:
        """Device memory that a launch with these arguments needs."""
        return self._kernel.query(_QUERY_WORKSPACE_BYTES, (*args, *self._tail, 0))

    def native(self) -> _native.Launch | None:
        """The plan for C++; None where a launch needs a workspace, or a grid that C++ does not compute."""
        grid, kernel = self._grid, self._kernel
        if self.needs_workspace or not isinstance(grid, Grid) or grid.one[2] != 1 or grid.most:
            return None
        shape = (grid.rows, *grid.one[:2], kernel.block, kernel.smem_bytes, self._pdl)
        return _native.Launch(kernel.function, kernel.host_launcher, *shape, self._tail)

    def launch(self, m: int, args: tuple[int | float, ...], stream: int, workspace: int = 0) -> None:
        """Queue the kernel for m rows."""
        if self._tail:
            args = (*args, *self._tail, workspace)
        self._kernel.launch(self._grid(m), args, stream, self._pdl)


def load(source: KernelSource, device: int) -> jit.Kernel:
    """Build a kernel unless it is cached, and load it."""
    return jit.load(jit.build(source), source, device)


def gemm_plan(
    problem: GemmProblem,
    m: int,
    n: int,
    k: int,
    device: int,
    *,
    tensor_cores: bool = True,
    choice: Choice | None = None,
) -> LaunchPlan:
    """Plan of an int8 GEMM of up to m rows, on dispatch's choice of kernel unless one is given."""
    if choice is None:
        gpu = target(device)
        if tensor_cores and (few := few_tokens("none", problem, m, n, k, gpu)) is not None:
            return few_tokens_plan(*few, n, device)
        choice = dispatch.select_gemm(problem, m, n, k, gpu, cutlass=has_cutlass(), tensor_cores=tensor_cores)
    return _planned(choice, problem, n, device)


def few_tokens(
    tokens: w8a8_decode.Tokens,
    problem: GemmProblem,
    m: int,
    n: int,
    k: int,
    gpu: Target,
    *,
    aligned: bool = True,
    absmax: bool = False,
) -> tuple[W8A8Problem, W8A8Tile] | None:
    """The kernel for few tokens of this kind, if it serves this GEMM of up to m rows."""
    if m > w8a8_decode.MAX_TOKENS or problem.layouts != "tnt" or problem.alignment_k % 16:
        return None
    few = W8A8Problem(tokens, problem.epilogue.out, problem.epilogue, aligned, absmax)
    if not w8a8_decode.is_legal(few, m, k, gpu.arch):
        return None
    return few, int8_tile(few, m, n, k, gpu)


def few_tokens_plan(few: W8A8Problem, tile: W8A8Tile, n: int, device: int) -> LaunchPlan:
    """Its plan."""
    arch = target(device).arch
    kernel = load(emit_w8a8_decode(few, tile, arch), device)
    return LaunchPlan(kernel, Grid(tile.tokens, int8_cut.grid(tile, 1, n)), pdl=architecture(arch).pdl)


def weight_only_plan(problem: GemmProblem, m: int, n: int, k: int, device: int, *, pdl: bool = True) -> LaunchPlan:
    """Plan of a GEMM with 16-bit activations and int8 weights; ``pdl`` lets it begin before its predecessor ends."""
    return _planned(dispatch.select_weight_only(problem, m, n, k, target(device)), problem, n, device, pdl=pdl)


def _planned(choice: Choice, problem: GemmProblem, n: int, device: int, *, pdl: bool = True) -> LaunchPlan:
    gpu = target(device)
    kernel = load(dispatch.emit(choice, problem, gpu.arch), device)
    # Started early, the kernel for many tokens took 1.7 to 2.4 times as long (14336×4096, M = 64).
    pdl = pdl and architecture(gpu.arch).pdl and kernel.waits and choice.family != W8A16_MMA.name
    grid = dispatch.grid(choice, n, gpu.sm_count)
    if choice.family != INT8_CUTLASS.name:
        return LaunchPlan(kernel, grid, pdl=pdl)
    assert isinstance(choice.tile, TileConfig)
    return LaunchPlan(
        kernel,
        grid,
        tail=(gpu.sm_count, choice.swizzle, choice.raster, choice.splits),
        needs_workspace=choice.tile.schedule == "stream_k",
        pdl=pdl,
        min_rows=TMA_ROWS if choice.tile.schedule != "multistage" else 1,
    )


def linear_problem(x_dtype: DType, n: int, k: int, bias: bool, activation: str, kind: Kind) -> GemmProblem:
    """What a linear layer asks of its GEMM."""
    epilogue = Epilogue(
        out=x_dtype,
        row_scale="per_token" if kind == "dynamic" else "none",
        col_scale="per_channel",
        zero_point="per_tensor" if kind == "static" else "none",
        bias=bias,
        activation=Activation(activation),
    )
    problem = GemmProblem(epilogue=epilogue, alignment_n=dispatch.alignment_of(n))
    if kind == "weight_only":
        return replace(problem, a=x_dtype, alignment_k=8 if k % 8 == 0 else 1)
    return problem


@dataclass(frozen=True)
class LinearCall:
    """One layer at one number of rows, for `prebuild`."""

    kind: Kind
    dtype: torch.dtype
    rows: int
    n: int
    k: int
    bias: bool
    activation: str


def prebuild(calls: Iterable[LinearCall], device: int, progress: bool = True) -> None:
    """Build, in parallel, the GEMM kernels of these layers and the C++ code of their calls, where not in the cache.

    Raises:
        BuildError: the first kernel that does not compile.
    """
    gpu = target(device)
    sources: dict[str, KernelSource] = {}
    for call in calls:
        problem = linear_problem(DTYPES[call.dtype], call.n, call.k, call.bias, call.activation, call.kind)
        rows = m_bucket(call.rows)
        few = None
        if call.kind == "dynamic":
            few = few_tokens("given", problem, rows, call.n, padded_k(call.k), gpu)
        if call.kind == "weight_only":
            choice = dispatch.select_weight_only(problem, rows, call.n, call.k, gpu)
        elif few is None:
            rows = max(rows, TMA_ROWS)
            choice = dispatch.select_gemm(problem, rows, call.n, padded_k(call.k), gpu, cutlass=has_cutlass())
        source = dispatch.emit(choice, problem, gpu.arch) if few is None else emit_w8a8_decode(*few, gpu.arch)
        sources[source.name] = source
    with ThreadPoolExecutor(1, thread_name_prefix="qcut-build") as pool:
        pool.submit(_native.build)
        results = jit.build_many(sources.values(), progress=progress and sys.stderr.isatty())
    for result in results.values():
        if isinstance(result, Exception):
            raise result
