"""What a function's source mentions: the layers it reads weights of, and what it asks about their classes.

Paths begin at ``self``; names that stand for a part of the model are followed through assignments and loops. Functions
without source are read as bytecode, which tells only names.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from qcut.models.guards import DESCRIPTIONS

VALUES = ("weight", "bias")
"""Tensors of a linear layer."""
ALL_VALUES = ("parameters", "named_parameters", "state_dict", "_parameters", "buffers", "named_buffers", "_buffers")
"""Attributes of a module that give the tensors of all that is in it."""
_PEEKS = ("isinstance", "hasattr", "type", "id")
"""Functions that look at an object without reading a tensor's values."""

SHOWS = ("vars", "dir", "repr", "str")
"""Functions whose result says all that an object has, or of which class it is."""
SHOWN = ("__dict__", "__module__", "__doc__", "extra_repr")
"""Attributes that do."""

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
        attribute: that it may have, "*" for any; "" where the class is asked for.
        exact: whether an object of a subclass is none of these classes, as for ``type(x) is C``.
        conditions: under which the question is asked.
    """

    paths: frozenset[tuple[Path, bool]]
    of: str
    classes: tuple[ast.expr, ...] | None
    attribute: str
    exact: bool
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
        wholes: where all parameters below a module are read: paths as in `Question`, and the conditions.
    """

    reads: set[tuple[Path, bool, str, Conditions]] = field(default_factory=set)
    loose: set[tuple[str, str, Conditions]] = field(default_factory=set)
    parameters: set[tuple[int, str]] = field(default_factory=set)
    passed: set[tuple[str, int, Path]] = field(default_factory=set)
    questions: set[Question] = field(default_factory=set)
    wholes: set[tuple[frozenset[tuple[Path, bool]], Conditions]] = field(default_factory=set)


@cache
def code_of(function: FunctionType) -> Code:
    """What a function's source mentions; of a function without source, what its bytecode does."""
    definition = definition_of(function)
    return _without_source(function.__code__) if definition is None else _Reader(definition).code


@cache
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


def paths_of(definition: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, node: ast.expr) -> set[tuple[Path, bool]]:
    """Paths from ``self`` that an expression in a function may stand for; with True, for a child of that."""
    return _Reader(definition)._paths(node)


def _without_source(code: CodeType) -> Code:
    """Where there is only bytecode: a function that names ``weight`` may read it off any layer that it names."""
    names = _all_names(code)
    reads: set[tuple[str, str, Conditions]] = {
        (name, attribute, ()) for attribute in VALUES if attribute in names for name in names
    }
    wholes: set[tuple[frozenset[tuple[Path, bool]], Conditions]] = set()
    if not names.isdisjoint(ALL_VALUES):
        wholes.add((frozenset(), ()))
    asks = not names.isdisjoint(("isinstance", "issubclass", "type", "__class__", "_get_name", "singledispatch"))
    return Code(
        loose=reads, questions={Question(frozenset(), "", None, "", True, ())} if asks else set(), wholes=wholes
    )


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
        if node.attr in SHOWN:
            self._note_question(node.value, None, "*")
        if node.attr in DESCRIPTIONS:
            self.quiet.add(id(node.value))
        if node.attr in ALL_VALUES and id(node) not in self.quiet:
            self.code.wholes.add((frozenset(self._paths(node.value)), self.conditions))
        if node.attr in VALUES and id(node) not in self.quiet:
            self._note_read(node.value, node.attr)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        self._visit_branches(node.test, node.body, node.orelse)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._visit_branches(node.test, [node.body], [node.orelse])

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        before, goes_on = self.conditions, isinstance(node.op, ast.And)
        for operand in node.values:
            self.visit(operand)
            self.conditions = (*self.conditions, (operand, goes_on))
        self.conditions = before

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
        for part in (part for case in node.cases for part in ast.walk(case.pattern)):
            if isinstance(part, ast.MatchClass):
                self._note_question(node.subject, (part.cls,))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = (node.left, *node.comparators)
        for side in sides:
            asked = _class_taken(side)
            if asked is not None:
                self._note_question(asked, tuple(other for other in sides if other is not side), exact=True)
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
        elif called in SHOWS and len(node.args) == 1:
            self._note_question(node.args[0], None, "*")
        if called == "next" and node.args:
            # The first parameter says which dtype or device a module has.
            self.quiet.update(id(part) for part in ast.walk(node.args[0]) if isinstance(part, ast.Attribute))
        if called in _PEEKS:
            self.quiet.update(map(id, node.args))
        elif called == "getattr" and len(node.args) > 1:
            key = node.args[1]
            if isinstance(key, ast.Constant) and key.value in VALUES and id(node) not in self.quiet:
                self._note_read(node.args[0], key.value)
        elif called:
            for i, argument in enumerate(node.args):
                self.code.passed |= {(called, i, path) for path, _ in self._paths(argument)}
        self.generic_visit(node)

    def _note_question(
        self, asked: ast.expr, classes: tuple[ast.expr, ...] | None, attribute: str = "", exact: bool = False
    ) -> None:
        of = asked.attr if isinstance(asked, ast.Attribute) and asked.attr in VALUES else ""
        paths = self._paths(asked.value if of and isinstance(asked, ast.Attribute) else asked)
        self.code.questions.add(Question(frozenset(paths), of, classes, attribute, exact, self.conditions))

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
