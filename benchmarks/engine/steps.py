"""`qcut.Engine` on models of known shapes with random weights: prefill, first token, decode, and time by kernel.

The first token is timed by the host's clock, from the prompt as a list of ids to the token. Decoding is timed as a user
sees it: the time of generating many tokens less that of one, divided by the number of further tokens. The floor of a
step is the time to read the weights, and the cache at half of the new tokens, at the GPU's measured bandwidth. A step
is also timed in engines of the shortest and the longest context, which is to make no difference.
"""

from __future__ import annotations

import argparse
import copy
import csv
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import qcut
from benchmarks import harness
from benchmarks.harness import CEILINGS, CheckError, Timing
from benchmarks.publish import plots
from qcut.layers.experts.linear_stack import LinearStack

PROMPT, NEW = 256, 256
ROUNDS, QUICK_ROUNDS = 5, 2
SETTLE_S, SAMPLED_S = 0.1, 0.1
"""Seconds of calls before those that are counted, and of those, at least."""
KEY = ("case", "what", "batch")
"""Rows that a call does not measure stay."""
CONTEXTS_OF = (1, 8)
"""Numbers of sequences; their steps are timed in a short and a long context."""
IN_CONTEXT = "decode in a context of "
"""Prefix of these rows' ``what``, before the number of tokens."""
CHECKED = 64
"""Tokens of the prompt that results are compared on."""
MIN_COSINE, MIN_COSINE_ROUTED = 0.999, 0.998
"""Between the engine's logits and those of transformers running the same modules; see `NOISE`. In a mixture two experts
of nearly equal logits may change places.
"""
NOISE = 2.0
"""Or how many times further from transformers' logits than those are from its own with another kernel for attention: a
bit that differs before int8 activations may be a step of 1/127 after them, in every layer.
"""


