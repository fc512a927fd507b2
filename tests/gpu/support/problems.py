"""The int8 GEMMs that the GPU tests run, as data: whoever runs them can build every kernel first, in parallel.

Imports nothing but emitters: no torch, no CUDA.
"""

from __future__ import annotations

from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType
from qcut.emitters.gemm.problem import GemmProblem

DYNAMIC = Epilogue(row_scale="per_token", col_scale="per_channel", bias=True)
"""What w8a8_linear fuses: most tests use it, so that they share its kernels."""

STATIC = Epilogue(zero_point="per_tensor", col_scale="per_channel", bias=True)
"""What w8a8_static_linear fuses."""

GEMM_EPILOGUES = (
    DYNAMIC,
    Epilogue(row_scale="per_token", col_scale="per_channel"),
    Epilogue(DType.BF16, row_scale="per_token", col_scale="per_channel", bias=True),
    Epilogue(DType.F32, row_scale="per_token", col_scale="per_channel", bias=True),
    Epilogue(DType.F32),
    Epilogue(DType.S8),
    Epilogue(DType.S8, col_scale="per_channel"),
    Epilogue(row_scale="per_token", col_scale="per_channel", zero_point="per_token", bias=True),
    Epilogue(DType.S8, "per_token", "per_channel", "per_token", bias=True),
    Epilogue(row_scale="per_token", col_scale="per_channel", residual=True),
    Epilogue(row_scale="per_token", col_scale="per_channel", bias=True, activation=Activation.RELU),
    Epilogue(row_scale="per_token", col_scale="per_channel", bias=True, activation=Activation.GELU_ERF),
    Epilogue(row_scale="per_token", col_scale="per_channel", bias=True, activation=Activation.GELU_TANH),
    Epilogue(row_scale="per_token", col_scale="per_channel", bias=True, activation=Activation.SILU),
    Epilogue(DType.S8, "per_token", "per_channel", bias=True, activation=Activation.GELU_TANH),
    Epilogue(DType.BF16, "per_token", "per_channel", "per_token", True, Activation.SILU, residual=True),
)
"""What gemm_s8 is asked to fuse: every output type, and every part of an epilogue at least once."""

EPILOGUE_SHAPE = (129, 336, 272)
"""(M, N, K) of the epilogue tests: one row and a few columns more than a tile, K no multiple of one."""

GUARD_SHAPE = (129, 512, 272)
"""The same with outputs that fill whole 512-byte blocks of the allocator."""

ALIGNED_SHAPES = (
    (1, 256, 256),
    (15, 112, 112),
    (16, 128, 128),
    (17, 144, 144),
    (33, 16, 16),
    (127, 240, 2064),
    (129, 272, 1040),
    (257, 384, 128),
    (16, 1280, 5120),
    (1024, 1280, 1280),
    (500, 5120, 1024),
    (1000, 5120, 1024),
)
"""(M, N, K) around tile boundaries, one that invites split-K, and layers that take the large tiles."""

ODD_SHAPES = ((1, 1, 1), (2, 3, 5), (15, 17, 31), (17, 33, 65), (33, 127, 129), (129, 257, 100), (16, 50257, 37))
"""(M, N, K) that are multiples of nothing: the raw family's."""


LINEAR_SIZES = ((272, 336), (336, 272), (1280, 1280))
"""(K, N) of the layers that CUTLASS kernels serve; the others are odd, and the raw family's."""

LINEAR_EPILOGUES = (
    DYNAMIC,
    Epilogue(DType.BF16, row_scale="per_token", col_scale="per_channel", bias=True),
    STATIC,
)
MODEL_SIZES = ((256, 768), (256, 256), (256, 1024), (1024, 256))
"""(K, N) of gpt2-5m's layers."""

TOKENS = (1, 9, 17, 33, 129, 512)
"""M of the layer and model tests, one for every bucket of M that they reach."""


def gpu_test_problems() -> list[GemmProblem]:
    """Every distinct (types, epilogue) of the CUTLASS kernels the tests reach, each once."""
    return [GemmProblem(epilogue=e) for e in (*GEMM_EPILOGUES, STATIC)]


def gpu_test_calls() -> list[tuple[Epilogue, int, int, int]]:
    """The (epilogue, M, N, K) of the tests' products: what tiles are chosen for."""
    calls = [(e, *shape) for e in GEMM_EPILOGUES for shape in (EPILOGUE_SHAPE, GUARD_SHAPE)]
    calls += [(DYNAMIC, *shape) for shape in ALIGNED_SHAPES + ODD_SHAPES]
    calls.append((Epilogue(DType.F32), 17, 48, 131_056))
    sizes = LINEAR_SIZES + MODEL_SIZES
    calls += [(e, m, n, k) for e in LINEAR_EPILOGUES for k, n in sizes for m in TOKENS]
    return list(dict.fromkeys(calls))
