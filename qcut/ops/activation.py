"""The activations of a decoder's MLP, which also find the largest magnitudes of rows, or rotate rows."""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from qcut.errors import ConfigError, ShapeError
from qcut.numerics import int8
from qcut.numerics.gating import check_clamped_silu, clamped_silu_mul
from qcut.ops.checks import FLOAT_DTYPES, check_absmax, check_dtype, check_tensor
from qcut.ops.codebook import QuantizeRotatedOp, RotateTokensOp, check_rotated, rotation_of_rows
from qcut.ops.registry import MUTATED, operator


def _check_rows(op: str, name: str, x: Tensor) -> None:
    check_dtype(op, name, x.dtype, FLOAT_DTYPES)
    if x.dim() != 2:
        raise ShapeError(f"qcut::{op}: {name} has shape {list(x.shape)}; allowed: [M, N]")


@operator("silu_mul", returns="Tensor")
class SiluMulOp(NamedTuple):
    """``y = rne(rne(silu(gate)) * up)``, rne rounding to the nearest value of the type.

    The other arguments make it `qcut.numerics.gating.clamped_silu_mul`.

    Args:
        gate: float16, bfloat16 or float32 ``[M, N]``, of any strides.
        up: as ``gate``.
        absmax: float32 ``[M]``, contiguous, raised to the largest magnitude of each row of y; None: not wanted.
        alpha: multiplies the sigmoid's argument; positive, at most 1e6.
        limit: gate is at most ``limit``, up within ``±limit``; at most 1e6, 0 for none.
        plus_one: whether ``up + 1`` takes the place of up.

    Returns:
        y ``[M, N]``, contiguous, of ``gate``'s type.

    Raises:
        DtypeError, ShapeError, DeviceError: an argument that is not as above.
        ConfigError: another alpha or limit.

    Exactness: a kernel's ``silu`` is within 2 ulp of float32's, in float32, before it is rounded.
    """

    gate: Tensor
    up: Tensor
    absmax: Annotated[Tensor | None, MUTATED] = None
    alpha: float = 1.0
    limit: float = 0.0
    plus_one: bool = False

    def check(self) -> None:
        _check_rows("silu_mul", "gate", self.gate)
        check_clamped_silu("qcut::silu_mul", self.alpha, self.limit)
        check_tensor("silu_mul", "up", self.up, (self.gate.dtype,), tuple(self.gate.shape), self.gate.device)
        check_absmax("silu_mul", "absmax", self.absmax, self.gate)

    def fake(self) -> Tensor:
        return self.gate.new_empty(self.gate.shape)

    def cpu(self) -> Tensor:
        y = clamped_silu_mul(self.gate.contiguous(), self.up.contiguous(), *self[3:])
        int8.raise_absmax(self.absmax, y)
        return y


@operator("gelu_tanh", returns="Tensor")
class GeluTanhOp(NamedTuple):
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


@operator("activate_rotated", returns="(Tensor, Tensor)")
class ActivateRotatedOp(NamedTuple):
    """An MLP's activation, rotated for a product with codebook weights by `RotateTokensOp` with ``hadamard``.

    For a product with int8 weights, `QuantizeRotatedOp` rotates it.

    Args:
        x: float16 or bfloat16 ``[M, K]``, of any strides, K a multiple of the group.
        up: as x: the activation is `SiluMulOp` of both; None: it is `GeluTanhOp` of x.
        operands: int32 ``[passes, Kp / 32]``, signs of the rotation, as `qcut.numerics.codebook.tokens.operands` makes
            them.
        group_size: columns of a group: 32, 64 or 128, or K or more where K is one of those.
        seeds: one for each pass, at least one.
        out_dtype: int8, or x's type.
        alpha: as in `SiluMulOp`, like the two that follow; 1 without ``up``.
        limit: 0 without ``up``.
        plus_one: False without ``up``.
        in_rows: return int8 rows ``[M, K]`` as `QuantizeRotatedOp` does, in place of blocks; only with int8, one seed.

    Returns:
        Blocks and scales, as `RotateTokensOp` returns them, or rows and scales.

    Raises:
        DtypeError, ShapeError, DeviceError: an argument is not as above.
        ConfigError: another group, alpha or limit, no seed, several in rows, or an option of `SiluMulOp` without
            ``up``.
        QuantizationError: K beyond the exact range of products of int8 rows.

    Exactness: bitwise those operators of the activation's result on the same device.
    """

    x: Tensor
    up: Tensor | None
    operands: Tensor
    group_size: int
    seeds: list[int]
    out_dtype: torch.dtype
    alpha: float = 1.0
    limit: float = 0.0
    plus_one: bool = False
    in_rows: bool = False
    early_read: bool = False

    @property
    def unrotated(self) -> SiluMulOp | GeluTanhOp:
        """The activation without its rotation."""
        return GeluTanhOp(self.x) if self.up is None else SiluMulOp(self.x, self.up, None, *self[6:9])

    def rotation(self, y: Tensor) -> RotateTokensOp | QuantizeRotatedOp:
        """The rotation of the activation's result y."""
        return rotation_of_rows(y, *self[2:6], self.in_rows, self.early_read)

    def check(self) -> None:
        op, x = "activate_rotated", self.x
        _check_rows(op, "x", x)
        if self.up is not None:
            check_tensor(op, "up", self.up, (x.dtype,), tuple(x.shape), x.device)
        check_clamped_silu(f"qcut::{op}", self.alpha, self.limit)
        if self.up is None and self[6:9] != (1.0, 0.0, False):
            raise ConfigError(f"qcut::{op}: alpha, limit and plus_one go with up")
        if not x.shape[1]:
            raise ShapeError(f"qcut::{op}: x has shape {list(x.shape)}; allowed: [M, K] with K >= 1")
        check_rotated(op, x, *self[2:6], self.in_rows)

    def fake(self) -> tuple[Tensor, Tensor]:
        return self.rotation(self.x).fake()

    def cpu(self) -> tuple[Tensor, Tensor]:
        return self.rotation(self.unrotated.cpu()).cpu()
