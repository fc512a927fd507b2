"""The operator of linear layers on integers: tokens, weights, bias and result are integers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qcut.errors import QuantizationError, ShapeError
from qcut.numerics import int16
from qcut.numerics import integers as numerics
from qcut.numerics.checks import out_of_range
from qcut.ops.checks import S32, check_dtype, check_matrix, check_tensor, flat
from qcut.ops.registry import operator
from qcut.schemes import K_ALIGNMENT, padded_k

S64 = (torch.int64,)


@operator("integer_linear", returns="Tensor")
class IntegerLinearOp(NamedTuple):
    """``y = clamp(rne((acc + bias[n]) * multiplier[n] / 2**shift[n]) + zero_point, least, most)`` in integers.

    ``acc = sum_k q[m, k] * qweight[n, k]``, and ``rne`` rounds to the nearest integer, halves to the even one. int8
    tokens give int8, clamped to -128 and 127; int16 tokens give int16, clamped to ±32,639.

    Args:
        q: int8 or int16 ``[..., K]``, K from 1 to `qcut.numerics.integers.K_MAX`, any strides. int16 values are 32,639
            at most.
        qweight: int8 ``[N, padded_k(K)]``, N >= 1, zero padded.
        bias: int64 ``[N]``, magnitudes below 2**38, at the scale of the sums.
        multiplier: int32 ``[N]``, 0 to 2**24 - 1.
        shift: int32 ``[N]``, 0 to 62.
        zero_point: int32 ``[1]``, in [-128, 127], of an int8 result; None for int16.
        relu: whether ``least`` is the zero point.

    Returns:
        ``[..., N]``, contiguous, of q's type.

    Raises:
        DtypeError, ShapeError, DeviceError: an argument that is not as above.
        QuantizationError: K beyond the exact range; on the CPU, a value that is not as above. CUDA does not look, since
            an error would have to wait for the device: results with such values have no meaning.

    Exactness: bitwise, on every device; a token's result does not depend on the other tokens.
    """

    q: Tensor
    qweight: Tensor
    bias: Tensor
    multiplier: Tensor
    shift: Tensor
    zero_point: Tensor | None
    relu: bool = False
    early_read: bool = False

    def check(self) -> None:
        op, q, qweight = "integer_linear", self.q, self.qweight
        check_dtype(op, "q", q.dtype, tuple(numerics.LIMITS))
        if q.dim() == 0 or q.shape[-1] < 1:
            raise ShapeError(f"qcut::{op}: q has shape {list(q.shape)}; allowed: [..., K] with K >= 1")
        check_matrix(op, "qweight", qweight, min_rows=1)
        n, k = qweight.shape[0], q.shape[-1]
        if qweight.shape[1] != padded_k(k):
            sizes = f"q has K = {k}, qweight has shape {list(qweight.shape)}"
            raise ShapeError(f"qcut::{op}: {sizes}; allowed: [N, {padded_k(k)}], K rounded up to {K_ALIGNMENT}")
        if k > numerics.K_MAX:
            raise QuantizationError(f"qcut::{op}: K is {k}; allowed: 1 to {numerics.K_MAX}, with sums below 2**38")
        check_tensor(op, "qweight", qweight, (torch.int8,), (n, padded_k(k)), q.device)
        for name, vector, dtypes in (("bias", self.bias, S64), ("multiplier", self.multiplier, S32)):
            check_tensor(op, name, vector, dtypes, (n,), q.device)
        check_tensor(op, "shift", self.shift, S32, (n,), q.device)
        if (self.zero_point is None) != (q.dtype is torch.int16):
            given = "none" if self.zero_point is None else "one"
            wanted = "none" if self.zero_point is not None else "one"
            raise ShapeError(f"qcut::{op}: zero_point of {str(q.dtype)[6:]} tokens: found {given}; allowed: {wanted}")
        if self.zero_point is not None:
            check_tensor(op, "zero_point", self.zero_point, S32, (1,), q.device)

    def fake(self) -> Tensor:
        return self.q.new_empty((*self.q.shape[:-1], self.qweight.shape[0]))

    def cpu(self) -> Tensor:
        found = numerics.state_problem(self.bias, self.multiplier, self.shift)
        if self.zero_point is not None and (bad := out_of_range(self.zero_point, -128, 127)):
            found = "zero_point", f"found {bad}; -128 to 127 are allowed"
        elif self.q.dtype is torch.int16 and (bad := out_of_range(self.q, -(2**15), int16.LARGEST)):
            found = "q", f"found {bad}; {-(2**15)} to {int16.LARGEST} are allowed"
        if found:
            raise QuantizationError(f"qcut::integer_linear: {found[0]}: {found[1]}")
        y = numerics.integer_linear_ref(flat(self.q), *self[1:-1])
        return y.view(*self.q.shape[:-1], self.qweight.shape[0])
