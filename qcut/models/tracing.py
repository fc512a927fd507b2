"""Finds norms with output channels that can be rescaled without changing the model.

A norm can be rescaled where (1) its output is proportional to its weight and bias, and (2) linear layers are the only
readers of that output. The tracer watches forward calls for both, and goes by no names: any plain PyTorch model
will do, and a Gemma-style ``(1 + w)`` norm fails the first test by measurement. What no call has come to is looked up
in the code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from qcut.models.classes import is_unwatched
from qcut.models.modules import ExpertsModule, first_input, is_linear, tensor_key, weight_holders, weight_of
from qcut.models.selection import held_elsewhere
from qcut.models.weight_sharing.norm_outputs import Places, branches_by_values
from qcut.models.weight_sharing.readers import layers_read


@dataclass(frozen=True)
class NormPair:
    """A norm and all that reads its output, by name.

    Attributes:
        norm: the norm.
        layers: linear layers, those of experts among them.
        routers: weights ``[E, K]`` of routers that are no linear layers, such as ``mlp.gate.weight``.
    """

    norm: str
    layers: tuple[str, ...]
    routers: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"norm": self.norm, "layers": list(self.layers), "routers": list(self.routers)}


class NormTracer(TorchFunctionMode):
    """Watches forward calls of a model for the readers of its norms.

    A norm here is a childless module with a one-dimensional ``weight`` of K values and an output that ends in K
    channels. Readers are recognized by the identity of the tensor: every torch function that takes the norm's output,
    outside a linear layer it was passed to, is another reader (a residual, a view, an unquantized module), unless the
    function returns no tensor (``x.shape``). The model's caller is a reader too, of all that the model returns, and so
    is a hook. A view with the same rows, or a copy of another dtype, is the output still. Experts read it with their
    first product, and a router that calls ``linear`` with a parameter of its own reads it with that.

    What no call comes to may read the output as well. A norm is refused if a module near it and its readers never ran,
    or if code may read its output at a place that no call came to (`qcut.models.weight_sharing`).

    Args:
        model: in evaluation mode while it runs; hooks are on its modules until `remove`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.outputs: dict[int, tuple[str, Tensor]] = {}
        """Norm outputs by id; the reference keeps the id from being used again."""
        self.layers: dict[str, list[str]] = {}
        self.reasons: dict[str, str] = {}
        self.sources: dict[str, set[str | None]] = {}
        """Of every linear layer: the norms (or None) its inputs came from."""
        self.ran: set[int] = set()
        """Ids of the modules that ran."""
        self.depth = 0
        self.probing = False
        self.holders = weight_holders(model)
        self.modules = dict(model.named_modules())
        self.watched = {name for name, module in self.modules.items() if not is_unwatched(module)}
        self.places = Places(NormTracer.run.__code__)
        self.handles: list[Any] = []
        self.routers: dict[str, list[str]] = {}
        self.weights: dict[int, tuple[str, Tensor]] = {}
        """Weights that routers may have, by id."""
        self.misread: dict[str, str] = {}
        """Functions that read such a weight otherwise than a router does."""
        for name, module in self.modules.items():
            for key, p in () if is_linear(module) else module._parameters.items():
                if p is not None and p.dim() == 2:
                    self.weights[id(p)] = (f"{name}.{key}", p)
        self.matrices = dict(self.weights)
        """The same, and copies in another dtype."""
        experts = {name: module for name, module in self.modules.items() if isinstance(module, ExpertsModule)}
        inside = {id(part) for module in experts.values() for part in module.modules()}
        for name, module in experts.items():
            self.handles.append(module.register_forward_pre_hook(self._experts(name), with_kwargs=True, prepend=True))
            self.handles.append(module.register_forward_hook(self._leave, always_call=True))
        for name, module in self.modules.items():
            if id(module) in inside:
                continue
            if is_linear(module):
                self.handles.append(module.register_forward_pre_hook(self._enter(name), with_kwargs=True, prepend=True))
                self.handles.append(module.register_forward_hook(self._leave, always_call=True))
            elif _looks_like_norm(module):
                self.handles.append(module.register_forward_hook(self._norm(name), with_kwargs=True))
            elif module._parameters:
                self.handles.append(module.register_forward_pre_hook(self._note))

    def run(self, call: Callable[[], Any]) -> None:
        """Watch one forward call."""
        with self:
            output = call()
        for leaf in [*pytree.tree_leaves(output), *pytree.tree_leaves(getattr(output, "__dict__", None))]:
            if id(leaf) in self.outputs:
                self.reasons.setdefault(self.outputs[id(leaf)][0], "its output is part of the model's output")
        self.outputs.clear()
        self.matrices = dict(self.weights)

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self.handles:
            handle.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        values = args if kwargs is None else (*args, *kwargs.values())
        if not self.probing:
            self._note_matrices(func, values, result)
        if self.outputs and self.depth == 0 and not self.probing:
            for leaf in self._among(values):
                norm, name = self.outputs[id(leaf)][0], getattr(func, "__name__", str(func))
                if leaf is values[0] and (router := self._router(func, values)) is not None:
                    if router not in self.routers.setdefault(norm, []):
                        self.routers[norm].append(router)
                    self.places.reads(norm, router, self._copies(norm))
                elif _keeps_rows(func, leaf, result):
                    self.outputs[id(result)] = (norm, result)
                    self.places.passes(norm, name, new=True)
                elif not _harmless(func, leaf, result):
                    self.reasons.setdefault(norm, f"its output is also read by {name}()")
                elif result is leaf:
                    self.places.passes(norm, name)
        return result

    def _among(self, values: Iterable[Any]) -> Iterator[Tensor]:
        """The norm outputs among arguments; faster than pytree, which this is called too often for."""
        for value in values:
            if id(value) in self.outputs:
                yield value
            elif isinstance(value, (list, tuple)):
                yield from self._among(value)

    def _copies(self, norm: str) -> list[Tensor]:
        """A norm's output, and views and copies of it."""
        return [output for name, output in self.outputs.values() if name == norm]

    def _note_matrices(self, func: Any, values: Sequence[Any], result: Any) -> None:
        """Note copies of matrices in another dtype, and reads that are none of a router."""
        for value in values:
            if id(value) in self.matrices:
                name = self.matrices[id(value)][0]
                if _keeps_rows(func, value, result):
                    self.matrices[id(result)] = (name, result)
                elif self._router(func, values) is None and not _harmless(func, value, result):
                    self.misread.setdefault(name, getattr(func, "__name__", str(func)))

    def _router(self, func: Any, values: Sequence[Any]) -> str | None:
        """The matrix that a call multiplies a norm's output by, if it does so and nothing more."""
        if func is not torch.nn.functional.linear or len(values) < 2 or id(values[0]) not in self.outputs:
            return None
        name = self.matrices[id(values[1])][0] if id(values[1]) in self.matrices else None
        return None if any(value is values[0] for value in values[1:]) else name

    def _experts(self, name: str) -> Callable[..., None]:
        layers = [f"{name}.up.{e}" for e in range(len(self.modules[f"{name}.up"]))]  # type: ignore[arg-type]

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.depth += 1
            self.ran |= {id(part) for part in module.modules()}
            given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if id(leaf) in self.outputs]
            source = self.outputs[id(given[0])][0] if given and given[0] is first_input(args, kwargs) else None
            for leaf in given:
                norm = self.outputs[id(leaf)][0]
                if leaf is not first_input(args, kwargs):
                    self.reasons.setdefault(norm, f"experts {name!r} read its output as their routes")
                self.places.reads(norm, name, self._copies(norm))
            for layer in layers:
                if source is not None and layer not in self.layers[source]:
                    self.layers[source].append(layer)
                self.sources.setdefault(layer, set()).add(source)

        return hook

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.depth += 1
            self.ran.add(id(module))
            source = None
            for leaf in pytree.tree_leaves((args, kwargs)):
                if id(leaf) in self.outputs:
                    source = self.outputs[id(leaf)][0]
                    if name not in self.layers[source]:
                        self.layers[source].append(name)
                    self.places.reads(source, name, self._copies(source))
            self.sources.setdefault(name, set()).add(source)

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.depth -= 1

    def _note(self, module: nn.Module, args: Any) -> None:
        self.ran.add(id(module))

    def _norm(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.ran.add(id(module))
            if self.probing or not isinstance(output, Tensor) or output.shape[-1:] != module.weight.shape:  # type: ignore[union-attr]
                return
            if name not in self.layers:
                self.layers[name] = []
                self.probing = True
                try:
                    proportional = _proportional(module, args, kwargs, output)
                finally:
                    self.probing = False
                if not proportional:
                    self.reasons[name] = (
                        f"the output of {type(module).__name__} is not proportional to its weight and bias "
                        "(as in norms that multiply by 1 + weight)"
                    )
            self.outputs[id(output)] = (name, output)
            self.places.made(name)

        return hook

    def verdict(self) -> tuple[list[NormPair], dict[str, str]]:
        """What the calls have shown.

        Returns:
            The norms that may be rescaled, with their readers, in the order the norms ran first; and by name the reason
            why another norm may not.
        """
        idle = {name: m for name, m in self.modules.items() if m._parameters and id(m) not in self.ran}
        read = layers_read(self.model, idle.values())  # by modules that call functions with the weights
        idle = {name: module for name, module in idle.items() if id(module) not in read}
        held = held_elsewhere(self.model, [self.modules[norm] for norm in self.layers])
        own = layers_read(self.model, [self.modules[norm] for norm in self.layers])
        for norm, layers in self.layers.items():
            reason = self._unsafe(norm, layers) or self._unknown(norm, layers, idle)
            if id(self.modules[norm]) in own:
                reason = reason or f"{own[id(self.modules[norm])]} reads its weight itself, without calling it"
            if id(self.modules[norm]) in held:
                reason = reason or f"it is also held outside of the model's modules ({held[id(self.modules[norm])]})"
            if not reason and branches_by_values(self.modules[norm]):
                reason = "its forward goes another way with other values"
            if not reason and norm not in self.reasons:
                readers = [*layers, *(router.rpartition(".")[0] for router in self.routers.get(norm, ()))]
                reason = self.places.problem(self.model, norm, [self.modules[reader] for reader in readers])
            if reason:
                self.reasons.setdefault(norm, reason)
        pairs = [
            NormPair(norm, tuple(layers), tuple(self.routers.get(norm, ())))
            for norm, layers in self.layers.items()
            if norm not in self.reasons
        ]
        return pairs, {norm: self.reasons[norm] for norm in self.layers if norm in self.reasons}

    def _unknown(self, norm: str, layers: list[str], idle: Iterable[str]) -> str | None:
        """Who else may read the norm's output, as far as the calls that were watched do not tell."""
        for name in (norm, *layers):
            if name in self.watched:
                return f"{name!r} has hooks or a forward of its own, which may read its output"
        paths: list[list[str]] = [name.split(".")[:-1] for name in (norm, *layers)]
        common = next((i for i, parts in enumerate(zip(*paths, strict=False)) if len(set(parts)) > 1), None)
        prefix = ".".join(sorted(paths, key=len)[0] if common is None else paths[0][:common])
        below = (name for name in idle if not prefix or name.startswith(f"{prefix}."))
        found = next(below, None)
        return None if found is None else f"{found!r} did not run with these batches, and may read its output"

    def _unsafe(self, norm: str, layers: list[str]) -> str | None:
        if not layers:
            return "no linear layer reads its output"
        for layer in layers:
            if self.sources[layer] != {norm}:
                return f"layer {layer!r} also reads other tensors"
        for router in self.routers.get(norm, ()):
            if router in self.misread:
                return f"{router!r}, which reads its output, is also read by {self.misread[router]}()"
        routers = {router.rpartition(".")[0] for router in self.routers.get(norm, ())}
        allowed = {norm, *layers, *routers}
        for name in allowed:
            for key, parameter in self.modules[name]._parameters.items():
                if parameter is not None and (name in {norm, *routers} or key == "weight"):
                    others = set(self.holders[tensor_key(parameter)]) - allowed
                    if others:
                        return f"the {key} of {name!r} is shared with {min(others)!r}"
        weights = [tensor_key(weight_of(self.modules[layer])) for layer in layers]
        return "two of its layers share one weight" if len(set(weights)) < len(weights) else None


_MOVES = ("view", "reshape", "flatten", "contiguous", "float", "half", "bfloat16", "to", "type")
"""Functions that may return the same rows, seen in another way or in another dtype."""


def _keeps_rows(func: Any, tensor: Tensor, result: Any) -> bool:
    """Whether a call returns another tensor of the same rows."""
    if getattr(func, "__name__", "") not in _MOVES or not isinstance(result, Tensor) or result is tensor:
        return False
    if result.shape[-1:] != tensor.shape[-1:] or result.numel() != tensor.numel() or not result.is_floating_point():
        return False
    with torch._C.DisableTorchFunction():
        k = tensor.shape[-1]
        return torch.equal(result.detach().reshape(-1, k), tensor.detach().to(result).reshape(-1, k))


def _looks_like_norm(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim == 1 and not any(True for _ in module.children())


def _harmless(func: Any, tensor: Tensor, result: Any) -> bool:
    """Whether a call neither reads nor changes the norm's output: the call returns no tensor, or the same tensor."""
    name = getattr(func, "__name__", "")
    if result is tensor:
        return not (name.endswith("_") and not name.endswith("__"))
    return name not in ("item", "tolist", "numpy", "__setitem__") and not any(
        isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)
    )


def _proportional(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> bool:
    """Whether scaling weight and bias scales every channel of the output alike (to 1 %: half precision may round)."""
    factor = 2.0 ** (1 + torch.arange(output.shape[-1], device=output.device, dtype=torch.int64) % 2)
    held = {k: p for k, p in module._parameters.items() if p is not None}
    if set(held) - {"weight", "bias"} or any(p.shape != factor.shape for p in held.values()):
        return False
    scaled = {name: p * factor.to(p.dtype) for name, p in held.items()}
    probe = torch.func.functional_call(module, scaled, args, kwargs)
    expected = (output.float() * factor).reshape(-1, output.shape[-1])
    error = (probe.float().reshape(expected.shape) - expected).abs()
    return output.numel() > 0 and bool((error <= 0.01 * expected.abs().amax(0)).all())
