"""Chooses the linear layers of a model to quantize, with a reason for every other one that stays in float."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from qcut.errors import ConfigError, DtypeError, QuantizationError, UnsupportedError
from qcut.models.modules import (
    ExpertsModule,
    Quantized,
    expert_count,
    looks_linear,
    own_ways,
    unserved_dtype,
    weight_nk,
    weight_of,
)
from qcut.models.weight_sharing.functions import named_in_calls, outer_values, parts_inside
from qcut.models.weight_sharing.readers import class_checked, layers_read

DEFAULT_SKIP = ("lm_head",)
"""Layers left in float by default: most models tie the classifier to the embedding, and the classifier is sensitive."""

_WRAPPED = ("base_layer", "original_module")
"""What adapters call the layer that they wrap."""
_REGISTERED = frozenset(vars(nn.Module()))
"""Attributes of every module, among them those where modules are registered."""
_SHELLS = ("base_model", "model")
"""What PEFT's models call the model that they wrap."""


def check_model(model: Any) -> None:
    """Check that this is a model whose parameters exist.

    Raises:
        DtypeError: it is something else; the message names what to pass.
        UnsupportedError: a parameter has no size yet, or a module is TorchScript (named).
    """
    if isinstance(model, nn.Module):
        script = next((n for n, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)), None)
        if script is not None:
            raise UnsupportedError(
                f"module {script!r} is TorchScript: its layers cannot be looked at; allowed: modules of Python, "
                "which may be scripted or traced after they are quantized"
            )
        lazy = next((n for n, p in model.named_parameters() if isinstance(p, UninitializedParameter)), None)
        if lazy is not None:
            raise UnsupportedError(f"parameter {lazy!r} has no size yet; run the model once")
        return
    kind = type(model).__name__
    inner = getattr(model, "model", None)
    if isinstance(model, str) or hasattr(model, "__fspath__"):
        what = (
            f"the {kind} {str(model)!r}; load the model first, with transformers' from_pretrained, or with qcut.load "
            "where qcut.save wrote it"
        )
    elif isinstance(model, type):
        what = f"the class {model.__name__}; pass an instance"
    elif isinstance(inner, nn.Module):
        what = f"a {kind}; pass its model, .model ({type(inner).__name__})"
    elif isinstance(model, Mapping):
        what = f"a {kind}, such as a state dict; load it into a model first"
    elif "Tokenizer" in kind or "Processor" in kind:
        what = f"a tokenizer or processor ({kind}); pass the model"
    else:
        what = f"a {kind}"
    raise DtypeError(f"model: found {what}; an nn.Module with its weights is needed")


def matches(name: str, patterns: Iterable[str], stacks: Container[str] = ()) -> bool:
    """Whether a glob matches the whole dotted name or its end: ``lm_head``, ``*.mlp.*``, ``h.0.attn.c_attn``.

    A layer inside an adapter goes by the name of its place too: ``lm_head`` matches ``lm_head.base_layer``. A layer of
    an expert, ``mlp.experts.up.3``, goes by those of its stack (of ``stacks``) and of the experts: ``mlp.experts.up``
    and ``mlp.experts`` match it.
    """
    outer, _, last = name.rpartition(".")
    names = [name, outer] if last in _WRAPPED else [name]
    if outer in stacks:
        names += [outer, outer.rpartition(".")[0]]
    return any(fnmatch.fnmatchcase(n, p) or fnmatch.fnmatchcase(n, f"*.{p}") for n in names for p in patterns)


