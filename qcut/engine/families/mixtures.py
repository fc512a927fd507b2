"""The part after attention in blocks of Llama's shape: a dense MLP with a gate, or a mixture of experts."""

from __future__ import annotations

from typing import Any

from torch import nn

from qcut.engine.decoder import MLP, FeedForward
from qcut.engine.mixture import Mixture, Router, Routing, SharedExperts
from qcut.errors import UnsupportedError
from qcut.layers.experts.experts import Experts
from qcut.layers.experts.weights import open_experts


def mlp_of(block: Any) -> FeedForward:
    """The part of a block after attention.

    Args:
        block: a layer of transformers' model.

    Raises:
        UnsupportedError: see `experts_of`.
    """
    mlp = block.mlp
    if not hasattr(mlp, "experts"):
        return gated_mlp(mlp)
    # Mixtral's router has no such option: its weights always add up to 1.
    routing = Routing("softmax", mlp.gate.top_k, renormalize=getattr(mlp.gate, "norm_topk_prob", True))
    shared = None
    if hasattr(mlp, "shared_expert"):
        shared = SharedExperts(gated_mlp(mlp.shared_expert), mlp.shared_expert_gate)
    return Mixture(Router(mlp.gate, routing), experts_of(mlp.experts, block), shared)


def gated_mlp(mlp: Any) -> MLP:
    """A dense MLP with a gate."""
    return MLP((mlp.gate_proj, mlp.up_proj), mlp.act_fn, mlp.down_proj, gated=True)


def experts_of(module: nn.Module, block: Any) -> Experts:
    """A mixture's experts: quantized ones as they are, float ones as linear layers in the same memory.

    Args:
        module: experts.
        block: the layer of the model that holds them, which names the error.

    Raises:
        UnsupportedError: float experts that `open_experts` does not know.
    """
    made = module if isinstance(module, Experts) else open_experts(module)
    if isinstance(made, str):
        allowed = "allowed: experts of qcut.quantize, or of a kind that it takes; or model.generate"
        raise UnsupportedError(f"experts of layer {block.self_attn.layer_idx}: {made}; {allowed}")
    return made
