"""The server under load: HTTP clients in another process, against the scheduler without HTTP in this one.

The load is that of engine/batching.py: prompts of many lengths, each client's next one when its last is answered; here
every answer is a stream; its pieces are timed as they come. The tokenizer is made for the purpose, a word for each
token, so that the text of every answer shows its tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import qcut
from benchmarks import harness
from benchmarks.engine.batching import Answer, check, columns_of, load, load_options, prompts_of
from benchmarks.engine.steps import CASES, build
from benchmarks.harness import CheckError, Timing, percentile

KEY = ("case", "clients", "what")
_NAME = "model"
_HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "


def tokenizer_of(vocabulary: int) -> Any:
    """A tokenizer of transformers in which token i is the word ``ti``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    found = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t0"))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=found)


@contextmanager
def serving(scheduler: qcut.Scheduler) -> Iterator[int]:
    """A server in a thread; gives its port."""
    from qcut.server import running
    from qcut.server.application import Settings, application
    from qcut.server.metrics import Metrics

    metrics = Metrics(scheduler)
    server = running.server(application(scheduler, Settings(_NAME), metrics), metrics)
    failed: list[BaseException] = []

    def serve() -> None:
        try:
            running.run(server, scheduler, found)
        except BaseException as error:
            failed.append(error)

    with running.listening("127.0.0.1", 0) as found:
        found.listen(2048)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield found.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()
    if failed:
        raise failed[0]


def ask(port: int, prompts: list[list[int]], clients: int, new: int, results: Any) -> None:
    """Put the seconds until all prompts are answered, and the answers, into a queue; runs in a separate process."""
    results.put(asyncio.run(_asked(port, prompts, clients, new)))


async def _asked(port: int, prompts: list[list[int]], clients: int, new: int) -> tuple[float, list[Answer]]:
    answers: dict[int, Answer] = {}

    async def client(mine: int) -> None:
        for i in range(mine, len(prompts), clients):
            answers[i] = await _streamed(port, prompts[i], new)

    start = time.perf_counter()
    await asyncio.gather(*(client(i) for i in range(clients)))
    return time.perf_counter() - start, [answers[i] for i in range(len(prompts))]


async def _streamed(port: int, prompt: list[int], new: int) -> Answer:
    """One answer: its tokens, the start of the request, and the time of each token."""
    body = {"prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True}
    data = json.dumps(body)
    times, text = [time.perf_counter()], ""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"{_HEAD}{len(data)}\r\n\r\n{data}".encode())
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                piece = json.loads(line[6:])["choices"][0]["text"]
                text += piece
                times += [time.perf_counter()] * len(piece.split())
            elif line.startswith(b"data: [DONE]"):
                break
    finally:
        writer.close()
    return Answer([int(word[1:]) for word in text.split()], times)


def over_http(port: int, prompts: list[list[int]], clients: int, new: int) -> tuple[float, list[Answer]]:
    """Seconds and answers of clients in another process.

    Raises:
        CheckError: an answer has another number of tokens.
    """
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    process = spawn.Process(target=ask, args=(port, prompts, clients, new, results))
    process.start()
    while True:
        try:
            seconds, answers = results.get(timeout=1)
            break
        except Exception:
            if not process.is_alive():
                raise CheckError(f"the clients ended with {process.exitcode}") from None
    process.join()
    counts = {len(answer.tokens) for answer in answers}
    if counts != {new}:
        raise CheckError(f"answers of {sorted(counts)} tokens; expected {new}")
    return seconds, answers


@harness.script(harness.timing_options, load_options)
def main(options: argparse.Namespace) -> int:
    """Run the benchmark; 1 if an answer was wrong or lost."""
    device = options.device
    shortest, longest = map(int, options.lengths.split(","))
    case, clients, new = CASES[options.case], options.clients, options.new
    context = longest + new
    tokenizer = tokenizer_of(case.vocabulary)
    sizes = {"batch": clients, "context": context, "kv_cache": options.kv_cache, "tokenizer": tokenizer}
    engine, shallow = (qcut.Engine(build(c, device, context), **sizes) for c in (case, replace(case, layers=1)))
    prompts = prompts_of(clients * options.rounds, case.vocabulary, shortest, longest)
    results = harness.Results("bench_server", harness.environment())
    try:
        with serving(qcut.Scheduler(shallow, chunk=options.chunk, prefix_cache=0)) as port:
            check(shallow, prompts[:clients], over_http(port, prompts[:clients], clients, new)[1])
        scheduler = qcut.Scheduler(engine, chunk=options.chunk, prefix_cache=0)
        scheduler.warm_up()
        with scheduler:
            load(scheduler, prompts[:clients], clients, new)
            alone, _ = load(scheduler, prompts, clients, new)
        scheduler = qcut.Scheduler(engine, chunk=options.chunk, prefix_cache=0)
        scheduler.warm_up()
        with serving(scheduler) as port:
            over_http(port, prompts[:clients], clients, new)
            seconds, answers = over_http(port, prompts, clients, new)
    except CheckError as error:
        print(f"WRONG {options.case}: {error}")
        return 1
    firsts = sorted(each.times[1] - each.times[0] for each in answers)
    gaps = sorted(b - a for each in answers for a, b in zip(each.times[1:], each.times[2:], strict=False))
    rates = {"server": len(prompts) * new / seconds, "scheduler": len(prompts) * new / alone}
    lines = [["tokens/s", f"{rates['server']:,.0f}", f"{alone / seconds:.2f} of the scheduler's alone"]]
    for what, values in (("first token", firsts), ("between tokens", gaps)):
        worst = percentile(values, 0.99)
        lines.append([what, f"{statistics.median(values) * 1e3:.2f} ms", f"99 in 100 within {worst * 1e3:.2f} ms"])
    print(harness.table([f"{clients} clients of HTTP, {len(prompts)} prompts", "", ""], lines))
    columns = columns_of(options, prompts)
    for what, took in (("server", seconds), ("scheduler", alone)):
        results.add(Timing.of([took * 1e6], "wall"), **columns, what=what, tokens_s=round(rates[what], 1), p99_us="")
    for what, values in (("first token", firsts), ("gap", gaps)):
        worst = round(percentile(values, 0.99) * 1e6, 1)
        results.add(Timing.of([v * 1e6 for v in values], "wall"), **columns, what=what, tokens_s="", p99_us=worst)
    print(f"rows in {results.write_csv(options.out, KEY)}")
    return 0
