"""Arithmetic that does not depend on what the caller has switched on: autocast, inference mode, short float32 products.

Tables and constants have explicit dtypes and devices everywhere (`tests/repo/test_explicit_tensors.py`), so torch's
default dtype and default device have no influence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

from qcut.common.locks import Lock

P = ParamSpec("P")
R = TypeVar("R")

_PRODUCTS: tuple[Any, ...] = (
    torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
    torch.backends.cuda.matmul,
)
"""Settings by which float32 products may be computed in bfloat16 or TF32."""
_FULL = ("none", "ieee")
_lock = Lock()
_inside = 0
_restore: list[Callable[[], None]] = []


@contextmanager
def outside_modes() -> Iterator[None]:
    """Run a block outside the thread's autocast and inference mode; under inference mode, without gradients."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))  # switches gradients on
            stack.enter_context(torch.no_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def plain_state() -> Iterator[None]:
    """Run a block outside autocast and inference mode, with float32 products in float32.

    Autocast and inference mode are the thread's. The precision of float32 products is the process's: other threads
    have full precision too, until the last block that runs at the same time has ended.
    """
    with outside_modes(), _full_products():
        yield


def in_plain_state(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to run in `plain_state`."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        with plain_state():
            return function(*args, **kwargs)

    return run


@contextmanager
def _full_products() -> Iterator[None]:
    global _inside
    with _lock:
        if _inside == 0 and any(setting.fp32_precision not in _FULL for setting in _PRODUCTS):
            _restore.append(_switch_to_full())
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0 and _restore:
                _restore.pop()()


def _switch_to_full() -> Callable[[], None]:
    """Set full precision, and return what undoes that. torch refuses to read its older switch if the two differ."""
    before = [setting.fp32_precision for setting in _PRODUCTS]
    try:
        older = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
    except RuntimeError:  # the caller has used only the newer switch
        older = None
    _set(["ieee"] * len(_PRODUCTS))

    def restore() -> None:
        if older is not None:
            torch.set_float32_matmul_precision(older)
        _set(before)

    return restore


def _set(wanted: list[str]) -> None:
    for setting, precision in zip(_PRODUCTS, wanted, strict=True):
        if setting.fp32_precision != precision:
            setting.fp32_precision = precision
