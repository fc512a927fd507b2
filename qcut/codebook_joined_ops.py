"""The operator of ``torch.ops.qcut`` that joins codebook weights' product of one token to what stands before it.

That is a norm, or the gate of an MLP. CUDA runs `qcut._codebook_joined_cuda`: one kernel, or the operators' own one
after the other, bitwise alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from qcut import codebook_ops, decoder_ops
from qcut.errors import ConfigError
from qcut.op_registry import define

PROLOGUES = ("gate", "rms", "layer")


def _check(
    x: Tensor,
    other: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    prologue: str,
    eps: float,
    operands: Tensor,
    group_size: int,
    seeds: Sequence[int],
    units: Tensor,
    norms: Tensor,
    col_scale: Tensor,
    book: Sequence[int],
    bias: Tensor | None,
    bits: int,
    activation: str,
) -> None:
    op = "codebook_gemv_of"
    if prologue not in PROLOGUES:
        raise ConfigError(f"qcut::{op}: prologue {prologue!r}; allowed: {', '.join(PROLOGUES)}")
    if prologue == "gate":
        if other is None or norm_weight is not None or norm_bias is not None:
            raise ConfigError(f"qcut::{op}: a gate has another operand, and no norm's weight or bias")
        decoder_ops._check_silu(x, other)
    else:
        if norm_weight is None:
            raise ConfigError(f"qcut::{op}: a norm has a weight")
        decoder_ops._check_norm(x, other, norm_weight, norm_bias, prologue == "layer", eps)
    product = (operands, group_size, seeds, units, norms, col_scale, book, bias, bits, activation)
    codebook_ops._check_gemv(x, *product, None, x.dtype)


def _fake(
    x: Tensor,
    other: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    prologue: str,
    eps: float,
    operands: Tensor,
    group_size: int,
    seeds: Sequence[int],
    units: Tensor,
    norms: Tensor,
    col_scale: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    summed = prologue != "gate" and other is not None
    return x.new_empty(x.shape if summed else (0,)), x.new_empty((1, len(col_scale)))


def _cpu(
    x: Tensor,
    other: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    prologue: str,
    eps: float,
    *product: Any,
) -> tuple[Tensor, Tensor]:
    if prologue == "gate":
        total, y = x.new_empty(0), decoder_ops._silu_cpu(x, other)
    else:
        total, y = decoder_ops._norm_cpu(x, other, norm_weight, norm_bias, prologue == "layer", eps)
    return total, codebook_ops._gemv_cpu(y, *product, None, x.dtype)


define(
    "codebook_gemv_of(Tensor x, Tensor? other, Tensor? norm_weight, Tensor? norm_bias, str prologue, float eps, "
    "Tensor operands, int group_size, int[] seeds, Tensor units, Tensor norms, Tensor col_scale, int[] book, "
    "Tensor? bias, int bits, str activation) -> (Tensor, Tensor)",
    _check,
    _fake,
    _cpu,
    cuda="_codebook_joined_cuda",
)
