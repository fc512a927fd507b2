"""Kernels of every family, for each architecture the ones that its GPUs would run."""

from __future__ import annotations

from dataclasses import replace

from qcut.dispatch import codebook, gemm
from qcut.dispatch.attention import select_prompt_attention
from qcut.dispatch.gpus import target_named
from qcut.dispatch.heuristics import best_tile
from qcut.emitters.attention.append import AttentionAppend
from qcut.emitters.attention.append_tokens import AttentionAppendTokens
from qcut.emitters.attention.mma import AttentionMma
from qcut.emitters.attention.prompt_mma import PromptMma
from qcut.emitters.attention.scores import Scores
from qcut.emitters.attention.simt import AttentionDecode
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.family import Kernel
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.decoder import quantize
from qcut.emitters.decoder.accept import AcceptTokens
from qcut.emitters.decoder.activate import ActivateRows
from qcut.emitters.decoder.append import RotateAndAppend
from qcut.emitters.decoder.argmax import ArgmaxRows
from qcut.emitters.decoder.embed import EmbedRows
from qcut.emitters.decoder.embed_codebook import EmbedCodebook
from qcut.emitters.decoder.norm import NormRows
from qcut.emitters.families import (
    CODEBOOK_MMA,
    CODEBOOK_STREAM,
    CODEBOOK_STREAM_ROUNDS,
    CODEBOOK_STREAM_WGMMA,
    CODEBOOK_WGMMA,
    FP8_MMA,
    INT8_CUTLASS,
    INT8_DP4A,
    INT8_MMA,
    INT8_STREAM,
    INT8_WMMA,
    W8A16_MMA,
)
from qcut.emitters.gemm.problem import GemmProblem
from qcut.emitters.routing.linear_route import LinearRoute
from qcut.emitters.routing.route import RouteTokens
from qcut.emitters.routing.sort_routes import SortRoutes
from qcut.emitters.routing.sum_routes import SumRoutes
from qcut.emitters.stream.w8a8 import W8A8Problem

F16, BF16, F32, S8 = DType.F16, DType.BF16, DType.F32, DType.S8
_SCALED = Epilogue(F16, col_scale="per_channel", bias=True)
_TOKENS = replace(_SCALED, row_scale="per_token")
_GELU = replace(_SCALED, activation=Activation.GELU_TANH)


def attention(arch: str) -> list[KernelSource]:
    """Decode attention in both forms, in clusters where there are any, with and without the step's key and value."""
    simt = [AttentionDecode.for_shape(F32, F32, 128, 1, arch), AttentionDecode.for_shape(F16, S8, 64, 4, arch)]
    parts = [AttentionMma.for_shape(F16, F16, 128, 4, arch), AttentionMma.for_shape(BF16, S8, 64, 1, arch)]
    if architecture(arch).clusters:
        parts += [AttentionMma.for_shape(F16, F16, 128, 4, arch, 8), AttentionMma.for_shape(BF16, BF16, 64, 1, arch, 2)]
    steps = [AttentionAppend(parts[0], True), AttentionAppend(parts[-1], False, settled=True)]
    return [*(desc.emit() for desc in (*simt, *parts)), *(desc.emit() for desc in steps)]


def prompts(arch: str) -> list[KernelSource]:
    """Attention of prompts: many tokens, few, and an int8 cache."""
    found = []
    for x, cache, head, length in (
        (F16, F16, 128, 4096),
        (BF16, BF16, 64, 32),
        (F16, S8, 128, 4096),
        (BF16, S8, 80, 9),
    ):
        shape = {"sequences": 1, "length": length, "kv_heads": 8, "group": 4, "context": 4096}
        kernel = select_prompt_attention(x, cache, head, target_named(arch), **shape)
        assert kernel is not None
        found.append(kernel.emit())
    return found


def rows(arch: str) -> list[KernelSource]:
    """The decoder's kernels around products: cache, norms, embeddings, activations, the next token, quantization."""
    appends = [RotateAndAppend(F16, F16, 128, "half", arch, many=True), RotateAndAppend(BF16, S8, 64, "none", arch)]
    norms = [
        NormRows.for_shape(F16, False, arch, 4096, residual=True, quantized=True),
        NormRows.for_shape(F32, True, arch, 1280, residual=False, quantized=False),
    ]
    return [
        *(desc.emit() for desc in appends),
        *(desc.emit() for desc in norms),
        EmbedRows(F16, S8, arch, places=True).emit(),
        EmbedCodebook(F16, F16, (4,), 128, arch, places=True).emit(),
        ActivateRows("silu_mul", F16, arch).emit(),
        ArgmaxRows(F16, arch, True).emit(),
        AcceptTokens(arch).emit(),
        quantize.QuantizePerToken.for_shape(F16, arch, 4096, 4096).emit(),
        quantize.QuantizePerToken.for_shape(F16, arch, 4096, 4096, halves=True).emit(),
        quantize.QuantizePerTensor.for_shape(F32, arch, 4096, 1280).emit(),
        quantize.Dequantize.for_shape(F16, arch, 4096, 4096).emit(),
        quantize.ColSum(arch).emit(),
    ]


