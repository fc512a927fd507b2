"""All families of products, each under the name that its kernels carry."""

from __future__ import annotations

from typing import Any

from qcut.emitters.codebook.cutlass import CODEBOOK_CUTLASS
from qcut.emitters.codebook.mma import CODEBOOK_MMA
from qcut.emitters.codebook.wgmma import CODEBOOK_WGMMA
from qcut.emitters.core.family import Family
from qcut.emitters.core.source import EmitError
from qcut.emitters.gemm.cutlass.fp8 import FP8_CUTLASS
from qcut.emitters.gemm.cutlass.gemm import INT8_CUTLASS
from qcut.emitters.gemm.cutlass.w8a16 import W8A16_CUTLASS
from qcut.emitters.gemm.dp4a import INT8_DP4A
from qcut.emitters.gemm.fp8 import FP8_MMA
from qcut.emitters.gemm.int8_wgmma import INT8_WGMMA
from qcut.emitters.gemm.mma import INT8_MMA
from qcut.emitters.gemm.w8a16 import W8A16_MMA
from qcut.emitters.gemm.w8a16_wgmma import W8A16_WGMMA
from qcut.emitters.gemm.wmma import INT8_WMMA
from qcut.emitters.stream.codebook import CODEBOOK_STREAM
from qcut.emitters.stream.codebook_experts import CODEBOOK_EXPERTS
from qcut.emitters.stream.codebook_rounds import CODEBOOK_STREAM_ROUNDS
from qcut.emitters.stream.codebook_wgmma import CODEBOOK_STREAM_WGMMA
from qcut.emitters.stream.int8_experts import INT8_EXPERTS
from qcut.emitters.stream.w8a8 import INT8_STREAM
from qcut.emitters.stream.w8a16 import W8A16_STREAM

__all__ = [
    "CODEBOOK_CUTLASS", "CODEBOOK_EXPERTS", "CODEBOOK_MMA", "CODEBOOK_STREAM", "CODEBOOK_STREAM_ROUNDS",
    "CODEBOOK_STREAM_WGMMA", "CODEBOOK_WGMMA", "FP8_CUTLASS", "FP8_MMA", "INT8_CUTLASS", "INT8_DP4A", "INT8_EXPERTS",
    "INT8_MMA", "INT8_STREAM", "INT8_WGMMA", "INT8_WMMA", "W8A16_CUTLASS", "W8A16_MMA", "W8A16_STREAM", "W8A16_WGMMA",
]  # fmt: skip

_TUNED: tuple[Family[Any, Any], ...] = (INT8_CUTLASS, INT8_MMA, INT8_WMMA, INT8_DP4A)
_OTHERS: tuple[Family[Any, Any], ...] = (
    INT8_STREAM,
    INT8_EXPERTS,
    INT8_WGMMA,
    W8A16_MMA,
    W8A16_STREAM,
    W8A16_WGMMA,
    W8A16_CUTLASS,
    FP8_MMA,
    FP8_CUTLASS,
    CODEBOOK_MMA,
    CODEBOOK_STREAM,
    CODEBOOK_EXPERTS,
    CODEBOOK_STREAM_ROUNDS,
    CODEBOOK_STREAM_WGMMA,
    CODEBOOK_WGMMA,
    CODEBOOK_CUTLASS,
)
_BY_NAME = {kind.name: kind for kind in (*_TUNED, *_OTHERS)}
FAMILIES = tuple(kind.name for kind in _TUNED)
"""Names of the int8 families that compete for a GEMM of many tokens, the usually faster first."""
ALL_FAMILIES = tuple(_BY_NAME)
"""Names of all families of products."""
CUTLASS_FAMILIES = (INT8_CUTLASS.name, W8A16_CUTLASS.name, FP8_CUTLASS.name, CODEBOOK_CUTLASS.name)
"""Names of the families that need nvcc and g++; a launch of theirs takes the arguments of CUTLASS's launchers too."""
TUNED_FAMILIES = (*FAMILIES, W8A16_CUTLASS.name)
"""Names of the families with tables of measured tiles."""
SPELLINGS = {"cutlass": "int8_cutlass", "mma": "int8_mma", "wmma": "int8_wmma", "simt": "int8_dp4a"}
"""Names of `FAMILIES` on command lines and in older tables of tuned kernels."""


def family(name: str) -> Family[Any, Any]:
    """Return the family of a name, or of the name's spelling on command lines.

    Raises:
        EmitError: there is none.
    """
    kind = _BY_NAME.get(SPELLINGS.get(name, name))
    if kind is None:
        raise EmitError(f"family {name!r} does not exist; there are {', '.join(ALL_FAMILIES)}")
    return kind
