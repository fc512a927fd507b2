"""Recognizes linear layers, calls a model, reads its output and replaces modules."""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils import _pytree as pytree

from qcut.errors import (
    ConfigError,
    DeviceError,
    DtypeError,
    QcutError,
    QuantizationError,
    ShapeError,
    UnsupportedError,
    layer_prefix,
)
from qcut.models.affine import is_affine
from qcut.models.classes import computes_its_own, conv1d_class, is_called_as_written, library_class

WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes of the float weights that qcut quantizes, and of the rows that its embeddings return."""
SERVED_DTYPES = WEIGHT_DTYPES[:3]
"""Dtypes of the tokens that quantized layers take: what the weights of a model's layers have to be of."""


_STATE_HOOKS = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


_PLAIN = frozenset(
    {
        *vars(nn.Module()),
        *("in_features", "out_features", "nf", "nx", "weight", "bias", "forward"),
        *("num_embeddings", "embedding_dim", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
    }
)
"""What every linear layer, or every table, may have in its ``__dict__``."""


def kept_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes that somebody has given to a linear layer or a table, which `keep_hooks` gives to a successor."""
    given = vars(module).items() if looks_linear(module) or isinstance(module, nn.Embedding) else ()
    return {key: value for key, value in given if key not in _PLAIN and not key.startswith("_")}


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' ``Conv1D``, a linear layer with its weight stored as ``[K, N]``."""
    return type(module) is conv1d_class()


class Quantized(nn.Module):
    """The base of `qcut.Linear`, by which this folder knows layers that are quantized.

    Attributes:
        activation: that the layer computes after its bias.
        apart: whether ``forward`` leaves the activation to the module behind, and only `forward_fused` computes it.
    """

    RESERVED = frozenset(
        {
            *("activation", "apart", "name", "scheme", "static_range", "float_count", "input_gradients", "parts"),
            *("codebook", "col_scale", "colsum", "fold", "geometry", "group_size", "input_scale", "input_zero_point"),
            *("int8", "kind", "norm_scale", "norms", "packed_norms", "qweight", "set_bits", "units", "weight_scale"),
        }
    )
    """Attributes and buffers of quantized layers that a float layer may not have as well."""

    activation: str
    apart: bool = False

    def forward_fused(self, x: Tensor) -> Tensor:
        """Applies the layer, its activation included."""
        raise NotImplementedError


class ExpertsModule(nn.Module):
    """A module that computes the experts of a mixture as layers: the base of `qcut.layers.experts.experts.Experts`.

    Attributes:
        num_experts: how many.
        identities: how many more that are the identity.
        gating: what is between their products, a `qcut.numerics.gating.Gating`.
    """

    num_experts: int
    identities: int
    gating: Any


_DBRX = ("transformers.models.dbrx.modeling_dbrx", "DbrxExperts")
"""Experts with matrices one below the other in parameters of two dimensions."""


def expert_count(module: nn.Module) -> int:
    """Number of experts in a module, as parameters of three dimensions or as layers; 0 if it has none."""
    if isinstance(module, ExpertsModule):
        return module.num_experts + module.identities
    if isinstance(module, _ConvNd) or type(module).__module__.startswith("torch."):
        return 0
    dbrx = library_class(*_DBRX)
    if dbrx is not None and isinstance(module, dbrx):
        return int(module.num_experts)  # type: ignore[arg-type]
    own = (p for p in module._parameters.values() if p is not None)
    return max((len(p) for p in own if p.ndim == 3 and min(p.shape) > 1), default=0)


def has_stacked_weights(module: nn.Module) -> bool:
    """Whether a module has matrices of several experts in one parameter of its own."""
    return not isinstance(module, ExpertsModule) and expert_count(module) > 0


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes ``x @ W.T + b`` with a plain weight: an ``nn.Linear`` or ``Conv1D`` and nothing more.

    Whether other code reads the weight, so that the module cannot be replaced, is for `qcut.models.selection`.
    """
    return looks_linear(module) and own_ways(module) is None


def looks_linear(module: nn.Module) -> bool:
    """Whether a module is an ``nn.Linear``, of a subclass too, or a ``Conv1D``."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def own_ways(module: nn.Module) -> str | None:
    """Why qcut cannot replace a module that looks linear, or None if it can."""
    cls = type(module)
    weight = module._parameters.get("weight")
    if weight is None:
        return f"its weight is computed from other parameters ({cls.__name__})"
    if type(weight) not in (nn.Parameter, Tensor) or weight.ndim != 2:
        return f"its weight is a {type(weight).__name__} of {weight.ndim} dimensions, not a plain matrix"
    if weight.dtype not in WEIGHT_DTYPES:
        return unserved_dtype(weight)
    if weight.numel() == 0:
        return f"its weight is empty: {list(weight.shape)}"
    bias: Any = getattr(module, "bias", None)
    if bias is not None and (type(bias) not in (nn.Parameter, Tensor) or bias.shape != weight_nk(module).shape[:1]):
        shape = list(bias.shape) if isinstance(bias, Tensor) else ""
        return f"its bias is a {type(bias).__name__} {shape}, not a plain vector of {len(weight_nk(module))} values"
    if others := [*module._parameters.keys() - {"weight", "bias"}, *module._buffers, *module._modules]:
        return f"it holds {others[0]!r} besides its weight and bias, which a quantized layer does not keep"
    if taken := Quantized.RESERVED & kept_attributes(module).keys():
        return f"it has an attribute {min(taken)!r} of its own, which a quantized layer has in another meaning"
    if any(vars(module).get(hooks) for hooks in _STATE_HOOKS):
        return "hooks are called when its state is written or read"
    if has_extra_state(module):
        return f"its class keeps extra state (get_extra_state of {type(module).__module__}.{type(module).__qualname__})"
    return own_forward(module)


def unserved_dtype(weight: Tensor) -> str | None:
    """Why no quantized layer takes the tokens of a layer with this weight, or None if one does."""
    served = ", ".join(map(dtype_name, SERVED_DTYPES))
    return (
        None
        if weight.dtype in SERVED_DTYPES
        else f"its weight is {dtype_name(weight.dtype)}; {served} can be quantized"
    )


def own_forward(module: nn.Module) -> str | None:
    """Why a module that looks linear may compute anything but ``x @ W.T + b``, or None if it does not."""
    cls = type(module)
    if "forward" in vars(module):
        return "a forward of its own was set on the layer itself"
    if not is_called_as_written(cls):
        return f"a subclass that is called in its own way (class {cls.__module__}.{cls.__qualname__})"
    if not isinstance(module, nn.Linear):
        return None if computes_its_own(cls) else f"{cls.__qualname__}.forward is not that of transformers"
    if not (cls.forward is nn.Linear.forward and computes_its_own(nn.Linear)) and not is_affine(module):
        if cls is nn.Linear:
            return "nn.Linear.forward is not that of torch"
        return f"a subclass with its own forward (class {cls.__module__}.{cls.__qualname__})"
    return None


def has_extra_state(module: nn.Module) -> bool:
    """Whether a module has state that is no tensor, as ``get_extra_state`` returns it."""
    return "get_extra_state" in vars(module) or type(module).get_extra_state is not nn.Module.get_extra_state


def weight_nk(module: nn.Module) -> Tensor:
    """The weight of a linear layer as ``[N, K]``, a view without gradient."""
    weight = weight_of(module).detach()
    return weight.t() if is_conv1d(module) else weight


def float_weight(module: nn.Module, name: str | None = None) -> Tensor:
    """The weight of a layer to quantize as ``[N, K]``, a view without gradient, for either storage order.

    Args:
        module: ``nn.Linear`` or ``Conv1D``.
        name: name of the layer, for error messages.

    Raises:
        UnsupportedError: the module is of another kind or has a forward of its own, or its weight is on the meta
            device.
        DtypeError: the weight's dtype is not one of `WEIGHT_DTYPES`.
    """
    where = layer_prefix(name)
    weight = getattr(module, "weight", None)
    if not (isinstance(module, nn.Linear) or is_conv1d(module)) or not isinstance(weight, Tensor):
        raise UnsupportedError(
            f"{where}cannot quantize a {type(module).__name__}; allowed: nn.Linear, transformers' Conv1D"
        )
    if (reason := own_forward(module)) is not None:
        raise UnsupportedError(f"{where}cannot quantize it: {reason}; allowed: a layer that computes x @ W.T + b")
    if weight.is_meta:
        raise UnsupportedError(f"{where}the weight is on the meta device; load the model first")
    if weight.dtype not in WEIGHT_DTYPES:
        raise DtypeError(f"{where}the weight is {dtype_name(weight.dtype)}; allowed: {weight_dtype_names()}")
    weight = weight.detach()
    return weight.t() if is_conv1d(module) else weight


def float_linear(module: nn.Module, x: Tensor) -> Tensor:
    """``x @ W.T + b`` of a linear layer, in float32 and on its device, for inputs ``[M, K]``."""
    weight, bias = weight_nk(module), module._parameters.get("bias")
    x = x.to(weight.device)
    return nn.functional.linear(x, weight.float(), None if bias is None else bias.detach().float())


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
    """A key that is equal for tied tensors: two tensors with the same memory, shape and strides.

    A tensor without memory of its own is tied only to itself: one on the meta device, a sparse one, or a wrapper of
    other tensors, such as ``DTensor``.
    """
    try:
        pointer = 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()
    except RuntimeError:  # torch's error for a tensor without storage or memory
        pointer = 0
    if pointer == 0:
        return (id(tensor),)
    return (tensor.device, pointer, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def weight_holders(model: nn.Module) -> dict[tuple[Any, ...], list[str]]:
    """Names of the modules that hold each parameter or buffer, by `tensor_key`."""
    holders: dict[tuple[Any, ...], list[str]] = {}
    for name, module in model.named_modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                holders.setdefault(tensor_key(tensor), []).append(name)
    return holders


def weight_of(module: nn.Module) -> nn.Parameter:
    """The weight of a module that has one."""
    weight = module._parameters["weight"]
    assert weight is not None
    return weight


def tied_elsewhere(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """The layers that share their weight with a module outside ``layers``, and that module's name.

    Such a layer stays in float: a quantized copy in addition to the embedding's weight would cost memory.
    """
    holders = weight_holders(model)
    outside = {name: set(holders[tensor_key(weight_of(module))]) - set(layers) for name, module in layers.items()}
    return {name: min(others) for name, others in outside.items() if others}


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


_REGISTERED = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of every module, by which it holds parameters, buffers, modules and hooks."""
_CONTAINERS = (list, dict, set, deque)


@contextmanager
def state_kept(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """Give a model and torch's generators their state back after a call: a call may count, cache or draw.

    Kept are buffers and plain attributes: tensors with their values, containers with what they hold, and everything
    else as the object that it is. Buffers of quantized layers are weights, which no call changes.

    Args:
        model: its state is kept.
        seed: of torch's generators meanwhile.
    """
    tables = []
    for module in model.modules():
        if not isinstance(module, Quantized):
            own = {key: value for key, value in vars(module).items() if key not in _REGISTERED}
            tables += [(vars(module), own), (module._buffers, dict(module._buffers))]
    copies = [(value, made) for _, own in tables for value in own.values() if (made := _copied(value)) is not None]
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators += torch.cuda.default_generators
    states = [(generator, generator.get_state()) for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
        for table, own in tables:
            for key in [key for key in table if key not in own and key not in _REGISTERED]:
                del table[key]
            table.update(own)
        for value, made in copies:
            _put_back(value, made)


def _copied(value: Any) -> Any:
    """A copy of an attribute that a call may change in place; None of others."""
    if isinstance(value, Tensor):
        return None if value.is_meta or value.layout is not torch.strided else value.detach().clone()
    return value.copy() if type(value) in _CONTAINERS else None


def _put_back(value: Any, made: Any) -> None:
    if isinstance(value, Tensor):
        with torch.inference_mode(value.is_inference()), torch.no_grad():
            # To compare is to wait for a GPU; but expanded tensors cannot be written to.
            if (value.is_cuda and 0 not in value.stride()) or not torch.equal(value, made):
                value.copy_(made)
        return
    value.clear()
    if isinstance(value, (list, deque)):
        value.extend(made)
    else:
        value.update(made)


@contextmanager
def eagerly() -> Iterator[None]:
    """Run compiled modules as they are written: graphs that were compiled before call no hooks placed since then."""
    if "torch._dynamo" not in sys.modules or torch.compiler.is_compiling():
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's values; of a sparse one, of those that it holds."""
    return tensor.nbytes if tensor.layout is torch.strided else tensor._nnz() * tensor.itemsize


def model_device(model: nn.Module) -> torch.device:
    """The device of the first parameter, else of the first buffer, else the CPU."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def device_with_memory(device: Any) -> torch.device:
    """The device that a caller names.

    Raises:
        DeviceError: there is no such device, or it is ``meta``.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(f"device: found {device!r}; allowed: cpu, cuda, cuda:N") from error
    if found.type == "meta":
        raise DeviceError("device: found 'meta', which holds no values; allowed: cpu, cuda, cuda:N")
    count = torch.cuda.device_count() if found.type == "cuda" else 0
    if found.type == "cuda" and (found.index or 0) >= count:
        allowed = ", ".join(["cpu", *(f"cuda:{i}" for i in range(count))])
        raise DeviceError(f"device: found {str(found)!r}, and torch finds {count} CUDA devices; allowed: {allowed}")
    return found


def check_batches(batches: Any) -> None:
    """Check that batches can be taken one after another.

    Raises:
        DtypeError: this is no iterable, or a single batch.
    """
    if isinstance(batches, str | Mapping) or not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        kind = "one batch, a " if isinstance(batches, Mapping) else ""
        raise DtypeError(
            f"batches: found {kind}{type(batches).__name__}; an iterable of batches is needed, such as [batch]"
        )


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy every tensor of a batch to the device, for a model may change its input in place; mappings become dicts."""
    batch = dict(batch) if isinstance(batch, Mapping) else batch
    return pytree.tree_map_only(Tensor, lambda t: t.to(device, copy=True), batch)


def forward(model: nn.Module, batch: Any) -> Any:
    """Call a model on one batch: a tensor is the first argument, a tuple or list all arguments, a mapping the keywords.

    A Hugging Face model gets ``use_cache=False``.

    Raises:
        DtypeError: the batch is of another type, holds no tensor, or has token ids that are no integers.
        ShapeError: a token id is outside the model's vocabulary.
        ConfigError: the model's forward does not take such arguments, or fails on them.
    """
    extra = {"use_cache": False} if getattr(getattr(model, "config", None), "use_cache", False) else {}
    if isinstance(batch, Mapping):
        args: tuple[Any, ...] = ()
        keywords = {**extra, **batch}
    else:
        args = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        keywords = extra
    _check_batch(model, batch, args, keywords)
    try:
        return model(*args, **keywords)
    except (QcutError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        held = ", ".join(f"{dtype_name(t.dtype)} {list(t.shape)}" for t in pytree.tree_leaves(batch) if _is_tensor(t))
        raise ConfigError(
            f"batches: {type(model).__name__} fails on this batch ({held}): {type(error).__name__}: {error}"
        ) from error


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _check_batch(model: nn.Module, batch: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    leaves = pytree.tree_leaves((args, keywords))
    foreign = [leaf for leaf in leaves if isinstance(leaf, str) or type(leaf).__module__.split(".")[0] == "numpy"]
    if foreign or not any(isinstance(leaf, Tensor) for leaf in leaves):
        kind = type(foreign[0] if foreign else batch).__name__
        advice = {"str": "; tokenize text first", "ndarray": "; see torch.from_numpy"}.get(kind, "")
        raise DtypeError(
            f"batches: found {kind}{advice}; a batch is a tensor, a tuple of arguments or a dict of keywords, and "
            "batches are an iterable of such"
        )
    if isinstance(getattr(model, "forward", None), MethodType):
        try:
            inspect.signature(model.forward).bind(*args, **keywords)
        except TypeError as error:
            raise ConfigError(f"batches: {type(model).__name__}.forward does not take this batch: {error}") from None
    _check_ids(model, keywords.get("input_ids", args[0] if args else None))


def _check_ids(model: nn.Module, ids: Any) -> None:
    """Check token ids of a model with known token embeddings."""
    given: Any = getattr(model, "get_input_embeddings", None)
    try:
        table = given() if callable(given) and getattr(model, "main_input_name", "") == "input_ids" else None
    except (NotImplementedError, AttributeError):
        return
    if not isinstance(table, nn.Embedding) or not isinstance(ids, Tensor) or ids.is_meta:
        return
    if ids.dtype not in (torch.int64, torch.int32):
        raise DtypeError(f"batches: token ids are {dtype_name(ids.dtype)}; int64 or int32 is needed")
    if ids.numel():
        low, high = (int(value) for value in ids.aminmax())
        if low < 0 or high >= table.num_embeddings:
            raise ShapeError(
                f"batches: found token id {low if low < 0 else high}; the model's table has {table.num_embeddings} rows"
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
    """The token ids of a batch, an integer tensor ``[B, T]``, or None if the batch has none."""
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
    else:
        ids = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    ok = isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_floating_point() and not ids.is_complex()
    return ids if ok else None


def first_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The first argument of a module's call, as its hooks get the arguments; None without any."""
    return args[0] if args else next(iter(kwargs.values()), None)


def as_given(x: Tensor, module: nn.Module) -> Tensor:
    """Sampled inputs of a layer, in the dtype that the layer gets from its model and that its CUDA kernels take."""
    weight = weight_of(module)
    return x.to(weight.device, weight.dtype if weight.is_cuda else x.dtype)


def replace_modules(model: nn.Module, new: dict[int, nn.Module]) -> None:
    """Replace modules, given by id, wherever the model registers them; hooks stay (`keep_hooks`)."""
    for module in list(model.modules()):
        if id(module) in new:
            keep_hooks(module, new[id(module)])
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is not None and id(child) in new:
                parent._modules[key] = new[id(child)]


def keep_hooks(old: nn.Module, new: nn.Module) -> None:
    """Give a module the hooks and `kept_attributes` of the one that it replaces; handles stay good for both."""
    vars(new).update(kept_attributes(old))
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        for extra in ("", "_with_kwargs", "_always_called"):
            if hooks + extra in vars(old):
                setattr(new, hooks + extra, getattr(old, hooks + extra))
    new._is_full_backward_hook = old._is_full_backward_hook
