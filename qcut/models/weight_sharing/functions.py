"""The functions that a forward call of a model may come to, found by reading code, not by running it.

Beginning with the ``forward`` of every class in the model, with methods that operators and statements call without a
name, with functions that single modules hold and with hooks, the names that a function mentions are followed: to
methods of the model's classes, and to functions that the name stands for in its module, in another module of the
model's author, in a class or in a container. Of torch's own functions only the methods of its modules are followed.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from qcut.models.classes import codes_in

_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "diffusers")
_KNOWN = (*_LIBRARIES, "builtins", "collections", "functools", "types")
"""Packages with objects that hold no code of a model's author."""
_LEAVES = (str, bytes, int, float, Tensor, type, FunctionType, ModuleType)
_NOT_CALLED = frozenset(
    {
        *("__init__", "__repr__", "__str__", "__dir__", "__del__", "__copy__", "__deepcopy__", "__sizeof__"),
        *("__init_subclass__", "__class_getitem__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"),
    }
)
"""Methods with names of Python's own that a forward call of a module does not come to by itself."""
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_DYNAMIC = frozenset({"getattr", "methodcaller", "attrgetter", "__getattribute__"})
"""Functions that take an attribute by a string."""
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
    todo += [f for name in methods if _is_implicit(name) for f in methods[name] if not is_library_code(f)]
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
        if _is_authors(home_of(function)):  # which may take getattr(self, f"run_{kind}")
            strings = names_of(function) - names_in(function.__code__)
            prefixes = tuple(text for text in strings if text[1:].endswith("_"))
            todo += [one for name in methods if name.startswith(prefixes) for one in methods[name]]
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
    """Modules and tensors in plain data: in containers, weak references, functions with what they hold, and objects."""
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
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        for one in (*enclosed(value).values(), *defaults):
            if depth or not isinstance(one, FunctionType):  # functions may hold one another
                yield from parts_inside(one, min(max(depth - 1, 0), 2))


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
    if isinstance(value, (functools.cached_property, functools.partialmethod)):
        value = value.func
    value = getattr(value, "__func__", value)
    inner: list[Any] = []
    if isinstance(value, property):
        inner = [value.fget, value.fset]
    elif isinstance(value, FunctionType):
        yield value
        inner = [getattr(value, "__wrapped__", None), *enclosed(value).values()]
    elif callable(value) and not isinstance(value, (type, nn.Module, Tensor)):
        inner = [getattr(value, "__wrapped__", None)]  # of functools.cache
    for function in inner if depth else ():
        if isinstance(function, FunctionType):
            yield from functions_in(function, depth - 1)


def _is_implicit(name: str) -> bool:
    """Whether operators, statements or torch call a method without its name."""
    return name == "forward" or (name[:2] == "__" == name[-2:] and name not in _NOT_CALLED)


def _is_own_object(value: Any) -> bool:
    """Whether a value is a plain object of a model's author, or a namespace."""
    if isinstance(value, (nn.Module, Tensor, type, ModuleType)) or not hasattr(value, "__dict__"):
        return False
    return _is_authors(type(value).__module__) or type(value) is SimpleNamespace


@cache
def names_of(function: FunctionType) -> frozenset[str]:
    """Names of attributes and globals that a function mentions; with ``getattr`` and the like, its strings too."""
    names = names_in(function.__code__)
    return frozenset(names if names.isdisjoint(_DYNAMIC) else names | strings_of(function))


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
    """The functions that names of a function stand for in its module, and those that the function encloses.

    In code of a model's author also its defaults, and what the names stand for in other modules, classes and data.
    """
    names = sorted(names_in(function.__code__))
    values = [*(function.__globals__.get(name) for name in names), *enclosed(function).values()]
    if not _is_authors(home_of(function)):
        return tuple(dict.fromkeys(one for value in values for one in _followed(value)))
    values += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    package = function.__globals__.get("__package__")
    values += [sys.modules.get(place) for name in names for place in (name, f"{package}.{name}")]  # imported inside
    modules: dict[str, None] = {}
    for value in values:  # which grows
        if isinstance(value, ModuleType) and value.__name__ not in modules and _is_authors(value.__name__):
            modules[value.__name__] = None
            values += [vars(value).get(name) for name in names]
    found = [
        one for value in values for one in (*_followed(value), *_functions_held(value), *_methods_run(value, names))
    ]
    return tuple(dict.fromkeys(one for one in found if home_of(one).partition(".")[0] != "torch"))


