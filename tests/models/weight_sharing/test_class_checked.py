"""Code that checks the class of its layers keeps them in float."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qcut import Linear, quantize
from qcut.models.modules import Quantized, kept_attributes
from qcut.models.selection import linear_layers
from tests.models.weight_sharing import asking as imported_already  # noqa: F401


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.list = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
        self.config = {"ways": 1}
        self.exact = False

    def reset(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()


class Instance(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) * 2 if isinstance(self.a, nn.Linear) else self.b(x)


class Exact(Base):
    def forward(self, x: Tensor) -> Tensor:
        if type(self.a) is nn.Linear:
            x = x * 2
        return self.b(x)


class Named(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) * (2 if self.a.__class__.__name__ == "Linear" else 1)


class Loops(Base):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.list:
            x = layer(x) if isinstance(layer, (nn.Linear, nn.Conv1d)) else x
        return x


class Walks(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * sum(isinstance(module, nn.Linear) for module in self.modules())


class Matches(Base):
    def forward(self, x: Tensor) -> Tensor:
        match self.b:
            case nn.Linear():
                return self.a(x) + 1
            case _:
                return self.a(x)


def is_plain(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear)


class Passes(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + is_plain(self.b)


@functools.singledispatch
def gain_of(layer: nn.Module) -> float:
    return 1.0


@gain_of.register(nn.Linear)
def _(layer: nn.Linear) -> float:
    return 2.0


class Dispatches(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * gain_of(self.b)


GAINS = {nn.Linear: 2.0}


class LooksUp(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) * GAINS.get(type(self.a), 1.0)


class Weight(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) * (2 if isinstance(self.a.weight, nn.Parameter) else 1)


class Attribute(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) * (2 if hasattr(self.a, "dequantized_weight") else 1)


class Buffer(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) * (2 if hasattr(self.a, "qweight") else 1)


class Dict(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) * (2 if "scheme" in self.a.__dict__ else 1)


class Vars(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) * len(vars(self.a))


class Text(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) * len(str(self.a))


class Place(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) * (2 if self.a.__module__.startswith("torch") else 1)


class Sum(nn.Module):
    def forward(self, part: nn.Module) -> Tensor:
        return torch.stack([p.sum() for p in part.parameters()]).sum()


class Given(Base):
    def __init__(self) -> None:
        super().__init__()
        self.sum = Sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) + self.sum(self.a)


class Buffers(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) + len(list(self.a.buffers()))


class Hooked(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a.register_forward_hook(lambda module, args, y: y * 2 if isinstance(module, nn.Linear) else y)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


class Parameters(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) + sum(p.mean() for p in self.a.parameters())


class OfAttribute(Base):
    kinds = (nn.Linear,)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) + sum(isinstance(layer, self.kinds) for layer in [self.a])


class OfProperty(Base):
    @property
    def kind(self) -> type:
        return nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) + isinstance(self.a, self.kind)


def is_one_of(layer: nn.Module, kinds: Any = nn.Linear) -> bool:
    return isinstance(layer, kinds)


class OfDefault(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + is_one_of(self.b)


class Scaled(nn.Linear):
    gain = 2.0

    def scaled(self, x: Tensor) -> Tensor:
        return self(x) * self.gain


class OwnMethod(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Scaled(16, 16), Scaled(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a.scaled(x))


class OwnMethodOfAny(OwnMethod):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = getattr(layer, "scaled")(x)  # noqa: B009
        return x


class Tries(Base):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.b(x) * callable(self.a.reset_parameters)
        except AttributeError:
            return x


class Harmless(Base):
    def forward(self, x: Tensor) -> Tensor:
        dtype = next(self.parameters()).dtype
        if not isinstance(x, Tensor) or not isinstance(self.a, nn.Module) or hasattr(self.a, "weight") is False:
            raise TypeError(f"found {type(self.a)}")
        if (self.exact and isinstance(self.a, nn.Linear)) or self.a.training:
            return x[..., : self.a.in_features]
        return self.a(x.to(self.a.weight.dtype)).to(dtype)


ALL = {"a", "b", "list.0", "list.1"}


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        (Instance, {"a"}),
        (Exact, {"a"}),
        (Named, {"a"}),
        (Loops, {"list.0", "list.1"}),
        (Walks, ALL),
        (Matches, {"b"}),
        (Passes, ALL),
        (Dispatches, ALL),
        (LooksUp, {"a"}),
        (Weight, {"a"}),
        (Attribute, {"a"}),
        (Buffer, {"a"}),
        (Dict, {"a"}),
        (Vars, {"a"}),
        (Text, {"a"}),
        (Place, {"a"}),
        (OfAttribute, ALL),
        (OfProperty, {"a"}),
        (OfDefault, ALL),
        (OwnMethod, {"a", "b"}),
        (OwnMethodOfAny, {"a", "b"}),
        (Tries, ALL),
        (Harmless, set()),
    ],
)
def test_layers_whose_class_is_checked_stay(cls: Callable[[], nn.Module], names: set[str]) -> None:
    layers, left = linear_layers(cls())
    assert set(left) == names
    assert set(layers) == ALL - names
    assert all("checks its class, or uses what" in reason for reason in left.values())


class Flagged(Base):
    """What a layer was given decides what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.a.gain, self.b.squared = 3.0, True

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) * self.a.gain
        for layer in self.children():
            if getattr(layer, "squared", False):
                x = layer(x) ** 2
        return x


