"""Tells whether code reads a norm's output at a place that no watched call came to.

`Places` notes where a norm's output was when it was made and when linear layers read it: in which functions, in what
names, at which expressions. The functions are then followed statement by statement. Every expression that reads the
value must be one that was seen to end in a linear layer; an expression in a branch, a loop or a function that the
batches did not come to is another reader.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

from torch import Tensor, nn

from qcut.models.guards import DESCRIPTIONS
from qcut.models.weight_sharing.functions import WALKS, home_of, is_library_code, mentioned_by, reached
from qcut.models.weight_sharing.readers import may_run, modules_at
from qcut.models.weight_sharing.syntax import (
    LOOKS,
    Definition,
    Place,
    definition_of,
    only_identity,
    parameters_of,
    paths_of,
    places_in,
    statements_of,
)

_PASSED_BY = ("torch", "qcut", "transformers.utils", "transformers.modeling_layers", "accelerate", "contextlib")
"""Modules with functions that hand their arguments on."""
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Span(NamedTuple):
    """The place of an expression in a file; without columns before Python 3.11."""

    line: int
    end_line: int
    column: int | None
    end_column: int | None

    def holds(self, node: Any) -> bool:
        """Whether a node stands in the span."""
        if self.column is None or self.end_column is None:
            return bool(self.line == node.lineno)
        begins = (self.line, self.column) <= (node.lineno, node.col_offset)
        return bool(begins and (node.end_lineno, node.end_col_offset) <= (self.end_line, self.end_column))

    def within(self, node: Any) -> bool:
        """Whether the span stands in a node."""
        if self.column is None or self.end_column is None:
            return bool(node.lineno <= self.line <= node.end_lineno)
        begins = (node.lineno, node.col_offset) <= (self.line, self.column)
        return bool(begins and (self.end_line, self.end_column) <= (node.end_lineno, node.end_col_offset))


class _Holder(NamedTuple):
    """A function that has a norm's output, and its module, if it is a method of one."""

    code: CodeType
    module: nn.Module | None


@dataclass
class _Seen:
    """Where one norm's output was.

    Attributes:
        births: calls, by function, that the output came from.
        results: calls that return the output: those of the norm itself.
        again: calls that were given the output and returned it.
        names: names, by function, that held the output.
        read: calls that took the output to a linear layer, with their files.
        kept: module that keeps the output, in words.
    """

    births: dict[_Holder, set[Span]] = field(default_factory=lambda: defaultdict(set))
    results: set[tuple[CodeType, Span]] = field(default_factory=set)
    again: set[tuple[CodeType, Span]] = field(default_factory=set)
    names: dict[_Holder, set[str]] = field(default_factory=lambda: defaultdict(set))
    read: set[tuple[str, Span]] = field(default_factory=set)
    kept: str | None = None


