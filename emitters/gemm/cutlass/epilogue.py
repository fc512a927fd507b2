"""Epilogues as nvidia-cutlass's visitor graphs."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from qcut.emitters.core.epilogue import ACTIVATIONS, Activation, Epilogue
from qcut.emitters.core.source import DType
from qcut.emitters.gemm.cutlass.compat import DequantizeTag, FunctorTag

_ACTIVATION_FUNCTORS = {
    Activation.RELU: "qcut::Relu",
    Activation.GELU_ERF: "qcut::GeluErf",
    Activation.GELU_TANH: "qcut::GeluTanh",
    Activation.SILU: "qcut::Silu",
}


def element_of(dtype: DType) -> Any:
    """The package's name of an element type."""
    return importlib.import_module("cutlass_library").DataType[dtype.value]


@dataclass
class _Leaf:
    """A graph node and the C++ initializer of its arguments."""

    name: str
    arguments: str


class EpilogueGraph:
    """An `Epilogue` as nvidia-cutlass's visitor graph, and as the initializer of its arguments.

    On SM90 one node of qcut computes everything up to the bias (``include/qcut/cutlass/sm90_dequantize.cuh``, or
    ``sm90_dequantize_transposed.cuh`` where the kernel computes the transpose of D), or everything where tokens are in
    halves (``sm90_dequantize_halves.cuh``); on SM80 each operation is a node.

    Args:
        epilogue: the epilogue.
        sm90: whether nodes are SM90's.
        transposed: the type of the sums of a kernel that computes the transpose of D; None if it computes D.
    """

    _M, _N = 512, 1024  # any shape: only strides and broadcasts are read off it

    def __init__(self, epilogue: Epilogue, sm90: bool, transposed: DType | None = None) -> None:
        self._epilogue = epilogue
        self._sm90 = sm90
        self._transposed = transposed
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
        tensor = self._tensor(element=element_of(dtype), shape=shape, layout_tag=self._library.LayoutType.RowMajor)
        self._frontend.add_load_node(name, tensor)
        return _Leaf(name, arguments)

    def _scalar(self, name: str, dtype: DType, value: str) -> _Leaf:
        return self._load(name, dtype, (1, 1), f"{{{{{value}}}, {{nullptr}}, {{}}}}")

    def _compute(self, functor: FunctorTag, *inputs: _Leaf, dtype: DType = DType.F32, own: str = "{}") -> _Leaf:
        name = f"qcut_op_{self._count}"
        self._count += 1
        self._frontend.add_compute_node(functor, name)
        node = self._frontend.dag_ir.get_node_meta(name)
        node.element_compute = element_of(dtype)
        for index, leaf in enumerate(inputs):
            self._frontend.add_edge(leaf.name, name, weight=index)
        return _Leaf(name, "{" + ", ".join([*(leaf.arguments for leaf in inputs), own]) + "}")

    def _build(self, frontend: Any) -> None:
        self._frontend = frontend
        e, m, n = self._epilogue, self._M, self._N
        if e.halves:
            value = self._dequantize_halves()
        elif self._transposed is not None:
            value = self._finished(self._dequantize_transposed())
        else:
            value = self._finished(self._dequantize_sm90() if self._sm90 else self._dequantize_sm80())
        frontend.add_store_node("D")
        frontend.add_edge(value.name, "D")
        layouts = self._library.LayoutType
        layout = layouts.RowMajor if self._transposed is None else layouts.ColumnMajor
        frontend.set_store_tensor("D", self._tensor(element=element_of(e.out), shape=(m, n), layout_tag=layout))
        frontend.mark_output("D")
        if self._sm90:
            self.arguments = value.arguments
        else:
            self.arguments = f"{{{value.arguments}, {{({cutlass_type(e.out)}*)a.d, {{a.ldd, {{}}, {{}}}}}}}}"

    def _finished(self, value: _Leaf) -> _Leaf:
        """The value after activation and residual, requantized where D is int8."""
        e, m, n = self._epilogue, self._M, self._N
        if e.activation is Activation.ANY:
            which = self._scalar("qcut_activation", DType.F32, "float(a.activation)")
            value = self._compute(FunctorTag("qcut::Activate"), value, which)
        elif e.activation is not Activation.NONE:
            value = self._compute(FunctorTag(_ACTIVATION_FUNCTORS[e.activation]), value)
        if e.residual:
            aux = (
                "{}"
                if self._sm90
                else "{(Element*)a.residual, {}, {a.ldd, {}, {}}}".replace("Element", cutlass_type(e.out))
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
        return value

    def _accumulator(self, dtype: DType = DType.S32) -> _Leaf:
        return self._load("accum", dtype, (self._M, self._N), "{}")

    def _vectors(self) -> list[str]:
        """C++ pointers to the tokens' scales, the channels' scales and the biases."""
        e = self._epilogue
        given = {"row_scale": e.row_scale == "per_token", "col_scale": e.col_scale == "per_channel", "bias": e.bias}
        return [f"(float const*)a.{name}" if has else "nullptr" for name, has in given.items()]

    def _dequantize_transposed(self) -> _Leaf:
        e, sums = self._epilogue, self._transposed
        assert sums is not None
        flags = e.row_scale == "per_token", e.col_scale == "per_channel", e.bias
        tag = DequantizeTag("Transposed", *flags, accumulator=cutlass_type(sums))
        return self._compute(tag, self._accumulator(sums), own=f"{{{', '.join(self._vectors())}}}")

    def _dequantize_halves(self) -> _Leaf:
        e = self._epilogue
        flags = e.row_scale == "per_token", e.col_scale == "per_channel", e.bias
        named = e.activation is not Activation.ANY
        own = ", ".join(["a.d, a.ldd, a.tokens", *self._vectors(), *([] if named else ["a.activation"])])
        activation = f"cute::Int<{ACTIVATIONS.index(e.activation.value) if named else len(ACTIVATIONS)}>"
        tag = DequantizeTag("Halves", *flags, accumulator=activation)
        return self._compute(tag, self._accumulator(), own=f"{{{own}}}")

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
        row_scale, col_scale, bias = self._vectors()
        own = ", ".join(
            [
                "(int32_t const*)a.colsum" if e.zero_point != "none" else "nullptr",
                "(int32_t const*)a.zero_point" if e.zero_point == "per_token" else "nullptr",
                "a.zero_point" if e.zero_point == "per_tensor" else "0",
                row_scale,
                col_scale,
                "a.col_scale" if e.col_scale == "per_tensor" else "1.f",
                bias,
            ]
        )
        return self._compute(DequantizeTag("", *flags), self._accumulator(), own=f"{{{own}}}")

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


def cutlass_type(dtype: DType) -> str:
    """CUTLASS's C++ name of an element type."""
    return {
        DType.F16: "cutlass::half_t",
        DType.BF16: "cutlass::bfloat16_t",
        DType.F32: "float",
        DType.S8: "int8_t",
        DType.S32: "int32_t",
    }[dtype]
