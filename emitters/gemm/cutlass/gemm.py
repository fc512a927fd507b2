"""CUTLASS int8 GEMMs through nvidia-cutlass: SM80 multistage and SM90 warp-specialized.

The Python interface writes the device text from a tile description and a visitor graph built from
`qcut.emitters.core.epilogue.Epilogue`; `qcut.emitters.gemm.cutlass.launcher` writes the host side.

Source: CUTLASS 4.2.0, ``cutlass/gemm/kernel`` and ``cutlass/epilogue/fusion``.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from qcut.emitters.core.arch import ARCHITECTURES, architecture
from qcut.emitters.core.constraints import require
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.names import procedural_name
from qcut.emitters.core.source import DType, KernelSource, Param, deferred
from qcut.emitters.gemm.cutlass import compat as cutlass_compat
from qcut.emitters.gemm.cutlass.compat import DequantizeTag, FunctorTag
from qcut.emitters.gemm.cutlass.launcher import emit_launcher
from qcut.emitters.gemm.problem import GemmProblem, TileConfig

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

FAMILY = "int8_cutlass"

_ACTIVATION_FUNCTORS = {
    Activation.RELU: "qcut::Relu",
    Activation.GELU_ERF: "qcut::GeluErf",
    Activation.GELU_TANH: "qcut::GeluTanh",
    Activation.SILU: "qcut::Silu",
}
_WGMMA_N_STOCK = {8, 16, 32, 64, 96, 128, 192, 256}
_WGMMA_N = _WGMMA_N_STOCK | {24, 48, 80, 112, 144, 160, 176, 208, 224, 240}


def validate(problem: GemmProblem, tile: TileConfig, arch: str) -> None:
    """Check a description against what the kernels can do.

    Raises:
        EmitError: names the kernel and the first constraint it breaks.
    """
    name = procedural_name(FAMILY, arch, problem, tile)
    m, n, k = tile.threadblock_shape
    require(arch in ARCHITECTURES, name, f"architecture: allowed are {', '.join(ARCHITECTURES)}")
    require(problem.a is DType.S8 and problem.b is DType.S8, name, "operands are s8 x s8")
    require(problem.layouts == "tnt", name, "A and B are contiguous along K, D is row-major (tnt)")
    require(not problem.epilogue.is_raw, name, "raw accumulators are the raw families'")
    require(tile.splits == 1, name, "K is split by the stream_k schedule, not by the tile")
    require(problem.alignment_k % 16 == 0, name, "rows of A and B are multiples of 16 bytes")
    require(problem.alignment_n * problem.epilogue.out.bits >= 128, name, "rows of D are multiples of 16 bytes")
    if tile.schedule == "multistage":
        wm, wn, wk = tile.warp_shape
        require(wm > 0 and wn > 0 and wk > 0, name, "warp_shape is given for a multistage kernel")
        require(m % wm == 0 and n % wn == 0 and k == wk, name, "warp_shape divides threadblock_shape, whole in K")
        require(wm % 16 == 0 and wn % 8 == 0 and wk % 32 == 0, name, "warp_shape is a multiple of 16x8x32")
        require(m // wm * (n // wn) in (1, 2, 4, 8), name, "1, 2, 4 or 8 warps")
        require(tile.stages >= 3, name, "a multistage pipeline has at least 3 stages")
        require((m + n) * k * tile.stages <= architecture(arch).smem_bytes, name, "operand stages fit shared memory")
        require(tile.cluster_shape == (1, 1), name, "clusters exist from sm_90 on")
        return
    require(architecture(arch).wgmma, name, f"schedule {tile.schedule} exists on sm_90a alone")
    require(not any(tile.warp_shape), name, "the schedule fixes the warp shape on sm_90a")
    require(m in (64, 128, 256) and n in _WGMMA_N and k in (64, 128, 256), name, "M is 64, 128 or 256, N a wgmma width")
    cooperative = tile.schedule in ("cooperative", "stream_k")
    require(not cooperative or m >= 128, name, "a cooperative tile has 128 rows or more")
    consumers = 2 if cooperative else 1
    require(m * n // (128 * consumers) <= 192, name, "accumulators leave registers for the epilogue")
    cm, cn = tile.cluster_shape
    require(cm in (1, 2, 4) and cn in (1, 2, 4) and cm * cn <= 8, name, "cluster sides are 1, 2 or 4")
    require((m + n) * k * 2 <= architecture(arch).smem_bytes, name, "two operand stages fit shared memory")
    if any(tile.epilogue_tile):
        em, en = tile.epilogue_tile
        require(n % en == 0 and em == 64 * consumers, name, "epilogue_tile is 64 rows per consumer and divides N")


def emit_cutlass_gemm(problem: GemmProblem, tile: TileConfig, arch: str) -> KernelSource:
    """Write one GEMM and its launcher.

    Args:
        problem: s8 x s8 with any epilogue.
        tile: ``multistage`` for sm_80 code (any architecture from sm_80 on), the other schedules for
            sm_90a.
        arch: real architecture the text is compiled for.

    Raises:
        EmitError: the description breaks a constraint; reading the texts, nvidia-cutlass cannot be imported.

    Exactness: accumulation is exact for K <= `qcut.emitters.gemm.problem.K_MAX`; the epilogue rounds as
    `qcut.emitters.core.epilogue` says.
    """
    validate(problem, tile, arch)
    name = procedural_name(FAMILY, arch, problem, tile)
    sm90 = tile.schedule != "multistage"
    return deferred(
        lambda: _texts(problem, tile, name),
        name=name,
        entry=name,
        params=(*problem.params(), *LAUNCH_PARAMS),
        arch=arch,
        toolchain="nvcc",
        defines=_sm90_defines(tile) if sm90 else (),
        includes=("qcut", "cutlass", "cuda"),
        waits=sm90 and tile.schedule != "stream_k",
    )


def _texts(problem: GemmProblem, tile: TileConfig, name: str) -> tuple[str, str]:
    """The device text and the launcher's."""
    cutlass_compat.cppgen()
    sm90 = tile.schedule != "multistage"
    graph = _EpilogueGraph(problem.epilogue, sm90)
    text, emitted_name = _device_text(problem, tile, sm90, graph)
    if sm90:
        text = cutlass_compat.edit_sm90_text(text, tile.epilogue_tile)
    declarations, kernel = cutlass_compat.split_kernel(text, emitted_name, name)
    header = "qcut/cutlass/sm90_dequantize.cuh" if sm90 else "qcut/cutlass/epilogue.cuh"
    declarations = f"#include <{header}>\n" + declarations
    host_text = emit_launcher(
        f"{name}_type",
        declarations,
        (*problem.params(), *LAUNCH_PARAMS),
        schedule=tile.schedule,
        epilogue=graph.arguments,
        residual=problem.epilogue.residual,
    )
    return declarations + kernel, host_text


