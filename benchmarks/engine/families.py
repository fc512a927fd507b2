"""Steps of every family of models that the engine runs, at a real size: tokens/s, and the fraction of their floor.

The floor is the time in which the memory delivers a step's weights and its part of the cache once. Each model has one
layer with random weights, quantized to codebook4 and copied, a table and a classifier in w8a16, and logits that are
compared with transformers' on the same modules before anything is timed. Windows, where a model has them, are shorter
than the context.

    python benchmarks engine families [--families qwen3-8b,...] [--batches 1,8]
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import qcut
from benchmarks import harness
from benchmarks.engine.steps import (
    CHECKED,
    NEW,
    PROMPT,
    QUICK_ROUNDS,
    ROUNDS,
    check,
    decode_us,
    prompts_of,
    read_bytes,
    repeat,
)
from benchmarks.harness import CEILINGS, CheckError
from benchmarks.publish import plots

CONTEXT = PROMPT + NEW
KEY = ("family", "batch")


@dataclass(frozen=True)
class Family:
    """A model's shape.

    Attributes:
        model_type: of transformers.
        width, hidden, layers, heads, kv_heads, vocabulary: sizes.
        more: what else its configuration says.
    """

    model_type: str
    width: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    more: dict[str, Any] = field(default_factory=dict)


def _rope(part: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": part}}


_LOCAL = {"head_dim": 256, "sliding_window": PROMPT, "query_pre_attn_scalar": 256}
FAMILIES = {
    "llama-3-8b": Family("llama", 4096, 14336, 32, 32, 8, 128256),
    "qwen2.5-7b": Family("qwen2", 3584, 18944, 28, 28, 4, 152064),
    "qwen3-8b": Family("qwen3", 4096, 12288, 36, 32, 8, 151936, {"head_dim": 128}),
    "mistral-7b": Family("mistral", 4096, 14336, 32, 32, 8, 32000, {"sliding_window": None}),
    "gemma-2b": Family("gemma", 2048, 16384, 18, 8, 1, 256000, {"head_dim": 256}),
    "gemma-2-2b": Family("gemma2", 2304, 9216, 26, 8, 4, 256000, _LOCAL),
    "gemma-3-1b": Family("gemma3_text", 1152, 6912, 26, 4, 1, 262144, _LOCAL),
    "phi-4": Family("phi3", 5120, 17920, 40, 40, 10, 100352),
    "phi-4-mini": Family("phi3", 3072, 8192, 32, 24, 8, 200064, _rope(0.75)),
    "olmo-2-7b": Family("olmo2", 4096, 11008, 32, 32, 32, 100352),
    "smollm3-3b": Family("smollm3", 2048, 11008, 36, 16, 4, 128256),
    "starcoder2-7b": Family("starcoder2", 4608, 18432, 32, 36, 4, 49152, {"sliding_window": None}),
    "pythia-6.9b": Family("gpt_neox", 4096, 16384, 32, 32, 32, 50432, _rope(0.25)),
    "gpt2-xl": Family("gpt2", 1600, 6400, 48, 25, 25, 50257),
    **{
        f"tiny-{kind}": Family(kind, 128, 256, 2, 4, 4, 96, {"head_dim": 32, "sliding_window": None})
        for kind in ("llama", "gpt_neox")
    },
}
"""The first is what the others are compared with. The tiny ones are for machines without a GPU."""


def build(family: Family, device: str) -> Any:
    """The model: one layer is quantized and copied, so that a large model takes no longer than a small one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": family.width, "intermediate_size": family.hidden, "num_attention_heads": family.heads}
    sizes |= {"num_key_value_heads": family.kv_heads, "vocab_size": family.vocabulary, "num_hidden_layers": 1}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "max_position_embeddings": 4 * CONTEXT}
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float16 if device == "cuda" else torch.float32)
    try:
        with torch.device(device):
            config = AutoConfig.for_model(family.model_type, **sizes, **ends, **family.more)
            model: Any = AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.eval()
    model.tie_weights()
    embeddings = "w8a16" if type(model.get_input_embeddings()) is nn.Embedding else None
    rows = [1, CHECKED - 1, CHECKED, PROMPT]
    qcut.quantize(model, "codebook4", embeddings=embeddings, prebuild=rows, progress=sys.stderr.isatty())
    (layers,) = (m for m in model.base_model.children() if isinstance(m, nn.ModuleList))
    repeat(model, layers, family.layers)
    return model


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--families", default=",".join(f for f in FAMILIES if "tiny" not in f), help="comma-separated")
    parser.add_argument("--batches", default="1,8", help="sequences at once, comma-separated")


@harness.script(harness.timing_options, add_options, time_budget=540.0)
def main(options: argparse.Namespace) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    deadline = time.monotonic() + options.time_budget
    results = harness.Results("bench_families", harness.environment())
    ceiling = CEILINGS.get(results.env.gpu)
    rows: list[list[object]] = []
    failures = 0
    prompt, new = (PROMPT, NEW) if device == "cuda" else (16, 4)
    batches = [int(word) for word in options.batches.split(",")]
    for name in options.families.split(","):
        if time.monotonic() > deadline:
            print(f"out of time before {name}", file=sys.stderr)
            break
        family = FAMILIES[name]
        model = build(family, device)
        engine = qcut.Engine(model, batch=max(batches), context=CONTEXT)
        try:
            check(engine, model, prompts_of(family.vocabulary, 1, min(prompt, CHECKED)))
        except CheckError as error:
            print(f"WRONG {name}: {error}")
            failures += 1
            continue
        for batch in batches:
            prompts = prompts_of(family.vocabulary, batch, prompt)
            share = batch * (prompt + new // 2) / (max(batches) * (CONTEXT + 1))
            moved = read_bytes(model) + engine.cache.nbytes * share
            floor = moved / ceiling.read_bytes * 1e6 if ceiling else math.nan
            timing = decode_us(engine, prompts, new, QUICK_ROUNDS if options.quick else ROUNDS)
            fraction = floor / timing.median_us
            columns = {"tokens_s": round(batch / timing.median_us * 1e6), "gb": round(moved / 1e9, 4)}
            columns |= {"floor_us": round(floor, 2), "fraction": round(fraction, 4)}
            results.add(timing, family=name, batch=batch, device=device, **columns)
            rows.append([name, batch, columns["tokens_s"], timing.median_us, floor, fraction])
            results.write_csv(options.out, KEY)
        del model, engine
        if device == "cuda":
            torch.cuda.empty_cache()
    print(harness.table(["model", "batch", "tokens/s", "us a step", "floor us", "of the floor"], rows))
    if ceiling and rows:
        draw(options.out)
    return 1 if failures else 0


def draw(folder: Path) -> None:
    """A plot of the fractions of the floor, by family and batch, from the rows in a folder."""
    reached: dict[str, dict[str, float]] = {}
    for row in harness.read_rows(folder / "bench_families.csv"):
        reached.setdefault(row["family"], {})[f"batch {row['batch']}"] = float(row["fraction"])
    batches = dict.fromkeys(batch for found in reached.values() for batch in found)
    series = {batch: [found.get(batch, math.nan) for found in reached.values()] for batch in batches}
    title = "Memory limit over the time of a step"
    plots.ratios(folder / "bench_families", list(reached), series, title, "fraction of the floor")
