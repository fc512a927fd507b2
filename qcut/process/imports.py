"""Runs code when a package is imported, which may be never."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call a function on a module: now where it was imported, else right after its import; never if there is none.

    Args:
        name: dotted name of the module.
        then: gets the module, its code executed. What it raises, the import raises.
    """
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is not None and not getattr(spec, "_initializing", False):
        then(module)
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder:
    """Finds one module as all others would, once, and lets its loader call the function."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                self._then(module)

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec
