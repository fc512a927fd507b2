"""One sequence, one llama2.c file, four ways to run it: `qcut.Engine`, transformers eager and compiled, plain C++.

`qcut.save_llama2c` writes files of random weights in the shapes of llama2.c's small models; ``--files`` adds others.
Tokens are checked before anything is timed. The C++ program (``cpu_llama.cpp``, built here by g++) must generate the
tokens of the engine in float32. For every other way, transformers in float32, with the same weights and the same tokens
read, must rate each token as the likeliest, or nearly so in 16 bits. The time of a token is the time of generating many
tokens less that of one, divided by the number of further tokens.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import qcut
from benchmarks import harness
from benchmarks.engine.cpu_program import build_cpp, cpu_name, run_cpp, thread_counts
from benchmarks.engine.steps import decode_us, prompts_of
from benchmarks.harness import CheckError, Timing
from qcut.engine.engine import Prompts
from qcut.engine.sequence import Generated
from qcut.errors import BuildError

PROMPT, NEW, CPU_NEW = 16, 128, 24
"""Tokens; a CPU generates fewer."""
ROUNDS, QUICK_ROUNDS = 3, 1
TOLERANCE, TOLERANCE_16 = 1e-3, 0.25
"""How far below the likeliest a chosen token's logit may lie, in standard deviations of the logits: in float32, and in
16 bits. A random token lies some four below.
"""
SCHEME = "w8a16"
"""Of the quantized engine: int8 weights, and 16-bit tokens, which random weights do not hurt."""


@dataclass(frozen=True)
class Case:
    """A model of Llama's shape: llama2.c's header, the classifier not tied."""

    width: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int


CASES = {
    "llama2c-288": Case(288, 768, 6, 6, 6, 32000, 256),
    "llama2c-512": Case(512, 1376, 8, 8, 8, 32000, 1024),
    "tiny": Case(64, 172, 2, 4, 2, 96, 48),
}


def write_random(case: Case, path: Path) -> None:
    """Write a file of random weights.

    The weights' spread keeps the size of activations from layer to layer: the tokens that a token attends to then
    decide the next token, and a wrong cache changes the result. A classifier tied to the table would repeat the last
    token.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=case.width,
        intermediate_size=case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        vocab_size=case.vocabulary,
        max_position_embeddings=case.context,
        rms_norm_eps=1e-5,
        initializer_range=case.width**-0.5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    qcut.save_llama2c(LlamaForCausalLM(config), path)


# ── transformers ─────────────────────────────────────────────────────────────────────────────────


class Loop:
    """Greedy decoding by transformers' model with the interface of an engine: a prompt at once, then a token a step.

    Tokens stay on the device until all are there.

    Args:
        model: of transformers.
        context: most tokens of a sequence; its keys and values then have fixed memory. None: memory that grows.
        compile_step: function that compiles the step, or None.
    """

    def __init__(
        self, model: Any, context: int | None, compile_step: Callable[[Callable[[Tensor], Tensor]], Any] | None = None
    ) -> None:
        from transformers import StaticCache

        self._model = model
        self._static = None if context is None else StaticCache(config=model.config, max_cache_len=context)
        self._cache = self._static
        self._step = compile_step(self._next) if compile_step else self._next

    def generate(self, prompts: Prompts, max_new_tokens: int) -> list[Generated]:
        """Generate tokens as `qcut.Engine.generate` does."""
        from transformers import DynamicCache

        ids = torch.as_tensor(prompts, device=self._model.device)
        # Compiled steps know the memory that they were captured with: it is emptied, not replaced.
        if self._static is None:
            self._cache = DynamicCache(config=self._model.config)
        else:
            self._static.reset()
        token = self._next(ids)
        tokens = [token]
        for _ in range(max_new_tokens - 1):
            torch.compiler.cudagraph_mark_step_begin()
            token = self._step(token).clone()  # a graph's next replay overwrites its result
            tokens.append(token)
        return [Generated(row) for row in torch.cat(tokens, 1).tolist()]

    def _next(self, ids: Tensor) -> Tensor:
        logits: Tensor = self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True)


def compiled(step: Callable[[Tensor], Tensor]) -> Any:
    """`torch.compile` with CUDA graphs."""
    return torch.compile(step, mode="reduce-overhead", fullgraph=True, dynamic=False)


