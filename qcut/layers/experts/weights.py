"""Opens a module of experts as linear layers, if its result on random tokens is theirs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qcut.layers.experts.experts import Experts, Projection, layer_of
from qcut.layers.experts.families import ExpertWeights, expert_weights
from qcut.layers.experts.linear_stack import LinearStack
from qcut.numerics.plain_state import outside_modes

_PROBE_TOKENS, _PROBE_EXPERTS = 6, 4
_LARGEST = 100.0


@outside_modes()
def open_experts(module: nn.Module, name: str | None = None) -> Experts | str:
    """The experts of a module as linear layers, or why it has none that qcut knows.

    Args:
        module: transformers' experts, in float, or `Experts`.
        name: of the module.

    Returns:
        `Experts` in the memory of the module; weights are copied where gate and up are interleaved or apart.
    """
    if isinstance(module, Experts):
        return module.with_projections(_opened(module.up), _opened(module.down))
    weights = expert_weights(module)
    if isinstance(weights, str):
        return weights
    made = experts_of(weights, name).train(module.training)
    return _difference(module, made) or made


def experts_of(weights: ExpertWeights, name: str | None = None) -> Experts:
    """Float experts with these weights, not copied."""
    up, down = _linears(weights.up, weights.up_bias), _linears(weights.down, weights.down_bias)
    return weights.form(up, down, weights.gating, weights.post_expert_norm, name, weights.identities)


def _opened(projection: Projection) -> nn.ModuleList:
    return nn.ModuleList(projection.layers) if isinstance(projection, LinearStack) else projection


def _linears(weight: Tensor | None, bias: Tensor | None) -> nn.ModuleList:
    layers = nn.ModuleList()
    for e in range(0 if weight is None else len(weight)):
        assert weight is not None
        layer = nn.Linear(weight.shape[2], weight.shape[1], bias is not None, device="meta")
        layer.weight = nn.Parameter(weight[e], requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias[e], requires_grad=False)
        layers.append(layer)
    return layers


def _difference(module: nn.Module, made: Experts) -> str | None:
    """What differs between a module's result on random tokens and that of its experts laid open; None if nothing.

    Weights on the meta device compute nothing: there class and flags decide. NaN and infinite values are for the layers
    to refuse, by name.
    """
    weight, kind = next(module.parameters()), type(module).__name__
    if weight.is_meta:
        return None
    x, index, routes = _probe(made, weight)
    arguments = made.arguments(x, index, routes)
    try:
        with torch.no_grad():
            expected = module(*(a.clone() if isinstance(a, Tensor) else a for a in arguments)).float()
            found = made(*arguments).float()
    except Exception as error:  # what a foreign module raises is not known
        return f"{kind} fails on random tokens: {' '.join(str(error).split())[:120]}"
    allowed = 1e-4 if weight.dtype.itemsize >= 4 and not weight.is_cuda else 0.03
    if found.shape == expected.shape:
        far = (found - expected).norm(dim=-1) > allowed * expected.norm(dim=-1)
        if not far.any() and torch.equal(found.isfinite(), expected.isfinite()):
            return None
    return f"{kind} computes something else than its weights and flags say"


def _probe(made: Experts, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens, a few experts and weights, as the float weight's dtype and device.

    Results of ``up`` are from a half to 16 in size, for gates differ when they are far from zero.
    """
    generator = torch.Generator().manual_seed(0)
    count, first = min(_PROBE_EXPERTS, made.num_experts), layer_of(made.up, 0)
    x = torch.randn(_PROBE_TOKENS, first.in_features, generator=generator, dtype=torch.float32, device="cpu")
    chosen = torch.rand(_PROBE_TOKENS, count, generator=generator, dtype=torch.float32, device="cpu")
    pool = torch.randperm(made.num_experts, generator=generator, dtype=torch.int64, device="cpu")[:count]
    index = pool[chosen.argsort(1)[:, :2]]
    if made.identities:
        index[0, 0] = made.num_experts + made.identities - 1
    routes = torch.rand(index.shape, generator=generator, dtype=torch.float32, device="cpu") + 0.5
    x, routes, index = x.to(weight), routes.to(weight), index.to(weight.device)
    with torch.no_grad():
        size = first(x).float().square().mean(1).sqrt().nan_to_num(1.0, posinf=1.0)
    wanted = torch.tensor([0.5, 1.0, 2.0, 4.0, 8.0, 16.0], dtype=torch.float32, device=weight.device)
    scale = (wanted / size.clamp(min=1e-6)).clamp(max=_LARGEST)[:, None]
    return (x.float() * scale).clamp(-_LARGEST, _LARGEST).to(weight.dtype), index, routes
