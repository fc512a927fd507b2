"""What a function's source mentions: layers that it reads weights of, and checks of their classes.

Paths begin at ``self``; names that stand for a part of the model are followed through assignments and loops. Functions
without source are read as bytecode, which has only names.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import CodeType
from typing import NamedTuple

from qcut.models.guards import DESCRIPTIONS
from qcut.models.weight_sharing.functions import names_in

VALUES = ("weight", "bias")
"""Tensors of a linear layer."""
ALL_VALUES = ("parameters", "named_parameters", "state_dict", "_parameters", "buffers", "named_buffers", "_buffers")
"""Attributes of a module that give the tensors of everything in it."""
SHOWS = ("vars", "dir", "repr", "str")
"""Functions that return all attributes of an object, or its class."""
SHOWN = ("__dict__", "__module__", "__doc__", "extra_repr")
"""Attributes that contain the same."""
LOOKS = ("isinstance", "hasattr", "type", "len")
"""Functions that take an object and read no values of a tensor."""
ASKS = ("isinstance", "issubclass", "hasattr", "type", "__instancecheck__", "__subclasscheck__", "__func__", "__code__")
"""Names of functions and attributes that show the class of an object."""
LOGS = frozenset(
    {
        *("print", "log", "debug", "info", "warn", "warning", "error", "exception", "critical"),
        *("warning_once", "info_once"),
    }
)
"""Functions with arguments that decide nothing."""
OF_FIRST = frozenset(
    {
        *("dtype", "device", "layout", "ndim", "dim", "itemsize", "element_size", "numel", "requires_grad"),
        *("is_cuda", "is_cpu", "is_meta", "is_xpu", "is_mps", "is_floating_point", "is_complex", "is_signed", "type"),
        *("new", "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "__class__", "data", "get_device"),
    }
)
"""Attributes of ``next(module.parameters())`` that a quantized layer's parameter has the same values of."""

Path = tuple[str, ...]
"""Names of attributes from ``self`` on; the first is "" if what they start from is unknown."""
Paths = frozenset[tuple[Path, bool]]
"""Paths, each with True for a child of the module there."""
Conditions = tuple[tuple[ast.expr, bool], ...]
"""Expressions about ``self``, and whether each is true where the code runs."""
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class ClassCheck(NamedTuple):
    """An expression with a value that depends on the class of an object.

    Attributes:
        paths: of the modules that the object may be; empty if unknown.
        tensor: ``weight`` or ``bias`` if the object is that tensor of the module, else "".
        classes: expressions of the classes compared with; None if the class itself is taken, as by ``type``.
        attribute: attribute looked for, "*" for any; "" for a check of the class.
        exact: whether subclasses do not count, as for ``type(x) is C``.
        conditions: under which the expression is evaluated.
    """

    paths: Paths
    tensor: str
    classes: tuple[ast.expr, ...] | None
    attribute: str
    exact: bool
    conditions: Conditions


@dataclass
class Code:
    """What a function mentions.

    Attributes:
        reads: reads of one tensor of a layer: path, whether the path is that of a container of layers, the tensor, and
            the conditions.
        reads_all: reads of all tensors below a module, and the conditions.
        parameters: positions of parameters with a tensor that is read, and the tensor.
        passed: calls of functions with a module as an argument: function, position, path.
        checks: of classes.
        attributes: reads of an attribute of a module: path, whether the path is that of a container, the name, and the
            conditions.
    """

    reads: set[tuple[Path, bool, str, Conditions]] = field(default_factory=set)
    reads_all: set[tuple[Paths, Conditions]] = field(default_factory=set)
    parameters: set[tuple[int, str]] = field(default_factory=set)
    passed: set[tuple[str, int, Path]] = field(default_factory=set)
    checks: set[ClassCheck] = field(default_factory=set)
    attributes: set[tuple[Path, bool, str, Conditions]] = field(default_factory=set)


@cache
def code_of(code: CodeType) -> Code:
    """What a function's source mentions; of a function without source, what its bytecode does."""
    definition = definition_of(code)
    return _without_source(code) if definition is None else _Reader(definition).code


