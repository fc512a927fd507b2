"""What becomes of gradients: operators have none, and a backward pass that reaches one raises.

A forward pass with gradients enabled is served, since a model may have parameters of its own before a quantized layer
and after it. Its result then ends in `inference_only`. The backward pass of that raises, in eager mode, under gradient
checkpointing and in compiled code alike. Nothing of this runs if no gradient is needed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qcut.errors import UnsupportedError
from qcut.ops.definition import define

ALLOWED = (
    "quantized weights are for inference only; keep what lies before them out of the backward pass "
    "(torch.no_grad(), .detach()), or keep the layer in floating point"
)

_library = torch.library.Library("qcut", "FRAGMENT")


def inference_only(result: Any, x: Tensor, who: str) -> Any:
    """The result of an operator or layer, as copies with a backward pass that raises.

    Args:
        result: a tensor or a tuple of tensors; those not of a floating type stay as they are.
        x: an argument that requires a gradient.
        who: names the operator or layer.
    """
    if isinstance(result, tuple):
        return tuple(inference_only(part, x, who) for part in result)
    if not result.is_floating_point():
        return result
    return torch.ops.qcut.inference_only.default(result, x, who)


def _copy(y: Tensor, x: Tensor, who: str) -> Tensor:
    return y.clone()


def _refuse(grad: Tensor, x: Tensor, who: str) -> Tensor:
    raise UnsupportedError(f"{who}: a backward pass reached it; {ALLOWED}")


def _backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
    # An operator, so that a compiler traces the refusal instead of meeting it.
    return None, torch.ops.qcut.no_gradient.default(grad, ctx.saved_tensors[0], ctx.who), None


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    _, x, ctx.who = inputs
    ctx.save_for_backward(x)


for _schema, _compute, _fake in (
    ("inference_only(Tensor y, Tensor x, str who) -> Tensor", _copy, lambda y, x, who: torch.empty_like(y)),
    ("no_gradient(Tensor grad, Tensor x, str who) -> Tensor", _refuse, lambda grad, x, who: torch.empty_like(x)),
):
    _name = _schema.partition("(")[0]
    define(_library, _name, _schema)
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _compute, _device)
    torch.library.register_fake(f"qcut::{_name}", _fake, lib=_library)
torch.library.register_autograd("qcut::inference_only", _backward, setup_context=_setup, lib=_library)
