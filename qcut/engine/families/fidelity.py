"""Checks that a model computes what its architecture in transformers computes, since the engine replaces its modules.

A reference of the same configuration is made of the installed transformers' classes on the meta device. Every module of
the model is compared with the reference's module of the same name: its class and overrides, attributes set on the
object, hooks, and the attributes that its code reads. Functions are identified by the file of their code, not by their
names. Linear layers, activations and experts, which the engine calls, may be others of a known kind.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules import module as torch_modules

from qcut.engine.decoder import kernel_activations
from qcut.errors import UnsupportedError, shown
from qcut.layers.embedding import Embedding
from qcut.layers.experts.experts import Experts
from qcut.layers.experts.families import uses_interface
from qcut.layers.experts.linear_stack import LinearStack
from qcut.layers.experts.opening import PROJECTIONS
from qcut.layers.linear import Linear
from qcut.models.classes import codes_in, replaced_function
from qcut.models.fusion import FusedActivation
from qcut.models.modules import is_linear, tensor_key, weight_holders, weight_nk

_ALWAYS = ("forward", "__call__", "_call_impl", "_wrapped_call_impl", "__getattribute__", "__getattr__")
"""Methods that call a module and find its parts."""
_LISTS = ("__iter__", "__getitem__", "__len__")
_GENERATION = ("generate", "prepare_inputs_for_generation", "_get_logits_processor", "_sample")
_READ_BY_FUNCTIONS = frozenset({"is_causal", "num_key_value_groups", "sliding_window", "layer_type"})
"""Attributes of a module that functions of attention, or the model around it, read."""
_READ_BY_ENGINE = frozenset(
    {"scaling", "eps", "variance_epsilon", "attn_logit_softcapping", "rope_type", "use_rope", "use_parallel_residual"}
    | {"top_k", "norm_topk_prob", "norm_min"}
)
"""Attributes that the engine reads as the module does."""
_WITHOUT_INFLUENCE = frozenset({"layer_idx", "training", "gradient_checkpointing", "vocab_size", "padding_idx"})
_ELEMENTWISE = (
    *(nn.CELU, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity, nn.LeakyReLU, nn.LogSigmoid),
    *(nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.Sigmoid, nn.SiLU, nn.Softplus, nn.Softsign, nn.Tanh, nn.Tanhshrink),
)
_ADAPTERS = ("peft.tuners.lora.", "peft.tuners.adalora.", "peft.tuners.ia3.", "peft.utils.other")
_IMPLEMENTATIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
_INSTEAD = "; the engine would compute without it. Allowed: transformers' own; or call model.generate"


def base_of(model: nn.Module) -> nn.Module:
    """The model in a `PeftModel`, with the active adapters in its layers; other models unchanged.

    Raises:
        UnsupportedError: a `PeftModel` that computes more than its layers.
    """
    peft: Any = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel | peft.PeftMixedModel):
        return model
    name = type(model).__name__
    _check_adapters(model, name)
    for wrapper in (model, model.base_model):
        kind = next((cls for cls in type(wrapper).__mro__ if _package(cls) == "peft"), type(wrapper))
        _check_itself(wrapper, kind, name, {kind})
    return cast(nn.Module, model.get_base_model())


def _check_adapters(model: Any, name: str) -> None:
    for adapter, config in (getattr(model, "peft_config", None) or {}).items():
        depends = ("alora_invocation_tokens", "arrow_config")
        if config.is_prompt_learning or any(getattr(config, each, None) is not None for each in depends):
            what = f"adapter {adapter!r} is a {_named(type(config))}, which acts outside the model's layers"
            raise UnsupportedError(f"{name}: {what}; allowed: LoRA, IA3 and AdaLoRA; or call model.generate")


def check_model(model: nn.Module) -> None:
    """Check that a causal language model computes what its architecture in transformers computes.

    Raises:
        UnsupportedError: it does not, or may not; the message names the module and the difference.
    """
    for what in ("_global_forward_hooks", "_global_forward_pre_hooks"):
        for hook in getattr(torch_modules, what).values():
            raise UnsupportedError(f"a hook on the forward of all modules, {_named(hook)}{_INSTEAD}")
    config: Any = model.config
    expected = _class_of(config)
    if expected not in type(model).__mro__:
        name = f"{expected.__module__}.{expected.__qualname__}"
        raise UnsupportedError(f"{_named(type(model))} is not the {name} of transformers{_INSTEAD}")
    _check_attention(config)
    _check_experts_function(config)
    _check_adapters(model, type(model).__name__)
    on_meta = next((key for key, p in model.named_parameters() if p.is_meta), None)
    if on_meta is not None:
        raise UnsupportedError(f"{on_meta} is on the meta device; allowed: a model whose weights are loaded")
    held = weight_holders(model)
    for key, table in model.named_modules():
        if isinstance(table, nn.Embedding) and table.max_norm is not None and len(held[tensor_key(table.weight)]) > 1:
            what = f"{key} has max_norm, by which a lookup, one of padding too, changes a weight that is tied"
            raise UnsupportedError(f"{what}; allowed: max_norm None, or model.generate")
    reference, known = _reference(expected, config), set[type]()
    _check(model, reference, type(model).__name__, known, _GENERATION)
    _check_parts(model, reference, "", config, known)


def _class_of(config: Any) -> type[nn.Module]:
    """The class of transformers for a configuration's class or its base."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    for cls in type(config).__mro__:
        if cls in MODEL_FOR_CAUSAL_LM_MAPPING:
            found: type[nn.Module] = MODEL_FOR_CAUSAL_LM_MAPPING[cls]
            return found
    raise UnsupportedError(
        f"{_named(type(config))} is no configuration of transformers; allowed: those, or model.generate"
    )


