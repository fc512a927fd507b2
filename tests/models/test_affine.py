from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qcut.models.affine import is_affine
from qcut.models.modules import is_linear, own_ways


class Falcon(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        hidden = input @ self.weight.T
        if self.bias is None:
            return hidden
        return hidden + self.bias


class Functional(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, bias=self.bias)


class BiasFirst(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.matmul(x, self.weight.transpose(0, 1))
        return y if self.bias is None else torch.add(self.bias, y)


class Super(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Transposes(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = x.matmul(self.weight.t())
        if self.bias is not None:
            y += self.bias
        return y


@pytest.mark.parametrize("cls", [Falcon, Functional, BiasFirst, Super, Transposes])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_proved(cls: type[nn.Linear], bias: bool, device: str) -> None:
    module = cls(8, 4, bias=bias, device=device)
    assert is_affine(module)
    assert is_linear(module)


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class NotTransposed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class WithoutBias(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class BiasTwice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.bias


class Identity(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.permute(0, 1) + self.bias


class Branches(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


class TwoInputs(nn.Linear):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x)


class Clamped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-1, 1))


class Casts(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.half(), self.weight.half(), self.bias.half())


class Alpha(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x @ self.weight.T, self.bias, alpha=2)


@pytest.mark.parametrize(
    "cls",
    [Scaled, NotTransposed, WithoutBias, BiasTwice, Identity, Branches, TwoInputs, Clamped, Casts, Alpha],
)
def test_not_proved(cls: type[nn.Linear]) -> None:
    module = cls(8, 8)
    assert not is_affine(module)
    assert own_ways(module) == f"a subclass with its own forward (class {__name__}.{cls.__name__})"


class Packed(Tensor):
    pass


def test_other_reasons() -> None:
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    assert "computed from other parameters" in str(own_ways(parametrized))
    assert "empty: [0, 8]" in str(own_ways(nn.Linear(8, 0)))
    patched = nn.Linear(8, 8)
    patched.forward = lambda x: x  # type: ignore[method-assign, assignment]
    assert "set on the layer itself" in str(own_ways(patched))

    class Called(nn.Linear):
        def __call__(self, x: Tensor) -> Tensor:
            return x

    class CalledInside(nn.Linear):
        def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
            return 3 * super()._call_impl(*args, **kwargs)

    class Reached(nn.Linear):
        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            return (lambda x: value(x) * 3) if name == "forward" else value

    class Found(nn.Linear):
        def __getattr__(self, name: str) -> Any:
            value = super().__getattr__(name)
            return value * 2 if name == "weight" else value

    for cls in (Called, CalledInside, Reached):
        assert "called in its own way" in str(own_ways(cls(8, 8)))
    found = nn.Linear(8, 8)
    found.__class__ = Found
    assert "called in its own way" in str(own_ways(found))
    for bias in (torch.randn(1), torch.randn(4, 8), torch.randn(8).as_subclass(Packed)):
        odd = nn.Linear(8, 8)
        odd.bias = nn.Parameter(bias)
        assert "not a plain vector of 8 values" in str(own_ways(odd))

    packed = nn.Linear(8, 8)
    packed.weight = nn.Parameter(torch.randn(8, 8).as_subclass(Packed))  # type: ignore[arg-type]
    assert "not a plain matrix" in str(own_ways(packed))
    for register in ("register_state_dict_post_hook", "register_load_state_dict_pre_hook"):
        stored = nn.Linear(8, 8)
        getattr(stored, register)(lambda *_: None)
        assert "hooks are called when its state" in str(own_ways(stored))
    assert own_ways(nn.Linear(8, 8)) is None
