"""Finds modules whose class other code asks for, and would go another way with another class in their place.

``isinstance(self.proj, nn.Linear)`` in a forward holds only for the float layer: the code goes on without an error,
and computes something else. Questions are found as weights that code reads are (`qcut.models.weight_reads`), in
what a forward call may reach. A question that both layers answer alike, such as ``isinstance(layer, nn.Module)`` or
``hasattr(layer, "weight")``, is none.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator
from functools import cache
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from qcut.models.modules import Quantized
from qcut.models.reached import is_library_code, methods_of, names_of, reached, strings_of
from qcut.models.syntax import SHOWN, SHOWS, Question, code_of
from qcut.models.weight_reads import may_run, modules_at

_SHARED = frozenset({"weight", "bias", "in_features", "out_features"})
"""What float and quantized layers have besides what every module has."""
_UNKNOWN: Any = object()


def modules_asked(
    model: nn.Module, modules: Iterable[nn.Module], replacement: type[nn.Module] = Quantized
) -> dict[int, str]:
    """Of these modules, by id, those whose class other code asks for, and the class or function that asks.

    Args:
        model: the model; its code is read, not run.
        modules: linear layers in it, or others that a module of another class may replace.
        replacement: that class, or a base of the classes.
    """
    candidates = {id(layer): layer for layer in modules}
    found: dict[int, str] = {}
    for module, functions in reached(model):
        own = {function for _, function in methods_of(type(module))}
        below: list[nn.Module] | None = None
        """All layers below the module, and the module itself where its hooks may ask."""
        for function in functions:
            questions = code_of(function).questions if _may_ask(function) else ()
            dispatched = list(_dispatched(function))
            if not questions and not dispatched:
                continue
            if below is None:
                below = [part for part in module.modules() if id(part) in candidates]
            if function in own and id(module) in candidates:
                continue
            asks = type(module).__name__ if function in own else function.__qualname__
            for layer in below:
                if _differs(layer, dispatched, replacement):
                    found.setdefault(id(layer), asks)
            for question in questions:
                if not may_run(module, question.conditions):
                    continue
                asked = list(_asked(module, question, function in own))
                known = bool(asked)
                for layer in asked if known else below:
                    if id(layer) in candidates and _matters(question, layer, function, known, replacement):
                        found.setdefault(id(layer), asks)
    return found


def _may_ask(function: FunctionType) -> bool:
    names = names_of(function)
    asks = ("isinstance", "issubclass", "type", "hasattr", "getattr", "__class__", "_get_name", *SHOWN, *SHOWS)
    classes = (_global(function, name) for name in names)
    return not names.isdisjoint(asks) or any(isinstance(c, type) for c in (*classes, *_of_torch(names)))


def _asked(module: nn.Module, question: Question, method: bool) -> Iterator[nn.Module]:
    for path, container in question.paths:
        if path:
            yield from modules_at(module, path, container)
        elif container or method:
            yield module


def _matters(question: Question, layer: nn.Module, function: FunctionType, known: bool, replacement: Any) -> bool:
    """Whether the replacement would give another answer, as far as can be told."""
    if question.attribute:
        return not question.of and known and _has_another(layer, question.attribute, replacement)
    if question.classes is None:
        return not question.of and (known or _knows(function, layer, replacement))
    classes = [cls for expression in question.classes for cls in _values(expression, function)]
    if any(cls is _UNKNOWN for cls in classes):
        return not question.of and (known or (not is_library_code(function) and _knows(function, layer, replacement)))
    if question.of:
        tensor = layer._parameters.get(question.of)
        return tensor is not None and any(isinstance(tensor, c) and not issubclass(Tensor, c) for c in _types(classes))
    return _differs(layer, classes, replacement, question.exact)


def _has_another(layer: nn.Module, attribute: str, replacement: Any) -> bool:
    if attribute == "*":
        return True
    if attribute in _SHARED or hasattr(nn.Module, attribute):
        return False
    if hasattr(layer, attribute):
        return not hasattr(replacement, attribute)
    return any(attribute in _attributes(cls) for cls in _subclasses(replacement))


def _subclasses(cls: Any) -> Iterator[Any]:
    yield cls
    for one in cls.__subclasses__():
        yield from _subclasses(one)


@cache
def _attributes(cls: Any) -> frozenset[str]:
    """Names that objects of a class may have as attributes: those that the class or its code mentions."""
    methods = [function for _, function in methods_of(cls)]
    return frozenset(vars(cls)).union(*(names_of(f) | strings_of(f) for f in methods))


def _differs(layer: nn.Module, classes: Iterable[Any], replacement: Any, exact: bool = False) -> bool:
    """Whether a layer is of a class, or has a class's name, that the replacement has not."""
    names = {cls.__name__ for cls in type(layer).__mro__ if cls not in (nn.Module, object)}
    for cls in classes:
        if isinstance(cls, str) and any(name in cls for name in names):
            return True
        if isinstance(cls, type):
            try:
                if (exact and type(layer) is cls) or (isinstance(layer, cls) and not issubclass(replacement, cls)):
                    return True
            except TypeError:  # a protocol, or another class that is no set of classes
                return True
    return False


def _types(values: Iterable[Any]) -> Iterator[type]:
    return (value for value in values if isinstance(value, type))


def _knows(function: FunctionType, layer: nn.Module, replacement: Any) -> bool:
    """Whether a function mentions a class of the layer, by itself, in a table or by its name."""
    values = (_global(function, name) for name in names_of(function))
    inside = [one for value in values for one in _contents(value)]
    mentioned = [*inside, *_of_torch(names_of(function)), *strings_of(function)]
    return _differs(layer, mentioned, replacement, exact=True)


def _of_torch(names: Iterable[str]) -> list[Any]:
    return [getattr(nn, name, None) for name in names]


def _dispatched(function: FunctionType) -> Iterator[type]:
    """Classes by which functions that this one calls choose what they do (``functools.singledispatch``)."""
    for name in function.__code__.co_names:
        registry = getattr(_global(function, name), "registry", None)
        if isinstance(_global(function, name), FunctionType) and registry is not None:
            yield from (cls for cls in registry if isinstance(cls, type))


def _contents(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        inside: list[Any] = [*value]
        yield from (one for one in inside if isinstance(one, (type, str)))
    elif isinstance(value, type):
        yield value


def _global(function: FunctionType, name: str) -> Any:
    names = function.__code__.co_freevars
    if name in names and function.__closure__ is not None:
        try:
            return function.__closure__[names.index(name)].cell_contents
        except ValueError:  # not filled yet
            return _UNKNOWN
    return function.__globals__.get(name, getattr(builtins, name, _UNKNOWN))


def _values(expression: ast.expr, function: FunctionType) -> list[Any]:
    """The classes and strings that an expression may stand for; `_UNKNOWN` among them where it cannot be told."""
    match expression:
        case ast.Constant(value=value):
            return [value]
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            return [value for part in parts for value in _values(part, function)]
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _values(left, function) + _values(right, function)
        case ast.Name(id=name):
            value = _global(function, name)
            if isinstance(value, (list, tuple, set, frozenset, dict)):
                return list(value)
            return [value] if isinstance(value, (type, str)) or value is None else [_UNKNOWN]
        case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name != "self":
            value = getattr(_global(function, name), attribute, _UNKNOWN)
            return [value] if isinstance(value, type) else [_UNKNOWN]
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id=name), attr=middle), attr=attribute):
            value = getattr(getattr(_global(function, name), middle, None), attribute, _UNKNOWN)
            return [value] if isinstance(value, type) else [_UNKNOWN]
    return [_UNKNOWN]
