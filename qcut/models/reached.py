"""The functions that a forward call of a model may come to, found by reading code, not by running it.

Beginning with the ``forward`` of every class in the model, with functions that single modules hold and with hooks, the
names that a function mentions are followed: to methods of the model's classes, and to functions that the name stands
for in its module. Functions of torch itself are not followed, apart from the methods of its modules.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "diffusers")
_KNOWN = (*_LIBRARIES, "builtins", "collections", "functools", "types")
"""Packages whose objects hold no code of a model's author."""
WALKS = ("children", "named_children", "modules", "named_modules", "get_submodule", "_modules", "__dict__", "vars")
"""Names by which code comes to modules without their names."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def is_library_code(function: FunctionType) -> bool:
    """Whether a function stands in a module of a library that is written for models of all kinds."""
    name = str(function.__globals__.get("__name__", ""))
    module = sys.modules.get(name)
    return name.partition(".")[0] in _LIBRARIES and module is not None and vars(module) is function.__globals__


def reached(model: nn.Module) -> Iterator[tuple[nn.Module, list[FunctionType]]]:
    """Every module of a model, and the functions that work on it: methods of its class, its own, and what these call.

    Args:
        model: its code is read, not run.
    """
    modules = list(model.modules())
    classes: set[Any] = {type(module) for module in modules}
    own = {id(module): list(_own_functions(module)) for module in modules}
    helpers: set[Any] = {type(one) for module in modules for one in _own_objects(module)}
    methods: dict[str, list[FunctionType]] = {}
    for cls in classes | helpers:
        for name, function in methods_of(cls):
            methods.setdefault(name, []).append(function)
    process_hooks = [f for hooks in _process_hooks() for hook in hooks.values() for f in _functions_of(hook)]
    todo = [*methods.get("forward", ()), *methods.get("__call__", ()), *process_hooks]
    todo += [function for functions in own.values() for function in functions]
    calls: dict[FunctionType, list[FunctionType]] = {}
    names: set[str] = set()
    while todo:
        function = todo.pop()
        if function in calls:
            continue
        calls[function] = list(called_by(function))
        todo += calls[function]
        for name in names_of(function) - names:
            names.add(name)
            todo += methods.get(name, ())
    by_class = {cls: _closure([f for _, f in methods_of(cls) if f in calls], calls) for cls in classes}
    for module in modules:
        helped = [f for one in _own_objects(module) for _, f in methods_of(type(one)) if f in calls]
        extra = _closure([*own[id(module)], *helped, *(process_hooks if module is model else ())], calls)
        yield module, [*dict.fromkeys([*by_class[type(module)], *extra])]


def mentions(model: nn.Module, names: Sequence[str], besides: type) -> bool:
    """Whether code that the model reaches mentions a child by one of these names, or walks its modules without names.

    Args:
        model: its code is read, not run.
        names: of children; only the first of them decides in libraries, which have the others in many places.
        besides: the class whose own ``forward`` calls them.
    """
    known = vars(besides)["forward"]
    for function in {f for _, functions in reached(model) for f in functions} - {known}:
        found = names_of(function) | {part for text in strings_of(function) for part in text.split(".")}
        if names[0] in found or (not is_library_code(function) and not found.isdisjoint((*names, *WALKS))):
            return True
    return False


def modules_inside(value: Any, depth: int = 4) -> Iterator[nn.Module]:
    """The modules in plain data: in lists, tuples, sets, dicts, partial and bound functions, and objects."""
    if isinstance(value, nn.Module):
        yield value
    elif depth and value is not None and not isinstance(value, (str, bytes, int, float, Tensor, type, FunctionType)):
        parts: list[Any] = []
        if isinstance(value, dict):
            parts = [*value.values(), *value]
        elif isinstance(value, (list, tuple, set, frozenset)):
            parts = list(value)
        elif isinstance(value, functools.partial):
            parts = [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, MethodType):
            parts = [value.__self__]
        elif type(value).__module__.partition(".")[0] not in _LIBRARIES and hasattr(value, "__dict__"):
            parts = list(vars(value).values())
        for part in parts:
            yield from modules_inside(part, depth - 1)
    elif isinstance(value, FunctionType):
        for one in _enclosed(value):
            if isinstance(one, nn.Module):
                yield one


def methods_of(cls: Any) -> tuple[tuple[str, FunctionType], ...]:
    """The methods of a class and its bases but ``nn.Module``, by name; overridden ones where ``super`` calls them."""
    return _methods_of(cls)


@cache
def _methods_of(cls: Any) -> tuple[tuple[str, FunctionType], ...]:
    found: list[tuple[str, FunctionType]] = []
    final: set[str] = set()
    for base in cls.__mro__:
        for name, value in vars(base).items() if base not in (nn.Module, object) else ():
            if name not in final:
                functions = list(functions_in(value))
                found += [(name, function) for function in functions]
                if not any("super" in function.__code__.co_names for function in functions):
                    final.add(name)
    return tuple(found)


def functions_in(value: Any, depth: int = 3) -> Iterator[FunctionType]:
    """The functions behind a class's attribute: those that decorators wrap, a property's, or a method's."""
    if isinstance(value, (property, functools.cached_property)):
        value = value.fget if isinstance(value, property) else value.func
    value = getattr(value, "__func__", value)
    if isinstance(value, FunctionType):
        yield value
        inner = [getattr(value, "__wrapped__", None), *_enclosed(value)]
        for function in inner if depth else ():
            if isinstance(function, FunctionType):
                yield from functions_in(function, depth - 1)