def asks(layer: nn.Module) -> int:
    return 2 if isinstance(layer, nn.Linear) else 1


class Operator(Base):
    def __matmul__(self, x: Tensor) -> Tensor:
        return self.b(x) * asks(self.a)

    def forward(self, x: Tensor) -> Tensor:
        return self @ x


class Unknown(Base):
    def __getattr__(self, name: str) -> Any:
        return asks(self.a) if name == "gain" else super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) * self.gain


class Runner:
    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def run(self, x: Tensor) -> Tensor:
        return self.layer(x) * asks(self.layer)

    def __get__(self, owner: Base, cls: type) -> int:
        return asks(owner.a)


class Inside(Base):
    def forward(self, x: Tensor) -> Tensor:
        return Runner(self.a).run(x)


class Descriptor(Base):
    gain = Runner(nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) * self.gain


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        return x * asks(layer)


class Applies(Base):
    def forward(self, x: Tensor) -> Tensor:
        return Function.apply(self.b(x), self.a)  # type: ignore[no-any-return]


class Table(Base):
    ways: ClassVar[dict[str, Any]] = {"a": [lambda layer: isinstance(layer, nn.Linear)]}

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) + self.ways["a"][0](self.a)


class Default(Base):
    def forward(self, x: Tensor, gain: Callable[[nn.Module], int] = asks) -> Tensor:
        return self.b(x) * gain(self.a)


once = functools.lru_cache(asks)


class Cached(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) * once(self.a)


class Visits(Base):
    def run_plain(self) -> int:
        return asks(self.a)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) * getattr(self, f"run_{'plain'}")()


class Imports(Base):
    def forward(self, x: Tensor) -> Tensor:
        from tests.models.weight_sharing import asking

        return self.b(x) + asking.is_plain_layer(self.a)


classes = {nn.Module: 1}


class Shadows(Base):
    def forward(self, x: Tensor) -> Tensor:
        for classes in (nn.Linear, nn.Conv1d):
            x = x * 2 if isinstance(self.a, classes) else x
        return self.b(x)


class Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is nn.functional.linear else result


class Intercepts(Base):
    def forward(self, x: Tensor) -> Tensor:
        with Mode():
            return self.a(x)


class Alias(Base):
    def forward(self, x: Tensor) -> Tensor:
        check = isinstance
        return self.b(x) + check(self.a, nn.Linear)


class Maps(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) * list(map(type, self.children())).count(nn.Linear)


class Formats(Base):
    def run_Linear(self, x: Tensor) -> Tensor:
        return self.a(x) * 2

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, f"run_{type(self.a).__name__}")(x)  # type: ignore[no-any-return]


class Static(Base):
    @staticmethod
    def probe(layer: nn.Module) -> bool:
        return isinstance(layer, nn.Linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) + type(self).probe(self.a)


class Gate(nn.Module):
    def forward(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x) * (2 if isinstance(layer, nn.Linear) else 1)


class Passed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.a, x)  # type: ignore[no-any-return]


class Single(Base):
    @functools.singledispatchmethod
    def gain(self, layer: Any) -> int:
        return 1

    @gain.register
    def _(self, layer: nn.Linear) -> int:
        return 2

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) * self.gain(self.a)


class HookModule(nn.Module):
    def forward(self, module: nn.Module, args: Any, y: Tensor) -> Tensor:
        return y * (2 if isinstance(module, nn.Linear) else 1)


