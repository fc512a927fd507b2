"""Train LoRA adapters over a quantized GPT-2, and compare with the same adapters over its float weights.

    pip install peft
    python examples/lora.py                                    # float, w8a8 and codebook4: 20 s on a CPU
    python examples/lora.py --steps 200 codebook4_int8         # more steps, another scheme
    python examples/lora.py --plot losses.png                  # the curves, with matplotlib

The training text is the beginning of LICENSE, repeated. The quantized weights are frozen; the adapters are about
130,000 float parameters.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import fmean

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import qcut
from qcut.common.progress import with_progress

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "gpt2-5m"
TEXT = ROOT / "LICENSE"
WINDOWS, LENGTH, ROWS = 8, 64, 2
EPOCH = WINDOWS // ROWS


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("schemes", nargs="*", default=["w8a8", "codebook4"], help="of linear layers [w8a8 codebook4]")
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="of two windows of 64 tokens each [40]")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses: .png, .svg or .pdf")
    args = parser.parse_args(argv)

    losses = {name: train(name, args.steps) for name in ("float", *args.schemes)}
    starts = range(0, args.steps, EPOCH)
    epochs = {name: [fmean(of[at : at + EPOCH]) for at in starts] for name, of in losses.items()}
    print(f"{'epoch':>6}" + "".join(f"{name:>18}" for name in losses))
    for epoch, means in enumerate(zip(*epochs.values(), strict=True)):
        print(f"{epoch:>6}" + "".join(f"{mean:>18.3f}" for mean in means) + "  " + "▪" * round(8 * means[-1]))
    if args.plot:
        draw(losses, args.plot)
    return losses


def train(name: str, steps: int) -> list[float]:
    """The loss at every step of training adapters over a model of this scheme."""
    device, dtype = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype).to(device)
    if name != "float":
        # An adapter's product is added before the activation, so no quantized layer may fuse one.
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
    ids = torch.tensor(AutoTokenizer.from_pretrained(MODEL)(TEXT.read_text(), verbose=False)["input_ids"])
    windows = ids[: WINDOWS * LENGTH].view(EPOCH, ROWS, LENGTH)
    return [windows[step % EPOCH] for step in range(steps)]


def draw(losses: dict[str, list[float]], path: Path) -> None:
    """A curve for each model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, of in losses.items():
        axes.plot(of, "k--" if name == "float" else "-", label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    print(f"drawn: {path}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # products this small gain nothing from more threads
    main(sys.argv[1:])