@cache
def names_of(function: FunctionType) -> frozenset[str]:
    """Names of attributes and globals that a function mentions; with ``getattr``, its strings too."""
    codes = list(_codes(function.__code__))
    names = {name for code in codes for name in code.co_names}
    return frozenset(names | strings_of(function) if "getattr" in names else names)


@cache
def strings_of(function: FunctionType) -> frozenset[str]:
    """The strings that a function holds, but not its docstring."""
    found = {value for code in _codes(function.__code__) for value in _flat(code.co_consts) if isinstance(value, str)}
    return frozenset(found - {function.__doc__})


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, frozenset)):
            yield from _flat(value)
        else:
            yield value


def _enclosed(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue


@cache
def called_by(function: FunctionType) -> tuple[FunctionType, ...]:
    """The functions that names of a function stand for in its module, and those that the function encloses."""
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    values = [*(function.__globals__.get(name) for name in sorted(names)), *_enclosed(function)]
    return tuple(dict.fromkeys(one for value in values for one in _followed(value)))


def _followed(value: Any) -> Iterator[FunctionType]:
    registry = getattr(value, "registry", None)  # of functools.singledispatch
    if isinstance(value, FunctionType) and registry is not None:
        yield from (f for one in registry.values() for f in _functions_of(one))
    for function in _functions_of(value):
        if str(function.__globals__.get("__name__", "")).partition(".")[0] != "torch":
            yield function


def _functions_of(value: Any) -> Iterator[FunctionType]:
    """The functions that a call of an object runs."""
    if isinstance(value, functools.partial):
        yield from _functions_of(value.func)
    elif isinstance(value, (FunctionType, MethodType)):
        yield from functions_in(value)
    elif callable(value) and not isinstance(value, (type, nn.Module, Tensor)):
        yield from functions_in(vars(type(value)).get("__call__"))


def _own_functions(module: nn.Module) -> Iterator[FunctionType]:
    """Functions that a module itself holds, among them a ``forward`` of its own, and its hooks."""
    for value in vars(module).values():
        for one in _inside(value):
            if isinstance(one, (FunctionType, MethodType, functools.partial)):
                yield from (f for f in _functions_of(one) if not _is_of_torch_alone(f))
    for hooks in _HOOKS:
        for hook in vars(module).get(hooks, {}).values():
            yield from _functions_of(hook)


def _own_objects(module: nn.Module) -> Iterator[Any]:
    """Objects of classes of one's own that a module holds, which may hold its layers and call them."""
    for value in vars(module).values():
        for one in _inside(value):
            known = type(one).__module__.partition(".")[0] in _KNOWN
            if not known and not isinstance(one, (nn.Module, Tensor, type)) and hasattr(one, "__dict__"):
                yield one


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else (value,)


def _is_of_torch_alone(function: FunctionType) -> bool:
    return str(function.__globals__.get("__name__", "")).startswith("torch.")


def _process_hooks() -> Iterable[dict[int, Callable[..., Any]]]:
    return torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks


def _closure(functions: list[FunctionType], calls: dict[FunctionType, list[FunctionType]]) -> list[FunctionType]:
    """Functions, and all that they call."""
    found: dict[FunctionType, None] = {}
    todo = functions[::-1]
    while todo:
        function = todo.pop()
        if function not in found:
            found[function] = None
            todo += calls.get(function, ())
    return list(found)
