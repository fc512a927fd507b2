"""Walks a model: finds the layers that qcut can quantize, calls the model, reads its output, replaces modules."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from qcut.errors import DtypeError, QuantizationError, UnsupportedError, layer_prefix

DEFAULT_SKIP = ("lm_head",)
"""Layers left in float by default: most models tie the classifier to the embedding, and the classifier is sensitive."""

WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes of the float weights that qcut quantizes, and of the rows that its embeddings return."""


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' ``Conv1D``, a linear layer whose weight is stored as ``[K, N]``."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_linear(module: nn.Module) -> bool:
    """Whether qcut can replace a module: an ``nn.Linear`` or ``Conv1D`` with the forward and the weight of that class.

    qcut leaves three kinds of module alone: subclasses with a forward of their own (adapters), modules with a
    parametrized weight, and the projection that ``nn.MultiheadAttention`` reads without calling it.
    """
    if module._parameters.get("weight") is None or type(module).__name__ == "NonDynamicallyQuantizableLinear":
        return False
    return is_conv1d(module) or (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward)


def weight_nk(module: nn.Module) -> Tensor:
    """The weight of a linear layer as ``[N, K]``, a view without gradient."""
    weight = weight_of(module).detach()
    return weight.t() if is_conv1d(module) else weight


def float_weight(module: nn.Module, name: str | None = None) -> Tensor:
    """The weight of a layer to quantize as ``[N, K]``, a view without gradient, for either storage order.

    Args:
        module: ``nn.Linear`` or ``Conv1D``, subclasses with a forward of their own included.
        name: name of the layer, for error messages.

    Raises:
        UnsupportedError: the module is of another kind, or its weight is on the meta device.
        DtypeError: the weight's dtype is not one of `WEIGHT_DTYPES`.
    """
    where = layer_prefix(name)
    weight = getattr(module, "weight", None)
    if not (isinstance(module, nn.Linear) or is_conv1d(module)) or not isinstance(weight, Tensor):
        raise UnsupportedError(
            f"{where}cannot quantize a {type(module).__name__}; allowed: nn.Linear, transformers' Conv1D"
        )
    if weight.is_meta:
        raise UnsupportedError(f"{where}the weight is on the meta device; load the model first")
    if weight.dtype not in WEIGHT_DTYPES:
        raise DtypeError(f"{where}the weight is {dtype_name(weight.dtype)}; allowed: {weight_dtype_names()}")
    weight = weight.detach()
    return weight.t() if is_conv1d(module) else weight


def float_bias(bias: Tensor, name: str | None = None) -> Tensor:
    """A copy of a bias as float32 ``[N]``.

    Raises:
        QuantizationError: the bias holds NaN or Inf.
    """
    bias = bias.detach().to(torch.float32, copy=True)
    if not bias.isfinite().all():
        raise QuantizationError("bias holds NaN or Inf; every value must be finite in float32", name)
    return bias


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without ``torch.``, such as ``float16``."""
    return str(dtype).removeprefix("torch.")


def weight_dtype_names() -> str:
    """The names of `WEIGHT_DTYPES`, for error messages."""
    return ", ".join(map(dtype_name, WEIGHT_DTYPES))


def tensor_key(tensor: Tensor) -> tuple[Any, ...]:
    """A key that is equal for tied tensors: two tensors with the same memory, shape and strides."""
    pointer = 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()
    if pointer == 0:
        return (id(tensor),)
    return (tensor.device, pointer, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def weight_holders(model: nn.Module) -> dict[tuple[Any, ...], list[str]]:
    """Names of the modules that hold each parameter, by `tensor_key`."""
    holders: dict[tuple[Any, ...], list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(tensor_key(parameter), []).append(name)
    return holders


def weight_of(module: nn.Module) -> nn.Parameter:
    """The weight of a module that has one."""
    weight = module._parameters["weight"]
    assert weight is not None
    return weight


def tied_elsewhere(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """The layers whose weight a module outside ``layers`` holds too, with that module's name.

    Such a layer stays in float: a quantized copy beside the embedding of the same weight would cost memory.
    """
    holders = weight_holders(model)
    outside = {name: set(holders[tensor_key(weight_of(module))]) - set(layers) for name, module in layers.items()}
    return {name: min(others) for name, others in outside.items() if others}


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a glob matches the whole dotted name or its end: ``lm_head``, ``*.mlp.*``, ``h.0.attn.c_attn``."""
    return any(fnmatch.fnmatchcase(name, p) or fnmatch.fnmatchcase(name, f"*.{p}") for p in patterns)


