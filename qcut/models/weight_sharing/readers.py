"""Finds layers if other code reads their weight or bias, or checks their class.

``nn.MultiheadAttention`` and Mamba, for example, pass ``self.out_proj.weight`` to a function; a quantized layer has no
float weight to give them. ``isinstance(self.proj, nn.Linear)`` in a forward holds only for the float layer: with
another the code goes on without an error, and computes something else.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from qcut.models.classes import codes_in
from qcut.models.modules import Quantized, kept_attributes
from qcut.models.weight_sharing.functions import (
    called_by,
    enclosed,
    functions_in,
    is_library_code,
    methods_of,
    names_of,
    reached,
    strings_of,
)
from qcut.models.weight_sharing.syntax import ClassCheck, Conditions, Path, code_of

_SHARED = frozenset({"weight", "bias", "in_features", "out_features"})
"""Attributes of float and quantized layers that not every module has."""
_OF_ALL = frozenset(vars(nn.Module()))
_INTERCEPTS = ("__torch_function__", "__torch_dispatch__")
"""Methods that may compute in the place of torch's operators, by which a float layer computes and another does not."""
_UNKNOWN: Any = object()


def layers_read(model: nn.Module, layers: Iterable[nn.Module]) -> dict[int, str]:
    """The layers, by id, with tensors that other modules read, and the class that reads them.

    Args:
        model: the model; its code is read, not run.
        layers: linear layers in it.
    """
    candidates = {id(layer): layer for layer in layers}
    found: dict[int, str] = {}
    for module, functions in reached(model):
        for function in functions:
            if id(module) in candidates:
                if _reads_first(module, function):  # its hooks
                    found.setdefault(id(module), function.__qualname__)
                continue
            for layer in (*_read_by(module, function), *_all_read_by(model, module, function)):
                if id(layer) in candidates:
                    found.setdefault(id(layer), type(module).__name__)
    return found


def _read_by(module: nn.Module, function: FunctionType) -> Iterator[nn.Module]:
    """The modules whose weight or bias a function reads."""
    code = code_of(function.__code__)
    read = [
        (part, tensor)
        for path, container, tensor, conditions in code.reads
        if may_run(module, conditions)
        for part in modules_at(module, path, container)
    ]
    for name, position, path in code.passed:
        target = _follow(module, path)
        for callee in called_by(function) if isinstance(target, nn.Module) else ():
            if callee.__name__ == name:
                read += [(target, tensor) for at, tensor in code_of(callee.__code__).parameters if at == position]
    yield from (part for part, tensor in read if part._parameters.get(tensor) is not None)


def _reads_first(module: nn.Module, function: FunctionType) -> bool:
    """Whether a function that a module itself holds reads the tensors of its first argument, the module."""
    if _is_method(function, module) or is_library_code(function):
        return False
    code = code_of(function.__code__)
    return any(position == 0 for position, _ in code.parameters) or any(paths for paths, _ in code.reads_all)


def _all_read_by(model: nn.Module, module: nn.Module, function: FunctionType) -> Iterator[nn.Module]:
    """The modules whose parameters a function takes all, whatever their names.

    An object that the function is given, its first argument, may be the module that comes to the function or any below;
    one of unknown origin may be any of the model.
    """
    known = not is_library_code(function)
    for paths, conditions in code_of(function.__code__).reads_all:
        if may_run(module, conditions):
            tops = [top for path, container in paths if path for top in modules_at(module, path, container)]
            if not tops and known:
                tops = [module if paths else model]
            for top in tops:
                yield from top.modules()


def class_checked(
    model: nn.Module, modules: Iterable[nn.Module], replacement: type[nn.Module] = Quantized
) -> dict[int, str]:
    """The modules, by id, if other code checks their class, and the class or function that does.

    A check with the same result for both classes, such as ``isinstance(layer, nn.Module)`` or ``hasattr(layer,
    "weight")``, does not count. The use of an attribute or a method that the replacement has not is a check too.

    Args:
        model: the model; its code is read, not run.
        modules: linear layers in it, or others that a module of another class may replace.
        replacement: that class, or a base of the classes.
    """
    everywhere = {id(layer): layer for layer in modules}
    candidates = set(everywhere)
    found: dict[int, str] = {}
    seen: set[FunctionType] = set()
    for module, functions in reached(model) if candidates else ():
        below = [part for part in module.modules() if id(part) in candidates]
        for function in functions:
            method = _is_method(function, module)
            if method and id(module) in candidates:
                continue  # a layer knows its own class
            dispatched = _dispatched(function, module)
            checked = [layer for layer in below if _differs(layer, dispatched, replacement)]
            checked += _used_otherwise(module, function, below, replacement)
            if function.__name__ in _INTERCEPTS and not is_library_code(function):
                checked += below
            for check in code_of(function.__code__).checks:
                if may_run(module, check.conditions):
                    named, given = list(_checked(module, check, method)), (module, function)
                    for layer in named or below:
                        if id(layer) in candidates and _matters(check, layer, given, bool(named), replacement):
                            checked.append(layer)
                    if not named and function not in seen:
                        checked += _checked_anywhere(check, given, everywhere, replacement)
            seen.add(function)
            for layer in checked:
                found.setdefault(id(layer), type(module).__name__ if method else function.__qualname__)
    return found


