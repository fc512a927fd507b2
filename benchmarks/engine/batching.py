"""Continuous batching under load: clients that send prompts of many lengths, each the next when the last is answered.

Next to it a static batch: as many sequences as clients, with the same prompts in the same order, where each batch ends
with its longest member. Both times hold reading the prompts. Every answer is counted; those of a model with one layer,
under the same load, are held against what its engine gives by itself. ``--constrained`` times the load twice more, in
an engine with a tokenizer made for the purpose: as it is, and with clients that all ask for JSON by a schema.
"""

from __future__ import annotations

import argparse
import gc
import queue
import random
import statistics
import sys
import time
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import qcut
from benchmarks import harness
from benchmarks.engine.steps import CASES, build
from benchmarks.harness import CheckError, Timing, percentile
from qcut.engine.sequence import Event

SHORTEST, LONGEST = 32, 1024
"""Tokens of a prompt."""
NEW = 128
"""Tokens of an answer."""
CHECKED = 8
"""Answers that are compared with the engine's."""
TIE = 0.1
"""Standard deviations of the logits by which another token than the likeliest may fall short: kernels are chosen by
the number of sequences, and round differently."""
SWITCH_S = 0.0005
"""Python's switch interval in seconds, as the server sets it."""
COPIES = 20
"""Number of copies of a sequence's KV cache."""
TO_REACH = {"static": 0.8, "gap": 4.0, "constrained": 0.95}
"""Of the static batch's tokens/s; the 99th percentile of the time between tokens, as a multiple of the median; and with
a schema, of the tokens/s without.
"""
_RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["person", "place", "thing"]},
        "amount": {"type": "integer", "minimum": 0, "maximum": 100_000},
        "new": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
    },
    "required": ["name", "kind", "amount", "new", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": _RECORD, "minItems": 1000}
"""Longer than any answer."""
_QUOTED = 0.01
"""Share of a vocabulary's words that end in a quote."""
KEY = ("case", "clients", "what")


class Answer(NamedTuple):
    """Tokens of an answer, and the time of each, in seconds."""

    tokens: list[int]
    times: list[float]


def prompts_of(count: int, vocabulary: int, shortest: int, longest: int) -> list[list[int]]:
    """Random prompts, their lengths evenly spread and shuffled."""
    rng = random.Random(count)
    lengths = [shortest + (longest - shortest) * i // max(1, count - 1) for i in range(count)]
    rng.shuffle(lengths)
    return [[rng.randrange(vocabulary) for _ in range(length)] for length in lengths]


def byte_tokenizer(vocabulary: int) -> Any:
    """A tokenizer of transformers: a token for each byte, and random words, one in a hundred with a quote.

    Such tokens take most of a mask's time, since only they end a string; models/gpt2-5m has fewer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    rng = random.Random(vocabulary)
    tokens = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(tokens) < vocabulary:
        letters = rng.choice(("abcdefghijklmnopqrstuvwxyz", "abcdefghijklmnopqrstuvwxyzABCDEFGHIJ", "0123456789"))
        word = "".join(rng.choices(letters, k=rng.randint(2, 9)))
        end = rng.choice(('"', '",', '":')) if rng.random() < _QUOTED else ""
        tokens[rng.choice(("", "\u0120")) + word + end] = None
    found = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=found)


def constrained(
    model: Any, answers: list[Answer], prompts: list[list[int]], options: argparse.Namespace, context: int
) -> tuple[float, float]:
    """Seconds of the load without and with a schema, in an engine with an end token that no answer has."""
    clients, new = options.clients, options.new
    vocabulary = CASES[options.case].vocabulary
    found = {token for answer in answers for token in answer.tokens}
    model.config.eos_token_id = next(token for token in reversed(range(vocabulary)) if token not in found)
    engine = qcut.Engine(
        model, batch=clients, context=context, kv_cache=options.kv_cache, tokenizer=byte_tokenizer(vocabulary)
    )
    scheduler = qcut.Scheduler(engine, chunk=options.chunk, prefix_cache=options.prefixes)
    scheduler.warm_up()
    gc.freeze()
    times = []
    with scheduler:
        for constraint in (None, qcut.Constraint.json_schema(SCHEMA)):
            load(scheduler, prompts[:clients], clients, new, constraint)
            times.append(load(scheduler, prompts, clients, new, constraint)[0])
    return times[0], times[1]


def load(
    scheduler: qcut.Scheduler,
    prompts: list[list[int]],
    clients: int,
    new: int,
    constraint: qcut.Constraint | None = None,
) -> tuple[float, list[Answer]]:
    """Seconds until all prompts are answered, and the answers; one thread reads those of all clients, as a server's."""
    events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
    answers = [Answer([], []) for _ in prompts]

    def submit(i: int) -> None:
        scheduler.submit(prompts[i], new, constraint=constraint, listener=lambda event: events.put((i, event)))

    start = time.perf_counter()
    for i in range(min(clients, len(prompts))):
        submit(i)
    left = len(prompts)
    while left:
        i, event = events.get()
        if event.token is not None:
            answers[i].tokens.append(event.token)
            answers[i].times.append(time.perf_counter())
        if event.reason is not None:
            left -= 1
            if len(answers[i].tokens) != new:
                raise CheckError(f"answer {i} has {len(answers[i].tokens)} of {new} tokens ({event.reason})")
            if i + clients < len(prompts):
                submit(i + clients)
    return time.perf_counter() - start, answers


def static(engine: qcut.Engine, prompts: list[list[int]], clients: int, new: int) -> float:
    """Seconds until batches of so many prompts, one after another, are answered."""
    start = time.perf_counter()
    for i in range(0, len(prompts), clients):
        engine.generate(prompts[i : i + clients], new)
    return time.perf_counter() - start


def check(engine: qcut.Engine, prompts: list[list[int]], answers: list[Answer]) -> None:
    """Raise `CheckError` unless answers are the engine's up to a near tie.

    Args:
        engine: of a model of one layer; more layers of random weights multiply rounding.
        prompts: some of those that have been answered.
        answers: to all prompts.
    """
    for i in range(0, len(prompts), max(1, len(prompts) // CHECKED)):
        prompt, found = prompts[i], answers[i].tokens
        (want,) = engine.generate([prompt], len(found))
        same = next((j for j, (a, b) in enumerate(zip(found, want.tokens, strict=True)) if a != b), len(found))
        if same < len(found):
            (logits,) = engine.prefill([prompt + found[:same]])
            short = float((logits.max() - logits[found[same]]) / logits.std())
            if short > TIE:
                raise CheckError(f"token {same} of answer {i} is {short:.2f} deviations less likely than the engine's")


def copy_us(engine: qcut.Engine, tokens: int) -> Timing:
    """Microseconds to copy so many tokens of the last sequence's KV cache to the first batch slot."""
    device, cache = engine.decoder.device, engine.cache
    found = []
    for _ in range(COPIES):
        start = time.perf_counter()
        cache.copy_sequence(cache, engine.batch - 1, 0, 0, tokens)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append((time.perf_counter() - start) * 1e6)
    return Timing.of(found, "wall")


def load_options(parser: argparse.ArgumentParser) -> None:
    """The options of a load of clients, over HTTP or not."""
    parser.add_argument("--case", choices=tuple(CASES), default="llama-3-8b-codebook4", help="of engine/steps.py")
    parser.add_argument("--clients", type=int, default=64, help="clients that wait for an answer at any time [64]")
    parser.add_argument("--rounds", type=int, default=4, help="prompts of each client [4]")
    parser.add_argument("--new", type=int, default=NEW, help=f"tokens of an answer [{NEW}]")
    parser.add_argument("--lengths", default=f"{SHORTEST},{LONGEST}", help="tokens of the shortest and longest prompt")
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens between two decode steps [512]")
    parser.add_argument("--kv-cache", default="auto")
    harness.device_option(parser)


def columns_of(options: argparse.Namespace, prompts: list[list[int]]) -> dict[str, object]:
    """The columns that describe the load."""
    shortest, longest = options.lengths.split(",")
    columns = {"case": options.case, "clients": options.clients, "chunk": options.chunk, "kv_cache": options.kv_cache}
    return columns | {"prompts": len(prompts), "new": options.new, "lengths": f"{shortest}-{longest}"}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prefixes", type=int, default=8, help="sequences in the prefix cache [8]")
    parser.add_argument("--constrained", action="store_true", help="time the load with a schema, too")


@harness.script(harness.timing_options, load_options, add_options)
def main(options: argparse.Namespace) -> int:
    """Run the benchmark; 1 if an answer was wrong or lost."""
    sys.setswitchinterval(SWITCH_S)
    device = options.device
    shortest, longest = map(int, options.lengths.split(","))
    case, clients, new = CASES[options.case], options.clients, options.new
    context = longest + new
    model, low = (build(each, device, context) for each in (case, replace(case, layers=1)))
    engine, shallow = (
        qcut.Engine(each, batch=clients, context=context, kv_cache=options.kv_cache) for each in (model, low)
    )
    prompts = prompts_of(clients * options.rounds, case.vocabulary, shortest, longest)
    results = harness.Results("bench_batching", harness.environment())
    try:
        with qcut.Scheduler(shallow, chunk=options.chunk, prefix_cache=options.prefixes) as scheduler:
            check(shallow, prompts[:clients], load(scheduler, prompts[:clients], clients, new)[1])
        scheduler = qcut.Scheduler(engine, chunk=options.chunk, prefix_cache=options.prefixes)
        scheduler.warm_up()
        gc.freeze()  # as the server does
        with scheduler:
            load(scheduler, prompts[:clients], clients, new)
            seconds, answers = load(scheduler, prompts, clients, new)
            found = scheduler.load.reused_tokens
        static(engine, prompts[:clients], clients, new)
        static_seconds = static(engine, prompts, clients, new)
        times = {"continuous": seconds, "static": static_seconds}
        if options.constrained:
            times["free"], times["constrained"] = constrained(model, answers, prompts, options, context)
    except CheckError as error:
        print(f"WRONG {options.case}: {error}")
        return 1
    gaps = [later - sooner for each in answers for sooner, later in zip(each.times, each.times[1:], strict=False)]
    median, worst = statistics.median(gaps), percentile(sorted(gaps), 0.99)
    rate, static_rate = (len(prompts) * new / each for each in (seconds, static_seconds))
    copied = copy_us(engine, longest)
    lines = [
        ["tokens/s", f"{rate:,.0f}", f"{rate / static_rate:.2f} of a static batch's {static_rate:,.0f}"],
        [
            "between tokens",
            f"{median * 1e3:.2f} ms",
            f"99 in 100 within {worst * 1e3:.2f} ms, {worst / median:.1f} times",
        ],
        ["beginnings found", str(found), "tokens"],
        ["a row copied", f"{copied.median_us / 1e3:.2f} ms", f"{longest} tokens, when a sequence leaves"],
    ]
    if options.constrained:
        constrained_rate = len(prompts) * new / times["constrained"]
        share = times["free"] / times["constrained"]
        lines.append(["with a schema", f"{constrained_rate:,.0f}", f"tokens/s, {share:.3f} of those without"])
    print(harness.table([f"{clients} clients, {len(prompts)} prompts", "", ""], lines))
    goals = f"{TO_REACH['static']} of the static batch, {TO_REACH['gap']} times the median"
    print(f"to reach: {goals}, with a schema {TO_REACH['constrained']} of the tokens/s without")
    columns = columns_of(options, prompts)
    for what, took in times.items():
        timing = Timing.of([took * 1e6], "wall")
        results.add(timing, **columns, what=what, tokens_s=round(len(prompts) * new / took, 1), p99_us="")
    results.add(copied, **columns, what="row copied", tokens_s="", p99_us="")
    results.add(
        Timing.of([gap * 1e6 for gap in gaps], "wall"), **columns, what="gap", tokens_s="", p99_us=round(worst * 1e6, 1)
    )
    print(f"rows in {results.write_csv(options.out, KEY)}")
    return 0
