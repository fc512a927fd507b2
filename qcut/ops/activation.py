"""The activations of a decoder's MLP, which also compute the largest magnitude of each row for the next product."""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qcut.errors import ShapeError
from qcut.numerics import int8
from qcut.ops.checks import FLOAT_DTYPES, check_absmax, check_dtype, check_tensor
from qcut.ops.registry import MUTATED, operator


def _check_rows(op: str, name: str, x: Tensor) -> None:
    check_dtype(op, name, x.dtype, FLOAT_DTYPES)
    if x.dim() != 2:
        raise ShapeError(f"qcut::{op}: {name} has shape {list(x.shape)}; allowed: [M, N]")


@operator("silu_mul", returns="Tensor")
class SiluMul(NamedTuple):
    """``y = rne(rne(silu(gate)) * up)``, rne rounding to the nearest value of the type.

    Args:
        gate: float16, bfloat16 or float32 ``[M, N]``, of any strides.
        up: as ``gate``.
        absmax: float32 ``[M]``, contiguous, raised to the largest magnitude of each row of y; None: not wanted.

    Returns:
        y ``[M, N]``, contiguous, of ``gate``'s type.

    Raises:
        DtypeError, ShapeError, DeviceError: an argument that is not as above.

    Exactness: a kernel's ``silu`` is within 2 ulp of float32's, in float32, before it is rounded.
    """

    gate: Tensor
    up: Tensor
    absmax: Annotated[Tensor | None, MUTATED] = None

    def check(self) -> None:
        _check_rows("silu_mul", "gate", self.gate)
        check_tensor("silu_mul", "up", self.up, (self.gate.dtype,), tuple(self.gate.shape), self.gate.device)
        check_absmax("silu_mul", "absmax", self.absmax, self.gate)

    def fake(self) -> Tensor:
        return self.gate.new_empty(self.gate.shape)

    def cpu(self) -> Tensor:
        y = F.silu(self.gate.contiguous()) * self.up.contiguous()
        int8.raise_absmax(self.absmax, y)
        return y


@operator("gelu_tanh", returns="Tensor")
class GeluTanh(NamedTuple):
    """``y = x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x**3)))``, every operation rounded as transformers' is.

    Args:
        x: float16, bfloat16 or float32 ``[M, N]``, of any strides.
        absmax: float32 ``[M]``, contiguous, raised to the largest magnitude of each row of y; None: not wanted.

    Returns:
        y ``[M, N]``, contiguous, of x's type.

    Raises:
        DtypeError, ShapeError, DeviceError: an argument that is not as above.

    Exactness: a kernel computes in float32 and rounds once.
    """

    x: Tensor
    absmax: Annotated[Tensor | None, MUTATED] = None

    def check(self) -> None:
        _check_rows("gelu_tanh", "x", self.x)
        check_absmax("gelu_tanh", "absmax", self.absmax, self.x)

    def fake(self) -> Tensor:
        return self.x.new_empty(self.x.shape)

    def cpu(self) -> Tensor:
        x = self.x.contiguous()
        y = 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
        int8.raise_absmax(self.absmax, y)
        return y
