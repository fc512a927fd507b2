"""Finds linear layers whose weight or bias other code reads, in place of calling the layer.

``nn.MultiheadAttention`` and Mamba, for example, pass ``self.out_proj.weight`` to a function. A quantized layer has no
float weight to give them. The code itself says so: what a model can run is read as syntax trees, beginning with the
``forward`` of every class in the model and following the names of methods and functions that are mentioned there.
Reading what describes a tensor (``weight.dtype``) is no reading of its values.

What this cannot see, such as a function from a compiled library that takes the layer, meets the error of
`qcut.models.guards.described` when it runs. Branches whose condition the module's plain attributes decide, such as
``if self.config.pretraining_tp > 1``, count only where they are taken.
"""

from __future__ import annotations

import ast
import inspect
import operator
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from qcut.models.guards import DESCRIPTIONS

_VALUES = ("weight", "bias")
_PEEKS = ("isinstance", "hasattr", "type", "id")
"""Functions that look at an object without reading a tensor's values."""

Path = tuple[str, ...]
"""Names of attributes from ``self`` on."""

Conditions = tuple[tuple[ast.expr, bool], ...]
"""Expressions about ``self``, and whether each is true where the code runs."""


@dataclass
class _Code:
    """What a function mentions.

    Attributes:
        names: names of attributes and globals.
        reads: where values are read: the path of the layer, whether the path is that of a container of layers, the
            attribute, and the conditions.
        loose: names of layers that are read off something other than ``self``, the attribute, and the conditions.
        parameters: which parameters' values are read, and the attribute.
        passed: calls of functions with a module as an argument: function, position, path.
    """

    names: set[str] = field(default_factory=set)
    reads: set[tuple[Path, bool, str, Conditions]] = field(default_factory=set)
    loose: set[tuple[str, str, Conditions]] = field(default_factory=set)
    parameters: set[tuple[int, str]] = field(default_factory=set)
    passed: set[tuple[str, int, Path]] = field(default_factory=set)


def layers_read(model: nn.Module, layers: Iterable[nn.Module]) -> dict[int, str]:
    """Of these layers, by id, those whose values other modules read, and the class that reads them.

    Args:
        model: the model; its code is read, not run.
        layers: linear layers in it.
    """
    candidates = {id(layer): layer for layer in layers}
    found: dict[int, str] = {}
    reached = _reached(model)
    for module in model.modules():
        if id(module) in candidates:
            continue
        cls: Any = type(module)
        for _, function in _methods(cls):
            if function not in reached:
                continue
            for layer, attribute in _layers_of(module, function, _code_of(function)):
                if id(layer) in candidates and layer._parameters.get(attribute) is not None:
                    found.setdefault(id(layer), type(module).__name__)
    return found


def _reached(model: nn.Module) -> set[FunctionType]:
    """The methods that a forward call of the model may come to, by name."""
    methods: dict[str, list[FunctionType]] = {}
    classes: set[Any] = {type(module) for module in model.modules()}
    for cls in classes:
        for name, function in _methods(cls):
            methods.setdefault(name, []).append(function)
    todo = ["forward", "__call__"]
    seen: set[str] = set()
    reached: set[FunctionType] = set()
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            for function in methods.get(name, ()):
                reached.add(function)
                todo += _code_of(function).names
    return reached


@cache
def _methods(cls: type) -> tuple[tuple[str, FunctionType], ...]:
    """The methods of a class and its bases but ``nn.Module``, by name; overridden ones where ``super`` calls them."""
    found: list[tuple[str, FunctionType]] = []
    final: set[str] = set()
    for base in cls.__mro__:
        for name, value in vars(base).items() if base not in (nn.Module, object) else ():
            if name not in final:
                functions = list(_functions_in(value))
                found += [(name, function) for function in functions]
                if not any("super" in function.__code__.co_names for function in functions):
                    final.add(name)
    return tuple(found)


def _functions_in(value: Any, depth: int = 3) -> Iterator[FunctionType]:
    """The functions behind a class's attribute: those that decorators wrap, a property's, or a method's."""
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__func__", value)
    if isinstance(value, FunctionType):
        yield value
        inner = [getattr(value, "__wrapped__", None), *_enclosed(value)]
        for function in inner if depth else ():
            if isinstance(function, FunctionType):
                yield from _functions_in(function, depth - 1)


