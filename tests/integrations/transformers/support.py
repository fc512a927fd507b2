"""Small folders of float models, and comparisons, for the tests next to this file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import qcut

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


def quantized(kind: str = "gpt2", scheme: str = "codebook4_g16", **options: Any) -> Any:
    """That model, quantized."""
    model = small(kind)
    qcut.quantize(model, scheme, progress=False, **options)
    return model


def folder_of(kind: str, tmp_path: Path) -> Path:
    """A folder with that model in float."""
    small(kind).save_pretrained(tmp_path / kind)
    return tmp_path / kind


def opened(folder: Path, **options: Any) -> Any:
    """``AutoModelForCausalLM.from_pretrained``."""
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def hub_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty snapshot of ``someone/small`` in a cache of the hub, which is not asked."""
    from huggingface_hub import constants

    repository = folder / "hub" / "models--someone--small"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(folder / "hub"), raising=False)
    return repository / "snapshots" / ("0" * 40)


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
