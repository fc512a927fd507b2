"""Steps of `qcut.Engine` that verify drafts, by the wall clock: their cost, and what drafts bring that are all right.

Greedy answers are generated plainly first. Then a drafter that knows them drafts their tokens, or always others: each
step gives as many tokens as it has, or one. A look-up that finds nothing shows what looking costs. At last the engine
chooses how wide a step is, by its cost and by how many drafts were right.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor

import qcut
from benchmarks import harness
from benchmarks.engine.steps import CASES, QUICK_ROUNDS, ROUNDS, build, prompts_of, wall_us
from benchmarks.harness import CheckError, Timing
from qcut.engine.drafters import MOST_NGRAM, DraftState
from qcut.engine.runner import ModelRunner
from qcut.engine.speculation import DraftedLoop

NEW = 128
"""Tokens that are generated, less one those that are timed."""
CONTEXT = 8192
CONTEXTS, BATCHES, WIDTHS = (256, 1024, 4096), (1, 8), (2, 4, 8)
KEY = ("case", "what", "batch", "context", "width")


@dataclass(frozen=True, eq=False)
class Replay:
    """Drafts the tokens of known answers, or always other ones.

    Attributes:
        answers: int64 ``[B, N]``.
        prompt: tokens of each prompt.
        drafts: drafts of a step.
        right: whether drafts are the answers' tokens.
    """

    answers: Tensor
    prompt: int
    drafts: int
    right: bool
    shortest: ClassVar[int] = 1
    longest: ClassVar[int] = 0
    reads_hidden: ClassVar[bool] = False

    def companion(self, runner: ModelRunner, tokenizer: Any) -> None:
        """See `qcut.engine.drafters.Drafter`."""

    def propose(self, companion: ModelRunner | None, state: DraftState, drafts: int, hidden: Tensor | None) -> None:
        """See `qcut.engine.drafters.Drafter`."""
        first = state.ends[:, None] - self.prompt  # of the token after the next one
        index = first + torch.arange(drafts, dtype=torch.int32, device=first.device)
        found = self.answers.gather(1, index.clamp(0, self.answers.shape[1] - 1).long())
        state.tokens[1 : drafts + 1].copy_((found if self.right else found ^ 1).t())
        state.counts.fill_(drafts + 1)


@contextmanager
def widest_steps() -> Iterator[None]:
    """All steps verify as many drafts as there are, whatever they cost."""
    with mock.patch.object(DraftedLoop, "cost", return_value=1.0):
        yield


def token_us(engine: qcut.Engine, length: int, batch: int, new: int, rounds: int) -> tuple[Timing, list[list[int]]]:
    """Microseconds of a new token of every sequence after ``length`` tokens, by the host's clock; and the tokens.

    Each call goes on from the same ``length`` tokens of the cache. Of many tokens less those of one, divided.
    """
    last = [[0]] * batch
    one, many = (functools.partial(engine.generate, last, count, reuse_prefix=length) for count in (1, new))
    answers = [found.tokens for found in many()]
    first = statistics.median(wall_us(one, rounds))
    return Timing.of([(us - first) / (new - 1) for us in wall_us(many, rounds)], "wall"), answers


def check(found: list[list[int]], answers: list[list[int]], what: str) -> None:
    """Raise `CheckError` unless all tokens are those of plain steps."""
    for slot, (mine, theirs) in enumerate(zip(found, answers, strict=True)):
        if mine != theirs:
            index = next(i for i, (x, y) in enumerate(zip(mine, theirs, strict=True)) if x != y)
            raise CheckError(f"{what}: token {index} of answer {slot} is {mine[index]}, by plain steps {theirs[index]}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", choices=tuple(CASES), default="llama-3-8b-codebook4", help="of engine/steps.py")
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS, metavar="TOKENS")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, metavar="SEQUENCES")
    harness.device_option(parser)


@harness.script(harness.timing_options, add_options, time_budget=240.0)
def main(options: argparse.Namespace) -> int:
    """Run the benchmark; 1 if tokens were others. On a CPU a tiny model is only checked."""
    device, deadline = options.device, time.monotonic() + options.time_budget
    on_gpu = device == "cuda"
    results = harness.Results("bench_speculation", harness.environment())
    case, rounds = CASES[options.case], QUICK_ROUNDS if options.quick else ROUNDS
    limit = CONTEXT if on_gpu else 128
    new, model, failures = min(NEW, limit // 4), build(case, device, limit, counts=True), 0
    table: list[list[object]] = []
    for batch in options.batches:
        for context in options.contexts if on_gpu else (16,):
            ids = torch.tensor(prompts_of(case.vocabulary, batch, context), device=device)

            def run(what: str, width: int, drafter: Any = None, widest: bool = True) -> list[list[int]] | None:
                if time.monotonic() > deadline:
                    return None
                engine = qcut.Engine(model, batch=batch, context=limit, speculate=drafter)  # noqa: B023
                engine.prefill(ids)  # noqa: B023
                with widest_steps() if widest else nullcontext():
                    timing, found = token_us(engine, context, batch, new, rounds if on_gpu else 1)  # noqa: B023
                row = {"case": options.case, "what": what, "batch": batch, "context": context, "width": width}  # noqa: B023
                if on_gpu:
                    results.add(timing, **row, tokens_s=round(batch / timing.median_us * 1e6, 1))  # noqa: B023
                    results.write_csv(options.out, KEY)
                table.append([*list(row.values())[1:], timing.median_us])
                return found

            answers = run("plain", 1)
            if answers is None:
                break
            known = torch.tensor(answers, device=device)
            nothing = qcut.Lookup(shortest=MOST_NGRAM, longest=MOST_NGRAM)
            kinds = [(f"{kind} drafts", width, kind) for width in WIDTHS for kind in ("wrong", "right")]
            adapted = [(f"{kind} drafts, steps as they pay", max(WIDTHS), kind) for kind in ("wrong", "right")]
            for what, width, kind in [("look-up finds nothing", 1, ""), *kinds, *adapted]:
                drafter = Replay(known, 1, width - 1, kind == "right") if kind else nothing
                found = run(what, width, drafter, (what, width, kind) in kinds)
                try:
                    if found is not None:
                        check(found, answers, f"{what}, {width} tokens, batch {batch}, context {context}")
                except CheckError as error:
                    print(f"WRONG {error}")
                    failures += 1
    print(harness.table(["what", "batch", "context", "width", "us a token"], table))
    if on_gpu:
        print(f"rows in {results.write_csv(options.out, KEY)}")
    return 1 if failures else 0
