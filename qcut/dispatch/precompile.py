"""The kernels that a first model is likely to need, for ``qcut precompile``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

from qcut.dispatch import codebook, gemm
from qcut.dispatch.gpus import target_named
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.families import (
    INT8_CUTLASS,
    INT8_DP4A,
    INT8_MMA,
    INT8_WMMA,
    W8A16_CUTLASS,
    W8A16_MMA,
    W8A16_WGMMA,
    family,
)
from qcut.emitters.gemm.problem import GemmProblem

LAYERS = (
    (3840, 1280, True, "none"),
    (1280, 1280, True, "none"),
    (5120, 1280, True, "gelu_tanh"),
    (1280, 5120, True, "none"),
    (4096, 4096, False, "none"),
    (1024, 4096, False, "none"),
    (14336, 4096, False, "none"),
    (4096, 14336, False, "none"),
)
"""N, K, bias and activation of the layers of GPT-2 Large and Llama 3 8B."""
_FEW_TOKENS = (8, 16, 32)
_CODEBOOK_TOKENS = (1, 8, 16, 64, 4096)
_GROUP = 128


def precompile_sources(arch: str) -> list[KernelSource]:
    """The kernels that a first model is likely to need on an architecture.

    The list holds every CUTLASS tile of the architecture's menu with the epilogues of `qcut.Linear` in float16 (dynamic
    W8A8 with a bias, without, and with GELU), the menu of ``int8_mma`` with the first of these epilogues, and the tiles
    of ``int8_wmma`` and ``int8_dp4a`` that the model prefers at 4096 cubed; W8A16's menus for prompts; and kernels that
    depend on sizes, W8A16 for few tokens and ``codebook4``, for the layers of GPT-2 Large and Llama 3 8B.
    """
    base = Epilogue(out=DType.F16, row_scale="per_token", col_scale="per_channel", bias=True)
    epilogues = (base, replace(base, bias=False), replace(base, activation=Activation.GELU_TANH))
    problems = [GemmProblem(epilogue=epilogue) for epilogue in epilogues]
    sources = [INT8_CUTLASS.emit(p, tile, arch) for p in problems for tile in INT8_CUTLASS.menu(p, arch)]
    sources += [INT8_MMA.emit(problems[0], tile, arch) for tile in INT8_MMA.menu(problems[0], arch)]
    gpu = target_named(arch)
    for name in (INT8_WMMA.name, INT8_DP4A.name):
        tile = gemm.best_tile(name, problems[0], 4096, 4096, 4096, gpu)
        sources.append(family(name).emit(problems[0], tile, arch))
    w8a16 = GemmProblem(a=DType.F16, epilogue=replace(base, row_scale="none"), alignment_k=8)
    sources += [W8A16_WGMMA.emit(w8a16, tile, arch) for tile in W8A16_WGMMA.menu(w8a16, arch)]
    for kind in (W8A16_MMA, W8A16_CUTLASS):
        sources += [kind.emit(w8a16, tile, arch) for tile in kind.menu(w8a16, arch)]
    few: dict[str, KernelSource] = {}
    for (n, k, bias, activation), m in product(LAYERS, _FEW_TOKENS):
        epilogue = replace(w8a16.epilogue, bias=bias, activation=Activation(activation))
        problem = replace(w8a16, epilogue=epilogue)
        source = gemm.emit(gemm.select_w8a16(problem, m, n, k, gpu), problem, arch)
        few[source.name] = source
    return [*sources, *few.values(), *codebook_sources(arch, LAYERS)]


def codebook_sources(arch: str, layers: Iterable[tuple[int, int, bool, str]]) -> list[KernelSource]:
    """The kernels of ``codebook4`` for layers on an architecture, in float16, with float16 and with int8 products.

    Kernels for one token, for a few, for some and for a prompt are listed, rotations included.

    Args:
        arch: real architecture.
        layers: N and K, multiples of 128, whether there is a bias, and the activation.
    """
    gpu = target_named(arch)
    sources: dict[str, KernelSource] = {}
    for (n, k, bias, activation), tokens, m in product(layers, (DType.F16, DType.S8), _CODEBOOK_TOKENS):
        problem = codebook.problem_of(tokens, 4, 1, DType.F16, bias, activation, False, 16)
        rotations = codebook.select_rotation("hadamard", DType.F16, tokens, m, k, _GROUP, 1, gpu)
        kernels = [codebook.emit_rotation(rotation) for rotation in rotations]
        kernels.append(codebook.emit(codebook.select(problem, m, n, k // 128, gpu), problem, arch))
        sources |= {source.name: source for source in kernels}
    return list(sources.values())
