"""Launch plans: kernels that are built, loaded and ready to launch, found again by what chose them.

A family of operators describes a kernel as a `LaunchSpec`, loads the spec on a device, and keeps the `LaunchPlan` in a
`PlanCache`, so that the calls that follow neither choose nor build.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Generic, Literal, TypeVar

import torch

from qcut import jit
from qcut.config import padded_k
from qcut.cuda import native
from qcut.cuda.streams import current_stream
from qcut.dispatch import gemm as dispatch
from qcut.dispatch.codebook import bucket
from qcut.dispatch.gemm import Choice, Target, target_for
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.gemm.problem import GemmProblem
from qcut.emitters.stream import w8a8 as w8a8_decode
from qcut.emitters.stream.w8a8 import W8A8Problem, W8A8Tile, emit_w8a8_decode
from qcut.jit.launch import QUERY_WORKSPACE_BYTES

DTYPES = {
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
    torch.float32: DType.F32,
    torch.int8: DType.S8,
    torch.int32: DType.S32,
}
"""Types of elements as emitters name them."""

MAX_PLANS = 1 << 16
"""Plans that a `PlanCache` holds. Keys with addresses never end in a process that loads model after model."""

TMA_ROWS = 64
"""Rows a layer's int8 operands have at least on sm_90a: a TMA box that hangs over the edge of A loads slower."""

Kind = Literal["dynamic", "static", "weight_only"]
P = TypeVar("P")
_lock = threading.RLock()
lock = _lock


class PlanCache(Generic[P]):
    """The plans of one family of operators, by what chooses them; threads share it::

        plan = plans.get(key) or plans.make(key, lambda: ...)

    A hit is one look-up in a dictionary. A miss makes the plan under a lock that all families share, because a plan may
    be made of another family's. A full cache is emptied.

    Args:
        limit: plans to hold.
        on_clear: called when the plans are forgotten.

    Attributes:
        get: finds the plan of a key, or None.
    """

    def __init__(self, limit: int = MAX_PLANS, on_clear: Callable[[], None] | None = None) -> None:
        self._plans: dict[Hashable, P] = {}
        self._limit, self._on_clear = limit, on_clear
        self.get: Callable[[Hashable], P | None] = self._plans.get  # the dictionary's own: calls pay for nothing else

    def __len__(self) -> int:
        return len(self._plans)

    def make(self, key: Hashable, make: Callable[[], P]) -> P:
        """The plan of a key, made unless another thread was first."""
        with _lock:
            plan = self._plans.get(key)
            if plan is None:
                plan = make()
                if len(self._plans) >= self._limit:
                    self.clear()
                self._plans[key] = plan
        return plan

    def clear(self) -> None:
        """Forget all plans."""
        with _lock:
            self._plans.clear()
            if self._on_clear is not None:
                self._on_clear()


@cache
def target(device: int) -> Target:
    """The GPU behind a CUDA ordinal, as dispatch sees it."""
    properties = torch.cuda.get_device_properties(device)
    return target_for((properties.major, properties.minor), properties.multi_processor_count, properties.name)


def pdl(device: int) -> bool:
    """Whether kernels of a device may begin before their predecessor ends (programmatic dependent launch)."""
    return target(device).arch == "sm_90a"


def m_bucket(m: int) -> int:
    """Rows up to which one launch plan serves: 1, 8, 16, 32, 64, then four steps an octave.

    Every m in a bucket runs the same kernel, so that nearby batch sizes neither build nor choose anew.
    """
    return bucket(max(1, m))


def load(source: KernelSource, device: int) -> jit.Kernel:
    """Build a kernel unless it is cached, and load it."""
    return jit.load(jit.build(source), source, device)