def routing(arch: str) -> list[KernelSource]:
    """The kernels between a router and its experts."""
    routers = [
        RouteTokens(F16, "softmax", 4, False, arch),
        RouteTokens(F32, "sigmoid", 8, True, arch),
        RouteTokens(BF16, "logits", 32, True, arch),
    ]
    sorts = [SortRoutes.for_routes(routes, arch) for routes in (8, 300, 32768)]
    linear = []
    if architecture(arch).clusters:
        linear.append(LinearRoute(BF16, F32, F32, "softmax", True, 60, 2048, 2, arch, True))
    sums = (SumRoutes(F16, arch), SumRoutes(BF16, arch, True, False))
    return [desc.emit() for desc in (*routers, *linear, *sorts, *sums)]


def int8(arch: str) -> list[KernelSource]:
    """Products with int8 weights, of few tokens and of many."""
    gpu, problem = target_named(arch), GemmProblem(epilogue=_TOKENS)
    menu = INT8_MMA.menu(problem, arch)
    found = [
        INT8_MMA.emit(problem, menu[0], arch),
        INT8_MMA.emit(GemmProblem(epilogue=replace(_TOKENS, out=S8)), menu[-1], arch),
    ]
    halves = replace(_TOKENS, halves=True)
    found.append(INT8_MMA.emit(GemmProblem(epilogue=halves), menu[-1], arch))
    for kind in (INT8_WMMA, INT8_DP4A):
        tile = best_tile(kind, problem, 4096, 4096, 4096, gpu)
        assert tile is not None
        found.append(kind.emit(problem, tile, arch))
    for few, m, n, k in (
        (W8A8Problem("rows", F16, _TOKENS), 8, 4096, 4096),
        (W8A8Problem("rows", F16, _TOKENS, absmax=True), 1, 14336, 4096),
        (W8A8Problem("given", F16, replace(_TOKENS, activation=Activation.SILU)), 8, 4096, 14336),
        (W8A8Problem("none", F16, _TOKENS), 4, 1280, 5120),
        (W8A8Problem("floats", F16, _TOKENS), 1, 5120, 1280),
        (W8A8Problem("none", F16, replace(_TOKENS, out=S8, zero_point="per_token")), 16, 4096, 14336),
        (W8A8Problem("given", F16, _TOKENS), 32, 5120, 1280),
        (W8A8Problem("floats", F16, halves), 1, 14336, 4096),
        (W8A8Problem("given", F16, halves), 8, 5120, 1280),
    ):
        found.append(INT8_STREAM.emit(few, best_tile(INT8_STREAM, few, m, n, k, gpu), arch))
    for a, m, n, k in ((F16, 1, 14336, 4096), (F16, 16, 32000, 288), (BF16, 32, 4096, 14336)):
        half = GemmProblem(a=a, epilogue=_SCALED, alignment_k=8)
        found.append(gemm.emit(gemm.select_w8a16(half, m, n, k, gpu), half, arch))
    half = GemmProblem(a=F16, epilogue=_GELU, alignment_k=8)
    tiles = W8A16_MMA.menu(half, arch)
    return [*found, *(W8A16_MMA.emit(half, tile, arch) for tile in (tiles[0], tiles[-1]))]


def float8(arch: str) -> list[KernelSource]:
    """Tokens of e4m3: their quantization, products of few, and of many where there are products of e4m3."""
    gpu, epilogue = target_named(arch), replace(_TOKENS, out=BF16)
    problem = GemmProblem(DType.E4M3, DType.E4M3, epilogue)
    floats, few = gemm.select_fp8(problem, 16, 4096, 4096, gpu)
    found = [gemm.emit(few, floats, arch)]
    found += [quantize.QuantizePerToken.for_shape(x, arch, 8, 4096, q=F16).emit() for x in (F16, F32)]
    found.append(quantize.QuantizePerTensor.for_shape(BF16, arch, 8, 4096, q=F16).emit())
    if architecture(arch).e4m3:
        found.append(quantize.QuantizePerToken.for_shape(BF16, arch, 4096, 4096, q=DType.E4M3).emit())
        found.append(quantize.QuantizePerTensor.for_shape(F32, arch, 4096, 4096, q=DType.E4M3).emit())
        found += [FP8_MMA.emit(problem, tile, arch) for tile in FP8_MMA.menu(problem, arch)[::2]]
    return found


