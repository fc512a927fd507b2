"""Drafts of real texts: how many are right, new tokens a step, and what that gives at the measured cost of steps.

    python benchmarks engine acceptance --models-dir DIR --text FILE

A model's greedy answers are prose that repeats itself, a small model's most of all; a writer's prose repeats less. A
document with edits stands for the answer of a model that is asked to edit it: every 12 to 60 tokens, one to four are
replaced, left out or added. Drafts never change an answer, so that look-ups are tried on the answers; a draft model is
run. Needs no GPU: the cost of steps is read from the rows of ``engine speculation``.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import qcut
from benchmarks.harness import Results, environment, model_options, read_rows, script, table
from benchmarks.perplexity.models import Evaluated
from qcut.engine.drafters import DraftState
from qcut.engine.speculation import DraftedLoop, DraftRecord, next_width, widths_of
from qcut.errors import ConfigError

PROMPT, NEW = 128, 128
DOCUMENT = 400
"""Tokens of a document that is repeated."""
DRAFTS = {"gpt2-14m": "gpt2-5m"}
"""Smaller models of the same vocabulary; their own steps are not in the cost."""
KEY = ("model", "text", "drafter")
AT = ("1", "1024")
"""Sequences and context of the rows from which the cost of steps is taken."""


def costs_of(results: Path, case: str) -> dict[int, float]:
    """Microseconds of a step, by its tokens.

    Raises:
        ConfigError: the rows are missing.
    """
    path = results / "bench_speculation.csv"
    rows = read_rows(path) if path.is_file() else []
    found = [row for row in rows if row["case"] == case and (row["batch"], row["context"]) == AT]
    costs = {int(row["width"]): float(row["median_us"]) for row in found if row["what"] in ("plain", "wrong drafts")}
    if 1 not in costs or len(costs) < 2:
        raise ConfigError(f"{path} has no rows of {case}; run benchmarks engine speculation --case {case} first")
    return costs


def edited(ids: Sequence[int], seed: int) -> list[int]:
    """A document with edits of one to four tokens."""
    chance, at = random.Random(seed), 0
    out: list[int] = []
    while at < len(ids):
        run, count = chance.randrange(12, 60), chance.randrange(1, 5)
        out += ids[at : at + run]
        at += run
        kind = chance.choice(("replaced", "left out", "added"))
        if kind != "left out":
            out += [chance.choice(ids) for _ in range(count)]
        if kind != "added":
            at += count
    return out


def looked_up(prompt: list[int], answer: list[int], lookup: qcut.Lookup, costs: dict[int, float]) -> tuple[int, float]:
    """Steps that give an answer, and the time that they take."""
    widths = [width for width in widths_of(lookup.drafts, lookup.drafts + 1) if width in costs]
    context = len(prompt) + len(answer) + lookup.drafts + 1
    state = DraftState.of(1, lookup.drafts + 1, context, torch.device("cpu"))
    state.begin(0, prompt)
    state.put(0, torch.tensor(answer[:1]), [len(prompt)], context)
    host_copy, turn = torch.zeros(1, 1, lookup.drafts + 3, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    record, new, steps, spent = DraftRecord(), 1, 0, 0.0
    padded = [*answer, *[-1] * max(widths)]
    while new < len(answer):
        width = next_width([record], widths, costs.__getitem__)
        chosen = torch.tensor([padded[new : new + width]])
        torch.ops.qcut.accept(chosen, *state, context, lookup.shortest, lookup.longest, host_copy, turn)
        count, found = host_copy[0, 0, :2].tolist()
        record.note(width, count, found)
        new, steps, spent = new + count, steps + 1, spent + costs[width]
    return steps, spent


def drafted(model: Any, draft: qcut.Engine, prompts: list[list[int]], drafts: int) -> float:
    """New tokens a step with drafts of a smaller model, as many in each step."""
    engine, steps, step = (
        qcut.Engine(model, context=draft.context, speculate=qcut.DraftModel(draft, drafts)),
        0,
        DraftedLoop.step,
    )

    def counted(loop: DraftedLoop, width: int, choose: Any) -> Any:
        nonlocal steps
        steps += 1
        return step(loop, width, choose)

    with mock.patch.object(DraftedLoop, "step", counted), mock.patch.object(DraftedLoop, "cost", return_value=1.0):
        new = sum(len(found.tokens) - 1 for prompt in prompts for found in engine.generate([prompt], NEW))
    return new / steps


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--case", default="llama-3-8b-codebook4", help="by the cost of steps of this one")


@script(model_options, add_options)
def main(options: argparse.Namespace) -> int:
    """Run the benchmark."""
    costs = costs_of(options.out, options.case)
    results, rows = Results("speculation_texts", environment()), []
    options.window, options.max_windows = max(PROMPT, DOCUMENT), options.max_windows or 24
    for path in options.models:
        found = Evaluated(path, options)
        windows = found.windows.tolist()
        engine = qcut.Engine(found.model, context=PROMPT + NEW)
        prompts = [window[:PROMPT] for window in windows]
        answers = [engine.generate([prompt], NEW)[0].tokens for prompt in prompts]
        documents = [window[:DOCUMENT] for window in windows]
        texts = {
            "a model's prose": list(zip(prompts, answers, strict=True)),
            "a writer's prose": [(window[:PROMPT], window[PROMPT:]) for window in windows],
            "a document with edits": [(ids, edited(ids, seed)) for seed, ids in enumerate(documents)],
        }
        for text, pairs in texts.items():
            made = [looked_up(prompt, answer, qcut.Lookup(), costs) for prompt, answer in pairs]
            new = sum(len(answer) - 1 for _, answer in pairs)
            steps, spent = (sum(part) for part in zip(*made, strict=True))
            rows.append([path.name, text, "look-up", new / steps, new * costs[1] / spent])
        smaller = options.models_dir / DRAFTS.get(path.name, "")
        if path.name in DRAFTS and smaller.is_dir():
            draft = qcut.Engine(Evaluated(smaller, options).model, context=PROMPT + NEW)
            for width in sorted(costs)[1:]:
                share = drafted(found.model, draft, prompts, width - 1)
                rows.append(
                    [
                        path.name,
                        "a model's prose",
                        f"{smaller.name}, {width - 1}",
                        share,
                        share * costs[1] / costs[width],
                    ]
                )
    for model, text, drafter, share, speed in rows:
        results.rows.append(
            {"bench": results.bench, "case": options.case, "model": model, "text": text, "drafter": drafter}
            | {"tokens_a_step": round(share, 3), "speedup": round(speed, 3)}
        )
    print(table(["model", "text", "drafter", "tokens a step", "times as fast"], rows))
    print(f"rows in {results.write_csv(options.out, KEY)}")
    return 0