@cache
def definition_of(code: CodeType) -> Definition | None:
    """A function's syntax tree, with its lines and columns in the file.

    None without source, and if several lambdas begin in one line.
    """
    try:
        if code.co_name == "<lambda>":
            source, before = "".join(linecache.getlines(code.co_filename)), 0
        else:
            source, before = inspect.getsource(code), code.co_firstlineno - 2
            source = ("if True:\n" if source[:1].isspace() else "\n") + source
        tree = ast.increment_lineno(ast.parse(source), before)
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    found = [node for node in ast.walk(tree) if isinstance(node, Definition) and _begins(node, code)]
    return found[0] if len(found) == 1 else None


def _begins(node: Definition, code: CodeType) -> bool:
    lines = [node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))]
    return min(lines) == code.co_firstlineno and getattr(node, "name", "<lambda>") == code.co_name


def parameters_of(definition: Definition) -> list[str]:
    """Names of the positional parameters."""
    return [one.arg for one in (*definition.args.posonlyargs, *definition.args.args)]


def statements_of(definition: Definition) -> Sequence[ast.AST]:
    """The statements of a function; of a lambda, its expression."""
    return definition.body if isinstance(definition.body, list) else [definition.body]


class Place(NamedTuple):
    """A node of a function's tree.

    Attributes:
        node: the node.
        conditions: under which the node is evaluated.
        statement: the smallest statement around the node; only the head of an ``if``, ``while`` or ``with``.
    """

    node: ast.AST
    conditions: Conditions
    statement: ast.AST


def places_in(node: ast.AST, conditions: Conditions = (), statement: ast.AST | None = None) -> Iterator[Place]:
    """A node and all nodes below, each before its children."""
    statement = node if isinstance(node, ast.stmt) or statement is None else statement
    yield Place(node, conditions, statement)
    match node:
        case ast.If(test=test) | ast.IfExp(test=test):
            yield from places_in(test, conditions, test)
            for part, taken in ((node.body, True), (node.orelse, False)):
                for one in part if isinstance(part, list) else [part]:
                    yield from places_in(one, (*conditions, (test, taken)), one)
        case ast.BoolOp(op=op, values=values):
            for value in values:
                yield from places_in(value, conditions, statement)
                conditions = (*conditions, (value, isinstance(op, ast.And)))
        case ast.While(test=head) | ast.withitem(context_expr=head):
            yield from places_in(head, conditions, head)
            for child in ast.iter_child_nodes(node):
                if child is not head:
                    yield from places_in(child, conditions, statement)
        case _:
            for child in ast.iter_child_nodes(node):
                yield from places_in(child, conditions, statement)


def only_identity(node: ast.AST) -> bool:
    """Whether a node is a comparison by ``is``, which reads no values."""
    return isinstance(node, ast.Compare) and all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops)


def paths_of(definition: Definition, node: ast.expr) -> set[tuple[Path, bool]]:
    """Paths from ``self`` that an expression in a function may stand for; with True, for a child of that."""
    return _Reader(definition)._paths(node)


def _without_source(code: CodeType) -> Code:
    """Of bytecode: a function that names ``weight`` may read that of any layer that it names."""
    names = names_in(code)
    reads: set[tuple[Path, bool, str, Conditions]] = {
        (("", name), False, tensor, ()) for tensor in VALUES if tensor in names for name in names
    }
    checks = not names.isdisjoint(("isinstance", "issubclass", "type", "__class__", "_get_name", "singledispatch"))
    return Code(
        reads,
        set() if names.isdisjoint(ALL_VALUES) else {(frozenset(), ())},
        checks={ClassCheck(frozenset(), "", None, "", True, ())} if checks else set(),
    )


def _name_of(node: ast.expr) -> str:
    """The last name of an expression such as ``torch.compile``."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _class_taken(node: ast.expr) -> ast.expr | None:
    """The object whose class, or class's name, an expression is; else None."""
    match node:
        case ast.Attribute(value=value, attr="__name__" | "__qualname__" | "__mro__" | "__bases__"):
            return _class_taken(value)
        case ast.Attribute(value=value, attr="__class__"):
            return value
        case ast.Call(func=ast.Attribute(value=value, attr="_get_name")):
            return value
        case ast.Call(func=ast.Name(id="str" | "repr" | "len" | "hash"), args=[argument]):
            return _class_taken(argument)
        case ast.Call(func=ast.Name(id="type") | ast.Attribute(attr="typename"), args=[argument]):
            return argument
    return None