class Places:
    """Where the outputs of norms were.

    Args:
        within: the code of the function that calls the model; frames above it are not looked at.
    """

    def __init__(self, within: CodeType) -> None:
        self._within = within
        self._norms: dict[str, _Seen] = defaultdict(_Seen)
        self._stacks: set[tuple[Any, ...]] = set()
        self._functions: dict[str, list[tuple[nn.Module, FunctionType]]] = {}

    def made(self, norm: str) -> None:
        """Note where a norm is called from."""
        seen = self._norms[norm]
        for frame, span, direct in self._new_frames(norm):
            seen.births[_holder(frame)].add(span)
            if direct:
                seen.results.add((frame.f_code, span))

    def reads(self, norm: str, reader: str, outputs: Sequence[Tensor]) -> None:
        """Note where a linear layer is called from with a norm's output, and the names that hold the output.

        Args:
            norm: the norm.
            reader: the layer.
            outputs: the output, and views and copies of it.
        """
        seen = self._norms[norm]
        for frame, span, _ in self._new_frames(norm, reader):
            seen.read.add((frame.f_code.co_filename, span))
            names = seen.names[_holder(frame)]
            for name, value in frame.f_locals.items():
                if isinstance(value, nn.Module):
                    for key in (key for key, one in vars(value).items() if _holds(one, outputs)):
                        seen.kept = f"{type(value).__name__} keeps its output as {key!r}"
                elif _holds(value, outputs):
                    names.add(name)

    def passes(self, norm: str, function: str, new: bool = False) -> None:
        """Note where a function is called that returns a norm's output as it is, or a new tensor of the same rows."""
        for frame, span, _ in self._new_frames(norm, function)[:1]:
            if new:
                self._norms[norm].results.add((frame.f_code, span))
            self._norms[norm].read.add((frame.f_code.co_filename, span))
            self._norms[norm].again.add((frame.f_code, span))

    def problem(self, model: nn.Module, norm: str, readers: Sequence[nn.Module]) -> str | None:
        """Who else than these layers may read a norm's output, or None."""
        seen = self._norms[norm]
        inside = (self._read_in(seen, holder, readers) for holder in {**seen.births, **seen.names})
        module = model.get_submodule(norm)
        names = (name for name, one in model.named_modules(remove_duplicate=False) if one is module)
        outside = (self._other_call(model, name, seen) for name in names)
        return seen.kept or next((found for problems in (inside, outside) for found in problems if found), None)

    @staticmethod
    def _read_in(seen: _Seen, holder: _Holder, readers: Sequence[nn.Module]) -> str | None:
        """Another reader in a function that has the output."""
        code, module = holder
        definition, where = definition_of(code), getattr(code, "co_qualname", code.co_name)
        if definition is None:
            return f"{where} has no source to read"
        spans = [span for file, span in seen.read if file == code.co_filename]
        results, again = ({span for one, span in calls if one is code} for calls in (seen.results, seen.again))
        births, names = seen.births.get(holder, set()), seen.names.get(holder, set())
        if _Flow(module, births | again, results, set() if births else names, names, spans).finds(definition):
            return f"{where} reads its output where other inputs may take it"
        for call in (node for node in ast.walk(definition) if isinstance(node, ast.Call)):
            called = any(span.holds(call) and span.within(call) for span in spans)
            given = names or any(span.within(call) and not span.holds(call) for span in results)
            if called and given and _may_call_others(call, definition, module, readers):
                return f"{where} gives its output to what other inputs may choose"
        return None

    def _other_call(self, model: nn.Module, norm: str, seen: _Seen) -> str | None:
        """A function that mentions a norm, or the container that it is in, in a statement that did not call it."""
        *path, key = norm.split(".")
        parent = model.get_submodule(".".join(path))
        while isinstance(parent, _CONTAINERS) and path:
            key = path.pop()
            parent = model.get_submodule(".".join(path))
        inside = {model.get_submodule(norm[:i]) for i, c in enumerate(norm) if c == "."} | {model}
        for module, function in (pair for walk in WALKS for pair in self._mentioning(model, walk)):
            if module in inside and not is_library_code(function):
                return f"{function.__qualname__} walks the modules that it is in"
        for module, function in self._mentioning(model, key):
            mentions, file = _mentions(function.__code__, key), function.__code__.co_filename
            if mentions is None:
                return f"{function.__qualname__} mentions it, and has no source to read"
            spans = [span for holder, calls in seen.births.items() if holder.code.co_filename == file for span in calls]
            for place, of_self in mentions:
                called = any(span.within(place.statement) for span in spans)
                if not called and (module is parent or not of_self) and may_run(module, place.conditions):
                    return f"{function.__qualname__} mentions it where these batches did not call it"
        return None

    def _mentioning(self, model: nn.Module, name: str) -> list[tuple[nn.Module, FunctionType]]:
        """The functions that may take a part of a module by this name, and the modules that they work on."""
        if not self._functions:
            for module, functions in reached(model):
                for function in functions:
                    for one in () if _passes_by(home_of(function)) else mentioned_by(function):
                        self._functions.setdefault(one, []).append((module, function))
        return self._functions.get(name, [])

    def _new_frames(self, *what: str) -> list[tuple[FrameType, Span, bool]]:
        """The functions that are running, from the inside; none if they have been noted already.

        With each, the expression that runs, and whether this calls the module itself, not what holds it.
        """
        frames: list[tuple[FrameType, Span, bool]] = []
        inside, direct = None, True
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not self._within:
            name = str(frame.f_globals.get("__name__", ""))
            if not _passes_by(name):
                span = inside or _span(frame.f_code, frame.f_lasti, frame.f_lineno)
                if frame.f_code.co_name in _COMPREHENSIONS:
                    inside = span  # which says more than the place in the function that it stands in
                else:
                    frames.append((frame, span, direct))
                    inside, direct = None, False
            elif name != nn.Module.__module__ and not name.startswith("qcut."):
                direct = False
            frame = frame.f_back
        key = (*what, *((id(frame.f_code), span) for frame, span, _ in frames))
        if key in self._stacks:
            return []
        self._stacks.add(key)
        return frames


