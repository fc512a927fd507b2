"""Rows of the conformance suite: the decoder's kernels between products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from qcut.emitters.codebook.rotate_rows import RowsRotation
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.decoder import activate, append, argmax, embed, embed_codebook, norm
from qcut.emitters.decoder.accept import AcceptTokens
from qcut.emitters.decoder.activate import ActivateRows
from qcut.emitters.decoder.append import RotateAndAppend
from qcut.emitters.decoder.argmax import ArgmaxRows
from qcut.emitters.decoder.embed import EmbedRows
from qcut.emitters.decoder.embed_codebook import EmbedCodebook
from qcut.emitters.decoder.norm import NormRows
from qcut.emitters.decoder.quantize import ColSum, Dequantize, QuantizePerTensor, QuantizePerToken
from qcut.emitters.decoder.split_halves import SplitHalves
from tests.emitters.conformance.row import Row

ARCH = "sm_90a"
F16, BF16, F32, S8, U4 = DType.F16, DType.BF16, DType.F32, DType.S8, DType.U4
FLOATS = (F16, BF16, F32)
ROTATION = RowsRotation(S8, 128)
IN_ROWS = RowsRotation(S8, 64, in_rows=True)
NORM = NormRows(F16, False, ARCH)
PLAIN_NORMS = (
    NormRows.for_shape(F16, False, ARCH, 2048, residual=True, rotation=RowsRotation(F16, 128), plain=True),
    NormRows.for_shape(BF16, False, ARCH, 4096, residual=True, rotation=ROTATION, plain=True),
    NormRows.for_shape(BF16, True, ARCH, 4096, many=True, rotation=ROTATION, plain=True),
    NormRows.for_shape(F16, False, ARCH, 160, aligned=False, rotation=RowsRotation(S8, 32, 2), plain=True),
    NormRows.for_shape(F16, False, ARCH, 4096, many=True, residual=True, rotation=IN_ROWS, plain=True),
    NormRows.for_shape(BF16, False, ARCH, 2048, residual=True, quantized=True, plain=True),
    NormRows.for_shape(F32, True, ARCH, 77, quantized=True, aligned=False, plain=True),
)
ACTIVATE = ActivateRows("silu_mul", F16, ARCH)
APPEND = RotateAndAppend(F16, F16, 128, "half", ARCH)
CODEBOOK = EmbedCodebook(F16, F16, (4,), 128, ARCH)


def rotations() -> tuple[RowsRotation, ...]:
    return RowsRotation(F16, 128), RowsRotation(S8, 64, 2), ROTATION, IN_ROWS


def norms(arch: str) -> Iterator[KernelSource]:
    for x, layer, residual, quantized, k in (
        (F16, False, True, True, 4096),
        (BF16, True, False, False, 1280),
        (F32, False, True, False, 14336),
    ):
        yield NormRows.for_shape(x, layer, arch, k, residual=residual, quantized=quantized).emit()
    yield NormRows.for_shape(F16, True, arch, 77, residual=True, quantized=True, aligned=False).emit()
    for rotation in rotations():
        many = rotation in (ROTATION, IN_ROWS)
        yield NormRows.for_shape(F16, False, arch, 4096, residual=True, many=many, rotation=rotation).emit()
    yield from (replace(desc, arch=arch).emit() for desc in PLAIN_NORMS)
    for x, k, many, options in (
        (F16, 2048, False, {"rotation": RowsRotation(F16, 128), "plain": True}),
        (BF16, 7168, False, {"quantized": True, "plain": True}),
        (F32, 4096, True, {}),
    ):
        yield NormRows.for_shape(x, False, arch, k, residual=True, many=many, routes=True, **options).emit()


def activations(arch: str) -> Iterator[KernelSource]:
    for rotation in rotations():
        yield ActivateRows.rotating("silu_mul", F16, arch, 14336, rotation).emit()
    yield ActivateRows.rotating("clamped_silu_mul", BF16, arch, 2880, RowsRotation(BF16, 64)).emit()
    yield ActivateRows.rotating("clamped_silu_mul", F16, arch, 14336, ROTATION).emit()
    for x, kind, aligned in (
        (F16, "silu_mul", True),
        (BF16, "gelu_tanh", True),
        (F32, "silu_mul", False),
        (BF16, "clamped_silu_mul", True),
        (F32, "clamped_silu_mul", False),
    ):
        yield ActivateRows(kind, x, arch, aligned).emit()


def appends(arch: str) -> list[RotateAndAppend]:
    heads: tuple[Any, ...] = ((F16, F16, 128, "half"), (BF16, S8, 256, "half"), (F32, F32, 8, "half"))
    heads += ((F16, S8, 64, "none"), (F16, F16, 64, "none"), (F32, F32, 250, "half"))
    heads += ((BF16, BF16, 128, "interleaved"), (F16, S8, 64, "interleaved"), (F32, F32, 40, "interleaved"))
    found = [RotateAndAppend(*head, arch, many) for head in heads for many in (False, True)]
    found += [replace(desc, aligned=False) for desc in found if desc.head != 250]
    few_bits = (RotateAndAppend(F16, U4, 128, "half", arch), RotateAndAppend(BF16, S8, 64, "none", arch, values=U4))
    return [*found, *(replace(desc, many=many) for desc in few_bits for many in (False, True))]


def append_sources(arch: str) -> Iterator[KernelSource]:
    yield from (desc.emit() for desc in appends(arch))
    yield RotateAndAppend(F16, F16, 128, "half", arch, True, ring=True).emit()
    yield RotateAndAppend(BF16, S8, 256, "half", arch, ring=True).emit()
    yield RotateAndAppend(F16, U4, 64, "none", arch, values=U4, ring=True).emit()


def append_instructions(source: KernelSource) -> tuple[str, ...]:
    """Whole vectors move 16 bytes at a time."""
    whole = {d.emit().name for d in appends(source.arch) if d.aligned and d.vector * d.x.bits == 128 and d.cache is d.x}
    return (r"STG.*128", r"!STG(?!.*128)", r"!LDG\.E\.(U16|64)") if source.name in whole else ("STG",)


def argmaxes(arch: str) -> Iterator[KernelSource]:
    if arch == ARCH:
        yield from (ArgmaxRows(x, arch, x is F16, argmax.PARTS, x is F16).emit() for x in (F16, F32))
    yield from (ArgmaxRows(x, arch, x is F16).emit() for x in FLOATS)


def embeds(arch: str) -> Iterator[KernelSource]:
    for x, places, aligned in ((x, p, a) for x in FLOATS for p in (False, True) for a in (False, True)):
        yield from (EmbedRows(x, table, arch, places, aligned, places).emit() for table in (x, S8))


def embed_instructions(source: KernelSource) -> Iterator[str]:
    if not source.name.split("_p")[-1].endswith("_u"):
        yield from (r"STG.*128", r"!LDG\.E\.(U16|U8|S8)")
        if "_z" not in source.name:
            yield r"!STG(?!.*128)"


def codebook_embeds(arch: str) -> Iterator[KernelSource]:
    """Every type, number of bits, group and option once at least."""
    first = replace(CODEBOOK, arch=arch)
    for changes in (
        {},
        {"places": True, "zeroes": True},
        {"pairs": True, "x": BF16},
        {"bits": (3,), "group": 64, "norms": F32},
        {"bits": (2,), "group": 32, "x": F32, "places": True},
        {"bits": (4, 4), "zeroes": True},
        {"bits": (3, 2), "group": 0, "x": F32, "places": True},
    ):
        yield replace(first, **changes).emit()  # type: ignore[arg-type]


def codebook_embed_instructions(source: KernelSource) -> Iterator[str]:
    """Groups of 32 columns and more are rotated among lanes."""
    yield from (r"STG.*128", "SHFL" if "_h" in source.name else "!SHFL")
    if "_z" not in source.name:
        yield r"!STG(?!.*128)"


def float8_types(arch: str) -> tuple[DType, ...]:
    """How tokens of e4m3 are stored."""
    return (DType.F16, DType.E4M3) if architecture(arch).e4m3 else (DType.F16,)


def token_quantizers(arch: str) -> Iterator[KernelSource]:
    descs = [QuantizePerToken(x, arch, *layout) for x in FLOATS for layout in ((32, 6), (1024, 4))]
    descs += [QuantizePerToken(F16, arch, 256, 0), QuantizePerToken(BF16, arch, 256, 2, aligned=False)]
    descs.append(QuantizePerToken.for_shape(F16, arch, 4096, 4096, halves=True))
    descs.append(QuantizePerToken(F32, arch, 256, 0, aligned=False, halves=True))
    for q in float8_types(arch):
        descs += [QuantizePerToken(x, arch, 512, 2, q=q) for x in FLOATS]
        descs += [QuantizePerToken(BF16, arch, 1024, 4, q=q), QuantizePerToken(F32, arch, 256, 0, False, q=q)]
    yield from (desc.emit() for desc in descs)


def tensor_quantizers(arch: str) -> Iterator[KernelSource]:
    descs = [*(QuantizePerTensor(x, arch) for x in FLOATS), QuantizePerTensor(F32, arch, aligned=False)]
    for q in float8_types(arch):
        descs += [*(QuantizePerTensor(x, arch, q=q) for x in FLOATS), QuantizePerTensor(F16, arch, 64, 2, False, q=q)]
    yield from (desc.emit() for desc in descs)


def dequantizers(arch: str) -> Iterator[KernelSource]:
    descs = [*(Dequantize(x, arch) for x in FLOATS), Dequantize(F16, arch, aligned=False)]
    yield from (desc.emit() for desc in descs)


NORM_REFUSALS: dict[str, list[Any]] = {
    "x": [{"x": S8}],
    "threads": [{"threads": 100}],
    "vectors": [{"vectors": 6}],
    "rotation": [
        {"rotation": RowsRotation(F16, 256)},
        {"rotation": RowsRotation(S8, 128, 2), "vectors": 3},
        {"rotation": ROTATION, "x": F32},
        {"rotation": RowsRotation(F16, 64, in_rows=True)},
        {"rotation": RowsRotation(S8, 64, 2, in_rows=True)},
    ],
    "quantized": [{"rotation": ROTATION, "quantized": True}],
    "plain": [{"plain": True}],
    "routes": [{"routes": True}],
}
ACTIVATE_REFUSALS: dict[str, list[Any]] = {
    "kind": [{"kind": "relu"}],
    "x": [{"x": S8}],
    "threads": [{"threads": 48}],
    "vectors": [{"vectors": 2}],
    "rotation": [{"rotation": RowsRotation(BF16, 128)}],
}
APPEND_REFUSALS: dict[str, list[Any]] = {
    "x": [{"x": S8}],
    "cache": [{"cache": BF16}, {"values": U4}, {"cache": U4, "head": 96}],
    "aligned": [{"cache": U4, "aligned": False}],
    "head": [{"head": 7}, {"head": 258}],
    "rotary": [{"rotary": "pairs"}],
}
CODEBOOK_REFUSALS: dict[str, list[Any]] = {
    "x": [{"x": S8}],
    "norms": [{"norms": BF16}],
    "bits": [{"bits": (4, 4, 4)}],
    "group": [{"group": 16}],
    "pairs": [{"pairs": True, "bits": (4, 4)}],
}
PER_TOKEN_REFUSALS: dict[str, list[Any]] = {
    "quantize_per_token: float type 's8'": [{"x": S8}],
    "48 threads per row; allowed are": [{"threads": 48}],
    "7 vectors per thread; allowed are 0 to 6": [{"vectors": 7}],
    "5 vectors per thread; allowed are 0 to 4": [{"threads": 1024, "vectors": 5}],
    "quantize_per_token: bf16; allowed are s8, e4m3, f16": [{"q": BF16}],
    "quantize_per_token: halves of f16; allowed are s8, e4m3, f16": [{"q": F16, "halves": True}],
    "quantize_per_token: e4m3 on sm_80; allowed are sm_89, sm_90a": [{"q": DType.E4M3}],
}

ROWS = {
    "norm": Row(NormRows.emit, norms, norm.CONSTRAINTS, NORM_REFUSALS, legal=NORM),
    "activation": Row(ActivateRows.emit, activations, activate.CONSTRAINTS, ACTIVATE_REFUSALS, legal=ACTIVATE),
    "append": Row(
        RotateAndAppend.emit,
        append_sources,
        append.CONSTRAINTS,
        APPEND_REFUSALS,
        legal=APPEND,
        instructions=append_instructions,
    ),
    "argmax": Row(
        ArgmaxRows.emit,
        argmaxes,
        argmax.CONSTRAINTS,
        {"x": [{"x": S8}], "parts": [{"parts": 2}, {"parts": 8, "arch": "sm_89"}]},
        legal=ArgmaxRows(F16, ARCH),
    ),
    "accept": Row(AcceptTokens.emit, lambda arch: [AcceptTokens(arch).emit()], legal=AcceptTokens(ARCH)),
    "embed": Row(
        EmbedRows.emit,
        embeds,
        embed.CONSTRAINTS,
        {"x": [{"x": S8, "table": S8}], "table": [{"table": BF16}]},
        legal=EmbedRows(F16, F16, ARCH),
        instructions=embed_instructions,
    ),
    "embed_codebook": Row(
        EmbedCodebook.emit,
        codebook_embeds,
        embed_codebook.CONSTRAINTS,
        CODEBOOK_REFUSALS,
        legal=CODEBOOK,
        instructions=codebook_embed_instructions,
    ),
    "quantize_per_token": Row(
        QuantizePerToken.emit,
        token_quantizers,
        refusals=PER_TOKEN_REFUSALS,
        legal=QuantizePerToken(F16, "sm_80"),
        instructions=lambda source: (r"LDG\.E\.128", r"STG\.E\.64$") if source.name.endswith("f16_t32v6") else (),
    ),
    "quantize_per_tensor": Row(
        QuantizePerTensor.emit,
        tensor_quantizers,
        refusals={"0 vectors per thread; allowed are 1 to": [{"vectors": 0}]},
        legal=QuantizePerTensor(F16, "sm_80"),
    ),
    "dequantize": Row(
        Dequantize.emit,
        dequantizers,
        refusals={"dequantize: float type 's32'": [{"x": DType.S32}]},
        legal=Dequantize(F16, "sm_80"),
    ),
    "colsum": Row(ColSum.emit, lambda arch: [ColSum(arch, aligned).emit() for aligned in (True, False)]),
    "split_halves": Row(
        SplitHalves.emit,
        lambda arch: [SplitHalves(arch, aligned).emit() for aligned in (True, False)],
        instructions=lambda source: ("!FADD|FMUL|FFMA",),
    ),
}
