"""Gemma, Gemma 2 and 3: norms of 1 + weight, scaled embeddings, gates by GELU; norms after attention and MLP, too."""

from __future__ import annotations

from typing import Any

from torch import nn

from qcut.engine.decoder import MLP, AddNorm, Block, Decoder, HeadNorms, Heads, Rotary, SelfAttention
from qcut.engine.families.common import decoder_from, heads_of, window_of
from qcut.engine.families.rotary import rotary_of
from qcut.errors import UnsupportedError

_SOFTCAPS = ("gemma2", "gemma3_text")
"""Models with a softcap of the logits; others ignore an entry in their configurations."""
_ATTENTION_SOFTCAPS = ("gemma2",)
"""Models with a softcap of attention; others ignore an entry, and an attribute, too."""


class _OnePlus(nn.Module):
    """The weight of a norm plus 1; of 16 bits it is rounded once more than in transformers."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        weight, self.variance_epsilon = norm.weight, norm.eps
        self.weight = nn.Parameter((weight.detach().float() + 1).to(weight.dtype), requires_grad=False)


def decoder(model: Any) -> Decoder:
    """The parts of a ``GemmaForCausalLM``, ``Gemma2ForCausalLM`` or ``Gemma3ForCausalLM``.

    Raises:
        UnsupportedError: attention to tokens that follow, a softcap of 0 or below, or see `rotary_of`.
    """
    body, config, heads = model.model, model.config, heads_of(model)
    if getattr(config, "use_bidirectional_attention", None):
        name = type(model).__name__
        raise UnsupportedError(f"{name}: use_bidirectional_attention is set; allowed: attention to earlier tokens")
    kinds = [getattr(block.self_attn, "layer_type", None) for block in body.layers]
    rotary = {kind: rotary_of(model, body.rotary_emb, heads, kind)[0] for kind in set(kinds)}
    blocks = (_block(block, heads, rotary[kind]) for block, kind in zip(body.layers, kinds, strict=True))
    softcap = config.final_logit_softcapping if config.model_type in _SOFTCAPS else None
    for cap in (softcap, *(_attention_softcap(block.self_attn) for block in body.layers)):
        if cap is not None and cap <= 0:
            raise UnsupportedError(f"{type(model).__name__}: a softcap is {cap!r}; allowed: None, or a number above 0")
    given = {"tokens": body.embed_tokens, "head": model.lm_head, "softcap": softcap}
    return decoder_from(model, heads, blocks, _rms(body.norm), **given)


def _rms(norm: Any, readers: tuple[nn.Module, ...] = ()) -> AddNorm:
    return AddNorm.rms(_OnePlus(norm), readers)


def _attention_softcap(attention: Any) -> float | None:
    return attention.attn_logit_softcapping if attention.config.model_type in _ATTENTION_SOFTCAPS else None


def _block(block: Any, heads: Heads, rotary: Rotary) -> Block:
    attention, mlp = block.self_attn, block.mlp
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up = (mlp.gate_proj, mlp.up_proj)
    norms = HeadNorms(_rms(attention.q_norm), _rms(attention.k_norm)) if hasattr(attention, "q_norm") else None
    ends = hasattr(block, "pre_feedforward_layernorm")
    return Block(
        attention_norm=_rms(block.input_layernorm, qkv),
        attention=SelfAttention(
            qkv,
            attention.o_proj,
            heads,
            attention.scaling,
            norms,
            rotary,
            window=window_of(attention),
            softcap=_attention_softcap(attention) or 0.0,
        ),
        mlp_norm=_rms(block.pre_feedforward_layernorm if ends else block.post_attention_layernorm, gate_up),
        mlp=MLP(gate_up, mlp.act_fn, mlp.down_proj, gated=True),
        attention_end=_rms(block.post_attention_layernorm) if ends else None,
        mlp_end=_rms(block.post_feedforward_layernorm) if ends else None,
    )
