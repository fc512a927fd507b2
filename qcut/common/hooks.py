"""Runs code when a module is imported, which may be never, and when a model is quantized."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def when_imported(name: str, then: str) -> None:
    """Call a function on a module: now if it was imported, and after each import and each reload that follows.

    Where the module is being imported, by this thread or another, the call comes at the end of that. An import that
    fails, or that is only looked for, calls nothing.

    Args:
        name: dotted name of the module, which need not exist.
        then: ``"module:function"``, looked up at the call. It gets the module, its code executed, may be called again
            for the same one, and what it raises, the import raises. A second wait for the same function adds nothing.
    """
    waiting = _FINDER.waiting.setdefault(name, [])
    if then not in waiting:
        waiting.append(then)
    module = sys.modules.get(name)
    spec: Any = getattr(module, "__spec__", None)
    if module is None:
        return
    if not getattr(spec, "_initializing", False):
        _call(then, module)
    elif type(spec.loader).__name__ != _Loader.__name__:
        _call_at_the_end(spec, then)


class _QcutFinder:
    """Finds the modules that functions wait for as the finders behind it would, and adds to what their import does.

    Attributes:
        waiting: functions, by the module that they wait for.
        quantized: functions that are called with each quantized model, by name.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, list[str]] = {}
        self.quantized: dict[str, Callable[[nn.Module], None]] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        finders = list(sys.meta_path)
        if name not in self.waiting or self not in finders:
            return None
        for finder in finders[finders.index(self) + 1 :]:
            spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec, self.waiting[name])  # type: ignore[assignment]
                return spec
        return None


class _Loader:
    """A module's own loader until the module has been executed: other attributes come from that loader."""

    def __init__(self, spec: ModuleSpec, waiting: list[str]) -> None:
        self._spec, self._loader, self._waiting = spec, spec.loader, waiting

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self).get("_loader"), name)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)  # type: ignore[union-attr]
        self._spec.loader = self._loader
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = self._loader
        for then in list(self._waiting):
            _call(then, sys.modules.get(self._spec.name, module))


def _call_at_the_end(spec: Any, then: str) -> None:
    """Call a function when a module that was found before anybody waited for it has been imported.

    The import system reports the end of an import only to the module's spec.
    """
    own: Any = type(spec)

    class Telling(own):
        @property
        def _initializing(self) -> bool:
            return True

        @_initializing.setter
        def _initializing(self, value: bool) -> None:
            self.__class__ = own
            self._initializing = value
            module = sys.modules.get(self.name)  # none after a failure
            if module is not None and not value:
                _call(then, module)

    spec.__class__ = Telling
    if not vars(spec)["_initializing"]:  # it ended meanwhile, in another thread
        spec._initializing = False


def _call(then: str, module: ModuleType) -> None:
    home, _, function = then.partition(":")
    getattr(import_module(home), function)(module)


def _installed() -> _QcutFinder:
    """The finder of this process: one, even if this module is reloaded, or imported anew."""
    for finder in sys.meta_path:
        if type(finder).__name__ == _QcutFinder.__name__:
            return finder  # type: ignore[return-value]
    finder = _QcutFinder()
    sys.meta_path.insert(0, finder)
    return finder


_FINDER = _installed()


def when_quantized(name: str, hook: Callable[[nn.Module], None]) -> None:
    """Call a function with each model that is quantized, or loaded quantized, from now on.

    Args:
        name: of the hook; one of the same name takes the place of the earlier one.
        hook: must not fail, and must not hold the model.
    """
    _FINDER.quantized[name] = hook


def notify_quantized(model: nn.Module) -> None:
    """Call all hooks with a model that holds quantized layers now."""
    for hook in tuple(_FINDER.quantized.values()):
        hook(model)
