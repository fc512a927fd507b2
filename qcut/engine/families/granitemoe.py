"""Granite-MoE: as Llama with mixtures of experts, and with factors of embeddings, branches and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qcut.engine.decoder import AddNorm, Block, Decoder, Heads, Rotary
from qcut.engine.families.common import llama_like
from qcut.engine.families.llama import block_of
from qcut.engine.families.mixtures import experts_of
from qcut.engine.mixture import Mixture, Router, Routing


def decoder(model: Any) -> Decoder:
    """The parts of a ``GraniteMoeForCausalLM``; see `llama_like` and `experts_of`."""
    made = llama_like(model, _block, AddNorm.rms(model.model.norm))
    divisor = model.config.logits_scaling
    return replace(made, embedding_multiplier=model.model.embedding_multiplier, logits_divisor=divisor)


def _block(block: Any, heads: Heads, rotary: Rotary) -> Block:
    return replace(block_of(block, heads, rotary, _mlp_of), multiplier=block.residual_multiplier)


def _mlp_of(block: Any) -> Mixture:
    mixture = block.block_sparse_moe
    router = Router(mixture.router, Routing("logits", mixture.router.top_k))
    return Mixture(router, experts_of(mixture.experts, block))
