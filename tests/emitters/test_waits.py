"""What kernels read before they wait for their predecessor, in machine code."""

from __future__ import annotations

from dataclasses import replace

from qcut.backends.cuda.gemm import Product
from qcut.backends.cuda.launch.plans import LaunchSpec
from qcut.backends.cuda.linear import linear_problem
from qcut.backends.cuda.quantize import per_tensor_spec, per_token_spec
from qcut.emitters.attention.append import AttentionAppend
from qcut.emitters.attention.append_tokens import AttentionAppendTokens
from qcut.emitters.attention.mma import AttentionMma
from qcut.emitters.attention.prompt_mma import PromptMma
from qcut.emitters.attention.prompt_wgmma import PromptWgmma
from qcut.emitters.attention.scores import Scores
from qcut.emitters.attention.simt import AttentionDecode
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.decoder.accept import AcceptTokens
from qcut.emitters.decoder.activate import ActivateRows
from qcut.emitters.decoder.append import RotateAndAppend
from qcut.emitters.decoder.argmax import ArgmaxRows
from qcut.emitters.decoder.embed import EmbedRows
from qcut.emitters.decoder.embed_codebook import EmbedCodebook
from qcut.emitters.families import INT8_MMA, INT8_STREAM, W8A16_STREAM
from qcut.emitters.routing.linear_route import LinearRoute
from qcut.emitters.routing.route import RouteTokens
from qcut.emitters.routing.sort_routes import SortRoutes
from qcut.emitters.routing.sum_routes import SumRoutes
from qcut.emitters.stream.w8a8 import W8A8Tile
from qcut.emitters.stream.w8a16 import W8A16Tile
from tests.emitters.conformance.gemm import INT8, SMALL
from tests.emitters.conformance.stream import NONE_EXPERTS, ROWS_EXPERTS, W8A16_EXPERTS
from tests.support.binaries import build, listing
from tests.support.fakes.launches import H200

ARCH, F16 = H200.arch, DType.F16
SINKS = Scores(sinks=True)
WAIT, LAUNCH = "ACQBULK", "PREEXIT"  # griddepcontrol.wait and .launch_dependents
READS = ("LDG", "LD.", "UTMALDG", "UBLKCP", "ATOM", "RED.")


def reads_early(cubin: bytes) -> list[str]:
    """Instructions before the first wait that read or copy global memory."""
    names = listing(cubin)
    assert WAIT in names
    return [name for name in names[: names.index(WAIT)] if name.startswith(READS)]


def stream(tokens: str) -> LaunchSpec:
    spec = Product(linear_problem(F16, 256, 256, True, "none", "w8a8"), 1, 256, 256).stream_spec(tokens, H200)
    assert spec is not None
    return spec


def routings() -> list[KernelSource]:
    """Kernels with results that a kernel two launches later may read before it waits."""
    routers = (RouteTokens(F16, "softmax", 4, by_score, ARCH) for by_score in (False, True))
    sorts = (SortRoutes.for_routes(routes, ARCH) for routes in (8, 300))
    return [desc.emit() for desc in (*routers, linear_route(False), *sorts, SumRoutes(F16, ARCH))]


def linear_route(early_read: bool) -> LinearRoute:
    return LinearRoute(F16, F16, F16, "softmax", False, 128, 2048, 1, ARCH, early_read)