@dataclass(frozen=True)
class Case:
    """A model of a shape.

    Attributes:
        gpt2: GPT-2; else of Llama's shape.
        width, hidden, layers, heads, kv_heads, vocabulary: sizes.
        scheme: of the linear layers, or None.
        embeddings: scheme of tables and head, or None.
        decode: tokens/s to reach, by batch.
        prefill: tokens/s to reach, by batch and prompt.
        first: milliseconds to the first token to reach, by batch and prompt.
        experts: of a mixture: number, those of a token, and their width; Qwen3's shape then, ``hidden`` is unused.
        gpt_oss: GPT-OSS's shape instead: windows in every second layer.
        skip: globs of layers that stay in float; None: those of `qcut.quantize`.
    """

    gpt2: bool
    width: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    scheme: str | None
    embeddings: str | None
    decode: dict[int, float]
    prefill: dict[tuple[int, int], float]
    first: dict[tuple[int, int], float] = field(default_factory=dict)
    experts: tuple[int, int, int] | None = None
    gpt_oss: bool = False
    skip: tuple[str, ...] | None = None

    @property
    def head(self) -> int:
        """Columns of a head of a mixture."""
        return min(64 if self.gpt_oss else 128, self.width // 2)


def _llama3(scheme: str, decode: dict[int, float], first: dict[int, float], embeddings: str = "w8a16") -> Case:
    waits = {(1, length): first.get(length, 0.0) for length in (1, 32, 256, 4096)}
    prefill: dict[tuple[int, int], float] = {(1, PROMPT): 0, (8, PROMPT): 0}
    return Case(False, 4096, 14336, 32, 32, 8, 128256, scheme, embeddings, decode, prefill, waits)


def _llama2c(width: int, hidden: int, layers: int, heads: int, scheme: str | None, decode: float) -> Case:
    return Case(False, width, hidden, layers, heads, heads, 32000, scheme, scheme, {1: decode}, {(1, PROMPT): 0})


def _qwen3_moe(scheme: str, embeddings: str = "w8a16") -> Case:
    decode = {1: 650.0, 2: 0.0, 4: 0.0, 8: 2600.0, 16: 0.0, 32: 0.0, 64: 9000.0}
    first = {(1, 256): 12.0, (1, 4096): 110.0}
    sizes = 2048, 768, 48, 32, 4, 151936
    return Case(False, *sizes, scheme, embeddings, decode, {}, first, (128, 8, 768))


def _gpt_oss(scheme: str, embeddings: str | None = "w8a16", skip: tuple[str, ...] | None = None) -> Case:
    decode = dict.fromkeys((1, 2, 4, 8, 16, 32, 64), 0.0)
    first = {(1, 256): 0.0, (1, 4096): 0.0}
    sizes = 2880, 2880, 24, 64, 8, 201088
    return Case(False, *sizes, scheme, embeddings, decode, {}, first, (32, 4, 2880), gpt_oss=True, skip=skip)


_GPT2_MARKS: dict[str, Any] = {"decode": {1: 2000, 8: 10600}, "prefill": {(8, 1024): 450_000}}
_GPT2_MARKS["first"] = {(1, 256): 4.0, (8, 1024): 15.5}
_BATCHES = {1: 715.0, 2: 0.0, 4: 0.0, 8: 4150.0, 16: 0.0, 32: 0.0, 64: 0.0}
CASES = {
    "gpt2-large-int8": Case(True, 1280, 5120, 36, 20, 20, 50257, "w8a8", "w8a16", **_GPT2_MARKS),
    "llama-3-8b-codebook4": _llama3("codebook4", _BATCHES, {1: 3, 32: 3, 256: 9}),
    "llama-3-8b-codebook4-int8": _llama3("codebook4_int8", {1: 715, 8: 4150}, {1: 3, 32: 3, 256: 6, 4096: 60}),
    "llama-3-8b-codebook4-head": _llama3("codebook4", {1: 0, 8: 0}, {}, "codebook4"),
    "llama-3-8b-int8": _llama3("w8a8", {1: 495, 8: 3500}, {1: 3, 32: 3, 256: 6}),
    "llama-3-8b-int8-rotated": _llama3("w8a8_rotated", {1: 0, 8: 0}, {}),
    "llama2c-288": _llama2c(288, 768, 6, 6, "w8a16", 12000),
    "llama2c-512": _llama2c(512, 1376, 8, 8, "w8a16", 9500),
    "llama2c-288-float": _llama2c(288, 768, 6, 6, None, 0),
    "qwen3-30b-a3b-codebook4": _qwen3_moe("codebook4"),
    "qwen3-30b-a3b-codebook4-head": _qwen3_moe("codebook4", "codebook4"),
    "qwen3-30b-a3b-codebook4-int8": _qwen3_moe("codebook4_int8"),
    "qwen3-30b-a3b-int8": _qwen3_moe("w8a8"),
    "olmoe-1b-7b-codebook4": Case(
        False, 2048, 1024, 16, 16, 16, 50304, "codebook4", "w8a16", {1: 1800}, {}, experts=(64, 8, 1024)
    ),
    "gpt-oss-20b-codebook4": _gpt_oss("codebook4"),
    "gpt-oss-20b-codebook4-g64": _gpt_oss("codebook4_g64"),
    "gpt-oss-20b-codebook4-g64-head": _gpt_oss("codebook4_g64", "codebook4_g64"),
    # As published: only the experts have 4 bits.
    "gpt-oss-20b-mxfp4": _gpt_oss("mxfp4", None, ("*.self_attn.*", "lm_head")),
    "tiny-gpt2": Case(True, 64, 256, 2, 4, 4, 96, "w8a8", None, {1: 0}, {(2, 32): 0}, {(2, 32): 0}),
    "tiny-mixture": Case(
        False, 128, 64, 2, 4, 2, 96, "codebook4", "w8a16", {1: 0, 2: 0}, {(1, 32): 0}, experts=(8, 2, 64)
    ),
    "tiny-gpt-oss": Case(
        False, 128, 64, 4, 4, 2, 96, "codebook4", "w8a16", {1: 0, 2: 0}, {(1, 32): 0}, {}, (8, 2, 64), gpt_oss=True
    ),
    "tiny-llama": Case(False, 128, 256, 2, 4, 2, 96, "codebook4", "w8a16", {1: 0, 2: 0}, {(1, 32): 0}),
}
"""Marks are tokens/s; 0 if none is set. The tiny cases are for machines without a GPU."""


def build(case: Case, device: str, context: int = 8192, *, counts: bool = False) -> Any:
    """Build the model: one layer is quantized and copied, so that a large model takes no longer than a small one.

    Of GPT-OSS it is two, one with a window and one without. A Llama is one that was made for ``context`` tokens.

    Args:
        case: sizes and schemes.
        device: of the model.
        context: most tokens of a sequence.
        counts: the likeliest token is the id after the last token's, by far, or with tied embeddings the same id:
            other orders of sums choose no other one.
    """
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        GptOssConfig,
        GptOssForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    torch.manual_seed(0)
    sizes = {"vocab_size": case.vocabulary, "num_hidden_layers": 1, "bos_token_id": None, "eos_token_id": None}
    model: Any
    torch.set_default_dtype(torch.float16 if device == "cuda" else torch.float32)
    try:
        with torch.device(device):
            if case.gpt2:
                heads = {"n_embd": case.width, "n_inner": case.hidden, "n_head": case.heads}
                model = GPT2LMHeadModel(GPT2Config(**sizes, **heads))
            else:
                llama: dict[str, Any] = {
                    "hidden_size": case.width,
                    "intermediate_size": case.hidden,
                    "max_position_embeddings": context,
                }
                llama |= {"num_attention_heads": case.heads, "num_key_value_heads": case.kv_heads}
                if case.experts is None:
                    model = LlamaForCausalLM(LlamaConfig(**sizes, **llama))
                elif case.gpt_oss:
                    names = ("num_local_experts", "num_experts_per_tok", "intermediate_size")
                    llama |= {**dict(zip(names, case.experts, strict=True)), "head_dim": case.head}
                    rope = {"rope_type": "yarn", "rope_theta": 150000.0, "original_max_position_embeddings": 4096}
                    llama["rope_parameters"] = {**rope, "factor": max(1.0, context / 4096), "truncate": False}
                    model = GptOssForCausalLM(GptOssConfig(**sizes | llama | {"num_hidden_layers": 2}))
                else:
                    names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
                    llama |= {**dict(zip(names, case.experts, strict=True)), "norm_topk_prob": True}
                    llama["head_dim"] = case.head
                    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **llama))
    finally:
        torch.set_default_dtype(torch.float32)
    model.eval()
    model.tie_weights()
    if counts:
        _make_count(model)
    if case.scheme is not None:
        check = (CHECKED, CHECKED - 1)
        rows = sorted({*case.decode, *(batch * length for batch, length in (*case.prefill, *case.first)), *check})
        shown = sys.stderr.isatty()
        qcut.quantize(model, case.scheme, skip=case.skip, embeddings=case.embeddings, prebuild=rows, progress=shown)
    repeat(model, layers_of(model), case.layers)
    return model


