from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qcut.models.selection import linear_layers


def left(model: nn.Module) -> set[str]:
    layers, reasons = linear_layers(model)
    assert not set(layers) & set(reasons)
    assert all("reads its weight itself" in reason for reason in reasons.values())
    return set(reasons)


def test_modules_of_torch() -> None:
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    assert left(nn.TransformerEncoder(encoder, 1)) == {f"layers.0.{n}" for n in ("self_attn.out_proj", *_MLP)}
    assert left(nn.Sequential(encoder)) == {f"0.{n}" for n in ("self_attn.out_proj", *_MLP)}
    assert left(nn.TransformerDecoderLayer(16, 2, 32)) == {"self_attn.out_proj", "multihead_attn.out_proj"}
    assert left(nn.MultiheadAttention(16, 2)) == {"out_proj"}


_MLP = ("linear1", "linear2")


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.list = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
        self.part = nn.ModuleDict({"c": nn.Linear(16, 16)})
        self.post_init()

    def post_init(self) -> None:
        self._init(self.a)
        nn.init.normal_(self.b.weight)

    def _init(self, module: nn.Linear) -> None:
        module.weight.data.normal_()


class Direct(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.linear(x, self.a.weight))


class Bias(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) + self.a.bias


class Described(Base):
    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.a.weight, Tensor) and self.a.weight.dtype != x.dtype and self.b.bias is not None:
            x = x.to(self.a.weight.dtype).view(-1, self.b.weight.shape[1], self.b.weight.size(0))
        return self.a(x)


class Alias(Base):
    def forward(self, x: Tensor) -> Tensor:
        layer = self.a
        return x @ layer.weight.T


class Loop(Base):
    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.list):
            x = F.linear(x, layer.weight) + i
        return x


class Index(Base):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.list[1].weight)


class Getattr(Base):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, getattr(self.a, "weight"))  # noqa: B009


class Method(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self._helper(x)

    def _helper(self, x: Tensor) -> Tensor:
        return F.linear(x, self.b.weight)


class Property(Base):
    @property
    def matrix(self) -> Tensor:
        return self.a.weight.T

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


def multiply(x: Tensor, layer: nn.Linear) -> Tensor:
    return x @ layer.weight.T


def shape_of(layer: nn.Linear) -> torch.Size:
    return layer.weight.shape


class Passed(Base):
    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, self.a).view(*shape_of(self.b))


def length_of(layer: nn.Module) -> Tensor:
    return torch.stack([p.norm() for p in layer.parameters()]).norm()


class PassedWhole(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) * length_of(self.a)


class Inherited(Direct):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Overrides(Direct):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


class Mixin:
    """No module itself."""

    def helper(self, x: Tensor) -> Tensor:
        return x @ self.b.weight.T


class Mixed(Mixin, Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.helper(x)


def undocumented(function):  # type: ignore[no-untyped-def]
    def call(*args, **kwargs):  # type: ignore[no-untyped-def]
        return function(*args, **kwargs)

    return call


class Decorated(Base):
    @undocumented
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.a.weight)


def documented(function):  # type: ignore[no-untyped-def]
    @functools.wraps(function)
    def call(*args, **kwargs):  # type: ignore[no-untyped-def]
        return function(*args, **kwargs)

    return call


class SameDecorator(Base):
    @documented
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.a.weight)

    @documented
    def _reset(self) -> None:
        self.b.weight.data.zero_()


class Deep(Base):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.part["c"].weight)


class Unused(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)

    def merge(self) -> Tensor:
        return self.a.weight + self.b.weight


class Parallel(Base):
    """Reads a weight on a path that its configuration switches off."""

    def __init__(self, ways: int) -> None:
        self.__dict__["config"] = type("Config", (), {})()
        self.__dict__["config"].ways, self.__dict__["exact"] = ways, True
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        if self.config.ways > 1 and self.exact:
            return F.linear(x, self.a.weight[:, :8])
        return self.a(x) if not self.training else x @ self.b.weight


def test_branches_that_the_configuration_decides() -> None:
    assert left(Parallel(1)) == {"b"}
    assert left(Parallel(2)) == {"a", "b"}


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Unused()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.inner(x), self.inner.b.weight)


class Asks(Outer):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.inner.merge()


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        (Direct, {"a"}),
        (Bias, {"a"}),
        (Described, set()),
        (Alias, {"a"}),
        (Loop, {"list.0", "list.1"}),
        (Index, {"list.0", "list.1"}),
        (Getattr, {"a"}),
        (Method, {"b"}),
        (Property, {"a"}),
        (Passed, {"a"}),
        (Inherited, {"a"}),
        (Overrides, set()),
        (Mixed, {"b"}),
        (Decorated, {"a"}),
        (SameDecorator, {"a"}),
        (Deep, {"part.c"}),
        (Unused, set()),
        (Outer, {"inner.b"}),
        (Asks, {"inner.a", "inner.b"}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_code_that_reads_weights(cls: type[nn.Module], names: set[str]) -> None:
    assert left(cls()) == names


def test_functions_that_take_whole_modules() -> None:
    assert "a" in left(PassedWhole())
    model = Unused()
    model.part.register_forward_hook(lambda module, args, y: y * length_of(module))
    model.register_forward_pre_hook(lambda module, args: (args[0] * length_of(args[0]),))
    assert {"part.c"} <= left(model)


def test_hooks_that_read_weight_of_their_layer() -> None:
    model = Unused()
    model.a.register_forward_hook(lambda module, args, y: y + F.linear(args[0], module.weight))
    model.b.register_forward_hook(lambda module, args, y: y * module.in_features)
    assert left(model) == {"a"}


def test_code_without_source() -> None:
    space: dict[str, object] = {"Base": Base, "F": F}
    exec("class Hidden(Base):\n def forward(self, x):\n  return self.b(F.linear(x, self.a.weight))", space)
    assert {"a"} <= left(space["Hidden"]())  # type: ignore[operator]


def test_layer_without_bias_is_not_read() -> None:
    model = Bias()
    model.a = nn.Linear(16, 16, bias=False)
    assert left(model) == set()
