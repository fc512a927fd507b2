"""Small decoder-only models of transformers with random weights, and the tokens and logits they give by themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from qcut.engine.kv_cache import KVCache

VOCABULARY = 96


def sizes(**changes: Any) -> dict[str, Any]:
    """Of a small Llama-family model: three heads for each key, an odd MLP, heads of 8."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 76,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "eos_token_id": None,
        "pad_token_id": None,
        "bos_token_id": None,
        **changes,
    }


def small(kind: str) -> Any:
    """A model with random weights, larger than usual so that its tokens differ."""
    torch.manual_seed(0)
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    gpt2 = GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=48, n_layer=2, n_head=4, eos_token_id=None, bos_token_id=None
    )
    model: Any = {
        "gpt2": lambda: GPT2LMHeadModel(gpt2),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**sizes())),
        "llama3_rope": lambda: LlamaForCausalLM(LlamaConfig(**sizes(rope_parameters=rope))),
        "mistral": lambda: MistralForCausalLM(MistralConfig(**sizes(sliding_window=None))),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**sizes())),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**sizes(head_dim=16))),
        "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**sizes())),
        "phi3": lambda: Phi3ForCausalLM(Phi3Config(**sizes())),
        "starcoder2": lambda: Starcoder2ForCausalLM(Starcoder2Config(**sizes(sliding_window=None))),
    }[kind]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")) or (kind == "olmo2" and "layernorm" in name):
                parameter.uniform_(0.5, 1.5)
    return model.eval()


def prompts_of(vocabulary: int, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def theirs(model: Any, prompt: list[int], count: int) -> list[int]:
    """What Hugging Face generates greedily."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def last_logits(model: Any, prompt: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([prompt])).logits[0, -1]
    return logits


def kept(cache: KVCache, layer: int) -> list[Tensor]:
    """Keys and values of a layer as floats ``[batch, kv_heads, context, D]``."""
    keys, values, *scales = cache.layer(layer)
    pairs = zip((keys, values), scales, strict=True)
    return [t.clone() if scale is None else t.float() * scale[..., None] for t, scale in pairs]
