"""The operators of ``torch.ops.qcut`` that join a W8A8 projection to what stands before it.

That is a norm, or the gate of an MLP. Results are bitwise those of the operators one after the other. CUDA runs
`qcut._w8a8_cuda`: one kernel for few tokens, those operators' kernels for more.
"""

from __future__ import annotations

from torch import Tensor

from qcut import decoder_ops, numerics
from qcut.op_registry import define

_PROJECTION = "Tensor qweight, Tensor weight_scale, Tensor? bias, str activation"


def _check_projection(
    op: str, x: Tensor, qweight: Tensor, weight_scale: Tensor, bias: Tensor | None, activation: str
) -> None:
    from qcut.ops import _check_w8a8_linear

    _check_w8a8_linear(x, qweight, weight_scale, bias, activation, op)


def _check_norm(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    layer: bool,
    eps: float,
    qweight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    activation: str,
) -> None:
    decoder_ops._check_norm(x, residual, norm_weight, norm_bias, layer, eps, "norm_w8a8", "norm_")
    _check_projection("norm_w8a8", x, qweight, weight_scale, bias, activation)


def _norm_fake(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    layer: bool,
    eps: float,
    qweight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if residual is not None else (0,)), x.new_empty(len(x), len(qweight))


def _norm_cpu(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    layer: bool,
    eps: float,
    qweight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor]:
    total, y = decoder_ops._norm_cpu(x, residual, norm_weight, norm_bias, layer, eps)
    return total, numerics.w8a8_linear_ref(y, qweight, weight_scale, bias, activation)


define(
    "norm_w8a8(Tensor x, Tensor? residual, Tensor norm_weight, Tensor? norm_bias, bool layer, float eps, "
    f"{_PROJECTION}) -> (Tensor, Tensor)",
    _check_norm,
    _norm_fake,
    _norm_cpu,
    cuda="_w8a8_cuda",
)


def _check_gate(
    gate: Tensor, up: Tensor, qweight: Tensor, weight_scale: Tensor, bias: Tensor | None, activation: str
) -> None:
    decoder_ops._check_silu(gate, up, "gate_w8a8")
    _check_projection("gate_w8a8", gate, qweight, weight_scale, bias, activation)


def _gate_fake(
    gate: Tensor, up: Tensor, qweight: Tensor, weight_scale: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    return gate.new_empty(len(gate), len(qweight))


def _gate_cpu(
    gate: Tensor, up: Tensor, qweight: Tensor, weight_scale: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    y = decoder_ops._silu_cpu(gate, up)
    return numerics.w8a8_linear_ref(y, qweight, weight_scale, bias, activation)


define(
    f"gate_w8a8(Tensor gate, Tensor up, {_PROJECTION}) -> Tensor",
    _check_gate,
    _gate_fake,
    _gate_cpu,
    cuda="_w8a8_cuda",
)
