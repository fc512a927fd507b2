"""A projection together with what stands before it, where one operator does both."""

from __future__ import annotations

from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from qcut import ops  # noqa: F401  (registers torch.ops.qcut)
from qcut.config import W8A8
from qcut.linear import Linear


def is_dynamic(module: nn.Module) -> TypeGuard[Linear]:
    """Whether a module takes int8 rows with a scale for each."""
    return isinstance(module, Linear) and module.scheme == W8A8()


def after_norm(
    module: nn.Module,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    layer: bool,
    eps: float,
) -> tuple[Tensor, Tensor] | None:
    """``x + residual`` (empty without one), and the module's result of its norm; ``[R, K]`` and ``[R, N]``.

    None where the two are two operators: the module is not W8A8 with scales for each token.
    """
    found: Any = None
    if is_dynamic(module):
        found = torch.ops.qcut.norm_w8a8(x, residual, weight, bias, layer, eps, *module.operands())
    return cast("tuple[Tensor, Tensor] | None", found)


def after_gate(module: nn.Module, gate: Tensor, up: Tensor) -> Tensor | None:
    """The module's result of ``silu(gate) * up``, ``[R, N]`` of ``[R, K]``; None as in `after_norm`."""
    found: Any = None
    if is_dynamic(module):
        found = torch.ops.qcut.gate_w8a8(gate, up, *module.operands())
    return cast("Tensor | None", found)
