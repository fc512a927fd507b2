"""Tells whether a class is one of torch's or transformers' own that computes what its library wrote.

A class's name decides nothing: a class of one's own may be called ``ReLU``, and another function may have been put in
place of ``nn.ReLU.forward``. The class itself is compared, and where its ``forward`` comes from.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

_WAY: dict[str, Any] = {
    key: getattr(nn.Module, key) for key in ("__call__", "_call_impl", "__getattr__", "__getattribute__")
}
"""What a call of a module goes through before it comes to ``forward``."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def library_class(place: str, name: str) -> type[nn.Module] | None:
    """A class of a library's module that has been imported; None if it has not been.

    No model can hold an object of a class that nobody has imported.
    """
    found: type[nn.Module] | None = getattr(sys.modules.get(place), name, None)
    return found


def is_called_as_written(cls: type) -> bool:
    """Whether a call of a module of this class comes to its ``forward``, and that to its parameters, as torch does."""
    return all(getattr(cls, key) is value for key, value in _WAY.items())


def computes_its_own(cls: type) -> bool:
    """Whether objects of a class are computed by the ``forward`` that the class's own module defines in it."""
    function = vars(cls).get("forward")
    return (
        isinstance(function, FunctionType)
        and function.__globals__ is vars(sys.modules[cls.__module__])
        and function.__qualname__ == f"{cls.__qualname__}.forward"
        and is_called_as_written(cls)
        and replaced_function(function) is None
    )


_SPACES = (torch, F, Tensor)
_TORCH = Path(torch.__file__).parent
_DECORATORS = ("typing.py", "typing_extensions.py", "warnings.py", "_py_warnings.py")
"""Files of the wrappers around functions that torch itself calls deprecated."""


def replaced_function(function: FunctionType) -> str | None:
    """The name of a function of torch that a function mentions, and that somebody has put another in place of, or None.

    Functions of ``torch.nn.functional`` are followed. A name that means something else is looked at too: it does no
    harm.
    """
    left, seen = [function], set[FunctionType]()
    while left:
        function = left.pop()
        seen.add(function)
        for name in {name for code in codes_in(function.__code__) for name in code.co_names}:
            for space in _SPACES:
                value = vars(space).get(name)
                if isinstance(value, (functools.partial, MethodType)):
                    return name
                if isinstance(value, FunctionType):
                    file = Path(value.__code__.co_filename)
                    if _TORCH not in file.parents and file.name not in _DECORATORS:
                        return name
                    if space is F and value not in seen:
                        left.append(value)
    return None


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def is_exactly(module: nn.Module | None, cls: type[nn.Module] | None) -> bool:
    """Whether a module is of this very class, no subclass, and computes what the class's library wrote."""
    return cls is not None and type(module) is cls and "forward" not in vars(module) and computes_its_own(cls)


def is_unwatched(module: nn.Module) -> bool:
    """Whether nobody looks at a module's calls, or computes them in its place: no hook, no ``forward`` of its own."""
    state = vars(module)
    return "forward" not in state and not any(state[hooks] for hooks in _HOOKS)


def all_calls_are_watched() -> bool:
    """Whether hooks look at the calls of all modules of the process."""
    return bool(
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )


def conv1d_class() -> type[nn.Module] | None:
    """transformers' ``Conv1D``, if transformers has been imported."""
    return library_class("transformers.pytorch_utils", "Conv1D")


def activation_of(module: nn.Module | None) -> str | None:
    """The function of `qcut.schemes.ACTIVATIONS` that a module of torch or transformers computes, or None."""
    if is_exactly(module, nn.ReLU):
        return "relu"
    if is_exactly(module, nn.SiLU):
        return "silu"
    if isinstance(module, nn.GELU) and is_exactly(module, nn.GELU):
        return {"tanh": "gelu_tanh", "none": "gelu_erf"}.get(str(module.approximate))
    for name, (function, inner) in _OF_TRANSFORMERS.items():
        if is_exactly(module, library_class("transformers.activations", name)):
            return function if inner is None or _holds(module, inner) else None
    return None


_OF_TRANSFORMERS: dict[str, tuple[str, str | None]] = {
    "SiLUActivation": ("silu", None),
    "NewGELUActivation": ("gelu_tanh", None),
    "FastGELUActivation": ("gelu_tanh", None),
    "GELUTanh": ("gelu_tanh", "_gelu_tanh_python"),
    "PytorchGELUTanh": ("gelu_tanh", None),
    "GELUActivation": ("gelu_erf", "_gelu_python"),
}
"""Activations of transformers: the function, and the method that ``act`` may be if the class calls that."""


def _holds(module: Any, method: str) -> bool:
    """Whether ``module.act`` is the method, or torch's own function of the same values."""
    act = module.act
    if isinstance(act, functools.partial):
        return act.func is F.gelu and not act.args and act.keywords == {"approximate": "tanh"}
    return act is F.gelu if act.__class__ is F.gelu.__class__ else act == getattr(module, method, None)
