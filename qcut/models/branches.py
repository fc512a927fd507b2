"""Tells whether code reads a norm's output at a place that no watched call came to.

`Places` notes where a norm's output was when it was made and when linear layers read it: in which functions, in what
names, at which expressions. The functions are then followed statement by statement. Every expression that reads the
value must be one that was seen to end in a linear layer; whatever stands in a branch, a loop or a function that the
batches did not come to is another reader.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Sequence
from functools import cache
from itertools import islice
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

from torch import Tensor, nn

from qcut.models.guards import DESCRIPTIONS
from qcut.models.reached import WALKS, is_library_code, names_of, reached, strings_of
from qcut.models.syntax import Conditions, paths_of
from qcut.models.weight_reads import may_run, modules_at

_PASSED_BY = ("torch", "qcut", "transformers.utils", "transformers.modeling_layers", "accelerate", "contextlib")
"""Modules whose functions hand their arguments on."""
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
_LOOKS = ("isinstance", "len", "id", "type")
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


class _Place(NamedTuple):
    """A function that holds a norm's output, and the module whose method it is, if it is one."""

    code: CodeType
    module: nn.Module | None


class Places:
    """Where the outputs of norms were.

    Args:
        within: the code of the function that calls the model; frames above it are not looked at.
    """

    def __init__(self, within: CodeType) -> None:
        self._within = within
        self._births: dict[str, dict[_Place, set[Span]]] = {}
        self._results: dict[str, set[tuple[CodeType, Span]]] = {}
        """Calls whose result is the norm's output: those of the norm itself."""
        self._again: dict[str, set[tuple[CodeType, Span]]] = {}
        """Calls that were given the norm's output and gave it back."""
        self._names: dict[str, dict[_Place, set[str]]] = {}
        self._read: dict[str, set[tuple[str, Span]]] = {}
        self._kept: dict[str, str] = {}
        self._seen: set[tuple[Any, ...]] = set()
        self._functions: dict[str, list[tuple[nn.Module, FunctionType]]] = {}

    def made(self, norm: str) -> None:
        """Note where a norm is called from."""
        births = self._births.setdefault(norm, {})
        for frame, span, direct in self._new_frames(norm):
            births.setdefault(_place_of(frame), set()).add(span)
            if direct:
                self._results.setdefault(norm, set()).add((frame.f_code, span))

    def reads(self, norm: str, reader: str, output: Tensor) -> None:
        """Note where a linear layer is called from with a norm's output, and the names that hold that."""
        names = self._names.setdefault(norm, {})
        for frame, span, _ in self._new_frames(norm, reader):
            self._read.setdefault(norm, set()).add((frame.f_code.co_filename, span))
            found = names.setdefault(_place_of(frame), set())
            for name, value in frame.f_locals.items():
                if isinstance(value, nn.Module):
                    kept = next((key for key, one in vars(value).items() if _holds(one, output)), None)
                    if kept is not None:
                        self._kept[norm] = f"{type(value).__name__} keeps its output as {kept!r}"
                elif _holds(value, output):
                    found.add(name)

    def passes(self, norm: str, function: str) -> None:
        """Note where a function is called that gives a norm's output back as it is."""
        for frame, span, _ in self._new_frames(norm, function)[:1]:
            self._read.setdefault(norm, set()).add((frame.f_code.co_filename, span))
            self._again.setdefault(norm, set()).add((frame.f_code, span))

    def problem(self, model: nn.Module, norm: str, readers: Sequence[nn.Module]) -> str | None:
        """Who else than these layers may read a norm's output, or None where nobody does."""
        if norm in self._kept:
            return self._kept[norm]
        births, names, read = self._births.get(norm, {}), self._names.get(norm, {}), self._read.get(norm, set())
        for place in {**births, **names}:
            definition = _definition(place.code)
            where = place.code.co_qualname if sys.version_info >= (3, 11) else place.code.co_name
            if definition is None:
                return f"{where} has no source to read"
            spans = [span for file, span in read if file == place.code.co_filename]
            results = {span for code, span in self._results.get(norm, ()) if code is place.code}
            again = {span for code, span in self._again.get(norm, ()) if code is place.code}
            reader = _Reader(place.module, births.get(place, set()), results, again, names.get(place, set()), spans)
            if reader.finds(definition):
                return f"{where} reads its output where other inputs may take it"
            for call in (node for node in ast.walk(definition) if isinstance(node, ast.Call)):
                seen = any(span.holds(call) and span.within(call) for span in spans)
                given = names.get(place) or any(span.within(call) and not span.holds(call) for span in results)
                if seen and given and _may_call_others(call, definition, place.module, readers):
                    return f"{where} gives its output to what other inputs may choose"
        calls = [(place.code.co_filename, span) for place, spans in births.items() for span in spans]
        module = model.get_submodule(norm)
        everywhere = (name for name, one in model.named_modules(remove_duplicate=False) if one is module)
        return next((found for name in everywhere if (found := self._other_call(model, name, calls))), None)

    def _other_call(self, model: nn.Module, norm: str, calls: Sequence[tuple[str, Span]]) -> str | None:
        """A function that mentions a norm, or the container that it is in, in a statement that did not call it."""
        *path, key = norm.split(".")
        parent, index = model.get_submodule(".".join(path)), ""
        while isinstance(parent, _CONTAINERS) and path:
            index, key = key, path.pop()
            parent = model.get_submodule(".".join(path))
        named = self._mentioning(model, key)
        inside = {id(model.get_submodule(norm[:i])) for i, c in enumerate(norm) if c == "."} | {id(model)}
        for walk in WALKS:
            for module, function in self._functions.get(walk, ()):
                if id(module) in inside and not is_library_code(function):
                    return f"{function.__qualname__} walks the modules that it is in"
        for module, function in named:
            mentions = _mentions(function.__code__, key)
            spans = [span for file, span in calls if file == function.__code__.co_filename]
            for mention in mentions or ():
                if (mention.of_self and module is not parent) or (mention.item and mention.item != index):
                    continue
                if may_run(module, mention.conditions) and not any(span.within(mention.statement) for span in spans):
                    return f"{function.__qualname__} mentions it where these batches did not call it"
            if mentions is None:
                return f"{function.__qualname__} mentions it, and has no source to read"
        return None

    def _mentioning(self, model: nn.Module, name: str) -> list[tuple[nn.Module, FunctionType]]:
        """The functions that may take a part of a module by this name, and the modules that they work on."""
        if not self._functions:
            for module, functions in reached(model):
                for function in functions:
                    if not _passes_by(str(function.__globals__.get("__name__", ""))):
                        for one in names_of(function) | {p for s in strings_of(function) for p in s.split(".")}:
                            self._functions.setdefault(one, []).append((module, function))
        return self._functions.get(name, [])

    def _new_frames(self, *what: str) -> list[tuple[FrameType, Span, bool]]:
        """The functions that are running, from the inside; none where they have been noted already.

        With each, where it is, and whether the module itself is called there, not what holds it.
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
        if key in self._seen:
            return []
        self._seen.add(key)
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


def _place_of(frame: FrameType) -> _Place:
    code = frame.f_code
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    return _Place(code, first if isinstance(first, nn.Module) else None)


def _holds(value: Any, output: Tensor) -> bool:
    if isinstance(value, (list, tuple, set)):
        return any(one is output for one in value)
    return any(one is output for one in value.values()) if isinstance(value, dict) else value is output


@cache
def _functions(filename: str) -> dict[int, list[Any]]:
    """The functions of a file by their first lines, decorators counted."""
    found: dict[int, list[Any]] = {}
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return found
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            found.setdefault(first, []).append(node)
    return found


def _definition(code: CodeType) -> Any:
    """The function whose code this is; None where its source is not there, or several begin in its line."""
    nodes = _functions(code.co_filename).get(code.co_firstlineno, ())
    fitting = [node for node in nodes if getattr(node, "name", "<lambda>") == code.co_name]
    return fitting[0] if len(fitting) == 1 else None


def branches_by_values(module: nn.Module) -> bool:
    """Whether code of one's own for a module, such as a norm, goes other ways with other values.

    Args:
        module: its code is read, not run.
    """
    functions = (function for _, found in reached(module) for function in found if not is_library_code(function))
    definitions = (_definition(function.__code__) for function in functions)
    return any(definition is None or _Values(module, definition).found for definition in definitions)


class _Values(ast.NodeVisitor):
    """Looks for conditions about what a function computes."""

    def __init__(self, module: nn.Module, definition: Any) -> None:
        self.module = module
        self.locals = {part.arg for part in ast.walk(definition.args) if isinstance(part, ast.arg)} | _bound(definition)
        self.locals -= {"self"}
        self.found = False
        self.visit(definition)

    def visit_If(self, node: ast.If | ast.IfExp | ast.While) -> None:
        raises = isinstance(node, ast.If) and all(isinstance(one, ast.Raise) for one in node.body)
        decided = not all(may_run(self.module, ((node.test, taken),)) for taken in (True, False))
        self.found = self.found or not (raises or decided or self._describes(node.test))
        self.generic_visit(node)

    visit_IfExp = visit_If
    visit_While = visit_If

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.found = self.found or not self._describes(node)

    def visit_Try(self, node: ast.Try) -> None:
        self.found = True

    def _describes(self, node: Any) -> bool:
        """Whether an expression only says what a value is."""
        match node:
            case ast.Attribute(attr=attribute) if attribute in DESCRIPTIONS:
                return True
            case ast.Compare(ops=ops) if all(isinstance(op, (ast.Is, ast.IsNot)) for op in ops):
                return True
            case ast.Call(func=ast.Name(id=name)) if name in _LOOKS:
                return True
            case ast.Name(id=name):
                return name not in self.locals
        return all(self._describes(part) for part in ast.iter_child_nodes(node))


def _may_call_others(call: ast.Call, definition: Any, module: nn.Module | None, readers: Sequence[nn.Module]) -> bool:
    """Whether a call that came to these layers may come to another module, as one chosen by an index or a name."""
    paths = paths_of(definition, call.func)
    if not paths:
        held = _bound(definition) | {part.arg for part in ast.walk(definition.args) if isinstance(part, ast.arg)}
        return isinstance(call.func, ast.Name) and call.func.id in held
    if module is None or (len(paths) == 1 and not any(container for _, container in paths)):
        return False
    chosen = [one for path, container in paths for one in modules_at(module, path, container)]
    return not all(any(part in readers for part in one.modules()) for one in chosen)


class _Mention(NamedTuple):
    """An expression that takes a part of a module by its name.

    Attributes:
        statement: or the head of one, that the expression stands in; of a loop over the part, the whole loop.
        of_self: whether it is a part of the function's first argument.
        item: constant by which something is taken out of the part, or "".
        conditions: under which the statement runs.
    """

    statement: Any
    of_self: bool
    item: str
    conditions: Conditions


@cache
def _mentions(code: CodeType, name: str) -> tuple[_Mention, ...] | None:
    """Where a function takes a part of that name; None where that cannot be told."""
    definition = _definition(code)
    if definition is None:
        return None
    arguments = definition.args.posonlyargs + definition.args.args
    finder = _Finder(name, arguments[0].arg if arguments else "")
    for node in definition.body if isinstance(definition.body, list) else [definition.body]:
        finder.visit_in(node, node)
    return tuple(finder.found)


class _Finder(ast.NodeVisitor):
    """Finds the mentions of a name in a function."""

    def __init__(self, name: str, self_name: str) -> None:
        self.name, self.self_name = name, self_name
        self.found: list[_Mention] = []
        self.statement: Any = None
        self.conditions: Conditions = ()
        self.item = ""

    def visit(self, node: ast.AST) -> None:
        """Visit a node, and know the statement that its parts stand in."""
        before = self.statement
        if isinstance(node, ast.stmt):
            self.statement = node
        super().visit(node)
        self.statement = before

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        self.visit_in(node.test, node.test)
        before = self.conditions
        for part, taken in ((node.body, True), (node.orelse, False)):
            self.conditions = (*before, (node.test, taken))
            for one in part if isinstance(part, list) else [part]:
                self.visit_in(one, one)
        self.conditions = before

    visit_IfExp = visit_If

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            self.visit_in(item.context_expr, item.context_expr)
        for one in node.body:
            self.visit(one)

    def visit_While(self, node: ast.While) -> None:
        self.visit_in(node.test, node.test)
        for one in (*node.body, *node.orelse):
            self.visit(one)

    def visit_Compare(self, node: ast.Compare) -> None:
        if not all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.item = str(node.slice.value) if isinstance(node.slice, ast.Constant) else ""
        self.visit(node.value)
        self.item = ""
        self.visit(node.slice)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr == self.name:
            of_self = isinstance(node.value, ast.Name) and node.value.id == self.self_name
            self.found.append(_Mention(self.statement, of_self, self.item, self.conditions))
        self.item = ""
        if not (isinstance(node.value, ast.Attribute) and node.value.attr == self.name):  # a part of the part
            self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and self.name in node.value.split("."):  # as get_submodule takes it
            self.found.append(_Mention(self.statement, False, "", self.conditions))

    def visit_in(self, node: ast.AST, statement: ast.AST) -> None:
        """Visit a node, whose parts count as standing in a statement."""
        before, self.statement = self.statement, statement
        self.visit(node)
        self.statement = before


class _Reader:
    """Follows the names that hold a norm's output through a function."""

    def __init__(
        self,
        module: nn.Module | None,
        births: set[Span],
        results: set[Span],
        again: set[Span],
        names: set[str],
        read: Sequence[Span],
    ) -> None:
        self.module, self.names, self.read = module or _Nothing(), names, read
        self.births, self.results = births | again, results
        self.held: set[str] = set() if births else set(names)
        self.found = False

    def finds(self, definition: Any) -> bool:
        """Whether a read of the value is none of those that were seen."""
        if isinstance(definition, ast.Lambda):
            self._look(definition.body)
        else:
            self._walk(definition.body)
        return self.found

    def _walk(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, node: Any) -> None:
        if hasattr(node, "body") and self._born_in_head(node):
            self.held |= self.names
        match node:
            case ast.If(test=test, body=body, orelse=orelse):
                self._look(test)
                parts = zip((body, orelse), (True, False), strict=True)
                self._either(*(part for part, taken in parts if may_run(self.module, ((test, taken),))))
            case ast.For(iter=inner) | ast.AsyncFor(iter=inner):
                self._look(inner)
                for _ in range(2):  # a name that the end of the loop binds is read at its beginning
                    self._either([*node.body, *node.orelse], [])
            case ast.While(test=test, body=body, orelse=orelse):
                self._look(test)
                for _ in range(2):
                    self._either([*body, *orelse], [])
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                for item in items:
                    self._look(item.context_expr)
                self._walk(body)
            case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=final):
                self._walk(body)
                self._either([], *(handler.body for handler in handlers))
                self._walk([*orelse, *final])
            case ast.Match(subject=subject, cases=cases):
                self._look(subject)
                self._either(*(case.body for case in cases), [])
            case ast.Global() | ast.Nonlocal():
                self.found = True  # other functions see what this one binds
            case ast.FunctionDef(body=body) | ast.AsyncFunctionDef(body=body):
                self._either(body, [])
            case ast.Assign(targets=targets, value=value):
                self._move(value)
                for target in targets:
                    self._bind(target, value)
            case ast.AnnAssign(target=target, value=value) if value is not None:
                self._move(value)
                self._bind(target, value)
            case _:
                for part in ast.iter_child_nodes(node):
                    if isinstance(part, ast.expr):
                        self._look(part)
        if not hasattr(node, "body") and any(span.within(node) for span in self.births):
            self.held |= self.names & _bound(node)

    def _born_in_head(self, node: Any) -> bool:
        inner = [part for part in ast.walk(node) if isinstance(part, ast.stmt) and part is not node]
        born = [span for span in self.births if span.within(node)]
        return any(not any(span.within(part) for part in inner) for span in born)

    def _either(self, *branches: Sequence[ast.stmt]) -> None:
        before, after = set(self.held), set[str]()
        for branch in branches:
            self.held = set(before)
            self._walk(branch)
            after |= self.held
        self.held = after if branches else before

    def _move(self, value: Any) -> None:
        """Look at an expression that is given a name: the value itself may be, the name holds it then."""
        match value:
            case ast.Name():
                return
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self._look(test)
                self._move(body)
                self._move(orelse)
            case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts) | ast.Dict(values=parts):
                for part in parts:
                    self._move(part)
            case _:
                self._look(value)

    def _may_hold(self, value: Any) -> bool:
        match value:
            case ast.Name(id=name):
                return name in self.held
            case ast.IfExp(body=body, orelse=orelse):
                return self._may_hold(body) or self._may_hold(orelse)
            case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts) | ast.Dict(values=parts):
                return any(self._may_hold(part) for part in parts)
        return any(span.holds(value) and span.within(value) for span in self.results)

    def _bind(self, target: Any, value: Any) -> None:
        holds = self._may_hold(value)
        if holds and any(isinstance(part, (ast.Attribute, ast.Subscript)) for part in ast.walk(target)):
            self.found = True  # kept where the function's own names do not tell
        names = {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}
        self.held = self.held | names if holds else self.held - names

    def _look(self, node: Any) -> None:
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
            case ast.Compare(ops=ops) if all(isinstance(op, (ast.Is, ast.IsNot)) for op in ops):
                return
            case ast.Call(func=ast.Name(id=name)) if name in _LOOKS:
                return
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=attribute)):
                if not hasattr(self.module, attribute) and not isinstance(self.module, _Nothing):
                    return  # a layer that this module has not
            case ast.NamedExpr(target=target, value=value):
                self._move(value)
                self._bind(target, value)
                return
            case ast.Name(id=name, ctx=ast.Load()) if name in self.held:
                self.found = self.found or not any(span.holds(node) for span in self.read)
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.expr):
                self._look(part)
            elif isinstance(part, ast.keyword):
                self._look(part.value)
            elif isinstance(part, ast.comprehension):
                for one in (part.iter, *part.ifs):
                    self._look(one)


class _Nothing(nn.Module):
    """In place of the module of a function that is no method."""


def _bound(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
