"""Finds linear layers whose weight or bias other code reads, in place of calling the layer.

``nn.MultiheadAttention`` and Mamba, for example, pass ``self.out_proj.weight`` to a function. A quantized layer has no
float weight to give them. The code itself says so: what a model can run (`qcut.models.reached`) is read as syntax
trees. Reading what describes a tensor (``weight.dtype``) is no reading of its values. The same trees say where code
asks for the class of a layer; see `qcut.models.class_questions`.

What this cannot see, such as a function from a compiled library that takes the layer, meets the error of
`qcut.models.guards.described` when it runs. Branches whose condition the module's plain attributes decide, such as
``if self.config.pretraining_tp > 1``, count only where they are taken.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any

from torch import nn

from qcut.models.reached import called_by, functions_in, is_library_code, methods_of, names_of, reached
from qcut.models.syntax import ALL_VALUES, VALUES, Code, Conditions, Path, code_of


def layers_read(model: nn.Module, layers: Iterable[nn.Module]) -> dict[int, str]:
    """Of these layers, by id, those whose values other modules read, and the class that reads them.

    Args:
        model: the model; its code is read, not run.
        layers: linear layers in it.
    """
    candidates = {id(layer): layer for layer in layers}
    found: dict[int, str] = {}
    for module, functions in reached(model):
        if id(module) in candidates:
            continue
        for function in functions:
            if all(names_of(one).isdisjoint(VALUES) for one in (function, *called_by(function))):
                continue
            for layer, attribute in _layers_of(module, function, code_of(function)):
                if id(layer) in candidates and layer._parameters.get(attribute) is not None:
                    found.setdefault(id(layer), type(module).__name__)
        for function in functions:
            for layer in _read_as_a_whole(model, module, function):
                if id(layer) in candidates:
                    found.setdefault(id(layer), type(module).__name__)
    return found


def _read_as_a_whole(model: nn.Module, module: nn.Module, function: FunctionType) -> Iterator[nn.Module]:
    """The modules whose parameters the function takes all, whatever their names.

    Of an object that the function is given, it may be any module of the model.
    """
    if names_of(function).isdisjoint(ALL_VALUES):
        return
    known, method = not is_library_code(function), function in (f for _, f in methods_of(module.__class__))
    for paths, conditions in code_of(function).wholes:
        if not may_run(module, conditions):
            continue
        tops = [top for path, container in paths if path for top in modules_at(module, path, container)]
        if not tops and known and (method or not paths):
            tops = [module] if paths else [model]
        for top in tops:
            yield from top.modules()


def _layers_of(module: nn.Module, function: FunctionType, code: Code) -> Iterator[tuple[nn.Module, str]]:
    """The modules below this one that the function reads, and which attribute of theirs."""
    for path, container, attribute, conditions in code.reads:
        if may_run(module, conditions):
            yield from ((m, attribute) for m in modules_at(module, path, container))
    for name, attribute, conditions in code.loose:
        if not may_run(module, conditions):
            continue
        yield from ((m, attribute) for m in _named_below(module, name))
    for name, position, path in code.passed:
        target = _follow(module, path)
        for callee in functions_in(function.__globals__.get(name)) if isinstance(target, nn.Module) else ():
            yield from ((target, attribute) for at, attribute in code_of(callee).parameters if at == position)


def modules_at(module: nn.Module, path: Path, container: bool) -> Iterator[nn.Module]:
    """The modules that a path below a module may stand for; with ``container``, the children of the module there."""
    target = _follow(module, path)
    if target is None and path:
        # The path goes through a property or an index: every module below of the last name may be meant.
        yield from _named_below(module, path[-1])
    elif isinstance(target, nn.Module):
        yield from target.children() if container else [target]


_UNKNOWN = object()

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
    """Whether code under these conditions may run, as far as the module's plain attributes say."""
    values = ((_value(module, test), taken) for test, taken in conditions)
    return all(value is _UNKNOWN or bool(value) is taken for value, taken in values)


def _value(module: nn.Module, node: ast.expr) -> Any:
    """The value of an expression of constants and of plain attributes below ``self``, or `_UNKNOWN`."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Attribute):
        return _plain_attribute(module, node)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value = _value(module, node.operand)
        return _UNKNOWN if value is _UNKNOWN else not value
    if isinstance(node, ast.BoolOp):
        values = [_value(module, part) for part in node.values]
        decisive = isinstance(node.op, ast.Or)
        if any(value is not _UNKNOWN and bool(value) is decisive for value in values):
            return decisive
        return _UNKNOWN if any(value is _UNKNOWN for value in values) else not decisive
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
        sides = [_value(module, side) for side in (node.left, node.comparators[0])]
        if not any(side is _UNKNOWN for side in sides):
            try:
                return _COMPARE[type(node.ops[0])](*sides)
            except TypeError:
                return _UNKNOWN
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


def _follow(module: nn.Module, path: Path) -> Any:
    target: Any = module
    for name in path:
        target = target._modules.get(name) if isinstance(target, nn.Module) else None
    return target


def _named_below(module: nn.Module, name: str) -> list[nn.Module]:
    return [m for path, m in module.named_modules(remove_duplicate=False) if path.rpartition(".")[2] == name]