class _Reader:
    """Collects `Code` of one function."""

    def __init__(self, definition: Definition) -> None:
        self.code = Code()
        arguments = parameters_of(definition)
        self.position = {name: i for i, name in enumerate(arguments)}
        self.self_name = arguments[0] if arguments else ""
        self.aliases: dict[str, set[tuple[Path, bool]]] = {}
        self.quiet: set[ast.AST] = set()
        """Nodes with a value that nobody reads."""
        self.noted: set[ast.AST] = set()
        """Nodes that take a class and are part of a check that is noted already."""
        self.users: dict[ast.AST, ast.AST] = {}
        """The node around each."""
        self.named: dict[str, list[ast.AST]] = {}
        """The nodes with each name."""
        for node in ast.walk(definition):
            self._note_alias(node)
            self.users.update(dict.fromkeys(ast.iter_child_nodes(node), node))
            if isinstance(node, ast.Name):
                self.named.setdefault(node.id, []).append(node)
        messages: set[ast.AST] = set()  # the text of an error decides nothing
        for statement in statements_of(definition):
            for node, conditions, _ in places_in(statement):
                if isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and _name_of(node.func) in LOGS):
                    messages.update(ast.walk(node))
                elif node not in messages:
                    self._visit(node, conditions)

    def _visit(self, node: ast.AST, conditions: Conditions) -> None:
        match node:
            case ast.Attribute():
                self._visit_attribute(node, conditions)
            case ast.Match(subject=subject, cases=cases):
                for part in (part for case in cases for part in ast.walk(case.pattern)):
                    if isinstance(part, ast.MatchClass):
                        self._note_check(conditions, subject, (part.cls,))
            case ast.Compare(left=left, comparators=comparators):
                sides = (left, *comparators)
                for side in sides:
                    if (taken := _class_taken(side)) is not None:
                        others = tuple(other for other in sides if other is not side)
                        self._note_check(conditions, taken, others, exact=True)
                        self.noted.add(side)
                if only_identity(node) and any(isinstance(side, ast.Constant) for side in sides):
                    self.quiet.update(sides)
            case ast.Call():
                self._visit_call(node, conditions)
            case ast.FormattedValue(value=shown) | ast.BinOp(left=ast.Constant(value=str()), op=ast.Mod(), right=shown):
                for one in shown.elts if isinstance(shown, ast.Tuple) else [shown]:
                    self._note_check(conditions, one, None, "*")
            case ast.Name(id=name) if name in ASKS and node not in self.noted:
                self._note_check(conditions, ast.Constant(None), None)

    def _visit_attribute(self, node: ast.Attribute, conditions: Conditions) -> None:
        if isinstance(node.ctx, ast.Load):
            self._note_attribute(conditions, node.value, node.attr)
        taken = _class_taken(node)
        if taken is not None and node not in self.noted:
            self.noted.add(node.value)
            self._note_check(conditions, taken, None)
        if node.attr in ASKS:
            self._note_check(conditions, ast.Constant(None), None)
        if node.attr in SHOWN:
            self._note_check(conditions, node.value, None, "*")
        if node.attr in DESCRIPTIONS:
            self.quiet.add(node.value)
        if node.attr in ALL_VALUES and node not in self.quiet:
            self.code.reads_all.add((frozenset(self._paths(node.value)), conditions))
        if node.attr in VALUES and node not in self.quiet:
            self._note_read(conditions, node.value, node.attr)

    def _visit_call(self, node: ast.Call, conditions: Conditions) -> None:
        called = node.func.id if isinstance(node.func, ast.Name) else ""
        self.noted.add(node.func)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "format":
            for one in (*node.args, *(keyword.value for keyword in node.keywords)):
                self._note_check(conditions, one, None, "*")
        if called in ("isinstance", "issubclass") and len(node.args) == 2:
            taken = _class_taken(node.args[0]) if called == "issubclass" else node.args[0]
            if taken is not None:
                self.noted.add(node.args[0])
                self._note_check(conditions, taken, (node.args[1],))
        elif (taken := _class_taken(node)) is not None and node not in self.noted:
            self._note_check(conditions, taken, None)
        elif called == "hasattr" or (called == "getattr" and len(node.args) == 3):
            key = node.args[1] if len(node.args) > 1 else None
            name = key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else "*"
            self._note_check(conditions, node.args[0], None, name)
        elif called in SHOWS and len(node.args) == 1:
            self._note_check(conditions, node.args[0], None, "*")
        if called == "next" and node.args and not self._is_read(node):
            # The first parameter is read for its dtype or device.
            self.quiet.update(part for part in ast.walk(node.args[0]) if isinstance(part, ast.Attribute))
        if called in LOOKS:
            self.quiet.update(one for one in node.args if _name_of(one) not in ALL_VALUES)
        elif called == "getattr" and len(node.args) > 1:
            key = node.args[1]
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                self._note_attribute(conditions, node.args[0], key.value)
                if key.value in VALUES and node not in self.quiet:
                    self._note_read(conditions, node.args[0], key.value)
        elif name := _name_of(node.func):
            for i, argument in enumerate(node.args):
                self.code.passed |= {(name, i, path) for path, _ in self._paths(argument)}

    def _is_read(self, node: ast.AST) -> bool:
        """Whether an operator, ``len`` or an attribute of others than `OF_FIRST` reads a value."""
        user = self.users[node]
        places = [node]
        if isinstance(user, (ast.Assign, ast.NamedExpr)):
            targets = user.targets if isinstance(user, ast.Assign) else [user.target]
            places += [user, *(place for target in targets for place in self.named.get(_name_of(target), []))]
        for place in places:
            match self.users[place]:
                case ast.Attribute(attr=name) if name not in OF_FIRST:
                    return True
                case ast.BinOp() | ast.UnaryOp() | ast.Subscript() | ast.Call(func=ast.Name(id="len")):
                    return True
                case ast.Compare() as comparison if not only_identity(comparison):
                    return True
                case ast.Call(func=ast.Attribute(value=ast.Name(id="torch" | "F"), attr=name)) if name[:3] != "is_":
                    return True
        return False

    def _note_check(
        self,
        conditions: Conditions,
        checked: ast.expr,
        classes: tuple[ast.expr, ...] | None,
        attribute: str = "",
        exact: bool = False,
    ) -> None:
        tensor = ""
        if isinstance(checked, ast.Attribute) and checked.attr in VALUES:
            tensor, checked = checked.attr, checked.value
        paths = frozenset(self._paths(checked))
        self.code.checks.add(ClassCheck(paths, tensor, classes, attribute, exact, conditions))

    def _note_attribute(self, conditions: Conditions, owner: ast.expr, name: str) -> None:
        self.code.attributes |= {(path, container, name, conditions) for path, container in self._paths(owner) if path}

    def _note_read(self, conditions: Conditions, owner: ast.expr, tensor: str) -> None:
        paths = self._paths(owner)
        self.code.reads |= {(path, container, tensor, conditions) for path, container in paths if path}
        if isinstance(owner, ast.Attribute) and not paths:
            self.code.reads.add((("", owner.attr), False, tensor, conditions))
        if isinstance(owner, ast.Name) and owner.id in self.position and (owner.id == self.self_name or not paths):
            # A free function's first parameter looks like ``self``.
            self.code.parameters.add((self.position[owner.id], tensor))

    def _note_alias(self, node: ast.AST) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._bind(target, self._paths(value))
            case ast.NamedExpr(target=target, value=value):
                self._bind(target, self._paths(value))
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                self._bind(target, {(path, True) for path in self._paths_inside(value)})

    def _bind(self, target: ast.expr, paths: set[tuple[Path, bool]]) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                self.aliases.setdefault(node.id, set()).update(p for p in paths if p[0])

    def _paths(self, node: ast.expr) -> set[tuple[Path, bool]]:
        """Paths from ``self`` that an expression may stand for; with True, for a child of the module there."""
        match node:
            case ast.Name(id=name):
                return {((), False)} if name == self.self_name else self.aliases.get(name, set())
            case ast.Attribute(value=value, attr=attribute):
                return {((*path, attribute), False) for path, container in self._paths(value) if not container}
            case ast.Subscript(value=value):
                return {(path, True) for path in self._paths_inside(value)}
            case ast.IfExp(body=body, orelse=orelse):
                return self._paths(body) | self._paths(orelse)
        return set()

    def _paths_inside(self, node: ast.expr) -> set[Path]:
        """Paths of the modules that an expression takes from: its own, or those that a call is given."""
        found = {path for path, _ in self._paths(node)}
        if isinstance(node, ast.Call):
            for argument in (*node.args, *([node.func.value] if isinstance(node.func, ast.Attribute) else [])):
                found |= self._paths_inside(argument)
        return {path for path in found if path}
