"""Measures schemes on a model, one at a time: the model is loaded anew for each, and quantized while it is loaded."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import qcut
from qcut.checkpoints.pretrained import load_pretrained
from qcut.cli.bench.report import Row
from qcut.cli.models import context_of, cut_text
from qcut.cli.runners import Runner, runner_for
from qcut.common.failures import is_memory, line_of
from qcut.common.memory import return_free_memory
from qcut.common.progress import Advance, progress_bar
from qcut.conversion.quantize import model_bytes
from qcut.emitters.core.source import EmitError
from qcut.errors import ConfigError, QcutError, UnsupportedError
from qcut.jit.waiting import no_fallbacks
from qcut.layers.quantized import QuantizedLayer
from qcut.schemes import Scheme
from qcut.tuning.timing import Variant, WallClock, measure

_FAILURES = (QcutError, EmitError, RuntimeError, MemoryError)
"""What a scheme may fail with: a refusal, a kernel that does not build, torch's errors, too little memory."""
_REASON = 600
"""Most characters of a row's error."""


@dataclass(frozen=True)
class Amounts:
    """How much is measured.

    Attributes:
        prompt: tokens of a prompt.
        new: tokens that continue each prompt, at least 2.
        windows: windows of the text.
        rounds: repetitions; results are their medians.
        min_rounds: repetitions even beyond ``limit_s``.
        limit_s: seconds for the first calls and repetitions of a scheme.
        settle_s: seconds of calls that are not counted, before those that are: a GPU takes so long to reach its clocks.
    """

    prompt: int
    new: int
    windows: int
    rounds: int
    min_rounds: int
    limit_s: float
    settle_s: float


ON_GPU = Amounts(512, 128, 40, rounds=5, min_rounds=5, limit_s=math.inf, settle_s=0.1)
ON_CPU = Amounts(32, 8, 4, rounds=3, min_rounds=1, limit_s=5.0, settle_s=0.0)


@dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
        model: a folder, or a name on the hub.
        device: where models run.
        dtype: of the float model, and of what is not quantized.
        batches: numbers of sequences that are continued at once.
        text: to predict, and for prompts.
        what: the text's option, for messages.
        prompt: tokens of a prompt; None: of `ON_GPU` or `ON_CPU`, within the model's context.
        new: new tokens of a sequence; None: likewise.
        window: tokens of a window; None: see `qcut.cli.models.cut_text`.
        windows: number of windows; None: of `ON_GPU` or `ON_CPU`.
    """

    model: str
    device: torch.device
    dtype: torch.dtype
    batches: tuple[int, ...]
    text: str
    what: str
    prompt: int | None = None
    new: int | None = None
    window: int | None = None
    windows: int | None = None

    def amounts(self, context: int | None) -> Amounts:
        """How much is measured on a model of a context; None: without a bound.

        Raises:
            ConfigError: prompt and new tokens do not fit.
        """
        usual = ON_GPU if self.device.type == "cuda" else ON_CPU
        room = math.inf if context is None else context
        free = room / 4 if self.prompt is None else room - self.prompt
        new = self.new or int(max(2, min(usual.new, free)))
        prompt = self.prompt or int(min(usual.prompt, max(1, room - new)))
        if prompt + new > room:
            raise ConfigError(
                f"--prompt-tokens {prompt} and --new {new} are {prompt + new} tokens; allowed: up to {context}, the "
                "model's context"
            )
        return replace(usual, prompt=prompt, new=new, windows=self.windows or usual.windows)


@dataclass(frozen=True)
class Measured:
    """All rows, and what they have in common.

    Attributes:
        rows: the model as it is first, then a row for each scheme, in order.
        amounts: how much was measured.
        windows: the text's windows ``[W, T]``.
        stored: whether the model itself is quantized, so that no other scheme was measured.
        device: device of the models, with its number.
        why: why transformers runs the model, if it does in any row.
    """

    rows: tuple[Row, ...]
    amounts: Amounts
    windows: Tensor
    stored: bool
    device: torch.device
    why: str


def measure_schemes(
    request: Request, schemes: Sequence[Scheme], *, only_float: bool, progress: bool = False
) -> Measured:
    """Measure a model as it is, then under each scheme. One model is in memory at a time.

    Kernels that are missing are built first, also where calls would not wait for them otherwise.

    Args:
        request: what to measure.
        schemes: of the further rows; none is measured of a model that is quantized itself.
        only_float: refuse a model that is quantized itself.
        progress: show a bar on standard error.

    Raises:
        ConfigError: the text is too short, the sizes do not fit, or the model is refused.
        CheckpointError: the model cannot be read.
        UnsupportedError: no row could be measured.
    """
    bench = _Bench(request, only_float)
    with progress_bar(3 * (1 + len(schemes)), "bench", "step", shown=progress) as advance, no_fallbacks():
        rows = []
        for scheme in (None, *schemes):
            rows.append(bench.row(scheme, advance))
            _release(request.device)
            if bench.stored:
                break
    if bench.read is None or all(row.error for row in rows):
        raise UnsupportedError(
            "bench: nothing could be measured: " + "; ".join(f"{row.scheme}: {row.error}" for row in rows)
        )
    windows, amounts = bench.read
    return Measured(tuple(rows), amounts, windows, bench.stored, bench.device, bench.why)


class _Bench:
    """Makes rows, and keeps what is the same for all.

    Attributes:
        read: the text's windows and the amounts, once a model was loaded.
        stored: whether the model itself is quantized.
        device: device of the models.
        why: why transformers runs the model.
    """

    def __init__(self, request: Request, only_float: bool) -> None:
        self._request, self._only_float = request, only_float
        self.read: tuple[Tensor, Amounts] | None = None
        self.stored, self.device, self.why = False, request.device, ""

    def row(self, scheme: Scheme | None, advance: Advance) -> Row:
        """The row of a scheme; None: the model as it is."""
        name = str(self._request.dtype).removeprefix("torch.") if scheme is None else scheme.name
        row, left = Row(name), 3

        def step(what: str, done: int = 1) -> None:
            nonlocal left
            left -= done
            advance(done, f"{name}: {what}")

        step("loading" if scheme is None else "loading and quantizing", 0)
        start = time.perf_counter()
        try:
            model, tokenizer = self._load(scheme)
        except _FAILURES as error:
            if scheme is None and not _is_memory(error):
                raise
            advance(left)
            return replace(row, error=line_of(error, _REASON))
        row = replace(row, load_s=time.perf_counter() - start, weight_bytes=model_bytes(model))
        if scheme is None and (found := {m.scheme.name for m in model.modules() if isinstance(m, QuantizedLayer)}):
            self.stored, row = True, replace(row, scheme=", ".join(sorted(found)))
            if self._only_float:
                raise ConfigError(
                    f"--schemes: {self._request.model} is quantized already ({row.scheme}); allowed: a float model"
                )
        windows, amounts = self._read(model, tokenizer)
        try:
            row = self._measure(row, model, windows, amounts, step)
        except _FAILURES as error:
            row = Row(row.scheme, line_of(error, _REASON))
        advance(left)
        return row

    def _load(self, scheme: Scheme | None) -> tuple[Any, Any]:
        given = self._request
        config = None if scheme is None else qcut.QcutConfig(scheme)
        model, tokenizer = load_pretrained(
            given.model, dtype=given.dtype, device=given.device, quantization=config, progress=False
        )
        if scheme is not None and not any(isinstance(module, QuantizedLayer) for module in model.modules()):
            qcut.quantize(model, scheme, progress=False)  # a format that transformers does not read
        return model, tokenizer

    def _read(self, model: Any, tokenizer: Any) -> tuple[Tensor, Amounts]:
        if self.read is None:
            given = self._request
            amounts = given.amounts(context_of(model))
            windows, _ = cut_text(model, tokenizer, given.text, given.what, given.window, amounts.windows)
            self.read = windows, amounts
        return self.read

    def _measure(
        self, row: Row, model: nn.Module, windows: Tensor, amounts: Amounts, step: Callable[[str], None]
    ) -> Row:
        """The row with its speeds, memory and perplexity; ``step`` moves the bar on."""
        given, batches = self._request, self._request.batches
        on_gpu = given.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(given.device)
        context = max(amounts.prompt + amounts.new, windows.shape[1])
        runner = runner_for(model, batch=max(batches), context=context, note=False)
        self.device, self.why = runner.device, self.why or runner.why
        step("building kernels, then speed" if on_gpu else "speed")
        clock = WallClock(given.device)
        times = measure(
            list(_calls(runner, windows.flatten(), batches, amounts)),
            clock,
            rounds=amounts.rounds,
            min_rounds=amounts.min_rounds,
            target_us=0.0,
            settle_us=1e6 * amounts.settle_s,
            deadline=time.monotonic() + amounts.limit_s,
        )
        peak = torch.cuda.max_memory_allocated(given.device) if on_gpu else None
        step("perplexity")
        rates = {}
        for batch in batches:
            after_first = times[f"{batch} all"].median_us - times[f"{batch} first"].median_us
            rates[batch] = batch * (amounts.new - 1) / after_first * 1e6 if after_first > 0 else math.nan
        perplexity = runner.perplexity(windows, min(max(batches), len(windows)), False)
        return replace(
            row,
            runs_on=runner.name,
            first_token_ms=times["1 first"].median_us / 1e3,
            tokens_per_s=rates,
            peak_bytes=peak,
            perplexity=perplexity,
            warm_up_s=clock.warm_up_s,
        )


def _calls(runner: Runner, tokens: Tensor, batches: Sequence[int], amounts: Amounts) -> Iterator[Variant]:
    """For each number of sequences, generating one token of each and all; for a single one at least the first."""
    for batch in sorted({1, *batches}):
        prompts = tokens.repeat(-(-batch * amounts.prompt // len(tokens)))[: batch * amounts.prompt]
        ids: list[list[int]] = prompts.view(batch, amounts.prompt).tolist()
        for what, new in (("first", 1), ("all", amounts.new)):
            if new == 1 or batch in batches:
                yield Variant(f"{batch} {what}", partial(_generate, runner, ids, new), graph=False)


def _generate(runner: Runner, prompts: list[list[int]], new: int, copy: int) -> None:
    runner.greedy(prompts, new)


def _is_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, is too little memory."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or is_memory(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _release(device: torch.device) -> None:
    """Return the memory of a model that nothing holds any more."""
    gc.collect()
    return_free_memory()
    if device.type == "cuda":
        torch.cuda.empty_cache()