def codebooks(arch: str) -> list[KernelSource]:
    """Rotations and products with codebook weights."""
    gpu = target_named(arch)
    wide = CodebookProblem(BF16, 3, 4, Epilogue(BF16, col_scale="per_channel", bias=True, residual=True))
    half, integer = CodebookProblem(epilogue=_GELU), CodebookProblem(S8, 4, 1, _TOKENS)
    two, narrow = CodebookProblem(S8, 2, 2, _TOKENS), replace(half, slots=8)
    rotations = [
        *codebook.select_rotation("hadamard", F16, F16, 1, 4096, 128, 1, gpu),
        *codebook.select_rotation("hadamard", F16, S8, 64, 14336, 128, 2, gpu),
        *codebook.select_rotation("qr", BF16, S8, 8, 4096, 128, 1, gpu),
    ]
    found = [rotation.emit() for rotation in rotations]
    for problem, m, n, units in (
        (half, 1, 14336, 32),
        (replace(half, rotates=F16), 1, 4096, 32),
        (replace(integer, rotates=F16), 1, 4096, 32),
        (wide, 8, 1280, 10),
        (two, 16, 1280, 10),
        (narrow, 8, 1280, 10),
    ):
        found.append(CODEBOOK_STREAM.emit(problem, best_tile(CODEBOOK_STREAM, problem, m, n, 128 * units, gpu), arch))
    pairs, integer_pairs = replace(half, pairs=True), replace(integer, pairs=True)
    for problem, m, n, units in ((pairs, 8, 1280, 10), (integer_pairs, 1, 14336, 32)):
        found.append(CODEBOOK_STREAM.emit(problem, best_tile(CODEBOOK_STREAM, problem, m, n, 128 * units, gpu), arch))
    for problem, m, n, units in (
        *((half, 1, 4096, 112), (wide, 16, 4096, 32), (integer, 8, 14336, 112)),
        *((pairs, 8, 4096, 112), (integer_pairs, 16, 4096, 112), (narrow, 16, 4096, 112)),
    ):
        found.append(
            CODEBOOK_STREAM_ROUNDS.emit(
                problem, best_tile(CODEBOOK_STREAM_ROUNDS, problem, m, n, 128 * units, gpu), arch
            )
        )
    many = ((half, 64), (wide, 4096), (integer, 4096), (two, 4096), (pairs, 64), (integer_pairs, 4096), (narrow, 4096))
    for problem, m in many:
        found.append(CODEBOOK_MMA.emit(problem, best_tile(CODEBOOK_MMA, problem, m, 4096, 128, gpu), arch))
    if architecture(arch).wgmma:
        some = ((half, 64), (wide, 1024), (integer, 32), (two, 4096), (pairs, 512), (integer_pairs, 4096))
        for problem, m in (*some, (narrow, 64), (narrow, 1024)):
            found.append(codebook.emit(codebook.select(problem, m, 4096, 32, gpu), problem, arch))
        found.append(
            CODEBOOK_STREAM_WGMMA.emit(half, best_tile(CODEBOOK_STREAM_WGMMA, half, 16, 4096, 14336, gpu), arch)
        )
        found += [CODEBOOK_WGMMA.emit(p, CODEBOOK_WGMMA.menu(p, arch)[0], arch) for p in (half, integer)]
    return found


def cutlass(arch: str) -> list[KernelSource]:
    """The CUTLASS product that a large int8 layer takes."""
    problem = GemmProblem(epilogue=_TOKENS)
    tile = best_tile(INT8_CUTLASS, problem, 4096, 4096, 4096, target_named(arch))
    assert tile is not None
    return [INT8_CUTLASS.emit(problem, tile, arch)]


def gpt_oss(arch: str) -> list[KernelSource]:
    """Sinks, also with windows over rings, a clamped gate, and a bias of logits."""
    sinks, ring = Scores(sinks=True), Scores(windowed=True, ring=True, sinks=True)
    step = AttentionMma.for_shape(BF16, BF16, 64, 8, arch, scores=ring)
    found: list[Kernel] = [PromptMma.for_shape(BF16, BF16, 64, arch, scores=sinks), AttentionAppend(step, True)]
    found += [ActivateRows("clamped_silu_mul", BF16, arch), AttentionDecode.for_shape(F32, F32, 64, 8, arch, sinks)]
    if architecture(arch).clusters:
        found.append(LinearRoute(BF16, BF16, BF16, "logits", False, 128, 2880, 1, arch, True, BF16))
    return [desc.emit() for desc in found]


def drafted(arch: str) -> list[KernelSource]:
    """Attention of several tokens of each sequence: of all of a sequence's in a CTA, and of one."""
    forms = [AttentionMma.for_shape(BF16, S8, 64, 1, arch), AttentionMma.for_shape(F16, F16, 128, 8, arch)]
    return [AttentionAppendTokens(AttentionAppend(form, True), 4).emit() for form in forms]


def raw_kernels(arch: str) -> list[KernelSource]:
    """All but CUTLASS's, each once."""
    found = [*attention(arch), *prompts(arch), *rows(arch), *int8(arch), *codebooks(arch), *routing(arch)]
    found += gpt_oss(arch)
    found += float8(arch)
    found += drafted(arch)
    return list({source.name: source for source in found}.values())
