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
import inspect
import operator
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn

from qcut.models.guards import DESCRIPTIONS
from qcut.models.reached import called_by, functions_in, names_of, reached

_VALUES = ("weight", "bias")
_PEEKS = ("isinstance", "hasattr", "type", "id")
"""Functions that look at an object without reading a tensor's values."""

Path = tuple[str, ...]
"""Names of attributes from ``self`` on."""

Conditions = tuple[tuple[ast.expr, bool], ...]
"""Expressions about ``self``, and whether each is true where the code runs."""


class Question(NamedTuple):
    """Something that code asks of an object whose answer depends on the object's class.

    Attributes:
        paths: of the modules that may be asked, and whether a path is that of a container; none where they are unknown.
        of: ``weight`` or ``bias`` where that tensor is asked and not the module; else "".
        classes: expressions of the classes that it may be of; None where the class itself is taken, as by ``type``.
        attribute: that it may have; "" where the class is asked for.
        conditions: under which the question is asked.
    """

    paths: frozenset[tuple[Path, bool]]
    of: str
    classes: tuple[ast.expr, ...] | None
    attribute: str
    conditions: Conditions


@dataclass
class Code:
    """What a function mentions.

    Attributes:
        reads: where values are read: the path of the layer, whether the path is that of a container of layers, the
            attribute, and the conditions.
        loose: names of layers that are read off something other than ``self``, the attribute, and the conditions.
        parameters: which parameters' values are read, and the attribute.
        passed: calls of functions with a module as an argument: function, position, path.
        questions: about classes.
    """

    reads: set[tuple[Path, bool, str, Conditions]] = field(default_factory=set)
    loose: set[tuple[str, str, Conditions]] = field(default_factory=set)
    parameters: set[tuple[int, str]] = field(default_factory=set)
    passed: set[tuple[str, int, Path]] = field(default_factory=set)
    questions: set[Question] = field(default_factory=set)


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
            if all(names_of(one).isdisjoint(_VALUES) for one in (function, *called_by(function))):
                continue
            for layer, attribute in _layers_of(module, function, code_of(function)):
                if id(layer) in candidates and layer._parameters.get(attribute) is not None:
                    found.setdefault(id(layer), type(module).__name__)
    return found


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
    return [m for path, m in module.named_modules() if path.rpartition(".")[2] == name]


@cache
def code_of(function: FunctionType) -> Code:
    """What a function's source mentions; of a function without source, what its bytecode does."""
    definition = definition_of(function)
    return _without_source(function.__code__) if definition is None else _Reader(definition).code


def definition_of(function: FunctionType) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | None:
    """A function's syntax tree, or None where there is no source, or several lambdas stand in one line."""
    wanted: tuple[type[ast.AST], ...] = (ast.FunctionDef, ast.AsyncFunctionDef)
    try:
        # The code's own source: that of a decorated function would be found through ``__wrapped__``.
        source = textwrap.dedent(inspect.getsource(function.__code__))
        if function.__name__ == "<lambda>":
            wanted = (ast.Lambda,)
            lines = source.strip().rstrip(",").splitlines()
            source = "\n".join(lines)[source.strip().index("lambda") :] if len(lines) == 1 else source
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    found: list[Any] = [node for node in ast.walk(tree) if isinstance(node, wanted)]
    return found[0] if found and (wanted != (ast.Lambda,) or len(found) == 1) else None


def _without_source(code: CodeType) -> Code:
    """Where there is bytecode alone: a function that names ``weight`` may read it off any layer that it names."""
    names = _all_names(code)
    reads: set[tuple[str, str, Conditions]] = {
        (name, attribute, ()) for attribute in _VALUES if attribute in names for name in names
    }
    asks = not names.isdisjoint(("isinstance", "issubclass", "type", "__class__", "_get_name", "singledispatch"))
    return Code(loose=reads, questions={Question(frozenset(), "", None, "", ())} if asks else set())


def _all_names(code: CodeType) -> set[str]:
    inner = (_all_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def _class_taken(node: ast.expr) -> ast.expr | None:
    """The object whose class an expression takes, or its class's name; None where it is no such expression."""
    if isinstance(node, ast.Attribute) and node.attr in ("__name__", "__qualname__", "__mro__", "__bases__"):
        return _class_taken(node.value)
    if isinstance(node, ast.Attribute) and node.attr == "__class__":
        return node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "_get_name":
        return node.func.value
    called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
    if isinstance(node, ast.Call) and len(node.args) == 1:
        if called in ("str", "repr", "len", "hash"):
            return _class_taken(node.args[0])
        return node.args[0] if called == "type" else None
    return None


class _Reader(ast.NodeVisitor):
    """Collects `Code` of one function."""

    def __init__(self, definition: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        self.code = Code()
        arguments = [a.arg for a in (*definition.args.posonlyargs, *definition.args.args)]
        self.position = {name: i for i, name in enumerate(arguments)}
        self.self_name = arguments[0] if arguments else ""
        self.aliases: dict[str, set[tuple[Path, bool]]] = {}
        self.conditions: Conditions = ()
        self.quiet: set[int] = set()
        """Nodes whose value nobody reads."""
        self.answered: set[int] = set()
        """Nodes that take a class and are part of a question that is noted already."""
        for node in ast.walk(definition):
            self._note_alias(node)
        for statement in definition.body if isinstance(definition.body, list) else [definition.body]:
            self.visit(statement)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        asked = _class_taken(node)
        if asked is not None and id(node) not in self.answered:
            self.answered.add(id(node.value))
            self._note_question(asked, None)
        if node.attr in DESCRIPTIONS:
            self.quiet.add(id(node.value))
        if node.attr in _VALUES and id(node) not in self.quiet:
            self._note_read(node.value, node.attr)
        self.generic_visit(node)

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

    def visit_Raise(self, node: ast.Raise) -> None:
        """What an error's message says decides nothing."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """As `visit_Raise`."""

    def visit_Match(self, node: ast.Match) -> None:
        for part in ast.walk(ast.Module([*node.cases], [])):
            if isinstance(part, ast.MatchClass):
                self._note_question(node.subject, (part.cls,))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = (node.left, *node.comparators)
        for side in sides:
            asked = _class_taken(side)
            if asked is not None:
                self._note_question(asked, tuple(other for other in sides if other is not side))
                self.answered.add(id(side))
        if all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            self.quiet.update(map(id, sides))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.id if isinstance(node.func, ast.Name) else ""
        if called in ("isinstance", "issubclass") and len(node.args) == 2:
            asked = _class_taken(node.args[0]) if called == "issubclass" else node.args[0]
            if asked is not None:
                self.answered.add(id(node.args[0]))
                self._note_question(asked, (node.args[1],))
        elif (asked := _class_taken(node)) is not None and id(node) not in self.answered:
            self._note_question(asked, None)
        elif called == "hasattr" or (called == "getattr" and len(node.args) == 3):
            key = node.args[1] if len(node.args) > 1 else None
            name = key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else "*"
            self._note_question(node.args[0], None, name)
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

    def _note_question(self, asked: ast.expr, classes: tuple[ast.expr, ...] | None, attribute: str = "") -> None:
        of = asked.attr if isinstance(asked, ast.Attribute) and asked.attr in _VALUES else ""
        paths = self._paths(asked.value if of and isinstance(asked, ast.Attribute) else asked)
        self.code.questions.add(Question(frozenset(paths), of, classes, attribute, self.conditions))

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