@dataclass(frozen=True)
class Grid:
    """CTAs of a launch as data: ``one``, those of one row, again along x for every further ``rows`` rows."""

    rows: int
    one: tuple[int, int, int]

    def __call__(self, m: int) -> tuple[int, int, int]:
        """CTAs for m rows."""
        x, y, z = self.one
        return (-(-m // self.rows) * x, y, z)


@dataclass(frozen=True)
class LaunchSpec:
    """A kernel's text, and how it is launched: a launch plan before anything is built.

    Attributes:
        source: the text.
        grid: CTAs for a number of rows; a host launcher computes its own and ignores them.
        tail: arguments that follow a call's, before the workspace (kernels with a host launcher).
        needs_workspace: whether a launch must be given device memory.
        pdl: whether the kernel may begin before its predecessor on the stream ends.
        min_rows: rows that the operands of a linear layer must have at least.
    """

    source: KernelSource
    grid: Callable[[int], tuple[int, int, int]]
    tail: tuple[int, ...] = ()
    needs_workspace: bool = False
    pdl: bool = False
    min_rows: int = 1

    def load(self, device: int) -> LaunchPlan:
        """The plan on a device, its kernel built unless it is in the cache."""
        return LaunchPlan(
            load(self.source, device),
            self.grid,
            tail=self.tail,
            needs_workspace=self.needs_workspace,
            pdl=self.pdl,
            min_rows=self.min_rows,
        )


class LaunchPlan:
    """A loaded kernel, and the parts of its launch that are the same for every call.

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
        self._kernel, self._grid, self._tail, self._pdl = kernel, grid, tail, pdl
        self.needs_workspace = needs_workspace
        self.min_rows = min_rows

    @property
    def name(self) -> str:
        """Procedural name of the kernel."""
        return self._kernel.name

    def workspace_bytes(self, args: tuple[int | float, ...]) -> int:
        """Device memory that a launch with these arguments needs."""
        return self._kernel.query(QUERY_WORKSPACE_BYTES, (*args, *self._tail, 0))

    def native(self) -> native.Launch | None:
        """The plan for C++; None where a launch needs a workspace, or a grid that C++ does not compute."""
        grid, kernel = self._grid, self._kernel
        if self.needs_workspace or not isinstance(grid, Grid) or grid.one[2] != 1:
            return None
        shape = (grid.rows, *grid.one[:2], kernel.block, kernel.smem_bytes, self._pdl)
        return native.Launch(kernel.function, kernel.host_launcher, *shape, self._tail)

    def launch(self, m: int, args: tuple[int | float, ...], stream: int, workspace: int = 0) -> None:
        """Queue the kernel for m rows."""
        if self._tail:
            args = (*args, *self._tail, workspace)
        self._kernel.launch(self._grid(m), args, stream, self._pdl)

    def run(self, m: int, args: tuple[int | float, ...], device: int) -> None:
        """Queue the kernel for m rows on the device's current stream, with a workspace where it needs one."""
        if self.needs_workspace:
            memory = torch.empty(self.workspace_bytes(args), dtype=torch.uint8, device=torch.device("cuda", device))
            self.launch(m, args, current_stream(device), memory.data_ptr())
        else:
            self.launch(m, args, current_stream(device))


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
    return few, w8a8_decode.for_shape(few, gpu.arch, m, n, k, gpu.sm_count)


def few_tokens_plan(few: W8A8Problem, tile: W8A8Tile, n: int, device: int) -> LaunchPlan:
    """Its plan."""
    arch = target(device).arch
    kernel = load(emit_w8a8_decode(few, tile, arch), device)
    return LaunchPlan(kernel, Grid(tile.tokens, w8a8_decode.grid(tile, 1, n)), pdl=arch == "sm_90a")


def weight_only_plan(problem: GemmProblem, m: int, n: int, k: int, device: int, *, pdl: bool = True) -> LaunchPlan:
    """Plan of a GEMM with 16-bit activations and int8 weights; ``pdl`` lets it begin before its predecessor ends."""
    return _planned(dispatch.select_weight_only(problem, m, n, k, target(device)), problem, n, device, pdl=pdl)


def _planned(choice: Choice, problem: GemmProblem, n: int, device: int, *, pdl: bool = True) -> LaunchPlan:
    gpu = target(device)
    kernel = load(dispatch.emit(choice, problem, gpu.arch), device)
    # Started early, the weight-only kernel took 1.7 to 2.4 times as long (14336×4096, M = 64).
    pdl = pdl and gpu.arch == "sm_90a" and choice.family != "weight_only"
    if choice.family != "cutlass":
        return LaunchPlan(kernel, Grid(dispatch.tile_rows(choice), dispatch.grid(choice, 1, n)), pdl=pdl)
    stream_k = choice.tile.schedule == "stream_k"
    return LaunchPlan(
        kernel,
        Grid(1, (1, 1, 1)),  # the host launcher computes its own
        tail=(gpu.sm_count, choice.swizzle, choice.raster, choice.splits),
        needs_workspace=stream_k,
        pdl=pdl and not stream_k,
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
        pool.submit(native.build)
        results = jit.build_many(sources.values(), progress=progress and sys.stderr.isatty())
    for result in results.values():
        if isinstance(result, Exception):
            raise result
