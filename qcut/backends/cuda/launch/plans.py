"""Launch plans: kernels that are built, loaded and ready to launch, kept by the sizes and types that chose them.

A family of operators describes a kernel as a `LaunchSpec`, loads the spec on a device, and keeps the `LaunchPlan` in a
`PlanCache`, so that the calls that follow neither choose nor build.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from qcut import jit
from qcut.backends.cuda.launch import native
from qcut.backends.cuda.launch.streams import current_stream
from qcut.common.locks import Lock, once
from qcut.dispatch.buckets import m_bucket as m_bucket
from qcut.dispatch.gpus import Target, target_for
from qcut.dispatch.machines import Rates
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.family import Grid
from qcut.emitters.core.source import DType, EmitError, KernelSource
from qcut.errors import BuildError, LaunchError, UnsupportedError
from qcut.jit import packs, waiting
from qcut.jit.device import rates
from qcut.jit.launch import QUERY_WORKSPACE_BYTES

DTYPES = {
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
    torch.float32: DType.F32,
    torch.int8: DType.S8,
    torch.uint8: DType.U4,
    torch.int16: DType.S16,
    torch.int32: DType.S32,
}
"""The emitters' name of each torch dtype."""

MAX_PLANS = 1 << 16
"""Most plans in a `PlanCache`. Keys hold addresses, so loading model after model makes ever more plans."""

_UNLIMITED = 2**31 - 1

P = TypeVar("P")
_lock = Lock()
_caches: weakref.WeakSet[PlanCache[Any]] = weakref.WeakSet()
_watchers: list[list[str]] = []
_generation = 0
_log = logging.getLogger("qcut")


class _Thread(threading.local):
    """State of each thread.

    Attributes:
        fallbacks: number of launches of fallback kernels that plans of this thread were made of.
        recaptures: whether graphs that this thread captures are captured again when better kernels are built.
    """

    fallbacks = 0
    recaptures = False


_thread = _Thread()


@contextmanager
def describing() -> Iterator[None]:
    """Around what chooses and describes kernels for a caller of qcut.

    Raises:
        UnsupportedError: in place of an `EmitError`, which names a kernel that the caller does not know.
    """
    try:
        yield
    except EmitError as error:
        raise UnsupportedError(f"this GPU has no kernel of qcut's for the call: {error}") from error


class PlanCache(dict[Hashable, P]):
    """The plans of one family of operators, by the arguments that choose them; threads may share a cache::

        @PlanCache
        def plans(...) -> LaunchPlan: ...  # makes a plan

        plan = plans[key]  # of a tuple of arguments

    A hit is one look-up in a dictionary. A miss makes the plan under a lock that all families share, because a plan may
    be made of another family's. A full cache is emptied. A plan with a fallback kernel is found by `make` only, which
    passes over it under the capture of a CUDA graph.

    Args:
        maker: makes the plan of arguments; None for a cache whose callers pass what makes a plan to `make`.
        limit: most plans to hold.
        on_clear: called when the plans are forgotten.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]  # sets hold caches, not contents

    def __init__(
        self,
        maker: Callable[..., P] | None = None,
        *,
        limit: int = MAX_PLANS,
        on_clear: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._fallbacks: dict[Hashable, P] = {}
        self.maker, self._limit, self._on_clear = maker, limit, on_clear
        _caches.add(self)

    def __missing__(self, key: tuple[Any, ...]) -> P:
        assert self.maker is not None
        return self.make(key, partial(self.maker, *key))

    def make(self, key: Hashable, make: Callable[[], P]) -> P:
        """The plan of a key, made by ``make`` unless another thread has made it.

        Raises:
            UnsupportedError: no kernel takes what the key describes.
        """
        with _lock:
            plan = self.get(key)
            if plan is None and not _captured_for_good():
                plan = self._fallbacks.get(key)
                _thread.fallbacks += plan is not None
            if plan is None:
                if len(self) + len(self._fallbacks) >= self._limit:
                    self.clear()
                asked, fallbacks = waiting.asked(), _thread.fallbacks
                with describing():
                    plan = make()
                if asked == waiting.asked():
                    (self if fallbacks == _thread.fallbacks else self._fallbacks)[key] = plan
        return plan

    def clear(self) -> None:
        """Forget all plans."""
        with _lock:
            super().clear()
            self._fallbacks.clear()
            if self._on_clear is not None:
                self._on_clear()


@once
def target(device: int) -> Target:
    """Dispatch's description of the GPU with a CUDA ordinal, with ahead-of-time kernels if a pack brings them."""
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    gpu = target_for(capability, properties.multi_processor_count, properties.name, lambda: Rates.of(**rates(device)))
    return replace(gpu, ahead_of_time=packs.installed(gpu.arch) is not None)