def _enclosed(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue


def _layers_of(module: nn.Module, function: FunctionType, code: _Code) -> Iterator[tuple[nn.Module, str]]:
    """The modules below this one that the function reads, and which attribute of theirs."""
    for path, container, attribute, conditions in code.reads:
        if not _may_run(module, conditions):
            continue
        target = _follow(module, path)
        if target is None and path:
            # The path goes through a property or an index: every module below of the last name may be meant.
            yield from ((m, attribute) for m in _named_below(module, path[-1]))
        elif isinstance(target, nn.Module):
            yield from ((m, attribute) for m in (target.children() if container else [target]))
    for name, attribute, conditions in code.loose:
        if not _may_run(module, conditions):
            continue
        yield from ((m, attribute) for m in _named_below(module, name))
    for name, position, path in code.passed:
        target = _follow(module, path)
        for callee in _functions_in(function.__globals__.get(name)) if isinstance(target, nn.Module) else ():
            yield from ((target, attribute) for at, attribute in _code_of(callee).parameters if at == position)


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


def _may_run(module: nn.Module, conditions: Conditions) -> bool:
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
    return [m for path, m in module.named_modules() if path.rpartition(".")[2] == name]


@cache
def _code_of(function: FunctionType) -> _Code:
    try:
        # The code's own source: that of a decorated function would be found through ``__wrapped__``.
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.__code__)))
        definition = next(node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    except (OSError, TypeError, SyntaxError, StopIteration, ValueError):
        return _without_source(function.__code__)
    return _Reader(definition).code


def _without_source(code: CodeType) -> _Code:
    """Where there is bytecode alone: a function that names ``weight`` may read it off any layer that it names."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _without_source(constant).names
    reads: set[tuple[str, str, Conditions]] = {
        (name, attribute, ()) for attribute in _VALUES if attribute in names for name in names
    }
    return _Code(names, loose=reads)


class _Reader(ast.NodeVisitor):
    """Collects `_Code` of one function."""

    def __init__(self, definition: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.code = _Code()
        arguments = [a.arg for a in (*definition.args.posonlyargs, *definition.args.args)]
        self.position = {name: i for i, name in enumerate(arguments)}
        self.self_name = arguments[0] if arguments else ""
        self.aliases: dict[str, set[tuple[Path, bool]]] = {}
        self.conditions: Conditions = ()
        self.quiet: set[int] = set()
        """Nodes whose value nobody reads."""
        for node in ast.walk(definition):
            self._note_alias(node)
        for statement in definition.body:
            self.visit(statement)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.code.names.add(node.attr)
        if node.attr in DESCRIPTIONS:
            self.quiet.add(id(node.value))
        if node.attr in _VALUES and id(node) not in self.quiet:
            self._note_read(node.value, node.attr)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self.code.names.add(node.id)

    def visit_If(self, node: ast.If) -> None:
        self._visit_branches(node.test, node.body, node.orelse)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._visit_branches(node.test, [node.body], [node.orelse])

    def _visit_branches(self, test: ast.expr, body: Sequence[ast.AST], orelse: Sequence[ast.AST]) -> None:
        self.visit(test)
        before = self.conditions
        for branch, taken in ((body, True), (orelse, False)):
            self.conditions = (*before, (test, taken))
            for node in branch:
                self.visit(node)
        self.conditions = before

    def visit_Compare(self, node: ast.Compare) -> None:
        if all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            self.quiet.update(map(id, (node.left, *node.comparators)))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.id if isinstance(node.func, ast.Name) else ""
        if called in _PEEKS:
            self.quiet.update(map(id, node.args))
        elif called == "getattr" and len(node.args) > 1:
            key = node.args[1]
            if isinstance(key, ast.Constant) and key.value in _VALUES and id(node) not in self.quiet:
                self._note_read(node.args[0], key.value)
        elif called:
            for i, argument in enumerate(node.args):
                self.code.passed |= {(called, i, path) for path, _ in self._paths(argument)}
        self.generic_visit(node)

    def _note_read(self, owner: ast.expr, attribute: str) -> None:
        paths = self._paths(owner)
        self.code.reads |= {(path, container, attribute, self.conditions) for path, container in paths if path}
        if isinstance(owner, ast.Attribute) and not paths:
            self.code.loose.add((owner.attr, attribute, self.conditions))
        if isinstance(owner, ast.Name) and not paths and owner.id in self.position and owner.id != self.self_name:
            self.code.parameters.add((self.position[owner.id], attribute))
        if isinstance(owner, ast.Name) and owner.id == self.self_name:
            # A free function's first parameter looks like ``self``.
            self.code.parameters.add((0, attribute))

    def _note_alias(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, node.value, False)
        elif isinstance(node, ast.NamedExpr):
            self._bind(node.target, node.value, False)
        elif isinstance(node, (ast.For, ast.comprehension)):
            self._bind(node.target, node.iter, True)

    def _bind(self, target: ast.expr, value: ast.expr, iterated: bool) -> None:
        names = [n.id for n in ast.walk(target) if isinstance(n, ast.Name)]
        paths = self._paths(value)
        if iterated:
            paths = {(path, True) for path in self._paths_inside(value)}
        for name in names:
            self.aliases.setdefault(name, set()).update(p for p in paths if p[0])

    def _paths(self, node: ast.expr) -> set[tuple[Path, bool]]:
        """Paths from ``self`` that an expression may stand for; with True, for a child of the module there."""
        if isinstance(node, ast.Name):
            return {((), False)} if node.id == self.self_name else self.aliases.get(node.id, set())
        if isinstance(node, ast.Attribute):
            base = self._paths(node.value)
            return {((*path, node.attr), False) for path, container in base if not container}
        if isinstance(node, ast.Subscript):
            return {(path, True) for path in self._paths_inside(node.value)}
        if isinstance(node, ast.IfExp):
            return self._paths(node.body) | self._paths(node.orelse)
        return set()

    def _paths_inside(self, node: ast.expr) -> set[Path]:
        """Paths of the modules that an expression takes from: its own, or those that a call is given."""
        found = {path for path, _ in self._paths(node)}
        if isinstance(node, ast.Call):
            for argument in (*node.args, *([node.func.value] if isinstance(node.func, ast.Attribute) else [])):
                found |= self._paths_inside(argument)
        return {path for path in found if path}