def expert_stacks(model: nn.Module) -> set[str]:
    """Names of the stacks of a model's experts, as `qcut.layers.experts.opening` lays them open."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, ExpertsModule)]
    return {f"{name}.{key}" for name, module in found for key in module._modules}


def expert_layers(model: nn.Module, layers: Iterable[str]) -> dict[str, list[str]]:
    """Of layers by name, those of experts, by the stack that they belong to."""
    stacks, found = expert_stacks(model), dict[str, list[str]]()
    for name in layers:
        if (stack := name.rpartition(".")[0]) in stacks:
            found.setdefault(stack, []).append(name)
    return found


def globs(patterns: Any, what: str) -> tuple[str, ...]:
    """Globs of module names; a single one may be a string.

    Args:
        patterns: as the caller of a public function gave them.
        what: the argument's name, for the error message.

    Raises:
        ConfigError: there is something else than strings among them.
    """
    try:
        found = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    except TypeError:
        found = (patterns,)
    if other := [one for one in found if not isinstance(one, str)]:
        raise ConfigError(f"{what}: found {other[0]!r}; allowed: globs of module names, such as ['lm_head', '*.mlp.*']")
    return found


def linear_layers(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """The linear layers that can be replaced, by name, and the reason of each that cannot.

    A module registered under several names counts once, under its first name.
    """
    looking = {name: module for name, module in model.named_modules() if name and looks_linear(module)}
    adapters = _adapters(model)
    read = layers_read(model, looking.values())
    checked = class_checked(model, [module for module in looking.values() if id(module) not in read])
    held = held_elsewhere(model, looking.values())
    layers: dict[str, nn.Module] = {}
    left: dict[str, str] = {}
    for name, module in looking.items():
        reason = own_ways(module) or unserved_dtype(weight_of(module))
        if id(module) in adapters:
            left[name] = f"part of an adapter ({adapters[id(module)]})"
        elif id(module) in read:
            left[name] = f"{read[id(module)]} reads its weight itself, without calling the layer"
        elif reason is not None:
            left[name] = reason
        elif id(module) in checked:
            left[name] = f"{checked[id(module)]} checks its class, or uses what a quantized layer has not"
        elif id(module) in held:
            left[name] = f"it is also held outside of the model's modules ({held[id(module)]})"
        else:
            layers[name] = module
    return layers, left


def quantized_layers(model: nn.Module) -> list[str]:
    """Names of the layers that are quantized already; open experts of a projection are one layer."""
    inside = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, ExpertsModule))
    found: dict[str, None] = {}
    for name, module in model.named_modules():
        if isinstance(module, Quantized):
            stack, _, number = name.rpartition(".")
            found[stack if number.isdigit() and name.startswith(inside) else name] = None
    return list(found)


def find_layers(
    model: nn.Module,
    include: Sequence[str] | None = None,
    skip: Sequence[str] = DEFAULT_SKIP,
    known: tuple[dict[str, nn.Module], dict[str, str]] | None = None,
) -> dict[str, nn.Module]:
    """The linear layers to work on, by name, in the order of ``named_modules``.

    Args:
        model: the model.
        include: globs (see `matches`) of layers to take; None takes every layer but those of `float_by_default`. A
            glob must match a layer.
        skip: globs of layers to leave out, even if ``include`` names them. A glob may match nothing.
        known: `linear_layers` of the model, if that has been called; None calls it.

    Raises:
        DtypeError: the model is no ``nn.Module``.
        UnsupportedError: a parameter has no size yet.
        ConfigError: a glob is no string.
        QuantizationError: a glob of ``include`` matches nothing, or no layer is left; the message gives the reason.
    """
    check_model(model)
    include, skip = None if include is None else globs(include, "include"), globs(skip, "skip")
    layers, left = linear_layers(model) if known is None else known
    stay, stacks = float_by_default(model, layers), expert_stacks(model)
    for pattern in include or ():
        if not any(matches(name, [pattern], stacks) for name in layers):
            raise QuantizationError(_unmatched(model, pattern, layers, left))
    chosen = {
        name: module
        for name, module in layers.items()
        if (name not in stay if include is None else matches(name, include, stacks)) and not matches(name, skip, stacks)
    }
    if not chosen:
        raise QuantizationError(_nothing(model, layers, left | stay, skip))
    return chosen


def float_by_default(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """The linear layers that stay in float unless they are included by name, with the reason.

    Those are layers of one output, and routers: as many outputs as there are experts next to them. An error of a router
    sends tokens to other experts, and it has few weights.
    """
    counts = _experts_beside(model)
    stay = {}
    for name, module in layers.items():
        n = len(weight_nk(module))
        if n == 1:
            stay[name] = "it has one output"
        elif any(n == count and name.startswith(place) and not name.startswith(own) for place, own, count in counts):
            stay[name] = f"a router, with an output for each of {n} experts"
    return stay


def _experts_beside(model: nn.Module) -> list[tuple[str, str, int]]:
    """Of every mixture: what the names of modules next to its experts begin with, those of its experts, and the number.

    A module with parameters of its own may hold the router too; of its experts, no module has a name.

    Experts are opened ones, or matrices in parameters of three dimensions, or a container of modules; of the last two
    only if the name or class shows it, for attention has such parameters too.
    """
    found = []
    for name, module in model.named_modules():
        outer = name.rpartition(".")[0]
        count, whole = expert_count(module), isinstance(module, ExpertsModule)
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            count, whole = len(module), True
        known = isinstance(module, ExpertsModule) or _called_experts(name, module)
        if count > 1 and known:
            found.append((f"{outer}." if outer else "", f"{name}." if whole else "\0", count))
    return found


def _called_experts(name: str, module: nn.Module) -> bool:
    called = f"{name.rpartition('.')[2]} {type(module).__name__}".lower()
    return any(word in called for word in ("expert", "moe", "mixture"))


def expert_modules(model: nn.Module) -> dict[str, list[str]]:
    """Experts that are modules of one class, by the name of the container that has them, which shows what they are."""
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and len(module) > 1 and _called_experts(name, module):
            # Layers of mixtures in a list of that name are no experts.
            mixed = any(_called_experts(key, part) for key, part in module.named_modules() if "." in key)
            if len({type(part) for part in module.children()}) == 1 and not mixed:
                found[name] = [f"{name}.{key}" for key in module._modules]
    return found


def expert_module_layers(model: nn.Module, layers: Iterable[str]) -> dict[str, tuple[list[str], bool]]:
    """Of layers by name, those of `expert_modules`, by the name with a ``*`` for the expert.

    Returns:
        Their names, and whether every expert of the container has one among them.
    """
    every = expert_modules(model)
    containers = {expert: container for container, experts in every.items() for expert in experts}
    found: dict[str, tuple[list[str], bool]] = {}
    for name in layers:
        outer = name
        while outer and outer not in containers:
            outer = outer.rpartition(".")[0]
        if outer:
            container = containers[outer]
            key = f"{container}.*{name.removeprefix(outer)}"
            names = [*found.get(key, ([],))[0], name]
            found[key] = names, len(names) == len(every[container])
    return found


def summary_of(reasons: Mapping[str, str]) -> str:
    """Reasons in a few words: each once, with one layer that has it and the number of the others."""
    first = {reason: name for name, reason in reversed(list(reasons.items()))}
    count = Counter(reasons.values())
    parts = [
        f"{first[reason]}{f' and {n - 1} others' if n > 1 else ''}: {reason}" for reason, n in count.most_common(4)
    ]
    return "; ".join(parts) + (f"; and {len(count) - 4} other reasons" if len(count) > 4 else "")


def _adapters(model: nn.Module) -> dict[int, str]:
    """Modules that adapt a layer next to them, by id, with the class of the adapter.

    An adapter is a module that holds the layer it wraps as ``base_layer`` or ``original_module``, as PEFT's do, or that
    PEFT defines; everything else that it holds is trained for that layer, and small.
    """
    found: dict[int, str] = {}
    for module in model.modules():
        kept = [key for key in _WRAPPED if isinstance(module._modules.get(key), nn.Module)]
        of_peft = type(module).__module__.split(".")[0] == "peft"
        if kept or of_peft:
            for key, child in module._modules.items():
                if child is not None and key not in kept and not (of_peft and key in _SHELLS):
                    found |= {id(part): type(module).__name__ for part in child.modules()}
    # A shared module may hang from an adapter and from the model: what a wrapper wraps is no adapter.
    return found


def held_elsewhere(model: nn.Module, layers: Iterable[nn.Module]) -> dict[int, str]:
    """Layers, by id, that are held as plain data too, where no replacement reaches them, and the name of the place.

    Places are attributes of modules and of their classes, and what functions of the model's author name. A layer is
    held with its weight as well, if code that a call comes to names the attribute.
    """
    candidates = {id(layer): layer for layer in layers}
    owners: dict[Any, list[int]] = {}
    for key, layer in candidates.items():
        for name, parameter in layer.named_parameters():
            if not name.endswith("bias"):
                owners.setdefault(_memory(parameter), []).append(key)
    found: dict[int, str] = {}
    named: set[str] | None = None
    held = [
        (f"{type(module).__name__}.{key}", parts_inside(value))
        for module in model.modules()
        for key, value in vars(module).items()
        if key not in _REGISTERED
    ]
    # Globals may hold anything: those far inside are not looked for.
    outer = [(place, parts_inside(value, 2)) for place, value in outer_values(model)] if candidates else []
    for place, parts in (*held, *outer):
        for part in parts:
            if isinstance(part, nn.Module):
                keys = [id(part)] if id(part) in candidates else []
            else:
                keys = owners.get(_memory(part), [])
                if keys and named is None:
                    named = named_in_calls(model)
                keys = keys if named and place.rpartition(".")[2] in named else []
            for one in keys:
                found.setdefault(one, place)
    return found


def _memory(tensor: Tensor) -> Any:
    """A key that is equal for tensors of one storage."""
    try:
        pointer = 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # torch's errors for a tensor without storage
        pointer = 0
    return (tensor.device, pointer) if pointer else id(tensor)


def _unmatched(model: nn.Module, pattern: str, layers: Mapping[str, Any], left: Mapping[str, str]) -> str:
    refused = {name: reason for name, reason in left.items() if matches(name, [pattern])}
    if refused:
        return f"{type(model).__name__}: {pattern!r} matches only layers that stay in float ({summary_of(refused)})"
    done = [name for name in quantized_layers(model) if matches(name, [pattern])]
    if done:
        return f"{type(model).__name__}: {pattern!r} matches only layers already quantized, such as {done[0]!r}"
    return f"{type(model).__name__}: {pattern!r} matches none of its {len(layers)} linear layers" + (
        f", such as {next(iter(layers))!r}" if layers else ""
    )


def _nothing(model: nn.Module, layers: Mapping[str, Any], left: Mapping[str, str], skip: Sequence[str]) -> str:
    """Why there is no layer to work on."""
    kind = type(model).__name__
    if isinstance(model, Quantized):
        return f"model: already quantized, a bare qcut.Linear ({kind})"
    if looks_linear(model):
        return f"model: a bare {kind}; use qcut.Linear.from_float(layer, scheme), and put it where the layer was"
    if isinstance(model, nn.Embedding):
        return f"model: a bare {kind}; use qcut.Embedding.from_float(table, scheme)"
    done = quantized_layers(model)
    if done and not layers:
        rest = f"; {len(left)} others stay in float ({summary_of(left)})" if left else ""
        return f"{kind}: already quantized: {len(done)} layers, such as {done[0]!r}, are qcut.Linear{rest}"
    if layers:
        also = f"already quantized: {len(done)} layers; " if done else ""
        return (
            f"{kind}: no layer to work on: {also}all {len(layers)} linear layers, such as {next(iter(layers))!r}, are "
            f"left out by skip={tuple(skip)} or include"
        )
    if left:
        return f"{kind}: no layer to work on; its {len(left)} linear layers stay in float: {summary_of(left)}"
    return f"{kind}: no layer to work on: it has no nn.Linear and no Conv1D of transformers"
