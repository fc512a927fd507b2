"""Hunyuan MoE: as Llama with mixtures of experts and shared experts, and norms of heads after rotary positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from qcut.engine.decoder import AddNorm, Block, Decoder, HeadNorms, Heads, Rotary
from qcut.engine.families.common import llama_like
from qcut.engine.families.llama import block_of
from qcut.engine.families.mixtures import experts_of, gated_mlp
from qcut.engine.mixture import Mixture, Router, Routing, SharedExperts


def decoder(model: Any) -> Decoder:
    """The parts of a ``HunYuanMoEV1ForCausalLM``; see `llama_like` and `experts_of`."""
    return llama_like(model, _block, AddNorm.rms(model.model.norm))


def _block(block: Any, heads: Heads, rotary: Rotary) -> Block:
    made, attention = block_of(block, heads, rotary, _mlp_of), block.self_attn
    norms = HeadNorms(AddNorm.rms(attention.query_layernorm), AddNorm.rms(attention.key_layernorm), after_rotary=True)
    return replace(made, attention=replace(made.attention, norms=norms))


def _mlp_of(block: Any) -> Mixture:
    mixture, gate = block.mlp, block.mlp.gate
    routing = Routing("softmax", gate.top_k, renormalize=True)
    router = Router(gate.wg, routing, by_layer=type(gate.wg) is not nn.Linear or gate.wg.bias is not None)
    return Mixture(router, experts_of(mixture.experts, block), SharedExperts(gated_mlp(mixture.shared_mlp)))