def _checked_anywhere(
    check: ClassCheck, given: tuple[nn.Module, FunctionType], layers: dict[int, nn.Module], replacement: Any
) -> Iterator[nn.Module]:
    """The layers of a model whose class a check of an object of unknown origin, in a model's own code, may ask for."""
    module, function = given
    if check.classes and not check.tensor and not check.attribute and not is_library_code(function):
        classes = [cls for one in check.classes for cls in _values(one, module, function) if cls is not _UNKNOWN]
        for layer in layers.values():
            if _differs(layer, classes, replacement, check.exact):
                yield layer


def _is_method(function: FunctionType, module: nn.Module) -> bool:
    cls: Any = type(module)
    return function in _methods(cls)


@cache
def _methods(cls: Any) -> frozenset[FunctionType]:
    static = {
        f
        for each in cls.__mro__
        for value in vars(each).values()
        if isinstance(value, staticmethod)
        for f in functions_in(value)
    }
    return frozenset(function for _, function in methods_of(cls)) - static


def _checked(module: nn.Module, check: ClassCheck, method: bool) -> Iterator[nn.Module]:
    for path, container in check.paths:
        if path:
            yield from modules_at(module, path, container)
        elif container or method:
            yield module


def _used_otherwise(
    module: nn.Module, function: FunctionType, below: list[nn.Module], replacement: Any
) -> Iterator[nn.Module]:
    """The modules of which a function takes an attribute that the replacement has not."""
    candidates = {id(layer) for layer in below}
    for path, container, attribute, conditions in code_of(function.__code__).attributes:
        if may_run(module, conditions):
            for layer in modules_at(module, path, container):
                if id(layer) in candidates and not is_kept(layer, attribute, replacement):
                    yield layer
    names = frozenset() if is_library_code(function) else names_of(function)
    for layer in below:
        cls: Any = type(layer)
        if not names.isdisjoint(_own_names(cls, replacement)):
            yield layer


@cache
def _own_names(cls: Any, replacement: Any) -> frozenset[str]:
    """Names of what a class of a layer has, and the replacement has not."""
    own = [each for each in cls.__mro__ if each.__module__.partition(".")[0] != "transformers"]
    names = {name for each in own for name in vars(each) if not name.startswith("__")}
    return frozenset(name for name in names if not hasattr(replacement, name))


def is_kept(layer: nn.Module, attribute: str, replacement: Any) -> bool:
    """Whether what replaces a module has an attribute of it too."""
    if hasattr(replacement, attribute) or attribute in _OF_ALL or attribute in kept_attributes(layer):
        return True
    return attribute in (_SHARED if issubclass(replacement, Quantized) else _annotated(replacement) | {*layer._modules})


@cache
def _annotated(cls: Any) -> frozenset[str]:
    return frozenset(name for each in cls.__mro__ for name in getattr(each, "__annotations__", ()))


def _matters(
    check: ClassCheck, layer: nn.Module, given: tuple[nn.Module, FunctionType], known: bool, replacement: Any
) -> bool:
    """Whether the replacement may give a check another result.

    Args:
        check: by code that reads ``given``: a function that comes from a module.
        layer: that may be checked.
        given: see ``check``.
        known: whether the code names the layer.
        replacement: class of what replaces it.
    """
    module, function = given
    if check.attribute:
        return not check.tensor and known and not is_kept(layer, check.attribute, replacement)
    if check.classes is None:
        return not check.tensor and (known or _mentions_class(function, layer, replacement))
    classes = [cls for expression in check.classes for cls in _values(expression, module, function)]
    if any(cls is _UNKNOWN for cls in classes):
        return not check.tensor and (known or not is_library_code(function))
    if check.tensor:
        tensor, types = layer._parameters.get(check.tensor), [cls for cls in classes if isinstance(cls, type)]
        return tensor is not None and any(isinstance(tensor, c) and not issubclass(Tensor, c) for c in types)
    return _differs(layer, classes, replacement, check.exact)


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


def _mentions_class(function: FunctionType, layer: nn.Module, replacement: Any) -> bool:
    """Whether a function mentions a class of the layer, by itself, in a table or by its name."""
    inside: list[Any] = []
    for value in _values_named(function):
        if isinstance(value, dict):
            value = [*value, *value.values()]
        if isinstance(value, (list, tuple, set, frozenset)):
            inside += [one for one in value if isinstance(one, (type, str))]
        elif isinstance(value, type):
            inside.append(value)
    return _differs(layer, [*inside, *strings_of(function)], replacement, exact=True)


