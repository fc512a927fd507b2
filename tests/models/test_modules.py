"""What ties two tensors: the memory they share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.errors import QuantizationWarning
from qcut.layers.linear import Linear
from qcut.models.modules import tensor_key


class Wrapper(Tensor):
    """A tensor with its values in another, as those of ``DTensor``; it has no memory."""

    held: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> Wrapper:
        made: Wrapper = Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)  # type: ignore[attr-defined]
        made.held = values
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = [a.held if isinstance(a, Wrapper) else a for a in args]
        result = func(*inner, **(kwargs or {}))
        return cls(result) if func is torch.ops.aten.detach.default else result


def test_tied_tensors_share_memory_shape_and_strides() -> None:
    t = torch.randn(4, 4)
    assert tensor_key(t) == tensor_key(t.detach()) == tensor_key(nn.Parameter(t)) == tensor_key(t.view(4, 4))
    others = (t.clone(), t.t(), t[:2], t[2:], t.view(16), t.view(torch.int32))
    assert len({tensor_key(other) for other in (t, *others)}) == 1 + len(others)


def test_tensors_without_memory_are_tied_to_themselves() -> None:
    values = torch.randn(4, 4)
    for one, other in (
        (torch.empty(4, 4, device="meta"), torch.empty(4, 4, device="meta")),
        (torch.empty(0, 4), torch.empty(0, 4)),
        (Wrapper(values), Wrapper(values)),
        (values.to_sparse(), values.to_sparse()),
    ):
        assert tensor_key(one) == tensor_key(one) != tensor_key(other)


def test_weights_in_wrappers_stay_in_float() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)).eval()
    wrapped: Any = nn.Parameter(Wrapper(torch.randn(32, 32)), requires_grad=False)
    model[1]._parameters["weight"] = wrapped
    with pytest.warns(QuantizationWarning, match="its weight is a Wrapper"):
        report = qcut.quantize(model, "w8a8", skip=(), progress=False)
    assert isinstance(model[0], Linear)
    assert model[1].weight is wrapped
    assert "Wrapper" in report.skipped["1"]
    assert report.parameters == {"quantized": 32 * 32, "linear layers": 32 * 32}
