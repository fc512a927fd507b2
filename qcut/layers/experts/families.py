"""Reads the weights of experts of transformers, and lays them out in one way.

Experts are taken for what they compute, not for what their class is called. Most go through transformers' interface for
experts; its flags say how the weights lie; other classes of transformers have a reader each. A gate is found by calling
it (`gating_of`), and the whole is compared with the module's own result on random tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn

from qcut.layers.experts.experts import Experts
from qcut.layers.experts.forms import BatchedExperts, DenseExperts, ParallelExperts, SharedExperts
from qcut.models.classes import codes_in, computes_its_own, is_exactly, is_unwatched, library_class
from qcut.models.modules import WEIGHT_DTYPES
from qcut.numerics.gating import Gating, gating_of

_INTERFACE = "transformers.integrations.moe"


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of one mixture's experts, as layers read them; views of the module's parameters if they can be.

    Attributes:
        up: ``[E, 2 I, H]`` with the gate above, or ``[E, I, H]`` without one.
        down: ``[E, H, I]``; None if ``up`` is the only projection.
        gating: what is between the products.
        up_bias: ``[E, 2 I]`` or ``[E, I]``; or None.
        down_bias: ``[E, H]`` or None.
        post_expert_norm: of an expert's result, or None.
        form: how the experts are called.
        identities: see `Experts`.
    """

    up: Tensor
    down: Tensor | None
    gating: Gating
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    post_expert_norm: nn.Module | None = None
    form: type[Experts] = Experts
    identities: int = 0


def expert_weights(module: nn.Module) -> ExpertWeights | str:
    """The weights of a module of experts, or why it has none that qcut knows.

    Args:
        module: with weights of several experts. On the meta device too.
    """
    kind = type(module).__name__
    read: Callable[[Any], ExpertWeights | str] | None
    if uses_interface(type(module)):
        read = _of_interface
    else:
        read = next((r for place, (r, _) in _READERS.items() if type(module) is _class(*place)), None)
    if read is None:
        return f"its weights have three dimensions, and {kind} is no class whose experts qcut knows"
    norm = getattr(module, "post_expert_norm", None)
    inner = set() if norm is None else set(norm.modules())
    if not all(is_unwatched(part) for part in module.modules() if part not in inner):
        return f"{kind} has hooks, or a forward of its own"
    weights = [p for p in module.parameters() if p not in {*(() if norm is None else norm.parameters())}]
    if not all(type(p) in (nn.Parameter, Tensor) and p.dtype in WEIGHT_DTYPES for p in weights):
        return f"{kind} has weights that are no plain tensors of floating point"
    try:
        return read(module)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        return f"{kind} is not laid out as its class is: {' '.join(str(error).split())[:120]}"


def _class(place: str, name: str) -> type[nn.Module] | None:
    found = library_class(f"transformers.models.{place}", name)
    return found if found is not None and computes_its_own(found) else None


def uses_interface(cls: type) -> bool:
    """Whether objects of a class are computed by transformers' interface for experts."""
    interface = sys.modules.get(_INTERFACE)
    forward = vars(cls).get("forward")
    if interface is None or not isinstance(forward, FunctionType):
        return False
    decorator, written = getattr(interface, "use_experts_implementation", None), getattr(forward, "__wrapped__", None)
    return (
        isinstance(decorator, FunctionType)
        and forward.__globals__ is vars(interface)
        and any(forward.__code__ is code for code in codes_in(decorator.__code__))
        and isinstance(written, FunctionType)
        and written.__qualname__ == f"{cls.__qualname__}.forward"
    )


