"""Small folders of float models, and comparisons, for the tests beside this file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

IDS = torch.arange(1, 13).view(1, 12)


def small(kind: str) -> Any:
    """A random model of GPT-2 (tied classifier, ``Conv1D``, activations to fuse) or Llama (neither)."""
    torch.manual_seed(3)
    common = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64, **common)).eval()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(num_key_value_heads=2, max_position_embeddings=64, **sizes, **common)
    return LlamaForCausalLM(config).eval()


def folder_of(kind: str, tmp_path: Path) -> Path:
    """A folder with that model in float."""
    small(kind).save_pretrained(tmp_path / kind)
    return tmp_path / kind


def opened(folder: Path, **options: Any) -> Any:
    """``AutoModelForCausalLM.from_pretrained``."""
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    """The model's logits, without gradients."""
    with torch.no_grad():
        return model(ids).logits


def same(one: Any, other: Any) -> bool:
    """Whether two models have the same state, of the same modules, and compute the same logits, bit by bit."""
    mine, its = one.state_dict(), other.state_dict()
    modules = [(name, type(module)) for name, module in one.named_modules()]
    return (
        list(mine) == list(its)
        and all(mine[key].dtype == its[key].dtype and torch.equal(mine[key], its[key]) for key in mine)
        and modules == [(name, type(module)) for name, module in other.named_modules()]
        and torch.equal(logits(one), logits(other))
    )
