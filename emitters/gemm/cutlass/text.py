"""A CUTLASS kernel's text: nvidia-cutlass's emitter run on a tile, operands and an epilogue's graph."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.source import DType, KernelSource, Param, deferred
from qcut.emitters.gemm.cutlass import compat as cutlass_compat
from qcut.emitters.gemm.cutlass.epilogue import EpilogueGraph, cutlass_type, element_of
from qcut.emitters.gemm.cutlass.launcher import emit_launcher
from qcut.emitters.gemm.problem import TileConfig

LAUNCH_PARAMS = (
    Param("sm_count", "i32"),
    Param("swizzle", "i32"),
    Param("raster", "i32"),
    Param("splits", "i32"),
    Param("workspace", "ptr", "void*"),
)
"""Run-time choices of a CUTLASS launch, after the problem's own arguments.

``swizzle``: tiles walk the output in stripes of this many (a power of two up to 8). ``raster``: 0 lets
CUTLASS choose, 1 walks along M first, 2 along N. ``splits``: parts K is cut into (stream-K kernels;
1 lets the scheduler decide). ``workspace``: device memory of `qcut_query`'s size, or null.
"""

WGMMA_N_STOCK = {8, 16, 32, 64, 96, 128, 192, 256}
WGMMA_N = WGMMA_N_STOCK | {24, 48, 80, 112, 144, 160, 176, 208, 224, 240}
"""Columns of a wgmma instruction, those of CUTLASS's own shapes and all that `sm90_defines` switches on."""


@dataclass(frozen=True)
class Operands:
    """Operands of a kernel: two matrices contiguous along K.

    Attributes:
        a: type of the rows' operand, by the package's name.
        b: type of the columns' operand.
        sums: type of the accumulators.
        instruction_k: K of one tensor-core instruction.
        transposed: whether rows are output channels and D is column-major: the same memory as a row-major D of tokens
            by channels.
        units: whether rows are indices into a codebook, in units, and columns are tokens in blocks.
        run: columns of 8-bit floats: the tensor core adds their products with its own bits, before the sum is added in
            float32; None: all, or other types.
    """

    a: str = "s8"
    b: str = "s8"
    sums: DType = DType.S32
    instruction_k: int = 32
    transposed: bool = False
    units: bool = False
    run: int | None = None


def emit(
    name: str,
    operands: Operands,
    epilogue: Epilogue,
    tile: TileConfig,
    arch: str,
    params: tuple[Param, ...],
    *,
    defines: tuple[str, ...] = (),
) -> KernelSource:
    """One kernel and its launcher; the texts are written when they are first read.

    Args:
        name: the kernel's procedural name.
        operands: operands of the product.
        epilogue: epilogue of the product.
        tile: in the kernel's terms: M counts A's rows, N those of B.
        arch: real architecture the text is compiled for.
        params: arguments of a launch before `LAUNCH_PARAMS`.
        defines: macros of the device's and the host's text.
    """
    sm90 = tile.schedule != "multistage"
    params = (*params, *LAUNCH_PARAMS)
    return deferred(
        lambda: _texts(name, operands, epilogue, tile, params),
        name=name,
        entry=name,
        params=params,
        arch=arch,
        toolchain="nvcc",
        defines=(*defines, *((f'QCUT_BOOK_PARAM="{name}_param_0"',) if operands.units else ())),
        includes=("qcut", "cutlass", "cuda"),
        waits=sm90 and tile.schedule != "stream_k",
    )


def _texts(
    name: str, operands: Operands, epilogue: Epilogue, tile: TileConfig, params: tuple[Param, ...]
) -> tuple[str, str]:
    """The device text and the launcher's."""
    cutlass_compat.cppgen()
    sm90 = tile.schedule != "multistage"
    graph = EpilogueGraph(epilogue, sm90, operands.sums if operands.transposed else None)
    text, emitted_name = _device_text(operands, epilogue, tile, sm90, graph)
    if sm90:
        text = cutlass_compat.edit_sm90_text(text, tile.epilogue_tile)
    if operands.units:
        text = cutlass_compat.edit_units_text(text)
    if epilogue.halves:
        text = cutlass_compat.edit_halves_text(text, cutlass_type(epilogue.out))
    declarations, kernel = cutlass_compat.split_kernel(text, emitted_name, name)
    of_sm90 = "sm90_dequantize" + ("_transposed" if operands.transposed else "_halves" if epilogue.halves else "")
    node = of_sm90 if sm90 else "epilogue"
    headers = (*(("codebook_operands",) if operands.units else ()), node)
    declarations = "".join(f"#include <qcut/cutlass/{header}.cuh>\n" for header in headers) + declarations
    host_text = emit_launcher(
        f"{name}_type",
        declarations,
        params,
        schedule=tile.schedule,
        epilogue=graph.arguments,
        residual=epilogue.residual,
        transposed=operands.transposed,
        units=operands.units,
        promotion=None if operands.run is None else operands.run // operands.instruction_k,
    )
    return declarations + kernel, host_text