@torch.no_grad()
def _make_count(model: Any) -> None:
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if head is not table:
        head.copy_(table.roll(1, 0))
    table.mul_(100 if head is table else 1000)  # far more than layers add to it


def repeat(model: Any, layers: nn.ModuleList, count: int) -> None:
    """Copy a model's layers in turn until there are so many."""
    first, types = len(layers), getattr(model.config, "layer_types", None)
    for index in range(first, count):
        layers.append(copy.deepcopy(layers[index % first]))
        for module in layers[index].modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index  # type: ignore[assignment]
            if hasattr(module, "config"):
                module.config = model.config  # the copies have copies of it
    model.config.num_hidden_layers = count
    if types:
        model.config.layer_types = [types[index % first] for index in range(count)]


def layers_of(model: Any) -> nn.ModuleList:
    """The decoder's blocks."""
    layers: nn.ModuleList = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    return layers


def read_bytes(model: Any, batch: int = 1) -> int:
    """Bytes of weights that one step reads: all weights except embeddings, since a step reads only single rows of them.

    Of a codebook's norms, which a layer keeps twice, a step reads those that are packed for kernels. Of experts, each
    as likely as any other, it reads those that a batch reaches.
    """
    head = {id(t) for t in _tensors(model.get_output_embeddings())}
    tables = [model.get_input_embeddings(), getattr(model.base_model, "wpe", None)]
    skipped = {id(t) for m in tables if m is not None for t in _tensors(m)} - head
    stacks = [m for m in model.modules() if isinstance(m, LinearStack)]
    skipped |= {id(m.norms) for m in (*model.modules(), *stacks) if hasattr(m, "packed_norms")}
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    read = sum(t.nbytes for key, t in tensors.items() if key not in skipped)
    if stacks:
        missed = (1 - model.config.num_experts_per_tok / stacks[0].experts) ** batch
        read -= round(missed * sum(t.nbytes for m in stacks for t in _tensors(m) if id(t) not in skipped))
    return read


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def prompts_of(vocabulary: int, batch: int, length: int) -> list[list[int]]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(length)
    found: list[list[int]] = torch.randint(0, vocabulary, (batch, length), generator=generator).tolist()
    return found


