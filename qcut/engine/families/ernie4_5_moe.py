"""Ernie 4.5 MoE: as Llama with mixtures of experts and shared experts; positions rotate neighbouring columns."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from qcut.engine.decoder import AddNorm, Block, Decoder, FeedForward, Heads, Rotary
from qcut.engine.families.common import heads_of, llama_like
from qcut.engine.families.llama import block_of
from qcut.engine.families.mixtures import experts_of, gated_mlp, mlp_of
from qcut.engine.families.rotary import column_order
from qcut.engine.mixture import Mixture, Router, Routing, SharedExperts
from qcut.models.modules import model_device


def decoder(model: Any) -> Decoder:
    """The parts of an ``Ernie4_5_MoeForCausalLM``; see `llama_like` and `experts_of`."""
    heads = heads_of(model)
    starts = range(0, heads.size * (heads.queries + 2 * heads.keys), heads.size)
    order = column_order(heads, heads.size, starts, model_device(model), interleaved=True)
    return llama_like(model, partial(_block, order=order), AddNorm.rms(model.model.norm))


def _block(block: Any, heads: Heads, rotary: Rotary, order: Tensor | None) -> Block:
    made = block_of(block, heads, rotary, _mlp_of)
    return replace(made, attention=replace(made.attention, order=order))


def _mlp_of(block: Any) -> FeedForward:
    mixture = block.mlp
    if not hasattr(mixture, "experts"):
        return mlp_of(block)
    gate = mixture.gate
    routing = Routing("softmax", gate.top_k, renormalize=True, min_sum=gate.norm_min)
    router = Router(gate, routing, gate.moe_statics.e_score_correction_bias, in_float32=True)
    shared = None if mixture.shared_experts is None else SharedExperts(gated_mlp(mixture.shared_experts))
    return Mixture(router, experts_of(mixture.experts, block), shared)
