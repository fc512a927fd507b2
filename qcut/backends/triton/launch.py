"""Triton itself: whether it is there, what it runs on, and the launch of a kernel in the fastest of its tiles."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from qcut import __version__
from qcut.common.locks import Lock
from qcut.errors import UnsupportedError
from qcut.jit.device import capture_tolerated
from qcut.numerics.codebook.constants import outside_capture

_FLUSH_BYTES = 1 << 27
_REPEATS = 5
_CHOICE = "tile"

T = TypeVar("T")
_choices: dict[Hashable, Any] = {}
_lock = Lock()


def required() -> Any:
    """Import triton.

    Raises:
        UnsupportedError: triton is missing or does not load.
    """
    try:
        return importlib.import_module("triton")
    except Exception as error:  # a broken driver library raises what it likes
        raise UnsupportedError(
            f"the Triton back end needs triton, which does not load ({error}): pip install triton, in the version that "
            "this build of torch names"
        ) from error


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU: the variable TRITON_INTERPRET says so."""
    return bool(required().knobs.runtime.interpret)


def require_device(device: torch.device) -> None:
    """Check that kernels run on a device.

    Raises:
        UnsupportedError: Triton has no kernels there.
    """
    if device.type != "cuda" and not interpreted():
        raise UnsupportedError(
            f"the Triton back end runs on GPUs, and tensors are on {device}; on the CPU it needs Triton's "
            "interpreter: TRITON_INTERPRET=1 in the environment"
        )


def has_ptx(device: torch.device) -> bool:
    """Whether a device takes PTX instructions, which kernels have where Triton's language has none as fast."""
    return device.type == "cuda" and torch.version.hip is None and not interpreted()


def has_boxes(x: Tensor) -> bool:
    """Whether a GPU loads tiles of a matrix with unit column stride by tensor descriptors."""
    if not has_ptx(x.device) or torch.cuda.get_device_capability(x.device)[0] < 9:
        return False
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0


def box(x: Tensor, tile: tuple[int, int]) -> Any:
    """A tensor descriptor that loads tiles of a matrix."""
    descriptors = importlib.import_module("triton.tools.tensor_descriptor")
    return descriptors.TensorDescriptor(x, list(x.shape), [x.stride(0), 1], list(tile))


@contextlib.contextmanager
def on(device: torch.device) -> Iterator[None]:
    """Make a device the current one, on which Triton launches, and let it load kernels while a graph is captured."""
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            if device.index != torch.cuda.current_device():
                stack.enter_context(torch.cuda.device(device))
            if has_ptx(device) and is_capturing(device):
                stack.enter_context(capture_tolerated())
        yield


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched on the device now becomes part of a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def finish(
    sums: Tensor,
    y: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor,
    colsum: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    zero_point: int,
    activation: str,
) -> None:
    """Add parts of sums ``[parts, M, N]`` and do what follows them, into y ``[M, N]``."""
    from qcut.backends.triton.kernels import epilogue

    parts, m, n = sums.shape
    epilogue.finish[(-(-n // 1024), m)](
        sums,
        y,
        row_scale,
        col_scale,
        colsum,
        bias,
        residual,
        m,
        n,
        zero_point,
        PARTS=parts,
        ACTIVATION=activation,
        HAS_ROW_SCALE=row_scale is not None,
        HAS_COLSUM=colsum is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        BN=1024,
        enable_fp_fusion=False,
    )


def bucket(m: int) -> int:
    """The most rows for which the tile of m rows is kept: a power of two."""
    return 1 << (m - 1).bit_length()


def launch_best(key: Hashable, tiles: Sequence[T], launch: Callable[[T], None], device: torch.device) -> None:
    """Launch a kernel in the fastest of its tiles, measured at the first call and kept in Triton's cache.

    A tile that a GPU cannot take, for its shared memory above all, is passed over. While a CUDA graph is captured,
    tiles are measured on a stream that is no part of the graph; times do not depend on the operands' values. HIP
    measures nothing then: a call without a tile takes the first that works, and keeps none.

    Args:
        key: all that decides which tile is fastest on a GPU, of values that print alike in every process.
        tiles: to choose from, the likeliest first.
        launch: launches the kernel in a tile; calls may be repeated.
        device: of the launch.

    Raises:
        UnsupportedError: the GPU takes no tile.
    """
    tile = _choices.get((key, device))
    if tile is not None:
        launch(tile)
        return
    if device.type != "cuda" or (is_capturing(device) and not has_ptx(device)):
        for tile in tiles:
            if _works(launch, tile):
                return
        raise _no_tile(key)
    with _lock, outside_capture(device):
        tile = _choices.get((key, device))
        if tile is None:
            tile = _kept(key, tiles, device)
            if tile is None or not _works(launch, tile):
                tile = _fastest(key, tiles, launch, device)
                _keep(key, tiles, device, tile)
            _choices[key, device] = tile
    launch(tile)


def _fastest(key: Hashable, tiles: Sequence[T], launch: Callable[[T], None], device: torch.device) -> T:
    working = [tile for tile in tiles if _works(launch, tile)]
    if not working:
        raise _no_tile(key)
    if len(working) == 1:
        return working[0]
    # Weights that lie in the cache from the last launch would favour tiles that are slow on memory.
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for tile in working:
        best = float("inf")
        for _ in range(_REPEATS):
            flush.zero_()
            start.record()
            launch(tile)
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end))
        times.append(best)
    return working[times.index(min(times))]


def _store(key: Hashable, tiles: Sequence[T], device: torch.device) -> Any:
    """The entry of Triton's cache that keeps a choice, for GPUs of the device's name."""
    triton = required()
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    facts = repr((__version__, triton.__version__, gpu, key, list(tiles)))
    return triton.runtime.cache.get_cache_manager(hashlib.sha256(facts.encode()).hexdigest())


def _kept(key: Hashable, tiles: Sequence[T], device: torch.device) -> T | None:
    """The tile that another process has measured to be the fastest; None if none has."""
    try:
        path = _store(key, tiles, device).get_file(_CHOICE)
        number = -1 if path is None else int(Path(path).read_bytes()[:8])
    except (OSError, ValueError):
        return None
    return tiles[number] if 0 <= number < len(tiles) else None


def _keep(key: Hashable, tiles: Sequence[T], device: torch.device, tile: T) -> None:
    with contextlib.suppress(OSError):  # a cache that cannot be written: the next process measures again
        _store(key, tiles, device).put(str(tiles.index(tile)), _CHOICE, binary=False)


def _works(launch: Callable[[T], None], tile: T) -> bool:
    triton = required()
    try:
        launch(tile)
    except (triton.runtime.errors.OutOfResources, triton.compiler.CompilationError):
        return False
    return True


def _no_tile(key: Hashable) -> UnsupportedError:
    return UnsupportedError(f"the Triton back end: no tile of the kernel {key} fits this GPU")
