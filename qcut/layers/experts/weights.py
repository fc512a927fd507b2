"""Reads the weights of experts, and lays them out in one way.

Experts are taken for what they compute, not for what their class is called: the module goes through transformers'
interface for experts, whose flags say how the weights lie; its gate is found by calling it (`gating_of`); and the whole
is compared with the module's own result on random tokens (`qcut.layers.experts.opening`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn

from qcut.layers.experts.experts import Experts, Projection, layer_of
from qcut.layers.experts.linear_stack import LinearStack
from qcut.models.classes import is_unwatched
from qcut.models.modules import WEIGHT_DTYPES
from qcut.numerics.gating import Gating, gating_of

_PROBE_TOKENS, _PROBE_EXPERTS = 6, 4
_INTERFACE = "transformers.integrations.moe"
_WEIGHTS = {"gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias"}


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of one mixture's experts, as layers read them; views of the module's parameters where they can be.

    Attributes:
        up: ``[E, 2 I, H]`` with the gate above, or ``[E, I, H]`` without one.
        down: ``[E, H, I]``.
        up_bias: ``[E, 2 I]`` or ``[E, I]``; or None.
        down_bias: ``[E, H]`` or None.
        gating: what is between the products.
        post_expert_norm: of an expert's result, or None.
    """

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    gating: Gating
    post_expert_norm: nn.Module | None = None


def uses_interface(cls: type) -> bool:
    """Whether objects of a class are computed by transformers' interface for experts."""
    interface = sys.modules.get(_INTERFACE)
    forward = vars(cls).get("forward")
    if interface is None or not isinstance(forward, FunctionType):
        return False
    written = getattr(forward, "__wrapped__", None)
    return (
        forward.__globals__ is vars(interface)
        and forward.__code__.co_qualname.startswith("use_experts_implementation.")
        and isinstance(written, FunctionType)
        and written.__qualname__ == f"{cls.__qualname__}.forward"
    )


def expert_weights(module: Any) -> ExpertWeights | str:
    """The weights of a module of experts, or why it has none that qcut knows.

    Args:
        module: with stacked weights. On the meta device too.
    """
    kind = type(module).__name__
    if not uses_interface(type(module)):
        return f"{kind} does not go through transformers' interface for experts"
    if not is_unwatched(module):
        return f"{kind} has hooks, or a forward of its own"
    held = {key: p for key, p in module._parameters.items() if p is not None}
    if not held.keys() <= _WEIGHTS or module._buffers:
        return f"{kind} has parameters that experts of the interface have not: {sorted(held.keys() - _WEIGHTS)}"
    name = "gate_up_proj" if module.has_gate else "up_proj"
    if any(p.ndim != 3 or p.dtype not in WEIGHT_DTYPES for p in (held[name], held["down_proj"])):
        return f"{kind} has weights that are no matrices of floating point"
    up, down = held[name].detach(), held["down_proj"].detach()
    bias, down_bias = ((held[f"{key}_bias"].detach() if module.has_bias else None) for key in (name, "down_proj"))
    if module.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    rows = up.shape[1] // 2 if module.has_gate else up.shape[1]
    if (up.shape[0], up.shape[2], rows) != (down.shape[0], down.shape[1], down.shape[2]):
        return f"{kind} has weights of {list(up.shape)} and {list(down.shape)}, which do not fit together"
    interleaved = module.has_gate and not module.is_concatenated
    gating = _gating(module, rows, interleaved)
    if gating is None:
        return f"{kind} has a gate that qcut does not know"
    if interleaved:
        up, bias = _halves(up), None if bias is None else _halves(bias)
    norm = module.post_expert_norm if module.has_post_expert_norm else None
    return ExpertWeights(up, down, bias, down_bias, gating, norm)


def _halves(t: Tensor) -> Tensor:
    """Rows gate, up, gate, up … as all gates above all ups."""
    return torch.cat([t[:, 0::2], t[:, 1::2]], 1)


