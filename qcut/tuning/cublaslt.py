"""cuBLASLt's int8 GEMM through ctypes, the baseline for int8 kernels.

``torch._int_mm`` takes cuBLASLt's first heuristic and writes int32. `Int8Matmul` takes the best of eight
heuristics and writes int8, which is the best that cuBLASLt can do.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch

from qcut.errors import QcutError

CUDA_R_32F, CUDA_R_8I = 0, 3
CUBLAS_COMPUTE_32I = 72
CUBLAS_OP_N, CUBLAS_OP_T = 0, 1
MATMUL_DESC_TRANSA, MATMUL_DESC_TRANSB = 3, 4
MATMUL_PREF_MAX_WORKSPACE_BYTES = 1
ALGO_CONFIG = {"id": 0, "tile": 1, "splitk": 2, "swizzle": 4, "stages": 6}
WORKSPACE_BYTES = 64 << 20


class CublasLtError(QcutError, RuntimeError):
    """A call of the library failed; the message names the call and its status."""


class _Algo(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64 * 8)]


class HeuristicResult(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t`` (cublasLt.h, CUDA 12 and 13): 96 bytes."""

    _fields_ = [
        ("algo", _Algo),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


def _load() -> ctypes.CDLL:
    soname = f"libcublasLt.so.{(torch.version.cuda or '13').split('.')[0]}"
    try:
        # torch has it loaded already: the soname finds that copy.
        return ctypes.CDLL(soname)
    except OSError:
        spec = importlib.util.find_spec("nvidia")
        for root in (spec.submodule_search_locations or []) if spec else []:
            for path in sorted(Path(root).rglob(soname)):
                return ctypes.CDLL(str(path))
        raise CublasLtError(f"{soname} was found neither by the loader nor in the nvidia packages") from None


def column_major(m: int, n: int, k: int, layouts: str) -> tuple[tuple[int, int], tuple[tuple[int, int], ...], bool]:
    """Translate a product with row- or column-major operands to cuBLAS's column-major terms.

    Returns:
        The operations on the left and right operands; (rows, columns) of left, right and result as column-major
        memory; whether B is the left operand.
    """
    a_row, b_row, d_row = (flag == "t" for flag in layouts)
    a, b = (k, m) if a_row else (m, k), (n, k) if b_row else (k, n)
    if d_row:
        operations = (CUBLAS_OP_N if b_row else CUBLAS_OP_T, CUBLAS_OP_N if a_row else CUBLAS_OP_T)
        return operations, (b, a, (n, m)), True
    operations = (CUBLAS_OP_T if a_row else CUBLAS_OP_N, CUBLAS_OP_T if b_row else CUBLAS_OP_N)
    return operations, (a, b, (m, n)), False


class Int8Matmul:
    """``D = clamp(rne(alpha * A B), -128, 127)``, A ``[M, K]``, B ``[K, N]``, D ``[M, N]``, int8 and contiguous.

    Compute type ``CUBLAS_COMPUTE_32I``, scale type float32, one scale for the whole tensor, nothing else fused.
    cuBLAS is column-major throughout: a row-major D is computed as D^T = B^T A^T.

    Args:
        m: rows of A and D.
        n: columns of B and D.
        k: columns of A, rows of B.
        requested: how many heuristic results to ask for.
        layouts: of A, B and D, ``t`` row-major and ``n`` column-major. The library documents int8 output for A
            row-major with B column-major (``tnt``, ``tnn``) and sizes that are multiples of 4.

    Raises:
        CublasLtError: the library is missing or has no algorithm for this problem.
    """

    _library: ctypes.CDLL | None = None
    _handle = ctypes.c_void_p()
    _workspace: torch.Tensor | None = None
    shape: tuple[int, int, int] | None = None

    def __init__(self, m: int, n: int, k: int, requested: int = 8, layouts: str = "tnt") -> None:
        cls = type(self)
        if cls._library is None:
            cls._library = _load()
            self._call("cublasLtCreate", ctypes.byref(cls._handle))
            cls._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        self.shape = (m, n, k)
        self.layouts = layouts
        operations, stored, self._swapped = column_major(m, n, k, layouts)
        self._desc = ctypes.c_void_p()
        self._call("cublasLtMatmulDescCreate", ctypes.byref(self._desc), CUBLAS_COMPUTE_32I, CUDA_R_32F)
        for attribute, operation in zip((MATMUL_DESC_TRANSA, MATMUL_DESC_TRANSB), operations, strict=True):
            value = ctypes.c_int32(operation)
            self._call("cublasLtMatmulDescSetAttribute", self._desc, attribute, ctypes.byref(value), ctypes.c_size_t(4))
        self._left, self._right, self._out = (self._layout(*size) for size in stored)
        self.algorithms = self._heuristics(requested)
        self._alpha, self._beta = ctypes.c_float(), ctypes.c_float(0.0)

    def _call(self, name: str, *args: object) -> None:
        status = getattr(self._library, name)(*args)
        if status != 0:
            raise CublasLtError(f"{name} returned status {status}{self._problem()}")

    def _problem(self) -> str:
        return " for M, N, K = {}, {}, {} and layouts {}".format(*self.shape, self.layouts) if self.shape else ""

    def _layout(self, rows: int, columns: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        self._call(
            "cublasLtMatrixLayoutCreate",
            ctypes.byref(layout),
            CUDA_R_8I,
            ctypes.c_uint64(rows),
            ctypes.c_uint64(columns),
            ctypes.c_int64(rows),
        )
        return layout

    def _heuristics(self, requested: int) -> list[HeuristicResult]:
        preference = ctypes.c_void_p()
        self._call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        limit = ctypes.c_uint64(WORKSPACE_BYTES)
        self._call(
            "cublasLtMatmulPreferenceSetAttribute",
            preference,
            MATMUL_PREF_MAX_WORKSPACE_BYTES,
            ctypes.byref(limit),
            ctypes.c_size_t(8),
        )
        results = (HeuristicResult * requested)()
        returned = ctypes.c_int()
        self._call(
            "cublasLtMatmulAlgoGetHeuristic",
            self._handle,
            self._desc,
            self._left,
            self._right,
            self._out,
            self._out,
            preference,
            requested,
            results,
            ctypes.byref(returned),
        )
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        usable = [results[i] for i in range(returned.value) if results[i].state == 0]
        if not usable:
            raise CublasLtError(f"no int8 algorithm{self._problem()}")
        return usable

    def run(self, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, alpha: float, algorithm: int) -> None:
        """Launch algorithm number ``algorithm`` on the current stream."""
        left, right = (b, a) if self._swapped else (a, b)
        workspace = type(self)._workspace
        if workspace is None:
            raise CublasLtError("no workspace: the library was never initialised")
        self._alpha.value = alpha
        self._call(
            "cublasLtMatmul",
            self._handle,
            self._desc,
            ctypes.byref(self._alpha),
            ctypes.c_void_p(left.data_ptr()),
            self._left,
            ctypes.c_void_p(right.data_ptr()),
            self._right,
            ctypes.byref(self._beta),
            ctypes.c_void_p(d.data_ptr()),
            self._out,
            ctypes.c_void_p(d.data_ptr()),
            self._out,
            ctypes.byref(self.algorithms[algorithm].algo),
            ctypes.c_void_p(workspace.data_ptr()),
            ctypes.c_size_t(WORKSPACE_BYTES),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )

    def describe(self, algorithm: int) -> str:
        """The algorithm's configuration, as cuBLASLt numbers it."""
        parts = []
        for label, attribute in ALGO_CONFIG.items():
            value, written = ctypes.c_uint32(), ctypes.c_size_t()
            arguments = (ctypes.byref(self.algorithms[algorithm].algo), attribute, ctypes.byref(value))
            self._call("cublasLtMatmulAlgoConfigGetAttribute", *arguments, ctypes.c_size_t(4), ctypes.byref(written))
            parts.append(f"{label}{value.value}")
        return "cublaslt_" + "_".join(parts)

    def best(self, time_us: Callable[[int], float]) -> int:
        """Number of the algorithm with the least ``time_us``; algorithms that cannot run are passed over."""
        timed = []
        for number in range(len(self.algorithms)):
            try:
                timed.append((time_us(number), number))
            except CublasLtError:
                continue
        if not timed:
            raise CublasLtError(f"no algorithm runs{self._problem()}")
        return min(timed)[1]