def _sm90_defines(tile: TileConfig) -> tuple[str, ...]:
    """Return the macros that switch on the parts of CUTLASS that a tile needs.

    Without the extended shapes a tile of 160 columns is cut into wgmma instructions of 32, at half the rate. The
    stream-K scheduler of 4.2 does not compile with programmatic dependent launch.
    """
    defines = [] if tile.schedule == "stream_k" else ["CUTLASS_ENABLE_GDC_FOR_SM90"]
    if tile.threadblock_shape[1] not in _WGMMA_N_STOCK:
        defines.append("CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED")
    return tuple(defines)


def _device_text(problem: GemmProblem, tile: TileConfig, sm90: bool, graph: _EpilogueGraph) -> tuple[str, str]:
    """Run nvidia-cutlass's emitter and return its text and the kernel's name in this text."""
    library = importlib.import_module("cutlass_library")
    backend = importlib.import_module("cutlass_cppgen.backend.library")
    gemm_operation = importlib.import_module("cutlass_cppgen.backend.gemm_operation")
    swizzle = importlib.import_module("cutlass_cppgen.swizzle")
    s8, s32 = library.DataType.s8, library.DataType.s32
    m, n, k = tile.threadblock_shape
    out_alignment = 128 // problem.epilogue.out.bits
    schedules: tuple[Any, Any, Any] = (None, None, None)
    if sm90:
        suffix = {"warp_specialized": "", "pingpong": "Pingpong"}.get(tile.schedule, "Cooperative")
        epilogue_suffix = "Cooperative" if suffix == "Cooperative" else ""
        schedules = (
            library.KernelScheduleType[f"TmaWarpSpecialized{suffix}"],
            library.EpilogueScheduleType[f"TmaWarpSpecialized{epilogue_suffix}"],
            library.TileSchedulerType.StreamK if tile.schedule == "stream_k" else None,
        )
        warps: list[int] = [4, 1, 1]
        instruction = [64, n, 32]
        operation = library.MathOperation.multiply_add
    else:
        warps = [m // tile.warp_shape[0], n // tile.warp_shape[1], 1]
        instruction = [16, 8, 32]
        operation = library.MathOperation.multiply_add_saturate
    description = backend.TileDescription(
        [m, n, k],
        tile.stages,
        warps,
        backend.MathInstruction(instruction, s8, s8, s32, library.OpcodeClass.TensorOp, operation),
        [*tile.cluster_shape, 1],
        *schedules,
    )
    # The package divides an SM90 tile by the cluster, which is right for Blackwell alone.
    description.blackwell_threadblock_shape = [m, n, k]
    row, column = library.LayoutType.RowMajor, library.LayoutType.ColumnMajor
    element_c = _element(problem.epilogue.out) if problem.epilogue.residual or not sm90 else library.DataType.void
    op = gemm_operation.GemmOperationUniversal(
        90 if sm90 else 80,
        description,
        backend.TensorDescription(s8, row, 16),
        backend.TensorDescription(s8, column, 16),
        backend.TensorDescription(element_c, row, out_alignment),
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


def _element(dtype: DType) -> Any:
    return importlib.import_module("cutlass_library").DataType[dtype.value]


@dataclass
class _Leaf:
    """A graph node and the C++ initializer of its arguments."""

    name: str
    arguments: str


class _EpilogueGraph:
    """An `Epilogue` as nvidia-cutlass's visitor graph, and as the initializer of its arguments.

    On SM90 one node of qcut computes everything up to the bias (``include/qcut/cutlass/sm90_dequantize.cuh``); on
    SM80 each operation is a node.
    """

    _M, _N = 512, 1024  # any shape: only strides and broadcasts are read off it

    def __init__(self, epilogue: Epilogue, sm90: bool) -> None:
        self._epilogue = epilogue
        self._sm90 = sm90
        self._count = 0
        base = importlib.import_module("cutlass_cppgen.backend.evt.frontend.frontend_base").EVTFrontendBase
        self._library = importlib.import_module("cutlass_library")
        self._tensor = importlib.import_module("cutlass_cppgen.backend.evt.ir.tensor").Tensor
        build = self._build

        class Frontend(base):  # type: ignore[misc, valid-type]
            def parse(self) -> None:
                build(self)

        self._frontend = Frontend(90 if sm90 else 80)
        self._frontend.return_names = ("D",)
        self.arguments = ""
        self._frontend.trace()

    def functor(self) -> Any:
        """The package's epilogue functor over this graph."""
        evt = importlib.import_module("cutlass_cppgen.backend.evt")
        return evt.EpilogueFunctorVisitor(90 if self._sm90 else 80, self._frontend)

    def _load(self, name: str, dtype: DType, shape: tuple[int, ...], arguments: str) -> _Leaf:
        tensor = self._tensor(element=_element(dtype), shape=shape, layout_tag=self._library.LayoutType.RowMajor)
        self._frontend.add_load_node(name, tensor)
        return _Leaf(name, arguments)

    def _scalar(self, name: str, dtype: DType, value: str) -> _Leaf:
        return self._load(name, dtype, (1, 1), f"{{{{{value}}}, {{nullptr}}, {{}}}}")

    def _compute(self, functor: FunctorTag, *inputs: _Leaf, dtype: DType = DType.F32, own: str = "{}") -> _Leaf:
        name = f"qcut_op_{self._count}"
        self._count += 1
        self._frontend.add_compute_node(functor, name)
        node = self._frontend.dag_ir.get_node_meta(name)
        node.element_compute = _element(dtype)
        for index, leaf in enumerate(inputs):
            self._frontend.add_edge(leaf.name, name, weight=index)
        return _Leaf(name, "{" + ", ".join([*(leaf.arguments for leaf in inputs), own]) + "}")

    def _build(self, frontend: Any) -> None:
        self._frontend = frontend
        e, m, n = self._epilogue, self._M, self._N
        value = self._dequantize_sm90() if self._sm90 else self._dequantize_sm80()
        if e.activation is Activation.ANY:
            which = self._scalar("qcut_activation", DType.F32, "float(a.activation)")
            value = self._compute(FunctorTag("qcut::Activate"), value, which)
        elif e.activation is not Activation.NONE:
            value = self._compute(FunctorTag(_ACTIVATION_FUNCTORS[e.activation]), value)
        if e.residual:
            aux = (
                "{}"
                if self._sm90
                else "{(Element*)a.residual, {}, {a.ldd, {}, {}}}".replace("Element", _cutlass_type(e.out))
            )
            source = self._load("C", e.out, (m, n), aux)
            value = self._compute(FunctorTag("qcut::Add"), value, source)
        if e.out is DType.S8:
            value = self._compute(
                FunctorTag("qcut::Requantize"),
                value,
                self._scalar("qcut_out_inv_scale", DType.F32, "a.out_inv_scale"),
                self._scalar("qcut_out_zero_point", DType.F32, "a.out_zero_point"),
            )
        frontend.add_store_node("D")
        frontend.add_edge(value.name, "D")
        frontend.set_store_tensor(
            "D", self._tensor(element=_element(e.out), shape=(m, n), layout_tag=self._library.LayoutType.RowMajor)
        )
        frontend.mark_output("D")
        if self._sm90:
            self.arguments = value.arguments
        else:
            self.arguments = f"{{{value.arguments}, {{({_cutlass_type(e.out)}*)a.d, {{a.ldd, {{}}, {{}}}}}}}}"

    def _accumulator(self) -> _Leaf:
        return self._load("accum", DType.S32, (self._M, self._N), "{}")

    def _dequantize_sm90(self) -> _Leaf:
        e = self._epilogue
        flags = (
            e.zero_point == "per_tensor",
            e.zero_point == "per_token",
            e.row_scale == "per_token",
            e.col_scale == "per_tensor",
            e.col_scale == "per_channel",
            e.bias,
        )
        own = ", ".join(
            [
                "(int32_t const*)a.colsum" if e.zero_point != "none" else "nullptr",
                "(int32_t const*)a.zero_point" if e.zero_point == "per_token" else "nullptr",
                "a.zero_point" if e.zero_point == "per_tensor" else "0",
                "(float const*)a.row_scale" if e.row_scale == "per_token" else "nullptr",
                "(float const*)a.col_scale" if e.col_scale == "per_channel" else "nullptr",
                "a.col_scale" if e.col_scale == "per_tensor" else "1.f",
                "(float const*)a.bias" if e.bias else "nullptr",
            ]
        )
        return self._compute(DequantizeTag(*flags), self._accumulator(), own=f"{{{own}}}")

    def _dequantize_sm80(self) -> _Leaf:
        e, m, n = self._epilogue, self._M, self._N
        value = self._accumulator()

        def per_channel(name: str, dtype: DType) -> _Leaf:
            return self._load(f"qcut_{name}", dtype, (n,), f"{{({dtype.cpp} const*)a.{name}, {{}}, {{}}}}")

        def per_token(name: str, dtype: DType) -> _Leaf:
            return self._load(f"qcut_{name}", dtype, (m, 1), f"{{({dtype.cpp} const*)a.{name}, {{}}, {{}}}}")

        if e.zero_point != "none":
            point = (
                self._scalar("qcut_zero_point", DType.S32, "a.zero_point")
                if e.zero_point == "per_tensor"
                else per_token("zero_point", DType.S32)
            )
            correction = self._compute(
                FunctorTag("qcut::Multiply"), point, per_channel("colsum", DType.S32), dtype=DType.S32
            )
            value = self._compute(FunctorTag("qcut::Subtract"), value, correction, dtype=DType.S32)
        if e.row_scale == "per_token":
            value = self._compute(FunctorTag("qcut::Multiply"), value, per_token("row_scale", DType.F32))
        if e.col_scale == "per_channel":
            value = self._compute(FunctorTag("qcut::Multiply"), value, per_channel("col_scale", DType.F32))
        elif e.col_scale == "per_tensor":
            value = self._compute(
                FunctorTag("qcut::Multiply"), value, self._scalar("qcut_col_scale", DType.F32, "a.col_scale")
            )
        if e.bias:
            value = self._compute(FunctorTag("qcut::Add"), value, per_channel("bias", DType.F32))
        return value if self._count else self._compute(FunctorTag("qcut::Identity"), value)


def _cutlass_type(dtype: DType) -> str:
    return {
        DType.F16: "cutlass::half_t",
        DType.BF16: "cutlass::bfloat16_t",
        DType.F32: "float",
        DType.S8: "int8_t",
        DType.S32: "int32_t",
    }[dtype]
