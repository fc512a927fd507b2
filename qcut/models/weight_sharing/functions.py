"""The functions that a forward call of a model may come to, found by reading code, not by running it.

Beginning with the ``forward`` of every class in the model, with functions that single modules hold and with hooks, the
names that a function mentions are followed: to methods of the model's classes, and to functions that the name stands
for in its module. Of torch's own functions only the methods of its modules are followed.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from qcut.models.classes import codes_in

_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "diffusers")
_KNOWN = (*_LIBRARIES, "builtins", "collections", "functools", "types")
"""Packages with objects that hold no code of a model's author."""
_LEAVES = (str, bytes, int, float, Tensor, type, FunctionType, ModuleType)
WALKS = ("children", "named_children", "modules", "named_modules", "get_submodule", "_modules", "__dict__", "vars")
"""Names by which code comes to modules without their names."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def is_library_code(function: FunctionType) -> bool:
    """Whether a function stands in a module of a library that is written for models of all kinds."""
    name = home_of(function)
    module = sys.modules.get(name)
    return name.partition(".")[0] in _LIBRARIES and module is not None and vars(module) is function.__globals__


def home_of(function: FunctionType) -> str:
    """Name of the module that owns a function's globals."""
    return str(function.__globals__.get("__name__", ""))


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
    all_hooks = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
    process_hooks = [f for hooks in all_hooks for hook in hooks.values() for f in _functions_of(hook)]
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
        helped = [f for one in _own_objects(module) for _, f in methods_of(one.__class__) if f in calls]
        extra = _closure([*own[id(module)], *helped, *(process_hooks if module is model else ())], calls)
        yield module, [*dict.fromkeys([*by_class[type(module)], *extra])]


def named_in_calls(model: nn.Module) -> set[str]:
    """The names that code mentions which a call of the model comes to."""
    return {name for function in {f for _, fs in reached(model) for f in fs} for name in mentioned_by(function)}


def mentions(model: nn.Module, names: Sequence[str], known: type) -> bool:
    """Whether code that the model reaches mentions a child by one of these names, or walks its modules without names.

    Args:
        model: its code is read, not run.
        names: of children; only the first of them decides in libraries, which have the others in many places.
        known: the class with a ``forward`` that calls them.
    """
    for function in {f for _, functions in reached(model) for f in functions} - {vars(known)["forward"]}:
        found = mentioned_by(function)
        if names[0] in found or (not is_library_code(function) and not found.isdisjoint((*names, *WALKS))):
            return True
    return False


def parts_inside(value: Any, depth: int = 4) -> Iterator[nn.Module | Tensor]:
    """Modules and tensors in plain data: in containers, weak references, partial and bound functions, and objects."""
    if isinstance(value, (nn.Module, Tensor)):
        yield value
    elif depth and value is not None and not isinstance(value, _LEAVES):
        parts: list[Any] = []
        if isinstance(value, Mapping):
            parts = [*value.values(), *value]
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            parts = list(value)
        elif isinstance(value, weakref.ReferenceType):
            parts = [value()]
        elif isinstance(value, functools.partial):
            parts = [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, MethodType):
            parts = [value.__self__]
        elif type(value).__module__.partition(".")[0] not in _KNOWN:
            parts = list(_attributes_of(value))
        for part in parts:
            yield from parts_inside(part, depth - 1)
    elif isinstance(value, FunctionType):
        for one in enclosed(value).values():
            if isinstance(one, (nn.Module, Tensor)):
                yield one


def _attributes_of(value: Any) -> Iterator[Any]:
    """The attributes of an object of any class, those in ``__slots__`` included."""
    yield from getattr(value, "__dict__", {}).values()
    for cls in type(value).__mro__:
        for member in vars(cls).values():
            if isinstance(member, MemberDescriptorType):
                with suppress(AttributeError):  # not set
                    yield member.__get__(value)