# ── checks ───────────────────────────────────────────────────────────────────────────────────────


def shortfall(reference: Any, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """Return the largest distance of a token's logit below the largest logit, in standard deviations; 0 if greedy.

    Args:
        reference: transformers' model.
        prompt: what was read.
        tokens: what followed; each is judged after those before it.
    """
    ids = torch.tensor([[*prompt, *tokens]], device=reference.device)
    logits = reference(ids[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :].double()
    chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
    worst: float = ((logits.amax(1) - chosen) / logits.std(1)).max().item()
    return worst


def check(reference: Any, prompt: Sequence[int], tokens: Sequence[int], new: int, tolerance: float) -> None:
    """Raise `CheckError` unless there are so many tokens and each is the reference's choice; NaN never passes."""
    if len(tokens) != new:
        raise CheckError(f"{len(tokens)} tokens; asked for {new}")
    worst = shortfall(reference, prompt, tokens)
    if not worst <= tolerance:
        raise CheckError(
            f"a token lies {worst:.3g} standard deviations of the logits below the likeliest; allowed {tolerance:g}"
        )


def widened(quantized: Any, model: Any) -> Any:
    """Return a copy of a float32 model with the dequantized weights of its quantized version."""
    model = copy.deepcopy(model)
    tables = {name for name, module in quantized.named_modules() if isinstance(module, qcut.Embedding)}
    for name, module in quantized.named_modules():
        layer = module.linear if name in tables else module
        if isinstance(layer, qcut.Linear) and name.rpartition(".")[0] not in tables:
            model.get_submodule(name).weight.data.copy_(layer.dequantized_weight())
    return model


# ── the script ───────────────────────────────────────────────────────────────────────────────────


class Comparison:
    """Rows of all ways, and how many were wrong.

    Args:
        options: see `main`.
        results: where rows go.
        folder: for the C++ program, which is built here; without a compiler its rows say so.
    """

    def __init__(self, options: argparse.Namespace, results: harness.Results, folder: Path) -> None:
        self.options, self.results = options, results
        self.device = options.device
        self.dtype = harness.served_dtype(options.device)
        self.rounds = QUICK_ROUNDS if options.quick else ROUNDS
        self.deadline = time.monotonic() + options.time_budget
        self.versions = {"cpu": cpu_name(), "transformers": version("transformers")}
        self.failures = 0
        self.program: Path | str
        try:
            self.program = build_cpp(folder)
        except BuildError as error:
            print(f"error: {error}", file=sys.stderr)
            self.program = str(error)
            self.failures += 1

    def measure(self, name: str, file: Path) -> None:
        """All ways to run a file."""
        model = qcut.load_llama2c(file, device=self.device)
        half = qcut.load_llama2c(file, dtype=self.dtype, device=self.device)  # .half() would round the rotation too
        vocabulary, positions = model.config.vocab_size, model.config.max_position_embeddings
        prompt = prompts_of(vocabulary, 1, max(1, min(PROMPT, positions // 2)))[0]
        new = min(NEW if self.device == "cuda" else CPU_NEW, positions - len(prompt))
        context = len(prompt) + new
        shape = {"case": name, "width": model.config.hidden_size, "layers": model.config.num_hidden_layers}
        shape |= {"vocabulary": vocabulary, "prompt": len(prompt), "new": new}
        engine = qcut.Engine(model, context=context)
        wanted = engine.generate([prompt], new)[0].tokens

        def run(
            variant: str, dtype: torch.dtype, build: Callable[[], Any], reference: Callable[[], Any] = lambda: model
        ) -> None:
            columns = {**shape, "variant": variant, "dtype": str(dtype).removeprefix("torch.")}
            if time.monotonic() > self.deadline:
                self._missing(columns, "out of time")
                return
            try:
                runner = build()
                exact = dtype is torch.float32 and SCHEME not in variant
                tokens = runner.generate([prompt], new)[0].tokens
                check(reference(), prompt, tokens, new, TOLERANCE if exact else TOLERANCE_16)
                timing = decode_us(runner, [prompt], new, self.rounds)
            except CheckError as error:
                self._wrong(columns, error)
            except Exception as error:  # torch.compile's failures are of many types, and cost only one row
                first = (str(error).strip() or "no message").splitlines()[0]
                self._missing(columns, f"{type(error).__name__}: {first[:200]}")
                self.failures += variant.startswith("qcut")
            else:
                self._add(timing, columns)

        made: list[Any] = []

        def of_quantized() -> qcut.Engine:
            made.append(self._quantized(half))
            return qcut.Engine(made[-1], context=context)

        run("qcut", torch.float32, lambda: engine)
        self._cpp(shape, file, prompt, new, wanted)
        if self.dtype is not torch.float32:
            run("qcut", self.dtype, lambda: qcut.Engine(half, context=context))
        run("eager_dynamic", self.dtype, lambda: Loop(half, None))
        run("eager_static", self.dtype, lambda: Loop(half, context))
        run(f"qcut_{SCHEME}", self.dtype, of_quantized, lambda: widened(made[-1], model))
        run("compile", self.dtype, lambda: Loop(half, context, compiled))
        torch.compiler.reset()

    def _quantized(self, model: Any) -> Any:
        model = copy.deepcopy(model)
        qcut.quantize(model, SCHEME, embeddings=SCHEME, prebuild=(), progress=False)
        return model

    def _cpp(self, shape: dict[str, Any], file: Path, prompt: list[int], new: int, wanted: list[int]) -> None:
        """Rows of the C++ program, by threads."""
        columns = {**shape, "variant": "cpp", "dtype": "float32"}
        if not isinstance(self.program, Path):
            self._missing(columns, self.program.splitlines()[0])
            return
        for threads in thread_counts():
            samples = []
            for _ in range(self.rounds):
                tokens, rate = run_cpp(self.program, file, prompt, new, threads)
                if tokens != wanted:
                    self._wrong(columns, CheckError(f"{tokens} where the engine has {wanted}"))
                    return
                samples.append(1e6 / rate)
            self._add(Timing.of(samples, "wall"), {**columns, "threads": threads})

    def _add(self, timing: Timing, columns: dict[str, Any]) -> None:
        if timing.p20_us <= 0:
            self._missing(columns, f"{columns['new']} tokens took no longer than one: another load on the machine")
            return
        device = "cpu" if columns["variant"] == "cpp" else self.device
        rate = 1e6 / timing.median_us
        self.results.add(timing, **columns, **self.versions, device=device, tokens_s=round(rate, 1))
        self._done(f"{rate:,.0f} tokens/s")

    def _missing(self, columns: dict[str, Any], reason: str) -> None:
        self.results.rows.append({"bench": self.results.bench, **columns, **self.versions, "reason": reason})
        self._done(f"not measured: {reason}")

    def _wrong(self, columns: dict[str, Any], error: CheckError) -> None:
        print(f"WRONG {columns['case']} {columns['variant']}: {error}")
        self._missing(columns, f"wrong: {error}")
        self.failures += 1

    def _done(self, text: str) -> None:
        """Print the last row, and write all rows, so that an interrupted run keeps them."""
        self.results.write_csv(self.options.out)
        row = self.results.rows[-1]
        what = " ".join(str(row[column]) for column in ("case", "variant", "dtype", "threads") if column in row)
        print(f"{what}: {text}", file=sys.stderr, flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cases", type=harness.list_of(CASES), default="llama2c-288,llama2c-512", help=f"of {', '.join(CASES)}"
    )
    parser.add_argument("--files", nargs="*", type=Path, default=[], metavar="FILE", help="llama2.c files to run too")
    harness.device_option(parser)


@harness.script(harness.timing_options, add_options)
def main(options: argparse.Namespace) -> int:
    """Run the benchmark; 1 if tokens were wrong, or there is no compiler for the C++ program."""
    results = harness.Results("bench_compare", harness.environment())
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(options, results, Path(folder))
        for name in options.cases:
            file = Path(folder) / f"{name}.bin"
            write_random(CASES[name], file)
            comparison.measure(name, file)
            file.unlink()
        for file in options.files:
            comparison.measure(file.stem, file)
    header = ["model", "variant", "dtype", "threads", "tokens/s", "µs a token"]
    rows = [
        [row.get(c, math.nan if c.endswith("s") else "") for c in ("case", "variant", "dtype", "threads", "tokens_s")]
        + [row.get("median_us", math.nan)]
        for row in results.rows
    ]
    print(harness.table(header, rows))
    print(f"{comparison.failures} wrong; rows in {results.write_csv(options.out)}")
    return 1 if comparison.failures else 0