def sm90_defines(tile: TileConfig) -> tuple[str, ...]:
    """Return the macros that switch on the parts of CUTLASS that a tile needs.

    Without the extended shapes a tile of 160 columns is cut into wgmma instructions of 32, at half the rate. The
    stream-K scheduler of 4.2 does not compile with programmatic dependent launch.
    """
    defines = [] if tile.schedule == "stream_k" else ["CUTLASS_ENABLE_GDC_FOR_SM90"]
    if tile.threadblock_shape[1] not in WGMMA_N_STOCK:
        defines.append("CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED")
    return tuple(defines)


def _device_text(
    operands: Operands, epilogue: Epilogue, tile: TileConfig, sm90: bool, graph: EpilogueGraph
) -> tuple[str, str]:
    """Run nvidia-cutlass's emitter and return its text and the kernel's name in this text."""
    library = importlib.import_module("cutlass_library")
    backend = importlib.import_module("cutlass_cppgen.backend.library")
    gemm_operation = importlib.import_module("cutlass_cppgen.backend.gemm_operation")
    swizzle = importlib.import_module("cutlass_cppgen.swizzle")
    a, b, sums = (library.DataType[name] for name in (operands.a, operands.b, operands.sums.value))
    m, n, k = tile.threadblock_shape
    out_alignment = 128 // epilogue.out.bits
    schedules: tuple[Any, Any, Any] = (None, None, None)
    if sm90:
        suffix = {"warp_specialized": "", "pingpong": "Pingpong"}.get(tile.schedule, "Cooperative")
        epilogue_suffix = "Cooperative" if suffix == "Cooperative" else ""
        fast = "FP8FastAccum" if tile.fast else ""
        schedules = (
            library.KernelScheduleType[f"TmaWarpSpecialized{suffix}{fast}"],
            library.EpilogueScheduleType[f"TmaWarpSpecialized{epilogue_suffix}"],
            library.TileSchedulerType.StreamK if tile.schedule == "stream_k" else None,
        )
        warps: list[int] = [4, 1, 1]
        instruction = [64, n, operands.instruction_k]
        operation = library.MathOperation.multiply_add
    else:
        warps = [m // tile.warp_shape[0], n // tile.warp_shape[1], 1]
        instruction = [16, 8, 32]
        operation = library.MathOperation.multiply_add_saturate
    description = backend.TileDescription(
        [m, n, k],
        tile.stages,
        warps,
        backend.MathInstruction(instruction, a, b, sums, library.OpcodeClass.TensorOp, operation),
        [*tile.cluster_shape, 1],
        *schedules,
    )
    # The package divides an SM90 tile by the cluster, which is right only for Blackwell.
    description.blackwell_threadblock_shape = [m, n, k]
    row, column = library.LayoutType.RowMajor, library.LayoutType.ColumnMajor
    element_c = element_of(epilogue.out) if epilogue.residual or not sm90 else library.DataType.void
    op = gemm_operation.GemmOperationUniversal(
        90 if sm90 else 80,
        description,
        backend.TensorDescription(a, row, 128 // library.DataTypeSize[a]),
        backend.TensorDescription(b, column, 128 // library.DataTypeSize[b]),
        backend.TensorDescription(element_c, column if operands.transposed else row, out_alignment),
        graph.functor(),
        swizzle.IdentitySwizzle1,
    )
    module = op.rt_module
    body = module.emit() + library.SubstituteTemplate(
        module.KernelTemplate,
        {"operation_name": module.name(), "operation_suffix": module.emitter.operation_suffix},
    )
    # Device adapters launch by themselves, in syntax that only nvcc reads.
    paths = [path for path in dict.fromkeys(module.emitter.includes) if "/device/" not in path]
    includes = "".join(f'#include "{path}"\n' for path in paths)
    return includes + body, module.name() + module.emitter.operation_suffix.replace("_type", "")
