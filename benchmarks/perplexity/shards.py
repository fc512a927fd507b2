"""Answers of a Llama with int8 tokens quantized in tensor-parallel shards, against those of whole tokens.

    python benchmarks perplexity shards --model DIR [--parts 2]

Tensor parallelism shards the inputs of ``o_proj`` and ``down_proj``, and each GPU has its own scale for its slice of a
token. This script does the same on the CPU in float32, where only the int8 rounding differs. It also compares the
scheme with the float model. Prompts and counts are those of ``engine/vllm.py --parallel``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import qcut
from benchmarks.engine.vllm import ANSWER, gaps_between, prompts_of
from benchmarks.harness import RESULTS, Results, environment, script, table
from qcut.layers.parallel import part_scheme
from qcut.schemes import parse_scheme

SCHEMES = ("w8a8", "codebook4_g64_int8")
CUT = ("o_proj", "down_proj")
KEY = ("model", "scheme", "parts", "beside")


class Parts(nn.Module):
    """A layer cut by input channels: the sum of its parts' results.

    Args:
        linear: float, without bias.
        scheme: of the whole layer.
        count: parts of equal width.
    """

    def __init__(self, linear: nn.Linear, scheme: str, count: int) -> None:
        super().__init__()
        self.width = linear.in_features // count
        absmax = linear.weight.detach().abs().amax(1)
        self.parts = nn.ModuleList()
        for index, weight in enumerate(linear.weight.detach().split(self.width, 1)):
            part = nn.Linear(self.width, linear.out_features, bias=False)
            part.weight = nn.Parameter(weight.clone(), requires_grad=False)
            own = part_scheme(parse_scheme(scheme), index * self.width, self.width)
            self.parts.append(qcut.Linear.from_float(part, own, row_absmax=absmax))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., N]`` of x ``[..., K]``."""
        pairs = zip(self.parts, x.split(self.width, -1), strict=True)
        return cast(Tensor, sum(part(own) for part, own in pairs))


def load(folder: Path, scheme: str | None = None, parts: int = 1) -> Any:
    """The model in float32, quantized, its layers in `CUT` in so many parts."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    cut = {name: m for name, m in model.named_modules() if name.endswith(CUT)} if parts > 1 else {}
    if scheme is not None:
        qcut.quantize(model, scheme, progress=False)
    for name, linear in cut.items():
        model.set_submodule(name, Parts(linear, cast(str, scheme), parts))
    return model


@torch.no_grad()
def answers(model: Any) -> list[dict[str, Any]]:
    """Tokens of each answer, and the gap between the log-probabilities of the two likeliest at each."""
    found = []
    for prompt in prompts_of(model.config.vocab_size):
        end: Any = {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER, "eos_token_id": None, "pad_token_id": 0}
        made = model.generate(
            torch.tensor([prompt]), do_sample=False, output_logits=True, return_dict_in_generate=True, **end
        )
        two = [logits[0].log_softmax(-1).topk(2).values for logits in made.logits]
        gaps = [float(best - second) for best, second in two]
        found.append({"tokens": made.sequences[0, len(prompt) :].tolist(), "gaps": gaps})
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="folder of a Llama")
    parser.add_argument("--schemes", default=",".join(SCHEMES), help="comma-separated")
    parser.add_argument("--parts", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)


@script(add_options)
def main(options: argparse.Namespace) -> int:
    """Count the answers that are the same."""
    results = Results("split_answers", environment())
    lines: list[list[object]] = []
    floats = answers(load(options.model))
    for scheme in options.schemes.split(","):
        whole = answers(load(options.model, scheme))
        split = answers(load(options.model, scheme, options.parts))
        for beside, pair in {"in parts": (whole, split), "the float model": (whole, floats)}.items():
            gaps = gaps_between(*pair)
            same, gap = len(whole) - len(gaps), round(max(gaps, default=0.0), 4)
            columns = {"model": options.model.name, "scheme": scheme, "parts": options.parts, "beside": beside}
            results.rows.append({"bench": results.bench, **columns, "same": same, "of": len(whole), "gap": gap})
            lines.append([scheme, beside, same, gap])
    path = results.write_csv(options.out, KEY)
    print(table(["scheme", "beside", "same", "gap"], lines))
    print(f"rows in {path}")
    return 0