def unpromised() -> list[KernelSource]:
    """Kernels that begin early whatever their caller promises."""
    attention = AttentionMma.for_shape(F16, F16, 64, 2, ARCH, 4)
    sunk = replace(attention, scores=SINKS)
    return [
        per_token_spec(F16, 1, 256, H200, aligned=True).source,
        per_tensor_spec(F16, 256, H200, aligned=True).source,
        stream("none").source,
        INT8_MMA.emit(replace(INT8, device_m=True), SMALL, ARCH),
        *(ActivateRows(kind, F16, ARCH, True).emit() for kind in ("silu_mul", "clamped_silu_mul")),
        RotateAndAppend(F16, F16, 64, "half", ARCH, False, True).emit(),
        ArgmaxRows(F16, ARCH, True).emit(),
        AcceptTokens(ARCH).emit(),
        attention.emit(),
        *(AttentionAppend(attention, True, norms).emit() for norms in (False, True)),
        *(kind.emit() for kind in (sunk, AttentionAppend(sunk, True))),
        *(AttentionAppendTokens(AttentionAppend(form, True, True), 4).emit() for form in (attention, sunk)),
        *(kind.for_shape(F16, F16, 64, ARCH, scores=SINKS).emit() for kind in (PromptMma, PromptWgmma)),
        AttentionDecode.for_shape(F16, F16, 64, 2, ARCH, SINKS).emit(),
        LinearRoute(F16, F16, F16, "logits", False, 128, 2048, 1, ARCH, False, F16).emit(),
        PromptMma.for_shape(F16, DType.S8, 64, ARCH).emit(),
        *(PromptWgmma.for_shape(F16, cache, 128, ARCH).emit() for cache in (F16, DType.S8)),
        EmbedRows(F16, DType.S8, ARCH, True, True).emit(),
        EmbedCodebook(F16, F16, (4,), 128, ARCH, places=True).emit(),
        *routings(),
    ]


def test_kernels_read_nothing_before_they_wait() -> None:
    sources = unpromised()
    for source, binary in zip(sources, build(*sources), strict=True):
        assert source.waits
        assert reads_early(binary.cubin) == [], source.name


def test_routings_launch_their_dependents_after_the_wait() -> None:
    for binary in build(*routings()):
        names = listing(binary.cubin)
        assert names.index(WAIT) < names.index(LAUNCH)


def test_routers_read_their_weight_before_they_wait() -> None:
    desc = linear_route(True)
    for binary in build(desc.emit(), replace(desc, bias=F16).emit()):
        assert len(reads_early(binary.cubin)) == desc.experts * desc.passes, "only the weight"
        names = listing(binary.cubin)
        assert names.index(WAIT) < names.index(LAUNCH)


def test_experts_launch_their_dependents_after_the_wait() -> None:
    tiles = W8A8Tile(2, 10, prefetch=2), W8A8Tile(2, 4, tokens=1)
    sources = [INT8_STREAM.emit(problem, tile, ARCH) for problem in (NONE_EXPERTS, ROWS_EXPERTS) for tile in tiles]
    sources += [W8A16_STREAM.emit(W8A16_EXPERTS, W8A16Tile(2, 8, tokens=tokens), ARCH) for tokens in (1, 8)]
    for source, binary in zip(sources, build(*sources), strict=True):
        assert source.waits
        assert reads_early(binary.cubin) == [], source.name
        names = listing(binary.cubin)
        assert names.index(WAIT) < names.index(LAUNCH), source.name


def test_stream_of_given_weights_does_not_wait() -> None:
    spec = stream("given")
    assert not spec.pdl, "without the promise, nothing is launched early"
    (binary,) = build(spec.source)
    assert reads_early(binary.cubin), "this is what the promise is for"


def test_settled_steps_read_the_cache_before_they_wait() -> None:
    forms = [AttentionMma.for_shape(F16, cache, 64, 2, ARCH, 4) for cache in (F16, DType.S8, DType.U4)]
    forms.append(AttentionMma.for_shape(F16, F16, 64, 2, ARCH, 1, None, Scores(windowed=True, ring=True)))
    forms.append(AttentionMma.for_shape(F16, F16, 64, 2, ARCH, 4, None, SINKS))
    for form in forms:
        steps = [AttentionAppend(form, True, False, settled) for settled in (False, True)]
        for pair in (steps, [AttentionAppendTokens(step, 4) for step in steps]):
            assert [kernel.name.replace("_settled", "") for kernel in pair] == [pair[0].name] * 2
            waiting, early = build(*(kernel.emit() for kernel in pair))
            assert reads_early(waiting.cubin) == []
            assert len(reads_early(early.cubin)) >= form.tiles * (2 + 4), "keys and values of every tile"