@cache
def _passes_by(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in _PASSED_BY)


@cache
def _span(code: CodeType, instruction: int, line: int) -> Span:
    if sys.version_info >= (3, 11):
        first, last, column, end = next(islice(code.co_positions(), instruction // 2, None))
        if first is not None and last is not None:
            return Span(first, last, column, end)
    return Span(line, line, None, None)


def _holder(frame: FrameType) -> _Holder:
    code = frame.f_code
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    return _Holder(code, first if isinstance(first, nn.Module) else None)


def _holds(value: Any, outputs: Sequence[Tensor]) -> bool:
    if isinstance(value, (list, tuple, set)):
        return any(_holds(one, outputs) for one in value if isinstance(one, Tensor))
    if isinstance(value, dict):
        return any(_holds(one, outputs) for one in value.values() if isinstance(one, Tensor))
    return any(value is output for output in outputs)


def branches_by_values(module: nn.Module) -> bool:
    """Whether a model's own code for a module, such as a norm, may take other branches for other values.

    Args:
        module: its code is read, not run.
    """
    functions = (function for _, found in reached(module) for function in found if not is_library_code(function))
    definitions = (definition_of(function.__code__) for function in functions)
    return any(one is None or any(_branches(module, node) for node in ast.walk(one)) for one in definitions)


def _branches(module: nn.Module, node: ast.AST) -> bool:
    match node:
        case ast.If(body=body) if all(isinstance(one, ast.Raise) for one in body):
            return False
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            return not _decided(module, test)
        case ast.BoolOp():
            return not _decided(module, node)
    return isinstance(node, ast.Try)


def _decided(module: nn.Module, test: ast.expr) -> bool:
    """Whether a condition is the same for all values of a module's input."""
    if isinstance(test, ast.BoolOp) and all(_decided(module, part) for part in test.values):
        return True
    return only_identity(test) or not all(may_run(module, ((test, taken),)) for taken in (True, False))


def _may_call_others(
    call: ast.Call, definition: Definition, module: nn.Module | None, readers: Sequence[nn.Module]
) -> bool:
    """Whether a call that came to these layers may come to another module, as one chosen by an index or a name."""
    paths = paths_of(definition, call.func)
    if not paths:
        parameters = {part.arg for part in ast.walk(definition.args) if isinstance(part, ast.arg)}
        return isinstance(call.func, ast.Name) and call.func.id in parameters | _bound(definition)
    if module is None or (len(paths) == 1 and not any(container for _, container in paths)):
        return False
    chosen = [one for path, container in paths for one in modules_at(module, path, container)]
    return not all(any(part in readers for part in one.modules()) for one in chosen)


@cache
def _mentions(code: CodeType, name: str) -> list[tuple[Place, bool]] | None:
    """Where a function takes a part of that name, and whether of its first argument; None without source."""
    definition = definition_of(code)
    if definition is None:
        return None
    found: list[tuple[Place, bool]] = []
    compared: set[ast.AST] = set()
    for place in (place for statement in statements_of(definition) for place in places_in(statement)):
        match place.node:
            case node if only_identity(node):
                compared.update(ast.walk(node))
            case ast.Attribute(value=value, attr=attribute) if attribute == name and place.node not in compared:
                found.append((place, isinstance(value, ast.Name) and value.id in parameters_of(definition)[:1]))
            case ast.Constant(value=str(text)) if name in text.split("."):  # as get_submodule takes it
                found.append((place, False))
    return found


class _Flow:
    """Follows the names that hold a norm's output through a function.

    Args:
        module: the one that has the function as a method, or None.
        births: expressions that the output comes from.
        results: calls that return the output.
        held: names that hold the output when the function begins.
        names: names that were seen to hold the output.
        read: calls that took the output to a linear layer.
    """

    def __init__(
        self,
        module: nn.Module | None,
        births: set[Span],
        results: set[Span],
        held: set[str],
        names: set[str],
        read: Sequence[Span],
    ) -> None:
        self.method, self.module = module is not None, module or nn.Module()
        self.births, self.results, self.held, self.names, self.read = births, results, set(held), names, read
        self.found = False

    def finds(self, definition: Definition) -> bool:
        """Whether a read of the value is none of those that were seen."""
        if isinstance(definition, ast.Lambda):
            self._look(definition.body)
        else:
            self._walk(definition.body)
        return self.found

    def _walk(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        blocks, heads = _blocks(node), list(_expressions(node))
        born = any(span.within(head) for head in heads for span in self.births)
        if blocks and born:
            self.held |= self.names
        match node:
            case ast.Global() | ast.Nonlocal():
                self.found = True  # other functions see what this one binds
            case ast.AugAssign(target=ast.Name(id=name)) if name in self.held:
                self.found = True
            case ast.Assign(value=value, targets=targets):
                self._bind(targets, value)
            case ast.AnnAssign(value=value, target=target) if value is not None:
                self._bind([target], value)
            case _:
                for head in heads:
                    self._look(head)
        match node:
            case ast.If(test=test, body=body, orelse=orelse):
                branches = ((body, True), (orelse, False))
                self._either(*(part for part, taken in branches if may_run(self.module, ((test, taken),))))
            case ast.With(body=body) | ast.AsyncWith(body=body):
                self._walk(body)
            case _ if blocks:
                for _ in range(2):  # a name that the end of a loop binds is read at its beginning
                    self._either([], *blocks)
            case _ if born:
                self.held |= self.names & _bound(node)

    def _either(self, *branches: Sequence[ast.stmt]) -> None:
        before, after = set(self.held), set[str]()
        for branch in branches:
            self.held = set(before)
            self._walk(branch)
            after |= self.held
        self.held = after if branches else before

    def _bind(self, targets: Sequence[ast.expr], value: ast.expr) -> None:
        holds = self._moves(value)
        for part in (part for target in targets for part in ast.walk(target)):
            if isinstance(part, ast.Name):
                self.held = self.held | {part.id} if holds else self.held - {part.id}
            elif holds and isinstance(part, (ast.Attribute, ast.Subscript)):
                self.found = True  # kept where the function's own names do not tell

    def _moves(self, value: ast.expr) -> bool:
        """Whether an expression may be the output itself; an assignment of a name reads nothing."""
        match value:
            case ast.Name(id=name):
                return name in self.held
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self._look(test)
                return any([self._moves(body), self._moves(orelse)])
        self._look(value)
        return any(span.holds(value) and span.within(value) for span in self.results)

    def _look(self, node: ast.expr) -> None:
        """Note reads of the value in an expression."""
        match node:
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self._look(test)
                for branch, taken in ((body, True), (orelse, False)):
                    if may_run(self.module, ((test, taken),)):
                        self._look(branch)
                return
            case ast.Attribute(value=ast.Name(), attr=attribute) if attribute in DESCRIPTIONS:
                return
            case ast.Call(func=ast.Name(id=name)) if name in LOOKS:
                return
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=attribute)):
                if self.method and not hasattr(self.module, attribute):
                    return  # a layer that this module has not
            case ast.NamedExpr(target=target, value=value):
                return self._bind([target], value)
            case ast.Name(id=name, ctx=ast.Load()) if name in self.held:
                self.found = self.found or not any(span.holds(node) for span in self.read)
        for part in () if only_identity(node) else _expressions(node):
            self._look(part)


def _blocks(node: ast.AST) -> list[list[ast.stmt]]:
    """The lists of statements in a statement; each list may run or not."""
    owners = (node, *getattr(node, "handlers", ()), *getattr(node, "cases", ()))
    blocks = (getattr(owner, name, None) for owner in owners for name in ("body", "orelse", "finalbody"))
    return [block for block in blocks if block]


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions in a statement or expression, without those of statements inside."""
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.expr):
            yield part
        elif not isinstance(part, ast.stmt):
            yield from _expressions(part)


def _bound(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