def _values_named(function: FunctionType) -> list[Any]:
    """The values that names of a function may stand for, as globals or as classes of torch."""
    names = names_of(function)
    return [*(_global(function, name) for name in names), *(getattr(nn, name, None) for name in names)]


def _dispatched(function: FunctionType, module: nn.Module) -> list[Any]:
    """Classes by which functions and methods that this one calls choose what they do (``functools.singledispatch``)."""
    names = function.__code__.co_names
    methods = (inspect.getattr_static(type(module), name, None) for name in names)
    called: list[Any] = [one.dispatcher for one in methods if isinstance(one, functools.singledispatchmethod)]
    called += [one for name in names if isinstance(one := _global(function, name), FunctionType)]
    return [cls for one in called for cls in getattr(one, "registry", ())]


def _global(function: FunctionType, name: str) -> Any:
    if name in function.__code__.co_freevars:
        return enclosed(function).get(name, _UNKNOWN)
    if any(name in code.co_varnames for code in codes_in(function.__code__)):
        return _UNKNOWN
    return function.__globals__.get(name, getattr(builtins, name, _UNKNOWN))


def _values(expression: ast.expr, module: nn.Module, function: FunctionType) -> list[Any]:
    """The classes and strings that an expression may stand for, with `_UNKNOWN` for every other value."""
    match expression:
        case ast.Constant(value=value):
            return [value]
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            return [value for part in parts for value in _values(part, module, function)]
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _values(left, module, function) + _values(right, module, function)
        case ast.Name(id=name):
            return _classes_in(_global(function, name))
        case ast.Attribute():
            return _classes_in(_attribute(expression, module, function))
    return [_UNKNOWN]


def _classes_in(value: Any) -> list[Any]:
    values = list(value) if isinstance(value, (list, tuple, set, frozenset, dict)) else [value]
    return [one if isinstance(one, (type, str)) or one is None else _UNKNOWN for one in values]


def _attribute(expression: ast.expr, module: nn.Module, function: FunctionType) -> Any:
    """The value of a name with dots, or `_UNKNOWN`; a property is not computed."""
    match expression:
        case ast.Name(id="self"):
            return module
        case ast.Name(id=name):
            return _global(function, name)
        case ast.Attribute(value=value, attr=attribute):
            owner = _attribute(value, module, function)
            found = _UNKNOWN if owner is _UNKNOWN else inspect.getattr_static(owner, attribute, _UNKNOWN)
            return _UNKNOWN if hasattr(type(found), "__get__") and not isinstance(found, type) else found
    return _UNKNOWN


def modules_at(module: nn.Module, path: Path, container: bool) -> Iterator[nn.Module]:
    """The modules that a path below a module may stand for; with ``container``, the children of the module there."""
    target = _follow(module, path)
    if target is None and path:
        # The path goes through a property or an index: every module below with the last name may be meant.
        named = module.named_modules(remove_duplicate=False)
        yield from (part for name, part in named if name.rpartition(".")[2] == path[-1])
    elif isinstance(target, nn.Module):
        yield from target.children() if container else [target]


def _follow(module: nn.Module, path: Path) -> Any:
    target: Any = module
    for name in path:
        target = target._modules.get(name) if isinstance(target, nn.Module) else None
    return target


_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


def may_run(module: nn.Module, conditions: Conditions) -> bool:
    """Whether code under these conditions may run, as far as the module's plain attributes decide."""
    values = ((_value(module, test), taken) for test, taken in conditions)
    return all(value is _UNKNOWN or bool(value) is taken for value, taken in values)


def _value(module: nn.Module, node: ast.expr) -> Any:
    """The value of an expression of constants and of plain attributes below ``self``, or `_UNKNOWN`."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Attribute():
            return _plain_attribute(module, node)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            value = _value(module, operand)
            return _UNKNOWN if value is _UNKNOWN else not value
        case ast.BoolOp(op=op, values=parts):
            values, decisive = [_value(module, part) for part in parts], isinstance(op, ast.Or)
            if any(value is not _UNKNOWN and bool(value) is decisive for value in values):
                return decisive
            return _UNKNOWN if _UNKNOWN in values else not decisive
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
            sides = [_value(module, side) for side in (left, right)]
            if _UNKNOWN not in sides:
                try:
                    return _COMPARE[type(op)](*sides)
                except TypeError:
                    pass
    return _UNKNOWN


def _plain_attribute(module: nn.Module, node: ast.Attribute) -> Any:
    """``self.a`` or ``self.config.a`` that is a number, a truth value, a string or None; a mode may still change."""
    names: list[str] = []
    at: ast.expr = node
    while isinstance(at, ast.Attribute):
        names.insert(0, at.attr)
        at = at.value
    if not isinstance(at, ast.Name) or at.id != "self" or names[-1] == "training":
        return _UNKNOWN
    value: Any = module
    for name in names:
        value = vars(value).get(name, _UNKNOWN) if hasattr(value, "__dict__") else _UNKNOWN
    return value if value is None or isinstance(value, (bool, int, float, str)) else _UNKNOWN