def _of_interface(module: Any) -> ExpertWeights | str:
    name = "gate_up_proj" if module.has_gate else "up_proj"
    expected = {name, "down_proj", *((f"{name}_bias", "down_proj_bias") if module.has_bias else ())}
    held: dict[str, Tensor] = {key: p.detach() for key, p in module._parameters.items() if p is not None}
    if held.keys() != expected or module._buffers:
        return f"{type(module).__name__} has parameters {sorted(held)}; its flags ask for {sorted(expected)}"
    up, down = held[name], held["down_proj"]
    bias, down_bias = held.get(f"{name}_bias"), held.get("down_proj_bias")
    if module.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    if module.has_gate and not _is_concatenated(module, up.shape[1] // 2):

        def interleaved(rows: Tensor) -> Tensor:
            return cast(Tensor, module._apply_gate(torch.stack(rows.chunk(2, -1), -1).flatten(-2)))

        up, bias = _halves(up), None if bias is None else _halves(bias)
        function = interleaved
    else:
        function = module._apply_gate if module.has_gate else module.act_fn
    norm = module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None
    return _checked(module, up, down, function, bool(module.has_gate), bias, down_bias, norm)


def _is_concatenated(module: Any, width: int) -> bool:
    """Whether all gates are above all ups; where transformers has no such flag yet, the gate tells."""
    flag = getattr(module, "is_concatenated", None)
    if not width:
        return True
    return _gating(module, module._apply_gate, width, True) is not None if flag is None else bool(flag)


def _halves(t: Tensor) -> Tensor:
    """Rows gate, up, gate, up … as all gates above all ups."""
    return torch.cat([t[:, 0::2], t[:, 1::2]], 1)


def _gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def gate(rows: Tensor) -> Tensor:
        g, u = rows.chunk(2, -1)
        return activation(g) * u

    return gate


def _llama4(module: Any) -> ExpertWeights | str:
    up, down = module.gate_up_proj.detach().transpose(1, 2), module.down_proj.detach().transpose(1, 2)
    return _checked(module, up, down, _gated(module.act_fn), form=DenseExperts)


def _longcat(module: Any) -> ExpertWeights | str:
    count = module.num_routed_experts
    up, down = module.gate_up_proj.detach()[:count], module.down_proj.detach()  # identities have rows too, never read
    return _checked(module, up, down, _gated(module.act_fn), identities=module.zero_expert_num)


def _step3p7(module: Any) -> ExpertWeights | str:
    return _checked(module, module.gate_up_proj.detach(), module.down_proj.detach(), module._apply_gate)


def _inkling_shared(module: Any) -> ExpertWeights | str:
    up = torch.cat([module.gate_proj.detach(), module.up_proj.detach()], 1)
    return _checked(module, up, module.down_proj.detach(), _gated(module.act_fn), form=SharedExperts)


def _dbrx(module: Any) -> ExpertWeights | str:
    mlp, shape = module.mlp, (module.num_experts, module.ffn_hidden_size, module.hidden_size)
    if not is_exactly(mlp, library_class("transformers.models.dbrx.modeling_dbrx", "DbrxExpertGLU")):
        return f"{type(module).__name__} has a {type(mlp).__name__} that qcut does not know"
    gate, up, down = (p.detach().view(shape) for p in (mlp.w1, mlp.v1, mlp.w2))
    both = torch.cat([gate, up], 1)
    return _checked(module, both, down.transpose(1, 2), _gated(mlp.activation_fn), form=BatchedExperts)


def _jetmoe(module: Any) -> ExpertWeights | str:
    return ExpertWeights(module.weight.detach(), None, Gating("none", gated=False), form=ParallelExperts)


_Columns = tuple[tuple[str, int], ...]
_GATE_UP: _Columns = (("gate_up_proj", 2),)
_READERS: dict[tuple[str, str], tuple[Callable[[Any], ExpertWeights | str], _Columns]] = {
    ("llama4.modeling_llama4", "Llama4TextExperts"): (_llama4, (("gate_up_proj", 1),)),
    ("longcat_flash.modeling_longcat_flash", "LongcatFlashExperts"): (_longcat, _GATE_UP),
    ("step3p7.modeling_step3p7", "Step3p7Experts"): (_step3p7, _GATE_UP),
    ("inkling.modeling_inkling", "InklingSharedExperts"): (_inkling_shared, (("gate_proj", 2), ("up_proj", 2))),
    ("dbrx.modeling_dbrx", "DbrxExperts"): (_dbrx, (("mlp.w1", 1), ("mlp.v1", 1))),
    ("jetmoe.modeling_jetmoe", "JetMoeParallelExperts"): (_jetmoe, (("weight", 2),)),
}
"""Classes of transformers outside of its interface, by module and name.

What reads them, and the parameters that multiply tokens, with the axis of their columns."""


def up_parameters(module: Any) -> list[tuple[nn.Parameter, int]]:
    """The parameters of a float module of experts that multiply tokens, each with the axis of its columns.

    Args:
        module: one with weights that `expert_weights` knows.
    """
    if uses_interface(type(module)):
        name = "gate_up_proj" if module.has_gate else "up_proj"
        return [(module.get_parameter(name), 1 if module.is_transposed else 2)]
    columns = next(columns for place, (_, columns) in _READERS.items() if type(module) is _class(*place))
    return [(module.get_parameter(name), axis) for name, axis in columns]


def _checked(
    module: nn.Module,
    up: Tensor,
    down: Tensor,
    function: Callable[[Tensor], Tensor],
    gated: bool = True,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    norm: nn.Module | None = None,
    form: type[Experts] = Experts,
    identities: int = 0,
) -> ExpertWeights | str:
    """Weights with sizes that fit together, and the gating that a function computes."""
    kind = type(module).__name__
    if up.ndim != 3 or down.ndim != 3:
        return f"{kind} has weights of {up.ndim} and {down.ndim} dimensions; those of experts have 3"
    if not up.numel() or not down.numel():
        return f"{kind} has weights that are no matrices: {list(up.shape)} and {list(down.shape)}"
    (count, rows, columns), width = up.shape, down.shape[2]
    if (count, columns, rows) != (down.shape[0], down.shape[1], width * (1 + gated)):
        return f"{kind} has weights of {list(up.shape)} and {list(down.shape)}, which do not fit together"
    gating = _gating(module, function, width, gated)
    if gating is None:
        return f"{kind} has a gate that qcut does not know"
    return ExpertWeights(up, down, gating, up_bias, down_bias, norm, form, identities)


def _gating(module: nn.Module, function: Callable[[Tensor], Tensor], width: int, gated: bool) -> Gating | None:
    """The gating of a module: its limits and caps are among the numbers that its parts hold, and rarely sizes."""
    numbers = {v for part in module.modules() for v in vars(part).values() if type(v) in (int, float)}
    sizes = {size for p in module.parameters() for size in p.shape}
    likely = sorted(numbers, key=lambda v: (type(v) is int, v in sizes, v))
    try:
        with torch.no_grad():
            return gating_of(function, width, gated, map(float, likely))
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None
