"""GPT-OSS: as Llama with mixtures of experts, sinks of attention, and windows in every second layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qcut.engine.decoder import AddNorm, Block, Decoder, Heads, Rotary
from qcut.engine.families.common import heads_of, llama_like
from qcut.engine.families.llama import block_of
from qcut.engine.families.mixtures import experts_of
from qcut.engine.families.rotary import rotary_of
from qcut.engine.mixture import Mixture, Router, Routing
from qcut.errors import UnsupportedError


@dataclass(frozen=True)
class _BothHalves:
    """Rotary positions of a module that returns the cosine and the sine of each pair of columns once."""

    rotary: Rotary

    def __call__(self, example: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[1, T, D]``."""
        cos, sin = self.rotary(example, positions)
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


class _Cast(nn.Module):
    """The weight of a norm in the dtype of activations: transformers keeps float32 norms in float16 models."""

    def __init__(self, norm: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.variance_epsilon = norm.variance_epsilon
        self.weight = nn.Parameter(norm.weight.detach().to(dtype), requires_grad=False)


def decoder(model: Any) -> Decoder:
    """The parts of a ``GptOssForCausalLM``; see `llama_like` and `experts_of`.

    Norms of 16 bits are rounded once more than in transformers, as Llama's are there.

    Raises:
        UnsupportedError: sinks of another number than heads, or rotary positions of a part of a head.
    """
    heads = heads_of(model)
    _, rotated = rotary_of(model, model.model.rotary_emb, heads)
    if rotated != heads.size:
        found = f"rotary positions of {rotated} of a head's {heads.size} columns"
        raise UnsupportedError(f"{type(model).__name__}: {found}; allowed: of all")
    dtype = model.model.layers[0].mlp.router.weight.dtype  # no scheme quantizes it
    made = llama_like(model, partial(_block, dtype=dtype), _rms(model.model.norm, dtype))
    return replace(made, dtype=dtype)


def _rms(norm: Any, dtype: torch.dtype, readers: Sequence[nn.Module] = ()) -> AddNorm:
    return AddNorm.rms(norm if norm.weight.dtype is dtype else _Cast(norm, dtype), readers)


def _block(block: Any, heads: Heads, rotary: Rotary, dtype: torch.dtype) -> Block:
    attention, sinks = block.self_attn, block.self_attn.sinks
    if sinks.shape != (heads.queries,):
        where = f"layer {attention.layer_idx} has sinks {list(sinks.shape)}"
        raise UnsupportedError(f"{where}; allowed: [{heads.queries}], one of each head")
    made = block_of(block, heads, _BothHalves(rotary), _mlp_of)
    return replace(
        made,
        attention_norm=_rms(block.input_layernorm, dtype, made.attention.projections),
        attention=replace(made.attention, sinks=sinks.detach().float()),
        mlp_norm=_rms(block.post_attention_layernorm, dtype, made.mlp.readers),
    )


def _mlp_of(block: Any) -> Mixture:
    mixture, router = block.mlp, block.mlp.router
    chosen = Router(router, Routing("logits", router.top_k), logits_bias=router.bias)
    return Mixture(chosen, experts_of(mixture.experts, block))
