"""Errors for code that reads a quantized layer's float weight, or saves its state in a format of float layers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from qcut.errors import UnsupportedError, layer_prefix

DESCRIPTIONS = frozenset(
    {
        *("dtype", "device", "shape", "ndim", "layout", "itemsize", "nbytes", "names", "size", "dim", "numel"),
        *("stride", "element_size", "storage_offset", "is_contiguous", "is_floating_point", "is_complex", "is_signed"),
        *("is_cuda", "is_cpu", "is_meta", "is_xpu", "is_mps", "is_sparse", "is_quantized", "is_nested", "is_leaf"),
        *("is_inference", "is_mkldnn", "is_pinned", "requires_grad", "grad", "grad_fn", "get_device", "data_ptr"),
        *("untyped_storage", "nelement", "ndimension", "is_same_size", "is_shared", "_version", "__class__"),
    }
)
"""Attributes and methods of a tensor that describe it and read no values."""

_is_batched = torch._C._functorch.is_batchedtensor
_SAVERS = frozenset({"save_pretrained", "_save_pretrained"})


class _Described(Tensor):
    """A tensor that gives its shape and device, another dtype than its own, and refuses its values."""

    owner: str
    stated: torch.dtype
    _is_param = True  # isinstance(layer.weight, nn.Parameter), as of a float layer

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
            if name == "dtype":
                return args[0].stated
            if name == "nbytes":
                return args[0].numel() * args[0].stated.itemsize
        if name in ("itemsize", "element_size"):
            return args[0].stated.itemsize
        if name == "is_floating_point":
            return args[0].stated.is_floating_point
        if name in DESCRIPTIONS or name in ("__repr__", "__len__", "__hash__", "_is_view", "is_set_to"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        owner = next((leaf.owner for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, _Described)), "")
        raise UnsupportedError(
            f"{owner}its weight is quantized, and something reads it as a float weight ({name}); call the layer, take "
            "dequantized_weight(), leave the layer in float with qcut.quantize(..., skip=[its name]), or merge "
            "adapters before it is quantized"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<quantized weight {list(self.shape)} on {self.device}; see dequantized_weight()>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(f"{self.owner}its weight is quantized; pickle the layer, not its weight")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise UnsupportedError(f"{self.owner}its weight is quantized; copy the layer, not its weight")


def described(tensor: Tensor, dtype: torch.dtype, name: str | None) -> Tensor:
    """A weight without values: shape and device of this tensor, and the dtype of the float weight.

    Model code casts its inputs to that dtype.

    Args:
        tensor: of the layer; shared, not copied.
        dtype: to state.
        name: of the layer, for error messages.

    Returns:
        A tensor that raises UnsupportedError, which names the layer, when its values are read. In compiled code, which
        knows no such tensors, one of NaN.
    """
    if torch.compiler.is_compiling():
        return torch.full((), torch.nan, dtype=dtype, device=tensor.device).expand(tensor.shape)
    view = tensor.as_subclass(_Described)
    view.owner, view.stated = layer_prefix(name), dtype
    return view


def is_described(tensor: Any, memory: Tensor) -> bool:
    """Whether this is what `described` makes of a tensor in the same memory."""
    return isinstance(tensor, _Described) and bool(memory.is_set_to(tensor))


def refuse_tangents(x: Tensor, where: str) -> None:
    """Refuse a tensor with a derivative in forward mode, which no operator of a quantized layer carries on.

    Raises:
        UnsupportedError: inside ``torch.func.jvp``, ``jacfwd`` or ``torch.autograd.forward_ad``.
    """
    if forward_ad.unpack_dual(x).tangent is not None:
        raise UnsupportedError(
            f"{where}a derivative in forward mode is wanted (torch.func.jvp, jacfwd); quantized layers have only "
            "gradients, with qcut.enable_input_gradients(model)"
        )


def refuse_batching(where: str, *tensors: Tensor) -> None:
    """Refuse tensors of ``torch.func.vmap``, for code that reads values on the host.

    Raises:
        UnsupportedError: there is one.
    """
    if any(map(_is_batched, tensors)):
        raise UnsupportedError(
            f"{where}values are read on the host, which torch.func.vmap cannot do; allowed: all samples in one call, "
            "or a call for each"
        )


def refuse_stored(state: Mapping[str, Any], where: str) -> None:
    """Refuse a call with tensors of a state dict, which are laid out otherwise than a layer's own.

    Args:
        state: of the layer that is called, its ``__dict__``.
        where: the layer, for the message.

    Raises:
        UnsupportedError: ``torch.func.functional_call`` has put stored indices into the layer.
    """
    if "indices" in state:
        raise UnsupportedError(
            f"{where}it is called with tensors of a state dict, as torch.func.functional_call does; allowed: those of "
            "named_buffers() of a layer of the same scheme, or load_state_dict"
        )


def transformed(where: str, error: RuntimeError, *tensors: Tensor | None) -> UnsupportedError | None:
    """The error of a layer under a transformation of ``torch.func`` that torch has refused; None outside of one."""
    if not any(tensor is not None and torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors):
        return None
    reason = str(error).partition("\n")[0][:120]
    return UnsupportedError(
        f"{where}a transformation of torch.func is not possible ({reason}); allowed: all samples in one call, and "
        "backward() for gradients, with qcut.enable_input_gradients(model)"
    )


def refuse_foreign_saving(name: str | None) -> None:
    """Raise if a layer's state is being collected for a ``save_pretrained``.

    The class that such a folder names has float layers: it would load with their weights drawn at random. Whether it is
    the model's own method, a part's, a pipeline's or a wrapper's, it reads the layer's state while it runs. PEFT's does
    too, and keeps only the adapters.

    Raises:
        UnsupportedError: a function of that name is running.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _SAVERS:
            if frame.f_globals.get("__name__", "").partition(".")[0] == "peft":
                return
            raise UnsupportedError(
                f"{layer_prefix(name)}save_pretrained cannot write a quantized layer in a form that from_pretrained "
                "reads back; use qcut.save(model, directory) and qcut.load(directory)"
            )
        frame = frame.f_back  # type: ignore[assignment]