class HookedByModule(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a.register_forward_hook(HookModule())

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


MORE = [Intercepts, Alias, Maps, Formats, Static, Passed, Single, HookedByModule]


@pytest.mark.parametrize(
    "cls",
    [*MORE, Operator, Unknown, Inside, Descriptor, Applies, Table, Default, Cached, Visits, Imports, Shadows],
)
def test_code_called_in_other_ways_is_read(cls: Callable[[], nn.Module]) -> None:
    assert "checks its class" in linear_layers(cls())[1].get("a", "")


def test_attributes_that_layers_were_given_stay() -> None:
    assert not any(kept_attributes(new) for new in (nn.Linear(4, 4), nn.Embedding(4, 4, padding_idx=0)))
    model, x = Flagged(), torch.randn(4, 16)
    want = model(x)
    report = quantize(model, "int16x8", allow_growth=True, verify=False, progress=False)
    assert {layer.name for layer in report.layers} == ALL
    torch.testing.assert_close(model(x), want, rtol=0.1, atol=0.1 * float(want.detach().abs().max()))


def test_attributes_that_quantized_layers_have_are_refused() -> None:
    model = Base()
    model.a.activation = "relu"  # type: ignore[assignment]
    assert "has an attribute 'activation' of its own" in linear_layers(model)[1]["a"]
    for scheme in ("w8a8_static", "w8a8_rotated", "int16x8_static", "codebook4+4_int8", "nvfp4", "fp8_blocks"):
        layer = Linear(256, 256, True, scheme, device="meta")
        own = {*vars(layer), *layer._buffers} - {*vars(nn.Linear(1, 1)), "bias"}
        assert {key for key in own if not key.startswith("_")} <= Quantized.RESERVED


def test_hooks_that_ask_keep_their_layer() -> None:
    assert "checks its class" in linear_layers(Hooked())[1]["a"]


class First(Base):
    def forward(self, x: Tensor) -> Tensor:
        first = next(self.a.parameters())
        return self.b(x.to(first.device, first.dtype)) * first.shape[0]


class Counts(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) * len(self.a._parameters)


class Same(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) * (2 if self.a.weight is self.a.weight else 1)


@pytest.mark.parametrize("cls", [First, Counts, Same])
def test_values_of_parameters_are_read(cls: Callable[[], nn.Module]) -> None:
    assert "reads its weight itself" in linear_layers(cls())[1].get("a", "")


def test_parameters_taken_as_a_whole_are_read() -> None:
    assert set(linear_layers(Parameters())[1]) == {"a"}
    assert set(linear_layers(Buffers())[1]) == {"a"}
    assert set(linear_layers(Given())[1]) == ALL


def test_layers_held_as_plain_data_stay() -> None:
    model = Base()
    model.__dict__["first"] = [model.a]
    assert "held outside of the model's modules (Base.first)" in linear_layers(model)[1]["a"]


OUTSIDE: dict[str, nn.Module] = {}


class Slots:
    __slots__ = ("layer",)

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer


class OfClass(Base):
    held: ClassVar[list[nn.Module]] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) + self.held[0](x)


class OfGlobal(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) + OUTSIDE["layer"](x)


def test_layers_held_in_other_places_stay() -> None:
    model = OfClass()
    OfClass.held[:] = [model.a]
    assert "(OfClass.held)" in linear_layers(model)[1]["a"]
    model = OfGlobal()  # type: ignore[assignment]
    OUTSIDE["layer"] = model.a
    assert set(linear_layers(model)[1]) == {"a"}
    assert "(OUTSIDE)" in linear_layers(model)[1]["a"]
    for held in (weakref.ref, Slots, lambda layer: deque([layer])):
        model = Base()  # type: ignore[assignment]
        model.__dict__["again"] = held(model.b)
        assert "(Base.again)" in linear_layers(model)[1]["b"]


class Conv1D(nn.Module):
    """Named as a class of transformers, with another formula."""

    def __init__(self) -> None:
        super().__init__()
        self.nf, self.weight, self.bias = 16, nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight + self.bias).relu()


def test_own_class_of_known_name_is_no_layer() -> None:
    layers, left = linear_layers(nn.Sequential(Conv1D(), nn.Linear(16, 16)))
    assert set(layers) == {"1"}
    assert not left


def test_replaced_forward_of_a_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain: Any = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: plain(self, x) * 2)
    assert "nn.Linear.forward is not that of torch" in linear_layers(nn.Sequential(nn.Linear(16, 16)))[1]["0"]


def test_replaced_function_of_torch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda *a: plain(*a) * 2)
    assert "nn.Linear.forward is not that of torch" in linear_layers(nn.Sequential(nn.Linear(16, 16)))[1]["0"]


HELD_BY_FUNCTIONS: dict[str, Callable[[nn.Module], Any]] = {
    "default": lambda layer: lambda x, one=layer: one(x),
    "keyword": lambda layer: lambda x, *, one=layer: one(x),
    "list": lambda layer: [(lambda held: lambda x: held[0](x))([layer])],
    "table": lambda layer: (lambda held: lambda x: held[1](x))({1: layer}),
    "partial": lambda layer: functools.partial(lambda x, one=layer: one(x)),
    "nested": lambda layer: (lambda inner: lambda x: inner(x))(lambda x: layer(x)),
}


@pytest.mark.parametrize("kind", HELD_BY_FUNCTIONS)
def test_layers_that_functions_hold_stay(kind: str) -> None:
    model = Base()
    model.__dict__["call"] = HELD_BY_FUNCTIONS[kind](model.a)
    assert "held outside of the model's modules (Base.call)" in linear_layers(model)[1]["a"]


def test_functions_that_hold_one_another_end() -> None:
    model = Base()

    def first(x: Any) -> Any:
        return second(x)

    def second(x: Any) -> Any:
        return first(x)

    model.__dict__["call"] = first
    assert "a" in linear_layers(model)[0]