def has_pdl(gpu: Target) -> bool:
    """Whether kernels of a GPU may begin before their predecessor ends (programmatic dependent launch)."""
    return architecture(gpu.arch).pdl


def pdl(device: int) -> bool:
    """`has_pdl` of the GPU with a CUDA ordinal."""
    return has_pdl(target(device))


def generation() -> int:
    """How often plans have been forgotten: a CUDA graph of an earlier generation launches the kernels of then."""
    return _generation


def forget_plans() -> None:
    """Forget the plans of all families: the next calls choose and load their kernels anew."""
    global _generation
    with _lock:
        _generation += 1
        for plans in list(_caches):
            plans.clear()


@contextmanager
def recapturing() -> Iterator[None]:
    """Let this thread capture fallback kernels, for a caller that captures again when `generation` has changed."""
    before, _thread.recaptures = _thread.recaptures, True
    try:
        yield
    finally:
        _thread.recaptures = before


def _captured_for_good() -> bool:
    """Whether a CUDA graph keeps, for as long as it lives, the kernels that this thread launches now."""
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return capturing and not _thread.recaptures and waiting.build_mode() != "fallback"


jit.background.builder.listen(forget_plans)


@contextmanager
def watched_loads() -> Iterator[list[str]]:
    """Note the names of the kernels that plans load within a block, in any thread."""
    names: list[str] = []
    _watchers.append(names)
    try:
        yield names
    finally:
        _watchers.remove(names)


def load(source: KernelSource, device: int) -> jit.Kernel:
    """Build a kernel unless it is cached, and load it."""
    for names in _watchers:
        names.append(source.name)
    return jit.load(jit.build(source), source, device)


@dataclass(frozen=True)
class LaunchSpec:
    """A kernel's text and the way to launch it: a launch plan before anything is built.

    Attributes:
        source: the kernel's text.
        grid: returns the CTAs for a number of rows; a host launcher ignores this grid and computes its own.
        tail: arguments after those of a call; kernels with a host launcher take the workspace after them.
        needs_workspace: whether a launch must be given device memory.
        pdl: whether the kernel may begin before its predecessor on the stream ends.
        row_multiple: the rows of a linear layer's operands must be a multiple of this number.
        fallback: describes the launch of a kernel that NVRTC builds, for use while nvcc builds this one in the
            background. Its integers are bitwise the same; it may add floats in another order.

    Raises:
        LaunchError: ``pdl`` for a kernel that does not wait for its predecessor.
    """

    source: KernelSource
    grid: Callable[[int], tuple[int, int, int]]
    tail: tuple[int, ...] = ()
    needs_workspace: bool = False
    pdl: bool = False
    row_multiple: int = 1
    fallback: Callable[[], LaunchSpec] | None = None

    def __post_init__(self) -> None:
        if self.pdl and not self.source.waits:
            raise LaunchError(f"kernel {self.source.name}: never waits for its predecessor, and cannot start before")

    def load(self, device: int) -> LaunchPlan:
        """Load the kernel on a device, built unless it is in the cache, and return its plan.

        The plan may be the fallback's until the kernel has been built. Under the capture of a CUDA graph the call waits
        for the kernel, unless it cannot be built.
        """
        if self.fallback is not None and waiting.build_mode() != "wait":
            found = jit.require([self.source], wait=False, first=True)
            if not found:  # its build has failed
                return self.fallback().load(device)
            if None in found.values() and not (_captured_for_good() and self._built()):
                _thread.fallbacks += 1
                plan = self.fallback().load(device)
                plan.is_fallback = True
                return plan
        return LaunchPlan(waiting.unbuilt_kernel(self.source, device) or load(self.source, device), self)

    def _built(self) -> bool:
        """Build the kernel now, or wait for the background process, which warns of a failure."""
        _log.warning(
            "qcut: a CUDA graph is being captured: waiting for nvcc to build %s (%s=fallback captures a slower kernel)",
            self.source.name,
            waiting.VARIABLE,
        )
        with suppress(BuildError):
            jit.require([self.source])
            return True
        return False


