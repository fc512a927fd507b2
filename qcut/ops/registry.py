"""How an operator of ``torch.ops.qcut`` is made: its schema, its checks, and what serves it on each device."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from qcut.errors import DeviceError, DtypeError, ShapeError

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

library = torch.library.Library("qcut", "DEF")


def check_dtype(op: str, name: str, dtype: torch.dtype, allowed: tuple[torch.dtype, ...]) -> None:
    """Raises `DtypeError` unless the dtype is one of those allowed."""
    if dtype not in allowed:
        names = [str(d).removeprefix("torch.") for d in (dtype, *allowed)]
        raise DtypeError(f"qcut::{op}: {name} is {names[0]}; allowed: {', '.join(names[1:])}")


def check_tensor(
    op: str,
    name: str,
    tensor: Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int, ...],
    device: torch.device,
) -> None:
    """Raises `DtypeError`, `ShapeError` or `DeviceError` unless the tensor is as the operator takes it."""
    check_dtype(op, name, tensor.dtype, dtypes)
    if tensor.shape != shape:
        raise ShapeError(f"qcut::{op}: {name} has shape {list(tensor.shape)}; allowed: {list(shape)}")
    if tensor.device != device:
        raise DeviceError(f"qcut::{op}: {name} is on {tensor.device}; the first argument is on {device}")


def check_absmax(op: str, name: str, absmax: Tensor | None, rows: Tensor) -> None:
    """Raises as `check_tensor`, or `ShapeError`, unless there is none or float32 ``[M]``, close together."""
    if absmax is None:
        return
    check_tensor(op, name, absmax, (torch.float32,), (len(rows),), rows.device)
    if not absmax.is_contiguous():
        raise ShapeError(f"qcut::{op}: {name} has strides {list(absmax.stride())}; allowed: contiguous")


def define(
    signature: str,
    check: Callable[..., None],
    fake: Callable[..., Any],
    cpu: Callable[..., Any],
    *,
    cuda: str | None = "_ops_cuda",
    native: bool = False,
) -> None:
    """Define an operator.

    Args:
        signature: its schema.
        check: raises on wrong arguments, on the CPU and while tracing.
        fake: makes results without values.
        cpu: computes them.
        cuda: the module of qcut that serves CUDA with a function of the operator's name, imported at the first call;
            None lets ``cpu`` serve CUDA too, checks included.
        native: define the operator behind `qcut.cuda.native`'s as well, under a leading underscore.
    """
    name = signature.partition("(")[0]

    def checked(implementation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            check(*args, **kwargs)
            return implementation(*args, **kwargs)

        return call

    cuda_implementation: Callable[..., Any] | None = None

    def on_cuda(*args: Any, **kwargs: Any) -> Any:
        nonlocal cuda_implementation
        if cuda_implementation is None:
            cuda_implementation = getattr(import_module(f"qcut.{cuda}"), name)
        return cuda_implementation(*args, **kwargs)

    library.define(signature, tags=(torch.Tag.pt2_compliant_tag,))
    # Without no_grad, torch would differentiate through the reference's rounding, and be wrong.
    on_cpu = torch.no_grad()(checked(cpu))
    library.impl(name, on_cpu, "CPU")
    library.impl(name, on_cpu if cuda is None else on_cuda, "CUDA")
    torch.library.register_fake(f"qcut::{name}", checked(fake), lib=library)
    if native:
        library.define(f"_{signature}", tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(f"_{name}", on_cuda, "CUDA")
