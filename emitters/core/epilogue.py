"""The GEMM epilogue as data.

One description serves every GEMM family::

    v = f32(acc - zero_point * colsum[n])        # the subtraction in int32
    v = v * row_scale[m] * col_scale[n]          # float32, left to right
    v = act(v + bias[n])
    v = v + residual[m, n]
    D = out_dtype(v)                             # s8: clamp(rne(v * out_inv_scale) + out_zero_point)

where int16 tokens come as two rows of int8, ``acc = 256 * high + low`` in int64; or, with integers only::

    D = clamp(rne((acc + bias[n]) * multiplier[n] / 2**shift[n]) + zero_point, least, most)      # 64 bits

to s8, or from int16 tokens to s16, without a zero point; or, for the accumulator itself::

    D = acc                                      # s32
    D = int8(acc)                                # s8 with wrap: the low eight bits

Every product and sum is one float32 operation rounded to nearest (kernels are compiled without
contraction), and ``rne`` rounds the exact product v * out_inv_scale once, so that for ``none`` and
``relu`` the CPU reference and every GPU family agree bitwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from qcut.emitters.core.source import DType, EmitError, Param
from qcut.emitters.core.text import flag


class Activation(str, Enum):
    """Elementwise functions an epilogue can fuse. With ``any``, a launch passes an index into `ACTIVATIONS`."""

    NONE = "none"
    RELU = "relu"
    GELU_ERF = "gelu_erf"
    GELU_TANH = "gelu_tanh"
    SILU = "silu"
    ANY = "any"


ACTIVATIONS = tuple(a.value for a in Activation if a is not Activation.ANY)
_ACTIVATIONS = {
    Activation.NONE: "kNone",
    Activation.RELU: "kRelu",
    Activation.GELU_ERF: "kGeluErf",
    Activation.GELU_TANH: "kGeluTanh",
    Activation.SILU: "kSilu",
    Activation.ANY: "kAny",
}
_MODES = {
    "none": "kNone",
    "per_tensor": "kPerTensor",
    "per_token": "kPerToken",
    "per_channel": "kPerChannel",
    "per_unit": "kPerUnit",
}
OUT_DTYPES = (DType.F16, DType.BF16, DType.F32, DType.S8, DType.S32)


@dataclass(frozen=True)
class Epilogue:
    """The operations between the accumulator and D.

    Attributes:
        out: element type of D (and of the residual).
        row_scale: ``per_token`` reads a float32 vector of M; ``none`` multiplies by nothing.
        col_scale: ``per_channel`` reads a float32 vector of N; ``per_tensor`` takes one float; ``per_unit`` reads
            float32 ``[N / 16, K / 128]``, both rounded up, by which sums of 128 columns are multiplied before they are
            added.
        zero_point: ``per_tensor`` takes one int, ``per_token`` an int32 vector of M; both read the
            int32 vector ``colsum`` of N.
        bias: add a float32 vector of N.
        activation: applied after the bias.
        residual: add a [M, N] tensor of D's type and layout, after the activation. Not with s8.
        wrap: an s8 output keeps the low eight bits of the accumulator, for agreement with programs that cast; like
            an s32 output it can fuse nothing else.
        halves: 16 rows of A hold eight int16 tokens as a hi/lo split: eight rows of high bytes, then eight of low
            bytes. D has ``tokens`` rows. Not with zero points.
        rescale: integers only, as `qcut.numerics.integers` says: int64 vector ``bias``, int32 vectors
            ``multiplier`` and ``shift`` of N, with s8 the int32 ``zero_point``, and the int ``relu``, whether the zero
            point is the least result. Nothing else is fused. D is s16 with halves, and s8 without.
    """

    out: DType = DType.F16
    row_scale: Literal["none", "per_token"] = "none"
    col_scale: Literal["none", "per_tensor", "per_channel", "per_unit"] = "none"
    zero_point: Literal["none", "per_tensor", "per_token"] = "none"
    bias: bool = False
    activation: Activation = Activation.NONE
    residual: bool = False
    wrap: bool = False
    halves: bool = False
    rescale: bool = False

    def __post_init__(self) -> None:
        if self.rescale:
            if self._fuses or self.wrap or self.out is not (DType.S16 if self.halves else DType.S8):
                raise EmitError(f"epilogue: rescale ({self.name}) fuses nothing, and gives s16 of halves, else s8")
            return
        if self.out not in OUT_DTYPES:
            raise EmitError(f"epilogue output {self.out.value!r} is not one of f16, bf16, f32, s8, s32")
        if self.residual and self.out is DType.S8:
            raise EmitError("epilogue: a residual cannot be added to an s8 output")
        if self.wrap and self.out is not DType.S8:
            raise EmitError(f"epilogue: wrap takes the low eight bits, the output is {self.out.value}")
        if self.halves and (self.is_raw or self.zero_point != "none"):
            raise EmitError(f"epilogue: halves ({self.name}) have no zero point, and are no raw accumulators")
        if self.is_raw and self._fuses:
            raise EmitError(f"epilogue: an output of raw accumulators ({self.name}) can fuse nothing")

    @property
    def is_raw(self) -> bool:
        """Whether D takes the accumulator's bits: no scale, no rounding, nothing fused."""
        return self.wrap or self.out is DType.S32

    @property
    def _fuses(self) -> bool:
        modes = (self.row_scale, self.col_scale, self.zero_point, self.activation.value)
        return self.bias or self.residual or any(mode != "none" for mode in modes)

    def rows(self, tokens: int) -> int:
        """Rows of A for a number of tokens."""
        return -(-tokens // 8) * 16 if self.halves else tokens

    @property
    def name(self) -> str:
        """Short name: the output type, then one token per thing that is fused."""
        parts = [self.out.value]
        if self.wrap:
            parts.append("wrap")
        if self.halves:
            parts.append("halves")
        if self.rescale:
            parts.append("rescale")
        if self.zero_point != "none":
            parts.append({"per_tensor": "zt", "per_token": "zm"}[self.zero_point])
        if self.row_scale != "none":
            parts.append("sm")
        if self.col_scale != "none":
            parts.append({"per_tensor": "st", "per_channel": "sn", "per_unit": "su"}[self.col_scale])
        if self.bias:
            parts.append("b")
        if self.activation is not Activation.NONE:
            parts.append(self.activation.value.replace("_", ""))
        if self.residual:
            parts.append("r")
        return "_".join(parts)

    def params(self) -> tuple[Param, ...]:
        """Arguments this epilogue reads, in the fixed order all families use."""
        params = [Param("tokens", "i32")] if self.halves else []
        if self.rescale:
            params.append(Param("bias", "ptr", "const long long*"))
            params += (Param(name, "ptr", "const int32_t*") for name in ("multiplier", "shift"))
            params += (Param("zero_point", "ptr", "const int32_t*"),) * (not self.halves)
            return (*params, Param("relu", "i32"))
        if self.zero_point == "per_tensor":
            params.append(Param("zero_point", "i32"))
        if self.zero_point == "per_token":
            params.append(Param("zero_point", "ptr", "const int32_t*"))
        if self.zero_point != "none":
            params.append(Param("colsum", "ptr", "const int32_t*"))
        if self.row_scale != "none":
            params.append(Param("row_scale", "ptr", "const float*"))
        if self.col_scale == "per_tensor":
            params.append(Param("col_scale", "f32"))
        if self.col_scale in ("per_channel", "per_unit"):
            params.append(Param("col_scale", "ptr", "const float*"))
        if self.bias:
            params.append(Param("bias", "ptr", "const float*"))
        if self.residual:
            params.append(Param("residual", "ptr", f"const {self.out.cpp}*"))
        if self.out is DType.S8 and not self.wrap:
            params += (Param("out_inv_scale", "f32"), Param("out_zero_point", "f32"))
        if self.activation is Activation.ANY:
            params.append(Param("activation", "i32"))
        return tuple(params)

    @property
    def cpp(self) -> str:
        """C++ type: `sums_cpp`; with halves, ``qcut::OfHalves`` of ``gemm/halves.cuh`` over it."""
        return f"qcut::OfHalves<{self.sums_cpp}>" if self.halves else self.sums_cpp

    @property
    def sums_cpp(self) -> str:
        """C++ type for whole sums: ``qcut::Epilogue<...>`` of ``core/epilogue.cuh``, or ``qcut::IntegerEpilogue``."""
        if self.rescale:
            return f"qcut::IntegerEpilogue<{self.out.cpp}>"
        arguments = (
            self.out.cpp,
            f"qcut::ZeroPoint::{_MODES[self.zero_point]}",
            flag(self.row_scale != "none"),
            f"qcut::ColScale::{_MODES[self.col_scale]}",
            flag(self.bias),
            f"qcut::Activation::{_ACTIVATIONS[self.activation]}",
            flag(self.residual),
            *(("true",) if self.wrap else ()),
        )
        return f"qcut::Epilogue<{', '.join(arguments)}>"

    def statements(self, params: tuple[Param, ...], *, whole_sums: bool = False) -> tuple[str, ...]:
        """C++ that declares the type ``Epilogue`` and fills its ``args`` from the kernel's parameters.

        Args:
            params: the kernel's parameters. The kernel itself fills arguments of the epilogue that are not among them.
            whole_sums: the kernel combines the halves' sums itself, and knows the number of tokens.
        """
        given = {param.name for param in params} - ({"tokens"} if whole_sums else set())
        return (
            f"using Epilogue = {self.sums_cpp if whole_sums else self.cpp};",
            "Epilogue::Args args{};",
            *(f"args.{self._member(p.name)} = {p.name};" for p in self.params() if p.name in given),
        )

    def _member(self, param: str) -> str:
        """The member of ``EpilogueArgs`` that a kernel argument sets."""
        modes = {"zero_point": self.zero_point, "col_scale": self.col_scale}
        vectors = ("per_token", "per_channel", "per_unit")
        return f"{param}_{modes[param]}" if modes.get(param) in vectors else param
