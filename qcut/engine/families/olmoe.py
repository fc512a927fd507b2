"""OLMoE: as Llama with mixtures of experts, norms of whole queries and keys, and clipped queries, keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qcut.engine.decoder import AddNorm, Block, Decoder, Heads, Rotary
from qcut.engine.families.common import llama_like
from qcut.engine.families.llama import block_of


def decoder(model: Any) -> Decoder:
    """The parts of an ``OlmoeForCausalLM``; see `llama_like` and `block_of`."""
    return llama_like(model, _block, AddNorm.rms(model.model.norm))


def _block(block: Any, heads: Heads, rotary: Rotary) -> Block:
    made = block_of(block, heads, rotary)
    return replace(made, attention=replace(made.attention, clip=block.self_attn.config.clip_qkv))