def check(engine: qcut.Engine, model: Any, prompts: list[list[int]]) -> None:
    """Raise `CheckError` unless prompt and step give the logits of transformers on the same modules; NaN raises."""
    ids = torch.tensor(prompts, device=next(model.parameters()).device)
    is_mixture = any(isinstance(module, LinearStack) for module in model.modules())
    engine.prefill(ids[:, :-1])
    for got, length in ((engine.prefill(ids[:, :-1]), -1), (engine.decode(ids[:, -1]), ids.shape[1])):
        # torch's kernel has no sinks: of models with these, transformers has no other attention without a compiler.
        kinds = ("sdpa" if model._supports_sdpa else "eager", "eager")
        want, again = (theirs(model, ids[:, :length], kind) for kind in kinds)
        noise = 1 - cosine(want, again)
        least = 1 - max(1 - (MIN_COSINE_ROUTED if is_mixture else MIN_COSINE), NOISE * noise)
        found = cosine(got, want)
        if not found >= least:
            raise CheckError(f"logits have cosine {found:.5f} with transformers'; allowed from {least:.5f} on")


def theirs(model: Any, ids: torch.Tensor, attention: str) -> torch.Tensor:
    """transformers' logits of the last token, with its attention of that name."""
    before = model.config._attn_implementation
    model.set_attn_implementation(attention)
    try:
        logits: torch.Tensor = model(ids, use_cache=False).logits[:, -1]
    finally:
        model.set_attn_implementation(before)
    return logits


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the smallest cosine of corresponding rows."""
    return nn.functional.cosine_similarity(a.double(), b.double()).min().item()


def wall_us(call: Callable[[], object], rounds: int) -> list[float]:
    """Microseconds of calls, each with the device's work: at least ``rounds``, and as many as fit into `SAMPLED_S`.

    Calls before them, for `SETTLE_S`, are not counted: a device that was idle takes that long to reach its clocks.
    """
    samples: list[float] = []
    begin = time.perf_counter()
    settled = 0
    while len(samples) < settled + rounds or time.perf_counter() - begin < SETTLE_S + SAMPLED_S:
        start = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) * 1e6)
        if time.perf_counter() - begin < SETTLE_S or not settled:
            settled = len(samples)
    return samples[settled:]


def decode_us(engine: qcut.Engine, prompts: list[list[int]], new: int, rounds: int) -> Timing:
    """Microseconds of one step, by the host's clock: of ``new`` tokens less the least of one, divided."""
    one = min(wall_us(lambda: engine.generate(prompts, 1), rounds))
    many = wall_us(lambda: engine.generate(prompts, new), rounds)
    return Timing.of([(us - one) / (new - 1) for us in many], "wall")