def _reference(cls: type[nn.Module], config: Any) -> nn.Module:
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"  # others may not be installed
    try:
        with torch.device("meta"), torch.inference_mode(False):
            return cls(config)
    except Exception as error:  # of whatever kinds an edited configuration leads to
        raise UnsupportedError(f"transformers makes no {cls.__name__} of the model's configuration: {error}") from error


def _check_attention(config: Any) -> None:
    """Refuse attention that is not transformers' own, or not to earlier tokens."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if not getattr(config, "is_causal", True):
        raise UnsupportedError(
            f"the configuration has is_causal {shown(config.is_causal)}; allowed: attention to earlier tokens, True"
        )
    name = getattr(config, "_attn_implementation", None) or "eager"
    function = ALL_ATTENTION_FUNCTIONS.get(name) if name != "eager" else None
    for one in (function, ALL_MASK_ATTENTION_FUNCTIONS.get(name)):
        known = one is None or _package(one) in ("torch", "transformers")
        culprit = _foreign(one, nn.Module) if known else _named(one)
        if name not in _IMPLEMENTATIONS or culprit is not None:
            how = "" if culprit is None else f", which runs {culprit}"
            instead = f"{_INSTEAD}, or set_attn_implementation('eager')"
            raise UnsupportedError(f"attention is computed by {shown(name)}{how}{instead}")


def _check_experts_function(config: Any) -> None:
    """Refuse float experts that are computed otherwise than by transformers."""
    name = getattr(config, "_experts_implementation", None) or "eager"
    interface: Any = sys.modules.get("transformers.integrations.moe")
    function = None if interface is None else interface.ALL_EXPERTS_FUNCTIONS.get(name)
    if function is not None and _package(function) != "transformers":
        raise UnsupportedError(
            f"experts are computed by {shown(name)}{_INSTEAD}, or set_experts_implementation('grouped_mm')"
        )


def _check_parts(model: nn.Module, reference: nn.Module, prefix: str, config: Any, known: set[type]) -> None:
    """Compare the parts of a module with a reference's; ``known`` are classes with checked code."""
    is_list = isinstance(reference, nn.ModuleList)
    if is_list:
        _check_list(model, reference, prefix)
    is_mlp = any(type(part) in _activations() for part in reference._modules.values())  # of any width
    for key, wanted in reference._modules.items():
        name, part = f"{prefix}{key}", model._modules.get(key)
        if wanted is None or (part is None and is_list):
            continue
        if part is None:
            raise UnsupportedError(f"{name} is missing; allowed: a {_named(type(wanted))}, or model.generate")
        if is_linear(wanted):
            _check_linear(part, name, known)
            count, outputs = _outputs(part), len(weight_nk(wanted))
            if count not in (None, outputs) and not is_mlp:
                by = f"by its configuration {outputs}"
                raise UnsupportedError(f"{name} has {count} outputs, and {by}; allowed: the same of both")
        elif type(wanted) in _activations():
            _check_activation(part, name, known)
        elif isinstance(part, Experts) and uses_interface(type(wanted)):
            _check_experts(part, wanted, name, known)
        elif type(wanted) is nn.Embedding and (kind := _known_kind(part)) is not None:
            _check_itself(part, kind, name, known)
        else:
            _check(part, wanted, name, known)
            own: Any = vars(part).get("config", config)
            if own is not config:
                _check_attention(own)
                if own.to_dict() != config.to_dict():
                    raise UnsupportedError(f"{name} has a configuration of its own{_INSTEAD}")
            _check_parts(part, wanted, f"{name}.", config, known)