class LaunchPlan:
    """A loaded kernel, and the parts of its launch that are the same for every call.

    Attributes:
        row_multiple: the rows of a linear layer's operands must be a multiple of this number.
        needs_workspace: whether `launch` must be given device memory.
        is_fallback: whether a better kernel is being built. C++ launches no such plan, since it does not know captures.
    """

    __slots__ = ("_grid", "_hosted", "_kernel", "_pdl", "_tail", "is_fallback", "needs_workspace", "row_multiple")

    def __init__(self, kernel: jit.Kernel, spec: LaunchSpec) -> None:
        self._kernel, self._grid, self._tail, self._pdl = kernel, spec.grid, spec.tail, spec.pdl
        self._hosted = bool(spec.tail) and kernel.host_launcher != 0
        self.needs_workspace, self.row_multiple = spec.needs_workspace, spec.row_multiple
        self.is_fallback = False

    @property
    def name(self) -> str:
        """Procedural name of the kernel."""
        return self._kernel.name

    def rows_for(self, m: int) -> int:
        """Rows that the operands of a linear layer have for m tokens: the next multiple of ``row_multiple``."""
        return -(-m // self.row_multiple) * self.row_multiple

    def workspace_bytes(self, args: tuple[int | float, ...]) -> int:
        """Bytes of device memory that a launch with these arguments needs."""
        return self._kernel.query(QUERY_WORKSPACE_BYTES, (*args, *self._tail, 0))

    def for_native(self) -> native.Launch | None:
        """The plan for C++; None for a fallback, and if a launch needs a workspace or a grid of another kind."""
        grid, kernel = self._grid, self._kernel
        if (
            self.is_fallback
            or self.needs_workspace
            or not isinstance(grid, Grid)
            or isinstance(kernel, waiting.UnbuiltKernel)
        ):
            return None
        shape = (grid.rows, *grid.one, _UNLIMITED if grid.most is None else grid.most)
        block = (kernel.block, kernel.smem_bytes, self._pdl)
        return native.Launch(kernel.function, kernel.host_launcher, *shape, *block, len(self._tail), self._tail)

    def launch(self, m: int, args: tuple[int | float, ...], stream: int, workspace: int = 0) -> None:
        """Queue the kernel for m rows."""
        if self._tail:
            args = (*args, *self._tail, workspace) if self._hosted else (*args, *self._tail)
        self._kernel.launch(self._grid(m), args, stream, self._pdl)

    def run(self, m: int, args: tuple[int | float, ...], device: int) -> None:
        """Queue the kernel for m rows on the device's current stream, with a workspace if needed."""
        if self.needs_workspace:
            memory = torch.empty(self.workspace_bytes(args), dtype=torch.uint8, device=torch.device("cuda", device))
            self.launch(m, args, current_stream(device), memory.data_ptr())
        else:
            self.launch(m, args, current_stream(device))


def hand_over(key: native.Key, plans: Sequence[LaunchPlan], k_padded: int = 0) -> None:
    """Let C++ serve the calls of a key from now on, if it is loaded and can launch the plans.

    Args:
        key: all that chose the plans, and that a call's checks read besides layouts of tensors.
        plans: launches of a call, in order, one or two.
        k_padded: columns of prepared tokens, of a rotation those of a pass.
    """
    launches = [launch for plan in plans if (launch := plan.for_native()) is not None]
    if len(launches) == len(plans) and (library := native.library(wait=False)) is not None:
        in_order = (native.Launch * 2)(*launches)
        library.insert(key, native.Plan(in_order, len(plans), plans[-1].row_multiple, k_padded))