KINDS = {
    "attention": ("attention_decode", "attention_mma", "attention_append"),
    "rotary positions, cache": ("qcut_append",),
    "norms": ("qcut_norm",),
    "embeddings": ("qcut_embed",),
    "argmax": ("qcut_argmax", "qcut_accept"),
    "activations": ("silu_mul", "gelu_tanh"),
    "rotations, int8": ("qcut_rotate", "qcut_quantize"),
    "routes": ("route",),
    "projections": ("qcut_", "gemm", "gemv", "cutlass", "nvjet", "splitK"),
}
"""What a kernel is, by parts of its name; the first that fits, else ``other``."""


def kind_of(kernel: str) -> str:
    """The key of `KINDS`."""
    return next((kind for kind, parts in KINDS.items() if any(part in kernel for part in parts)), "other")


def kernels_of(engine: qcut.Engine, prompts: list[list[int]], steps: int = 8) -> dict[str, tuple[float, float]]:
    """Launches and device microseconds a step of each kernel, by its name."""
    engine.prefill(prompts)
    tokens = [0] * len(prompts)
    engine.decode(tokens)
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(steps):
            engine.decode(tokens)
        torch.cuda.synchronize()
    found: dict[str, tuple[float, float]] = {}
    for event in prof.events():
        if event.device_type == DeviceType.CUDA:
            count, us = found.get(event.name, (0.0, 0.0))
            found[event.name] = count + 1 / steps, us + event.time_range.elapsed_us() / steps
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", default=",".join(c for c in CASES if "tiny" not in c), help="comma-separated")
    harness.device_option(parser)
    parser.add_argument("--steps", action="store_true", help="only decode steps, no prompts")
    parser.add_argument("--draw", action="store_true", help="table and plot of the rows in --out, nothing measured")