def _check_list(model: nn.Module, reference: nn.Module, prefix: str) -> None:
    """Check that a model has layers, no more than a reference, each with a KV cache index of its own."""
    if not model._modules:
        raise UnsupportedError(f"{prefix[:-1]} is empty; allowed: 1 to {len(reference._modules)} modules")
    if len(model._modules) > len(reference._modules):
        count = f"{len(model._modules)} modules where its configuration has {len(reference._modules)}"
        raise UnsupportedError(f"{prefix[:-1]} has {count}; allowed: as many, or model.generate")
    layers = [layer for layer in model._modules.values() if layer is not None]  # twice if used twice
    indices = [[getattr(part, "layer_idx", None) for part in layer.children()] for layer in layers]
    firsts = [found[0] for each in indices if (found := [index for index in each if isinstance(index, int)])]
    if len(set(firsts)) < len(firsts):
        raise UnsupportedError(f"{prefix[:-1]}: two layers keep their keys and values in one place (layer_idx)")


# ── one module ───────────────────────────────────────────────────────────────────────────────────


def _check(module: nn.Module, wanted: nn.Module, name: str, known: set[type], more: tuple[str, ...] = ()) -> None:
    """Compare a module with the one of transformers that the engine replaces."""
    kind: type = type(wanted)
    if _package(kind) not in ("torch", "transformers"):
        raise UnsupportedError(f"{name}: {_named(kind)} has been put in place of the class of transformers{_INSTEAD}")
    if kind not in type(module).__mro__:
        instead = f"{_named(type(module))}, in place of a {_named(kind)}"
        raise UnsupportedError(f"{name} is a {instead}{_INSTEAD}")
    own = {*vars(wanted), *wanted._parameters, *wanted._buffers, *wanted._modules}
    _check_itself(module, kind, name, known, (*more, *(key for key in own if not hasattr(kind, key))))
    if extra := [
        key for key, value in module._parameters.items() if value is not None and key not in wanted._parameters
    ]:
        raise UnsupportedError(f"{name} has a parameter {extra[0]!r} that a {_named(kind)} has not; allowed: none")
    if "weight" in wanted._parameters and module._parameters.get("weight") is None:
        raise UnsupportedError(f"{name} has no parameter 'weight'; allowed: with it, or model.generate")
    read = (_names(kind) | _READ_BY_FUNCTIONS) - _READ_BY_ENGINE - _WITHOUT_INFLUENCE
    for key, value in vars(wanted).items():
        is_read = key in read and not key.endswith("dropout")  # which evaluation leaves out
        if is_read and isinstance(value, int | float | str | tuple | None):
            found = vars(module).get(key)
            if found != value:
                by = f"by its configuration {key} is {shown(value)}"
                raise UnsupportedError(f"{name} has {key} {shown(found)}, and {by}; allowed: the same of both")


def _check_itself(module: nn.Module, kind: type, name: str, known: set[type], more: tuple[str, ...] = ()) -> None:
    """Check that a module computes what a class computes: its overrides, attributes set on it, and its hooks."""
    cls = type(module)
    names = {*_names(kind), *_ALWAYS, *_LISTS, *more}
    for key in sorted(names):
        raw, base = _found(cls, key), _found(kind, key)
        if raw is not base:
            raise UnsupportedError(f"{name}: its class {_named(cls)} has a {key} of its own{_INSTEAD}")
        if kind not in known and base is not None and (culprit := _foreign(base, kind)) is not None:
            raise UnsupportedError(f"{name}: {kind.__name__}.{key} runs {culprit}{_INSTEAD}")
        if _is_shadowed(module, key, base):
            if "_hf_hook" in vars(module):
                how = "accelerate.hooks.remove_hook_from_module(model, recurse=True)"
                raise UnsupportedError(
                    f"{name}: accelerate moves its tensors (device_map); load on one device, or {how}"
                )
            found = _named(vars(module)[key])
            raise UnsupportedError(f"{name}: {key} was set on the module itself, to {found}{_INSTEAD}")
    known.add(kind)
    _check_hooks(module, name)