def outer_values(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """What the code of a model's author has outside of the model's objects, by name: of its classes, and globals."""
    classes: set[Any] = {cls for module in model.modules() for cls in type(module).__mro__}
    for cls in classes:
        if cls.__module__.partition(".")[0] not in _KNOWN:
            yield from ((f"{cls.__name__}.{name}", value) for name, value in vars(cls).items() if name[:2] != "__")
    for function in {one for _, functions in reached(model) for one in functions}:
        if home_of(function).partition(".")[0] not in _KNOWN:
            named = ((name, function.__globals__.get(name)) for name in names_in(function.__code__))
            yield from (one for one in [*named, *enclosed(function).items()] if not callable(one[1]))


@cache
def methods_of(cls: Any) -> tuple[tuple[str, FunctionType], ...]:
    """The methods of a class and its bases except ``nn.Module``, by name; overridden ones if ``super`` calls them."""
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
        inner = [getattr(value, "__wrapped__", None), *enclosed(value).values()]
        for function in inner if depth else ():
            if isinstance(function, FunctionType):
                yield from functions_in(function, depth - 1)


@cache
def names_of(function: FunctionType) -> frozenset[str]:
    """Names of attributes and globals that a function mentions; with ``getattr``, its strings too."""
    names = names_in(function.__code__)
    return frozenset(names | strings_of(function) if "getattr" in names else names)


def names_in(code: CodeType) -> set[str]:
    """Names of attributes and globals in bytecode, functions inside included."""
    return {name for one in codes_in(code) for name in one.co_names}


@cache
def strings_of(function: FunctionType) -> frozenset[str]:
    """The strings that a function holds, but not its docstring."""
    found = {value for code in codes_in(function.__code__) for value in _flat(code.co_consts) if isinstance(value, str)}
    return frozenset(found - {function.__doc__})


def mentioned_by(function: FunctionType) -> set[str]:
    """Names that a function mentions, those in the parts of strings such as ``"encoder.norm"`` included."""
    return {*names_of(function), *(part for text in strings_of(function) for part in text.split("."))}


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, frozenset)):
            yield from _flat(value)
        else:
            yield value


def enclosed(function: FunctionType) -> dict[str, Any]:
    """The values that a function has from the functions around it, by name; those that are set already."""
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):  # not filled yet
            found[name] = cell.cell_contents
    return found


@cache
def called_by(function: FunctionType) -> tuple[FunctionType, ...]:
    """The functions that names of a function stand for in its module, and those that the function encloses."""
    names = sorted(names_in(function.__code__))
    values = [*(function.__globals__.get(name) for name in names), *enclosed(function).values()]
    return tuple(dict.fromkeys(one for value in values for one in _followed(value)))


def _followed(value: Any) -> Iterator[FunctionType]:
    registry = getattr(value, "registry", None)  # of functools.singledispatch
    if isinstance(value, FunctionType) and registry is not None:
        yield from (f for one in registry.values() for f in _functions_of(one))
    for function in _functions_of(value):
        if home_of(function).partition(".")[0] != "torch":
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
    for one in _held(module):
        if isinstance(one, (FunctionType, MethodType, functools.partial)):
            yield from (f for f in _functions_of(one) if not home_of(f).startswith("torch."))
    for hooks in _HOOKS:
        for hook in vars(module).get(hooks, {}).values():
            yield from _functions_of(hook)


def _own_objects(module: nn.Module) -> Iterator[Any]:
    """Objects of a model's own classes that a module holds, which may hold its layers and call them."""
    for one in _held(module):
        known = type(one).__module__.partition(".")[0] in _KNOWN
        if not known and not isinstance(one, (nn.Module, Tensor, type)) and hasattr(one, "__dict__"):
            yield one


def _held(module: nn.Module) -> Iterator[Any]:
    """A module's attributes, and what lists, tuples and dicts among them hold."""
    for value in vars(module).values():
        if isinstance(value, (dict, list, tuple)):
            yield from value.values() if isinstance(value, dict) else value
        else:
            yield value


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