@harness.script(harness.timing_options, add_options, time_budget=300.0)
def main(options: argparse.Namespace) -> int:
    """Run the benchmark; 1 if a result was wrong. A CPU runs the tiny models."""
    if options.draw:
        draw(options.out)
        return 0
    device = options.device
    deadline = time.monotonic() + options.time_budget
    results = harness.Results("bench_engine", harness.environment())
    ceiling = CEILINGS.get(results.env.gpu)
    rows: list[list[object]] = []
    failures = 0
    rounds = QUICK_ROUNDS if options.quick else ROUNDS

    def add(timing: Timing, name: str, what: str, batch: int, tokens: int, mark: float, **more: object) -> None:
        rate = tokens / timing.median_us * 1e6
        columns = {"tokens_s": round(rate), "mark": round(mark) or "", **more}
        results.add(timing, case=name, what=what, batch=batch, device=device, **columns)
        verdict = "" if not mark else "reached" if rate >= mark else "NOT reached"
        rows.append([name, what, batch, rate, mark or math.nan, verdict, more.get("floor_us", math.nan)])
        results.write_csv(options.out, KEY)

    for name in options.cases.split(","):
        if time.monotonic() > deadline:
            print(f"out of time before {name}", file=sys.stderr)
            break
        case, (prompt, new) = CASES[name], (PROMPT, NEW) if device == "cuda" else (32, 8)
        if options.steps:
            case = replace(case, prefill={}, first={})
        model = build(case, device)
        sizes = [*case.prefill, *case.first]
        context = max([prompt + new, *(length for _, length in sizes)])
        biggest = max([*case.decode, *(batch for batch, _ in sizes)])
        engine = qcut.Engine(model, batch=biggest, context=context)
        try:
            check(engine, model, prompts_of(case.vocabulary, 1, min(prompt, CHECKED)))
        except CheckError as error:
            print(f"WRONG {name}: {error}")
            failures += 1
            continue
        for (batch, length), mark in case.prefill.items():
            ids = torch.tensor(prompts_of(case.vocabulary, batch, length), device=device)
            samples = wall_us(functools.partial(engine.prefill, ids), rounds)
            add(Timing.of(samples, "wall"), name, f"prefill of {length}", batch, batch * length, mark)
        for (batch, length), ms in case.first.items():
            prompts = prompts_of(case.vocabulary, batch, length)
            samples = wall_us(functools.partial(engine.generate, prompts, 1), rounds)
            mark = batch * length / ms * 1e3 if ms else 0.0
            add(Timing.of(samples, "wall"), name, f"first token after {length}", batch, batch * length, mark)
        for batch, mark in case.decode.items():
            prompts = prompts_of(case.vocabulary, batch, prompt)
            moved = read_bytes(model, batch) + engine.cache.nbytes * batch * (prompt + new // 2) / (
                biggest * (context + 1)
            )
            floor = moved / ceiling.read_bytes * 1e6 if ceiling else math.nan
            timing = decode_us(engine, prompts, new, rounds)
            add(timing, name, "decode", batch, batch, mark, gb=round(moved / 1e9, 4), floor_us=round(floor, 2))
            if device == "cuda":
                breakdown(engine, prompts, results, name, batch)
        limit = engine.decoder.context
        del engine
        of = [batch for batch in case.decode if batch in CONTEXTS_OF]
        for batch, context in itertools.product(of, (prompt + new, limit)):
            timed = qcut.Engine(model, batch=batch, context=context)
            timing = decode_us(timed, prompts_of(case.vocabulary, batch, prompt), new, rounds)
            add(timing, name, f"{IN_CONTEXT}{context}", batch, batch, 0.0)
            del timed
        del model
        if device == "cuda":
            torch.cuda.empty_cache()
    path = results.write_csv(options.out, KEY)
    print(harness.table(["model", "what", "batch", "tokens/s", "to reach", "", "floor us"], rows))
    draw(options.out)
    print(f"rows in {path}")
    return 1 if failures else 0


def breakdown(engine: qcut.Engine, prompts: list[list[int]], results: harness.Results, name: str, batch: int) -> None:
    """A row for each kernel of a step."""
    for kernel, (count, us) in sorted(kernels_of(engine, prompts).items(), key=lambda item: -item[1][1]):
        columns = {"kernel": kernel[:160], "kind": kind_of(kernel), "launches": round(count, 2)}
        results.add(Timing.of([us], "profiler"), case=name, what="kernel", batch=batch, **columns)


def draw(folder: Path) -> None:
    """Table and plot of a step's microseconds by kind of kernel, from the rows in a folder."""
    with (folder / "bench_engine.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    parts: dict[str, dict[str, float]] = {}
    ticks: dict[str, dict[str, float]] = {"floor": {}, "step, measured": {}}
    for step in (row for row in rows if row["what"] == "decode"):
        found: dict[str, float] = {}
        for row in rows:
            if (row["what"], row["case"], row["batch"]) == ("kernel", step["case"], step["batch"]):
                found[row["kind"]] = found.get(row["kind"], 0.0) + float(row["median_us"])
        if found:
            # Kernels overlap under dependent launch, so that their sum may exceed the step.
            found["between kernels"] = max(0.0, float(step["median_us"]) - sum(found.values()))
            label = f"{step['case']}, batch {step['batch']}"
            parts[label] = found
            ticks["floor"][label], ticks["step, measured"][label] = float(step["floor_us"]), float(step["median_us"])
    if not parts:
        return
    kinds = [*KINDS, "other", "between kernels"]
    table = [
        [label, *(found.get(kind, 0.0) for kind in kinds), *(places[label] for places in ticks.values())]
        for label, found in parts.items()
    ]
    print(harness.table(["us a step", *kinds, *ticks], table))
    plots.stacks(
        folder / "bench_engine", parts, ticks, "One step's kernels, each from start to end: they overlap", "µs"
    )
