"""Train LoRA adapters over a quantized GPT-2, beside the same adapters over its float weights.

    pip install peft
    python examples/lora.py                       # w8a8 and codebook4 beside float32: minutes on a few CPU cores
    python examples/lora.py 200 codebook4_int8    # other steps, other schemes

The text is the beginning of this repository's page on schemes, read again and again. The quantized weights stay as they
are; the adapters are some 130,000 float parameters.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import qcut
from qcut.process.progress import with_progress

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "gpt2-5m"
PAGE = ROOT / "docs" / "schemes.md"
WINDOWS, LENGTH, ROWS = 8, 64, 2
EPOCH = WINDOWS // ROWS


def main(steps: int = 40, *schemes: str) -> dict[str, list[float]]:
    losses = {name: train(name, steps) for name in ("float32", *(schemes or ("w8a8", "codebook4")))}
    print(f"{'epoch':>6}" + "".join(f"{name:>18}" for name in losses))
    for epoch in range(steps // EPOCH):
        means = [sum(of[epoch * EPOCH :][:EPOCH]) / EPOCH for of in losses.values()]
        print(f"{epoch:>6}" + "".join(f"{mean:>18.3f}" for mean in means) + "  " + "▪" * round(8 * means[-1]))
    return losses


def train(name: str, steps: int) -> list[float]:
    """The loss at every step, of adapters over a model of this scheme."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(MODEL).to(device)
    if name != "float32":
        # Adapters come before an activation, so that no quantized layer may compute one itself.
        qcut.quantize(model, name, fuse=False, progress=False)
        qcut.enable_input_gradients(model)
    torch.manual_seed(0)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True)
    adapted = get_peft_model(model, config).train()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for batch in with_progress(batches(steps), name, "step", shown=True):
        loss = adapted(input_ids=batch.to(device), labels=batch.to(device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def batches(steps: int) -> list[Tensor]:
    """Token ids of the text, ``[ROWS, LENGTH]`` each, the same for every model."""
    ids = torch.tensor(AutoTokenizer.from_pretrained(MODEL)(PAGE.read_text(), verbose=False)["input_ids"])
    windows = ids[: WINDOWS * LENGTH].view(EPOCH, ROWS, LENGTH)
    return [windows[step % EPOCH] for step in range(steps)]


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40, *sys.argv[2:])