def find_layers(
    model: nn.Module, include: Sequence[str] | None = None, skip: Sequence[str] = DEFAULT_SKIP
) -> dict[str, nn.Module]:
    """The linear layers of a model, by name, in the order of ``named_modules``.

    Args:
        model: the model. A module registered under several names counts once, under its first name.
        include: globs (see `matches`) of layers to take; None takes every layer. A glob must match a layer.
        skip: globs of layers to leave out, even where ``include`` names them. A glob may match nothing.

    Raises:
        QuantizationError: a glob of ``include`` matches nothing, or no layer is left.
    """
    every = {name: module for name, module in model.named_modules() if name and is_linear(module)}
    for pattern in include or ():
        if not any(matches(name, [pattern]) for name in every):
            raise QuantizationError(
                f"{type(model).__name__}: {pattern!r} matches none of its {len(every)} linear layers"
                + (f", such as {next(iter(every))!r}" if every else "")
            )
    chosen = {
        name: module
        for name, module in every.items()
        if (include is None or matches(name, include)) and not matches(name, skip)
    }
    if not chosen:
        raise QuantizationError(
            f"{type(model).__name__}: no layer to work on ({len(every)} linear layers in all, include={include}, "
            f"skip={tuple(skip)}); qcut takes nn.Linear and transformers' Conv1D inside a model"
        )
    return chosen


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode and give every module its own mode back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def model_device(model: nn.Module) -> torch.device:
    """The device of the first parameter, else of the first buffer, else the CPU."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor of a batch to the device; mappings become dicts."""
    batch = dict(batch) if isinstance(batch, Mapping) else batch
    return pytree.tree_map_only(Tensor, lambda t: t.to(device), batch)


def forward(model: nn.Module, batch: Any) -> Any:
    """Call a model on one batch: a tensor is the first argument, a tuple or list all arguments, a mapping the keywords.

    A Hugging Face model is told not to build a key-value cache.

    Raises:
        DtypeError: the batch is of another type.
    """
    extra = {"use_cache": False} if getattr(getattr(model, "config", None), "use_cache", False) else {}
    if isinstance(batch, Tensor):
        return model(batch, **extra)
    if isinstance(batch, Mapping):
        return model(**{**extra, **batch})
    if isinstance(batch, (tuple, list)):
        return model(*batch, **extra)
    raise DtypeError(
        f"batches: found {type(batch).__name__}; a batch is a tensor, a tuple of arguments or a dict of keywords"
    )


def output_tensor(output: Any) -> Tensor:
    """The logits in a model's output: the output itself, its ``logits``, or its first floating-point tensor.

    Raises:
        DtypeError: the output holds no floating-point tensor.
    """
    logits = getattr(output, "logits", None)
    for leaf in [logits, *pytree.tree_leaves(output), *pytree.tree_leaves(getattr(output, "__dict__", None))]:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf
    raise DtypeError(f"model: found an output of type {type(output).__name__} without a floating tensor")


def input_ids_of(batch: Any) -> Tensor | None:
    """The token ids of a batch, an integer tensor ``[B, T]``, or None where the batch has none."""
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
    else:
        ids = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    ok = isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_floating_point() and not ids.is_complex()
    return ids if ok else None


def as_given(x: Tensor, module: nn.Module) -> Tensor:
    """Sampled inputs of a layer, in the dtype that the layer gets from its model and that its CUDA kernels take."""
    weight = weight_of(module)
    return x.to(weight.device, weight.dtype) if weight.is_cuda else x


def replace_modules(model: nn.Module, new: dict[int, nn.Module]) -> None:
    """Replace modules, given by id, wherever the model registers them."""
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is not None and id(child) in new:
                parent._modules[key] = new[id(child)]


class FusedActivation(nn.Identity):
    """Takes the place of an activation that the linear layer before it computes."""

    def __init__(self, activation: str = "none") -> None:
        super().__init__()
        self.activation = activation

    def extra_repr(self) -> str:
        """The activation's name, for ``print(model)``."""
        return self.activation


def fusible_activations(model: nn.Module) -> dict[str, tuple[str, str]]:
    """Activations whose only input is the result of one linear layer, by the name of that layer.

    Two places are known: the MLP of GPT-2 (``c_fc``, then ``act``), and neighbours in an ``nn.Sequential``.

    Returns:
        By layer name: the name of the activation module, and its function's name in `qcut.config.ACTIVATIONS`.
    """
    fusible = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if type(module).__name__ == "GPT2MLP":
            pairs = [("c_fc", "act")]
        elif isinstance(module, nn.Sequential):
            keys = list(module._modules)
            pairs = list(pairwise(keys))
        else:
            continue
        for first, second in pairs:
            layer, function = module._modules.get(first), module._modules.get(second)
            activation = _activation_name(function)
            if layer is not None and is_linear(layer) and activation is not None:
                fusible[prefix + first] = (prefix + second, activation)
    return fusible


def _activation_name(module: nn.Module | None) -> str | None:
    if isinstance(module, nn.GELU):
        return "gelu_tanh" if module.approximate == "tanh" else "gelu_erf"
    return _ACTIVATIONS.get(type(module).__name__)


_ACTIVATIONS = {
    "ReLU": "relu",
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu_erf",
    "NewGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}
"""Classes of torch and transformers by name, and the function of `qcut.config.ACTIVATIONS` that each computes."""