@cache
def _is_authors(module: str) -> bool:
    """Whether a module, by its name, is the code of a model's author: neither Python's nor of an installed package."""
    package = module.partition(".")[0]
    found: Any = sys.modules.get(package)
    places = [getattr(found, "__file__", None) or "", *getattr(found, "__path__", ())]
    installed = any(part in _INSTALLED for place in places for part in Path(place).parts)
    return not installed and package not in (*_KNOWN, *sys.stdlib_module_names, "qcut")


def _followed(value: Any) -> Iterator[FunctionType]:
    registry = getattr(value, "registry", None)  # of functools.singledispatch
    if isinstance(value, FunctionType) and registry is not None:
        yield from (f for one in registry.values() for f in _functions_of(one))
    for function in _functions_of(value):
        if home_of(function).partition(".")[0] != "torch":
            yield function


def _methods_run(value: Any, names: Iterable[str]) -> Iterator[FunctionType]:
    """The methods of an author's class, or object, that code with these names may run, and what those run of it."""
    cls: Any = value if isinstance(value, type) else type(value) if _is_own_object(value) else object
    known, left, before = set(names), dict.fromkeys(methods_of(cls) if _is_authors(cls.__module__) else ()), -1
    while len(left) != before:
        before = len(left)
        for name, function in list(left):
            implicit = not issubclass(cls, nn.Module) and (name == "__init__" or _is_implicit(name))
            if implicit or name in known:
                del left[name, function]
                known |= names_of(function)
                yield function


def _functions_of(value: Any) -> Iterator[FunctionType]:
    """The functions that a call of an object runs."""
    if isinstance(value, functools.partial):
        yield from _functions_of(value.func)
    elif isinstance(value, (FunctionType, MethodType)):
        yield from functions_in(value)
    elif callable(value) and not isinstance(value, (type, nn.Module, Tensor)):
        yield from functions_in(value)
        yield from functions_in(vars(type(value)).get("__call__"))


def _functions_held(value: Any, depth: int = 3) -> Iterator[FunctionType]:
    """The functions in a value: those that a call runs, and those in containers and objects of a model's author."""
    inner: list[Any] = []
    if isinstance(value, (dict, list, tuple, set, frozenset, deque)):
        inner = [*(value.values() if isinstance(value, dict) else value)]
    elif _is_own_object(value):
        inner = [*vars(value).values()]
        for cls in type(value).__mro__:
            yield from (f for name, f in vars(cls).items() if isinstance(f, FunctionType) and _is_implicit(name))
    else:
        yield from _functions_of(value)
    for one in inner if depth else ():
        yield from _functions_held(one, depth - 1)


def _own_functions(module: nn.Module) -> Iterator[FunctionType]:
    """Functions that a module holds, or its class in data, among them a ``forward`` of its own, and its hooks."""
    cls: Any = type(module)
    for one in (*vars(module).values(), *_class_data(cls)):
        yield from (f for f in _functions_held(one) if not home_of(f).startswith("torch."))
    for hooks in _HOOKS:
        for hook in vars(module).get(hooks, {}).values():
            yield from _functions_held(type(hook).forward if isinstance(hook, nn.Module) else hook)


@cache
def _class_data(cls: Any) -> tuple[Any, ...]:
    """What the classes of a model's author have, except methods."""
    owners = [each for each in cls.__mro__ if _is_authors(each.__module__)]
    return tuple(value for each in owners for value in vars(each).values() if not isinstance(value, FunctionType))


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
