"""The int8 GEMM, as an operator and as the function `qcut.gemm_s8`: any layout, any size, a fused epilogue."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from qcut.errors import ConfigError
from qcut.numerics import int8 as numerics
from qcut.ops.checks import (
    F32,
    FLOAT_DTYPES,
    S8,
    S32,
    check_dtype,
    check_k,
    check_matrix,
    check_scale,
    check_tensor,
    check_zero_point,
)
from qcut.ops.registry import operator
from qcut.schemes import K_MAX, K_MAX_ZERO_POINT, check_activation

OUT_DTYPES = (*FLOAT_DTYPES, torch.int8, torch.int32)
OUT_LAYOUTS = ("row", "column")


@operator("gemm_s8", returns="Tensor", positional=2)
class GemmS8Op(NamedTuple):
    """int8 GEMM with int32 sums; formula, arguments and exactness are `qcut.gemm_s8`'s."""

    a: Tensor
    b: Tensor
    zero_point: Tensor | None = None
    colsum: Tensor | None = None
    row_scale: Tensor | None = None
    col_scale: Tensor | None = None
    bias: Tensor | None = None
    activation: str = "none"
    residual: Tensor | None = None
    out_dtype: torch.dtype | None = None
    out_inv_scale: float = 1.0
    out_zero_point: int = 0
    out_layout: str = "row"
    wrap: bool = False
    tensor_cores: bool = True

    @property
    def dtype(self) -> torch.dtype:
        """Type of the result."""
        return self.out_dtype or torch.float16

    def check(self) -> None:
        op, a, b = "gemm_s8", self.a, self.b
        check_matrix(op, "a", a)
        check_matrix(op, "b", b, min_rows=1)
        (m, k), n = a.shape, b.shape[0]
        check_tensor(op, "b", b, S8, (n, k), a.device)
        if (self.zero_point is None) != (self.colsum is None):
            raise ConfigError(f"qcut::{op}: zero_point and colsum go together; give both or neither")
        check_k(op, k, K_MAX if self.zero_point is None else K_MAX_ZERO_POINT)
        for name, vector, dtypes, extent in (
            ("zero_point", self.zero_point, S32, m),
            ("colsum", self.colsum, S32, n),
            ("row_scale", self.row_scale, F32, m),
            ("col_scale", self.col_scale, F32, n),
            ("bias", self.bias, F32, n),
        ):
            if vector is not None:
                check_tensor(op, name, vector, dtypes, (extent,), a.device)
        check_dtype(op, "out_dtype", self.dtype, OUT_DTYPES)
        if self.out_layout not in OUT_LAYOUTS:
            raise ConfigError(f"qcut::{op}: out_layout is {self.out_layout!r}; allowed: {', '.join(OUT_LAYOUTS)}")
        if numerics.is_raw_output(self.dtype, self.wrap) and (fused := self.fused()):
            output = "int32 sums" if self.dtype is torch.int32 else "low eight bits (wrap)"
            raise ConfigError(f"qcut::{op}: an output of {output} can fuse nothing; leave out {', '.join(fused)}")
        if self.residual is not None:
            if self.dtype is torch.int8:
                raise ConfigError(f"qcut::{op}: a residual cannot be added to an int8 result; leave one out")
            check_tensor(op, "residual", self.residual, (self.dtype,), (m, n), a.device)
        check_activation(self.activation)
        check_scale(op, "out_inv_scale", self.out_inv_scale)
        check_zero_point(op, "out_zero_point", self.out_zero_point)

    def fused(self) -> list[str]:
        """Names of the arguments that ask for an epilogue."""
        asked = {
            "zero_point": self.zero_point is not None,
            "colsum": self.colsum is not None,
            "row_scale": self.row_scale is not None,
            "col_scale": self.col_scale is not None,
            "bias": self.bias is not None,
            "residual": self.residual is not None,
            "activation": self.activation != "none",
            "out_inv_scale": self.out_inv_scale != 1,
            "out_zero_point": self.out_zero_point != 0,
        }
        return [name for name, is_asked in asked.items() if is_asked]

    def fake(self) -> Tensor:
        m, n = self.a.shape[0], self.b.shape[0]
        if self.out_layout == "row":
            return self.a.new_empty((m, n), dtype=self.dtype)
        return self.a.new_empty((n, m), dtype=self.dtype).t()

    def cpu(self) -> Tensor:
        result = numerics.gemm_s8_ref(
            self.a,
            self.b,
            zero_point=self.zero_point,
            colsum=self.colsum,
            row_scale=self.row_scale,
            col_scale=self.col_scale,
            bias=self.bias,
            activation=self.activation,
            residual=self.residual,
            out_dtype=self.dtype,
            out_inv_scale=self.out_inv_scale,
            out_zero_point=self.out_zero_point,
            wrap=self.wrap,
        )
        return result if self.out_layout == "row" else self.fake().copy_(result)


