"""Finds norms whose output code reads in a branch that some inputs take and others do not.

The function that calls the norm is followed statement by statement: which names hold the norm's output, and whether one
of them is read under a condition that the module's plain attributes do not decide.
"""

from __future__ import annotations

import ast
from types import FunctionType

from torch import nn

from qcut.models.guards import DESCRIPTIONS
from qcut.models.reached import names_of, reached
from qcut.models.syntax import definition_of
from qcut.models.weight_reads import may_run

_REASON = "code reads its output in a branch that other inputs may take"


def conditional_reads(model: nn.Module) -> dict[int, str]:
    """Modules, by id, whose result the calling code reads under a condition that inputs decide, and the reason.

    Only childless modules are looked at that their parent's own code calls by name.

    Args:
        model: its code is read, not run.
    """
    found: dict[int, str] = {}
    for module, functions in reached(model):
        leaves = {key: part for key, part in module._modules.items() if part is not None and not part._modules}
        for function in functions:
            for key in leaves.keys() & names_of(function):
                if id(leaves[key]) not in found and _reads_in_branch(module, function, key):
                    found[id(leaves[key])] = _REASON
    return found


def _reads_in_branch(module: nn.Module, function: FunctionType, key: str) -> bool:
    definition = definition_of(function)
    if definition is None or isinstance(definition, ast.Lambda) or not definition.args.args:
        return False
    reader = _Reader(module, definition.args.args[0].arg, key)
    reader.walk(definition.body)
    return reader.found or (reader.calls > 1 and reader.conditional_calls > 0)


class _Reader:
    """Follows the names that hold the result of one child."""

    def __init__(self, module: nn.Module, self_name: str, key: str) -> None:
        self.module, self.self_name, self.key = module, self_name, key
        self.held: dict[str, int] = {}
        """Names that hold the result, and how many undecided conditions stood around the assignment."""
        self.depth = 0
        self.found = False
        self.calls = self.conditional_calls = 0

    def walk(self, statements: list[ast.stmt]) -> None:
        """Follow statements in their order."""
        for statement in statements:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.If(test=test, body=body, orelse=orelse):
                self._look(test)
                self._branches(test, body, orelse)
            case ast.For(iter=inner) | ast.AsyncFor(iter=inner):
                self._look(inner)
                self.walk([*node.body, *node.orelse])
            case ast.While(test=test, body=body, orelse=orelse):
                self._look(test)
                self._branches(test, body, orelse)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                for item in items:
                    self._look(item.context_expr)
                self.walk(body)
            case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=final):
                self.walk(body)
                self._apart([statement for handler in handlers for statement in handler.body])
                self.walk([*orelse, *final])
            case ast.Match(subject=subject, cases=cases):
                self._look(subject)
                for case in cases:
                    self._apart(case.body)
            case ast.Assign(targets=targets, value=value):
                self._look(value)
                for target in targets:
                    self._bind(target, value)
            case ast.AnnAssign(target=target, value=value) if value is not None:
                self._look(value)
                self._bind(target, value)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._apart(node.body)
            case _:
                for part in ast.iter_child_nodes(node):
                    if isinstance(part, ast.expr):
                        self._look(part)

    def _branches(self, test: ast.expr, body: list[ast.stmt], orelse: list[ast.stmt]) -> None:
        taken = [may_run(self.module, ((test, True),)), may_run(self.module, ((test, False),))]
        for branch, may in zip((body, orelse), taken, strict=True):
            if may and all(taken):
                self._apart(branch)
            elif may:
                self.walk(branch)

    def _apart(self, branch: list[ast.stmt]) -> None:
        """Statements that may run or not; afterwards names may hold what they held before."""
        before = dict(self.held)
        self.depth += 1
        self.walk(branch)
        self.depth -= 1
        self.held = {**self.held, **before}

    def _look(self, node: ast.expr) -> None:
        """Note calls of the child and reads of its result in an expression."""
        match node:
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self._look(test)
                taken = [may_run(self.module, ((test, True),)), may_run(self.module, ((test, False),))]
                for branch, may in zip((body, orelse), taken, strict=True):
                    self.depth += all(taken)
                    if may:
                        self._look(branch)
                    self.depth -= all(taken)
                return
            case ast.Attribute(value=ast.Name(), attr=attribute) if attribute in DESCRIPTIONS:
                return
            case ast.Compare(ops=ops) if all(isinstance(op, (ast.Is, ast.IsNot)) for op in ops):
                return
            case ast.Name(id=name, ctx=ast.Load()) if name in self.held:
                self.found = self.found or self.depth > self.held[name]
            case ast.NamedExpr(target=target, value=value):
                self._look(value)
                self._bind(target, value)
                return
        if self._is_call(node):
            self.calls += 1
            self.conditional_calls += self.depth > 0
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.expr):
                self._look(part)
            elif isinstance(part, (ast.keyword, ast.comprehension)):
                self._look(part.value if isinstance(part, ast.keyword) else part.iter)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        holds = self._is_call(value) or (isinstance(value, ast.Name) and value.id in self.held)
        for name in (part.id for part in ast.walk(target) if isinstance(part, ast.Name)):
            self.held.pop(name, None)
            if holds:
                self.held[name] = self.depth

    def _is_call(self, node: ast.expr) -> bool:
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attribute)):
                return name == self.self_name and attribute == self.key
        return False