def _is_shadowed(module: nn.Module, key: str, base: Any) -> bool:
    """Whether an attribute of a module hides its class's method; accelerate sets the method itself."""
    if key not in vars(module) or not (key in _ALWAYS or callable(base)):
        return False
    found = vars(module)[key]
    return getattr(found, "__func__", None) is not base or getattr(found, "__self__", None) is not module


def _check_hooks(module: nn.Module, name: str) -> None:
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        if not _is_harmless(hook):
            raise UnsupportedError(f"{name} has a hook on its forward, {_named(hook)}{_INSTEAD}, or remove the hook")


def _check_linear(module: nn.Module, name: str, known: set[type]) -> None:
    if type(module) is nn.Sequential:
        _check_itself(module, nn.Sequential, name, known)
        for key, part in module._modules.items():
            check = _check_activation if type(part) in _activations() else _check_linear
            check(part, f"{name}.{key}", known)
        return
    kind = _known_kind(module)
    if kind is not type(module) and isinstance(module, nn.Linear) and is_linear(module):
        _check_hooks(module, name)  # its own code has been read: x @ W.T + b
        return
    if kind is None:
        allowed = "allowed: layers of torch, transformers, qcut, bitsandbytes and PEFT's LoRA; or model.generate"
        raise UnsupportedError(f"{name} is a {_named(type(module))}, whose code the engine does not know; {allowed}")
    if isinstance(module, nn.Linear) and hasattr(module, "parametrizations"):
        raise UnsupportedError(f"{name} has a parametrized weight; allowed: without, or model.generate")
    if (base := module._modules.get("base_layer")) is not None:
        _check_itself(module, kind, name, known)
        _check_linear(base, f"{name}.base_layer", known)
        return
    _check_itself(module, kind, name, known)


def _outputs(module: nn.Module) -> int | None:
    """Columns of a linear layer's result; None where they are unknown."""
    if type(module) is nn.Sequential:
        counts = (_outputs(part) for part in reversed(module._modules.values()) if part is not None)
        return next((count for count in counts if count is not None), None)
    found = len(weight_nk(module)) if is_linear(module) else getattr(module, "out_features", None)
    return found if isinstance(found, int) else None


def _check_experts(experts: Experts, wanted: Any, name: str, known: set[type]) -> None:
    """Check experts in place of transformers' own, which are called in the same way."""
    _check_itself(experts, Experts, name, known)
    count = experts.num_experts + experts.identities
    if count != wanted.num_experts:
        raise UnsupportedError(f"{name} has {count} experts, and by its configuration {wanted.num_experts}{_INSTEAD}")
    for key in PROJECTIONS:
        projection = getattr(experts, key)
        if isinstance(projection, LinearStack):
            _check_itself(projection, LinearStack, f"{name}.{key}", known, ("expert",))
            continue
        _check_itself(projection, nn.ModuleList, f"{name}.{key}", known)
        for e, layer in enumerate(projection):
            _check_linear(layer, f"{name}.{key}.{e}", known)


def _check_activation(module: nn.Module, name: str, known: set[type]) -> None:
    kind = type(module)
    if kind not in _activations() and kind is not FusedActivation:
        allowed = "those of transformers.activations, and torch's that know no neighbours; or model.generate"
        raise UnsupportedError(f"{name} is a {_named(kind)}; allowed: {allowed}")
    _check_itself(module, kind, name, known)
    if kind in kernel_activations(False) | kernel_activations(True):
        x = torch.linspace(-6, 6, 25, dtype=torch.float32, device="cpu")
        if not torch.equal(module(x), kind()(x)):
            raise UnsupportedError(f"{name} computes otherwise than a {_named(kind)} that is new{_INSTEAD}")


@cache
def _activations() -> frozenset[type[nn.Module]]:
    """Classes of activations where each result depends on one number."""
    from transformers import activations

    found = [cls for cls in vars(activations).values() if isinstance(cls, type) and issubclass(cls, nn.Module)]
    return frozenset({*_ELEMENTWISE, *(cls for cls in found if cls.__module__ == activations.__name__)})


def _known_kind(module: nn.Module) -> type | None:
    """The base of a known package that computes a linear layer or an embedding, token by token; None: there is none."""
    from transformers.pytorch_utils import Conv1D

    known = next((cls for cls in type(module).__mro__ if _package(cls) is not None), nn.Module)
    if any(cls.__module__.startswith(_ADAPTERS) and _package(cls) == "peft" for cls in known.__mro__):
        return known
    is_row_wise = _package(known) != "peft" and issubclass(
        known, nn.Linear | nn.Embedding | Conv1D | Linear | Embedding
    )
    return known if is_row_wise else None


