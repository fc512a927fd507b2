"""Small decoder-only models of transformers with random weights, and the tokens and logits they give by themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from qcut.engine.kv_cache.cache import KVCache

VOCABULARY = 96
_THETA = {"rope_theta": 10000.0}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 4.0, 5.0]}
_LOCAL = ["sliding_attention", "full_attention"]
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 36}
_HALF = {"rope_parameters": {"rope_type": "default", **_THETA, "partial_rotary_factor": 0.5}}
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "llama": ("llama", {}),
    "llama3_rope": ("llama", {"rope_parameters": {**_LLAMA3, **_THETA, "original_max_position_embeddings": 16}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_window": ("mistral", {"sliding_window": 5}),
    "qwen2_window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "layer_types": _LOCAL},
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {}),
    "phi3_partial": ("phi3", _HALF),
    "phi3_long": (
        "phi3",
        {
            "original_max_position_embeddings": 48,
            "rope_parameters": {**_LONG, **_THETA, "original_max_position_embeddings": 48},
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "gpt_neox": ("gpt_neox", _HALF),
    "gpt_neox_serial": ("gpt_neox", {"use_parallel_residual": False}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 20,
            "sliding_window": 9,
            "layer_types": _LOCAL,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 20,
            "sliding_window": 7,
            "layer_types": _LOCAL,
            "final_logit_softcapping": 30.0,
        },
    ),
    "qwen3_moe": ("qwen3_moe", {**_EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe_window": (
        "qwen3_moe",
        {**_EXPERTS, "mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 6},
    ),
    "qwen2_moe": ("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 40}),
    "mixtral": ("mixtral", {"num_local_experts": 6}),
    "mixtral_window": ("mixtral", {"num_local_experts": 6, "sliding_window": 5}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    "olmoe_clipped": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "clip_qkv": 0.75}),
    "granitemoe": (
        "granitemoe",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.75,
            "attention_multiplier": 0.25,
            "logits_scaling": 2.5,
        },
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 36,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
    ),
    "hunyuan_v1_moe": (
        "hunyuan_v1_moe",
        {
            "num_experts": 6,
            "moe_topk": [2, 3],
            "head_dim": 8,
            "rope_parameters": {"rope_type": "dynamic", **_THETA, "factor": 1.0, "alpha": 1000.0},
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 9,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 8,
            },
        },
    ),
}
"""By kind, the model's type in transformers, and what differs from `sizes`."""
SINCE = {
    # Versions before refuse their own default settings.
    **dict.fromkeys(("olmo2", "olmoe", "ernie4_5_moe"), "5.5"),
    # Versions before hold the parts of a mixture by other names, which qcut refuses.
    **dict.fromkeys(("granitemoe", "hunyuan_v1_moe"), "5.13"),
}
"""By type, the version of transformers that has models which `small` can make and the engine serves."""
KINDS = tuple(_KINDS)
"""What `small` makes."""
MIXTURES = tuple(kind for kind in KINDS if any("experts" in key for key in _KINDS[kind][1]))
"""Kinds with mixtures of experts."""
WIDE = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Changes with which keys and values have 64 rows, so that codebooks too can be stacked."""


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


def small(kind: str, **changes: Any) -> Any:
    """A model with random weights, larger than usual so that its tokens differ."""
    torch.manual_seed(0)
    model_type, own = _KINDS[kind]
    since = SINCE.get(model_type, "0")
    if Version(transformers.__version__) < Version(since):
        pytest.skip(f"{model_type} is served from transformers {since} on")
    # Torch's attention knows no softcap, and older versions of transformers choose it all the same.
    options = {"attn_implementation": "eager"} if "attn_logit_softcapping" in own else {}
    config = AutoConfig.for_model(model_type, **sizes(**own | changes))
    model: Any = AutoModelForCausalLM.from_config(config, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.uniform_(-0.5, 0.5)
            elif name.endswith("sinks"):
                parameter.uniform_(-2, 3)
            elif parameter.dim() > 1:
                parameter.mul_(6)
            elif name.endswith("norm.weight"):
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
