"""Tiny mixtures of experts of transformers, of families that store and compute them in different ways."""

from __future__ import annotations

from typing import Any

import torch
import transformers

import qcut

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_FOUR = {"num_experts": 4, "num_experts_per_tok": 2}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GROUPS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
_FULL = ["full_attention", "full_attention"]
OPTIONS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {**_FOUR, "moe_intermediate_size": 32, "head_dim": 32},  # the usual names
    "Mixtral": _LOCAL,  # other names for what experts are in, and for their layers
    "GraniteMoe": _LOCAL,  # stored in three dimensions, under other names
    "GptOss": {**_LOCAL, "head_dim": 32, "layer_types": _FULL},  # transposed, interleaved, with biases
    "DeepseekV3": {**_GROUPS, **_LATENT, "first_k_dense_replace": 1},  # one dense layer, shared experts
    "Qwen2Moe": {**_FOUR, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "NemotronH": {  # no gate
        **_GROUPS,
        "head_dim": 32,
        "layers_block_type": ["attention", "moe"],
        "moe_shared_expert_intermediate_size": 32,
    },
    "Phimoe": _LOCAL,
}
FAMILIES = list(OPTIONS)


def mixture(family: str = "Qwen3Moe", **changes: Any) -> Any:
    """A random causal model of a family."""
    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(**{**_SIZES, **OPTIONS[family], **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("_bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def quantized_mixture(family: str = "Qwen3Moe", scheme: str = "codebook4_g32", **options: Any) -> Any:
    """That model, quantized, its experts among the rest."""
    model = mixture(family)
    qcut.quantize(model, scheme, allow_growth=True, progress=False, **options)
    return model