# ── code ─────────────────────────────────────────────────────────────────────────────────────────


def _found(cls: type, name: str) -> Any:
    """The raw attribute of a class or its bases; None if there is none."""
    return next((vars(each)[name] for each in cls.__mro__ if name in vars(each)), None)


@cache
def _names(kind: type) -> frozenset[str]:
    """Names that a class's forward reads, directly or through its own methods."""
    found: set[str] = set()
    left = ["forward"]
    while left:
        for code in _codes(_found(kind, left.pop())):
            new = set(code.co_names) - found
            found |= new
            left += [name for name in new if _found(kind, name) is not None and _found(nn.Module, name) is None]
    return frozenset(found)


def _codes(raw: Any) -> Iterator[CodeType]:
    """The code of a function or a property's getter, with its closure and nested functions."""
    for function in _functions(raw):
        yield from codes_in(function.__code__)


def _functions(raw: Any, depth: int = 0) -> Iterator[FunctionType]:
    raw = getattr(raw, "fget", None) or getattr(raw, "__func__", None) or raw
    if isinstance(raw, FunctionType) and depth < 8:
        yield raw
        for cell in raw.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            yield from _functions(content, depth + 1)


def _foreign(raw: Any, kind: type) -> str | None:
    """Code of another package than its class's that a method runs; None: there is none.

    Functions that it calls in the module's file are checked too: they may have been replaced there.
    """
    seen: set[int] = set()
    packages = ("torch", "transformers") if _package(kind) in ("torch", "transformers") else _PACKAGES
    left = [*_functions(raw)]
    while left:
        function = left.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        if _package(function) not in packages:
            return _named(function)
        if (name := replaced_function(function)) is not None:
            return f"another {name} than that of torch"
        if not any(place in _path(function.__code__) for place in _FOLLOWED):
            continue
        for name in {name for code in codes_in(function.__code__) for name in code.co_names}:
            value = function.__globals__.get(name)
            if isinstance(value, type):
                if issubclass(value, nn.Module) and _package(value) not in packages:
                    return _named(value)
            elif callable(value):
                functions = [*_functions(value)]
                if not functions and _package(type(value)) != "transformers":  # a partial, or an object with a call
                    return _named(value)
                left += functions
    return None


def _package(value: Any) -> str | None:
    """The known package of a function or a class, by the file of its code; None: another."""
    if isinstance(value, type):
        module = sys.modules.get(value.__module__)
        file = getattr(module, "__file__", None)
        return _package_of(file) if file and getattr(module, value.__name__, None) is value else None
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    if not isinstance(code, CodeType):
        return None
    if code.co_filename.startswith("<"):  # made by a decorator from text
        return str(getattr(value, "__module__", "")).partition(".")[0]
    return _package_of(code.co_filename)


_PACKAGES = ("torch", "transformers", "qcut", "peft", "bitsandbytes")


@cache
def _package_of(file: str) -> str | None:
    path = Path(file)
    return next((name for name, folder in _folders().items() if folder in path.parents), None)


@cache
def _folders() -> dict[str, Path]:
    """Folders of the known packages."""
    specs = {name: importlib.util.find_spec(name) for name in _PACKAGES}
    return {name: Path(spec.origin).parent for name, spec in specs.items() if spec is not None and spec.origin}


def _path(code: CodeType) -> str:
    return code.co_filename.replace("\\", "/")


_FOLLOWED = ("/transformers/models/", "/transformers/integrations/sdpa_attention.py")
"""Files in which functions are followed to those that they call."""
_HARMLESS = (
    ("transformers", "/transformers/utils/output_capturing.py"),
    ("transformers", "/transformers/modeling_utils.py"),
    ("transformers", "/transformers/utils/generic.py"),
    ("peft", "/peft/utils/other.py"),
)
"""Files of hooks that only observe results, or mark them for gradients."""


def _is_harmless(hook: Callable[..., Any]) -> bool:
    package = _package(hook)
    return any(package == name and _path(hook.__code__).endswith(file) for name, file in _HARMLESS)


def _named(value: Any) -> str:
    """A class or function with its module."""
    function = getattr(value, "__func__", value)
    name = getattr(function, "__qualname__", None)
    return (
        f"{getattr(function, '__module__', '')}.{name}"
        if name
        else f"a {type(value).__module__}.{type(value).__qualname__}"
    )