def gemm_s8(
    a: Tensor,
    b: Tensor,
    *,
    zero_point: Tensor | None = None,
    colsum: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    out_dtype: torch.dtype = torch.float16,
    out_inv_scale: float = 1.0,
    out_zero_point: int = 0,
    out_layout: Literal["row", "column"] = "row",
    wrap: bool = False,
    tensor_cores: bool = True,
) -> Tensor:
    """int8 GEMM with int32 sums and everything that follows them in one kernel.

    Terms whose tensor is None are left out of::

        acc = sum_k a[m, k] * b[n, k]                # int32, exact
        v = f32(acc - zero_point[m] * colsum[n])     # the subtraction in int32
        v = v * row_scale[m] * col_scale[n]          # left to right
        v = act(v + bias[n])
        v = v + f32(residual[m, n])
        D = out_dtype(v)                             # int8: clamp(rne(v * out_inv_scale) + out_zero_point)

    or, for the sums themselves::

        D = acc                                      # int32
        D = int8(acc)                                # int8 with wrap: the low eight bits

    Every product and sum is one float32 operation rounded to nearest; ``rne`` rounds the exact product once, half to
    even. All tensors lie on one device; strides are free, and only those named below cost a copy.

    Args:
        a: int8 ``[M, K]``, M >= 0, 1 <= K <= `qcut.schemes.K_MAX` (`K_MAX_ZERO_POINT` with a zero point). Read in
            place, at any offset and leading dimension, if it is contiguous along K or along M; copied otherwise.
        b: int8 ``[N, K]``, N >= 1, as weights are stored: the right operand of the product is its transpose. Read in
            place if it is contiguous along K or along N. Pointers, leading dimensions and contiguous extents of a
            and b that are multiples of 16 bytes are the fast case.
        zero_point: int32 ``[M]``, in [-128, 127]; goes with ``colsum``. The CPU refuses values out of range. CUDA does
            not look, since an error would have to wait for the device: rows with such values have no meaning, and the
            others are right.
        colsum: int32 ``[N]``, ``sum_k b[n, k]``.
        row_scale: float32 ``[M]``.
        col_scale: float32 ``[N]``.
        bias: float32 ``[N]``.
        activation: none, relu, gelu_erf, gelu_tanh or silu.
        residual: ``out_dtype`` ``[M, N]``; not with int8. Copied unless it is contiguous in ``out_layout``.
        out_dtype: float16, bfloat16, float32, int8, or int32 for the sums.
        out_inv_scale: inverse scale of an int8 result, a positive float32.
        out_zero_point: zero point of an int8 result, in [-128, 127].
        out_layout: ``row``, or ``column`` for a result with strides ``(1, M)``.
        wrap: an int8 result keeps the low eight bits of the sums, for agreement with programs that cast. Like an
            int32 result it can fuse nothing.
        tensor_cores: False takes the kernels that use dp4a instead. The CPU has one way to compute.

    Returns:
        ``out_dtype`` ``[M, N]``, contiguous in ``out_layout``.

    Raises:
        ShapeError, DtypeError, DeviceError: a tensor that does not fit the others.
        ConfigError: an option that does not exist, or contradicts another; on the CPU, a zero point out of range.
        QuantizationError: K beyond the exact range.
        UnsupportedError: a GPU that the kernels do not run on.
        BuildError: a kernel that is not in the cache does not compile.

    Exactness: int32 and ``wrap`` results are bitwise. The others are bitwise for activations ``none`` and ``relu``
    on every device, and otherwise differ between devices by the ulps of erf, tanh and exp. No result depends on the
    layouts, on the other rows, or on the kernel that dispatch takes.
    """
    result: Tensor = torch.ops.qcut.gemm_s8(
        a,
        b,
        zero_point=zero_point,
        colsum=colsum,
        row_scale=row_scale,
        col_scale=col_scale,
        bias=bias,
        activation=activation,
        residual=residual,
        out_dtype=out_dtype,
        out_inv_scale=out_inv_scale,
        out_zero_point=out_zero_point,
        out_layout=out_layout,
        wrap=wrap,
        tensor_cores=tensor_cores,
    )
    return result
