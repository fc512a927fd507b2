"""Small models that the quantization tests share."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qcut.numerics.checks import same_values
from tests.support import ROOT


class Block(nn.Module):
    """Pre-norm: ``ln1 -> (q, v) -> proj`` and ``ln2 -> up -> gelu -> down``, each with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.q, self.v = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.proj = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln1(x)
        x = x + self.proj(torch.sigmoid(self.q(h)) * self.v(h).cumsum(1) / 8)
        return x + self.down(nn.functional.gelu(self.up(self.ln2(x))))


class TinyLM(nn.Module):
    """A causal language model with a tied classifier; not of transformers."""

    def __init__(self, width: int = 32, blocks: int = 2, vocabulary: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("gain", torch.tensor([4.0]), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x)) * self.gain


def tiny_lm(**sizes: int) -> TinyLM:
    """`TinyLM` with fixed weights; its blocks, and not its embedding, decide what it predicts."""
    torch.manual_seed(1)
    model = TinyLM(**sizes)
    with torch.no_grad():
        model.embed.weight.mul_(0.15)
        for module in model.modules():
            if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
                module.weight.uniform_(0.5, 1.5)
    return model.eval()


def token_batches(count: int = 3, rows: int = 2, length: int = 16, vocabulary: int = 64) -> list[Tensor]:
    """Seeded token ids."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, vocabulary, (rows, length), generator=generator) for _ in range(count)]


def tiny_hf(kind: str) -> Any:
    """A random GPT-2 or Llama of transformers, built from a configuration."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_head=2, n_layer=2, vocab_size=64, n_positions=32)
        return transformers.GPT2LMHeadModel(config).eval()
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    if kind == "gemma":
        fields = {k: v for k, v in config.to_dict().items() if k not in ("model_type", "head_dim", "architectures")}
        return transformers.GemmaForCausalLM(transformers.GemmaConfig(**fields, head_dim=8)).eval()
    return transformers.LlamaForCausalLM(config).eval()


EMBEDDED = ROOT / "models" / "gpt2-5m"


def small_demo(folder: Path) -> None:
    """Write a random GPT-2 of two narrow blocks, with the tokenizer of the embedded model."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(2)
    config = GPT2Config.from_pretrained(EMBEDDED, n_embd=128, n_head=2, n_layer=2)
    _write(GPT2LMHeadModel(config).half(), folder)


def first_block(folder: Path) -> None:
    """Write the embedded model without all blocks but the first: what it predicts is worse, and no less sensible."""
    from transformers import GPT2LMHeadModel

    _write(GPT2LMHeadModel.from_pretrained(EMBEDDED, n_layer=1, dtype=torch.float16), folder)


def _write(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    for path in EMBEDDED.glob("tokenizer*"):
        shutil.copy(path, folder)


def snapshot(model: nn.Module) -> dict[str, Any]:
    """What a failed call must leave as it was: modules, modes, tensors and their identity."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {
        "modules": [(name, id(module)) for name, module in model.named_modules(remove_duplicate=False)],
        "modes": [module.training for module in model.modules()],
        "tensors": [(name, id(t), t.data_ptr()) for name, t in tensors],
        "values": [t.detach().clone() for _, t in tensors],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
    }


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two snapshots are equal."""
    values = all(same_values(x, y) for x, y in zip(a["values"], b["values"], strict=True))
    return values and all(a[key] == b[key] for key in ("modules", "modes", "tensors", "hooks"))


def inject_outliers(norm: nn.Module, layers: list[Any], factor: float = 64.0) -> None:
    """Multiply three channels of a norm and divide the columns that read them: nothing changes in float."""
    channels = [3, 11, 19]
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter[channels] *= factor
        for layer in layers:
            if isinstance(layer, nn.Linear):
                layer.weight[:, channels] /= factor
            else:
                layer.weight[channels] /= factor