def _gating(module: Any, width: int, interleaved: bool) -> Gating | None:
    gated = bool(module.has_gate)

    def function(rows: Tensor) -> Tensor:
        if interleaved:
            rows = torch.stack(rows.chunk(2, -1), -1).flatten(-2)
        return cast(Tensor, module._apply_gate(rows) if gated else module.act_fn(rows))

    numbers = {float(v) for m in module.modules() for v in vars(m).values() if type(v) in (int, float)}
    sizes = {float(size) for p in module._parameters.values() if p is not None for size in p.shape}
    try:
        with torch.no_grad():
            return gating_of(function, width, gated, sorted(numbers - sizes)[:8])
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None


def up_parameter(module: Any) -> tuple[nn.Parameter, int]:
    """Where a module of transformers' interface keeps the weights of the first product, and the axis of its columns."""
    parameter: nn.Parameter = module.gate_up_proj if module.has_gate else module.up_proj
    return parameter, 1 if module.is_transposed else 2


def open_experts(module: nn.Module, name: str | None = None) -> Experts | str:
    """The experts of a module as linear layers, or why it has none that qcut knows.

    Args:
        module: transformers' experts, in float, or `Experts`.
        name: of the module.

    Returns:
        `Experts` in the memory of the module; weights whose rows are interleaved are copied.
    """
    if isinstance(module, Experts):
        made = Experts(_opened(module.up), _opened(module.down), module.gating, module.post_expert_norm, module.name)
        return made.train(module.training)
    weights = expert_weights(module)
    if isinstance(weights, str):
        return weights
    made = experts_of(weights, name).train(module.training)
    return _difference(module, made) or made


def experts_of(weights: ExpertWeights, name: str | None = None) -> Experts:
    """Float experts with these weights, not copied."""
    up, down = _linears(weights.up, weights.up_bias), _linears(weights.down, weights.down_bias)
    return Experts(up, down, weights.gating, weights.post_expert_norm, name)


def _opened(projection: Projection) -> nn.ModuleList:
    return nn.ModuleList(projection.layers) if isinstance(projection, LinearStack) else projection


def _linears(weight: Tensor, bias: Tensor | None) -> nn.ModuleList:
    layers = nn.ModuleList()
    for e in range(len(weight)):
        layer = nn.Linear(weight.shape[2], weight.shape[1], bias is not None, device="meta")
        layer.weight = nn.Parameter(weight[e], requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias[e], requires_grad=False)
        layers.append(layer)
    return layers


def _difference(module: nn.Module, made: Experts) -> str | None:
    """What differs between a module's result on random tokens and that of its experts laid open; None if nothing.

    Weights on the meta device compute nothing: there the flags decide.
    """
    weight = next(module.parameters())
    if weight.is_meta:
        return None
    generator = torch.Generator().manual_seed(0)
    count = min(_PROBE_EXPERTS, made.num_experts)
    columns = layer_of(made.up, 0).in_features
    x = torch.randn(_PROBE_TOKENS, columns, generator=generator, dtype=torch.float32, device="cpu")
    chosen = torch.rand(_PROBE_TOKENS, made.num_experts, generator=generator, dtype=torch.float32, device="cpu")
    pool = torch.randperm(made.num_experts, generator=generator, dtype=torch.int64, device="cpu")[:count]
    index = pool[chosen[:, :count].argsort(1)[:, : min(2, count)]]
    routes = torch.rand(index.shape, generator=generator, dtype=torch.float32, device="cpu") + 0.5
    x, routes, index = x.to(weight), routes.to(weight), index.to(weight.device)
    try:
        with torch.no_grad():
            expected = module(x.clone(), index.clone(), routes.clone())
            found = made(x, index, routes)
    except Exception as error:  # what a foreign module raises is not known
        return f"{type(module).__name__} fails on random tokens: {' '.join(str(error).split())[:120]}"
    allowed = 1e-4 if weight.dtype.itemsize >= 4 and not weight.is_cuda else 0.03
    size = expected.float().norm().item()
    if found.shape != expected.shape or not (found.float() - expected.float()).norm().item() <= allowed * size:
        return f"{type(module).__name__} computes something else than its weights and flags say"
    return None
