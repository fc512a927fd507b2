"""Continuous batching: sequences join and leave a batch that keeps running."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import cast

import torch
from torch import Tensor

from qcut.common.failures import is_interrupt
from qcut.engine.chunked_prefill import size_for
from qcut.engine.engine import Engine, Prompts
from qcut.engine.failures import as_failure, check_device
from qcut.engine.kv_cache.prefix_cache import Found, Prefixes
from qcut.engine.likelihoods import LogProbability, check_top, likelihoods
from qcut.engine.request import Listener, Request
from qcut.engine.runner import inference
from qcut.engine.sequence import Event, NewTokens, SequenceBatch
from qcut.engine.token_ids import Options, is_whole
from qcut.errors import BusyError, ConfigError, ShapeError
from qcut.numerics.sampling import Sampling
from qcut.text.prompts import Chat

Prompt = str | Chat | Sequence[int] | Tensor
"""A text, a chat or ids."""

READERS = 8
"""Most prompts that are read at once."""
_SCORED = 64
"""Most rows of logits whose log-probabilities are in memory at once."""

_log = logging.getLogger("qcut")


@dataclass(frozen=True)
class Load:
    """What a scheduler does, and has done.

    Attributes:
        waiting: prompts that nobody reads yet.
        reading: prompts that are being read.
        running: sequences that are being continued.
        kept: tokens in the cache of beginnings.
        prompt_tokens: tokens of all prompts so far.
        found_tokens: of these, tokens that the cache of beginnings had.
        new_tokens: new tokens so far.
        steps: steps so far.
    """

    waiting: int
    reading: int
    running: int
    kept: int
    prompt_tokens: int
    found_tokens: int
    new_tokens: int
    steps: int


@dataclass(eq=False)
class _Prompt:
    """A prompt, and the sequences that go on from it.

    Attributes:
        ids: int64 ``[T]``.
        requests: those that have not ended.
        number: of those that came before.
        scores: log-probabilities of the tokens that have been read; None: nobody wants them.
        read: tokens that have been read.
        is_begun: whether the prefix cache has been looked at.
    """

    ids: Tensor
    requests: list[Request]
    number: int
    scores: list[LogProbability] | None = None
    read: int = 0
    is_begun: bool = False


class Scheduler:
    """Continues prompts that come when they like, all in one batch.

    Every turn takes one step of the sequences that run, and reads at most ``chunk`` tokens of prompts that wait: a long
    prompt delays running sequences by one chunk a turn. A sequence that has ended leaves its row to the last one, whose
    keys and values are copied; the rows in use are always the first ones, which steps of `qcut.Engine` take as they
    are. Prompts are read beside the batch, and join it when they have been read.

    `run` turns in a thread of its own, until `close`; or call `turn` yourself. Only one thread may turn.

    Args:
        engine: its ``batch`` bounds the sequences that run at once. The scheduler's while it lives.
        chunk: most tokens of prompts in a turn.
        prefixes: sequences whose beginnings are kept, to be found again by their tokens; as much memory as so many
            sequences of the batch.
        most_waiting: prompts that may wait.

    Exactness: with greedy sampling and layers of int8 products a sequence's tokens do not depend on its neighbours,
    but for sums of floats in attention, whose order depends on the pieces in which a prompt is read and on kernels
    chosen by the number of sequences and the longest of them; with other layers products' sums have that order, too.
    Draws depend on the seed, the index among the prompt's samples, and the position alone.

    Raises:
        ConfigError: a number below its least.

    What fails ends as little as it can: a listener or a tokenizer its own request, a step or a chunk of prompts the
    requests that it was for (`Request.error`). Others go on, and new ones are taken, unless the device computes no
    more.

    Attributes:
        error: what has ended the thread; no request is taken any more.
    """

    @inference()
    def __init__(self, engine: Engine, *, chunk: int = 512, prefixes: int = 8, most_waiting: int = 1024) -> None:
        for name, value, least in (("chunk", chunk, 1), ("prefixes", prefixes, 0), ("most_waiting", most_waiting, 1)):
            if not is_whole(value) or value < least:
                raise ConfigError(f"{name} is {value!r}; allowed: {least} and more")
        self.engine, self._chunk, self._most_waiting = engine, chunk, most_waiting
        self._batch = SequenceBatch[Request](engine.runner, engine.batch)
        self._reader = engine.runner.with_batch(min(READERS, engine.batch))
        kept = engine.runner.new_cache(prefixes) if prefixes else None
        self._prefixes = Prefixes(kept, prefixes, engine.context)
        self._waiting: deque[_Prompt] = deque()
        self._reading: list[_Prompt] = []
        self._arriving: deque[NewTokens[Request]] = deque()
        self._done = {"prompt_tokens": 0, "found_tokens": 0, "new_tokens": 0, "steps": 0}
        self._lock = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closing = self._cancels_all = self._has_failed = False
        self._numbers = itertools.count()
        self.error: BaseException | None = None

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def submit(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = None,
        *,
        min_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: Iterable[int | str] = (),
        skip_special_tokens: bool = True,
        top: int | None = None,
        prompt_top: int | None = None,
        listener: Listener | None = None,
    ) -> Request:
        """Continue a prompt, until a stop token, ``max_new_tokens``, or the context's end. May be called in any thread.

        Args:
            prompt: ids, 1 and more; or, where the engine has a tokenizer, a text or a chat.
            max_new_tokens: None fills the context. 0, with ``prompt_top``, reads only the prompt.
            min_new_tokens: see `qcut.Engine.generate`.
            sampling: see `qcut.Engine.generate`.
            stop: see `qcut.Engine.generate`.
            skip_special_tokens: see `qcut.Engine.generate`.
            top: each event has the log-probabilities of its token and of so many of the likeliest ones; None: of no
                token. Steps wait for them.
            prompt_top: `Request.prompt_log_probabilities` has those of the prompt's tokens, each with so many of the
                likeliest ones; None: of none. The whole prompt is read then, whatever the prefix cache has.
            listener: called with each `Event` in the thread that turns, in place of the request's own queue.

        Raises:
            BusyError: as many prompts wait as may; or the scheduler closes.
            As `qcut.Engine.generate`.
        """
        (request,) = self.submit_samples(
            prompt,
            1,
            max_new_tokens,
            min_new_tokens=min_new_tokens,
            sampling=sampling,
            stop=stop,
            skip_special_tokens=skip_special_tokens,
            top=top,
            prompt_top=prompt_top,
            listener=listener,
        )
        return request

    def submit_samples(
        self,
        prompt: Prompt,
        samples: int,
        max_new_tokens: int | None = None,
        *,
        min_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: Iterable[int | str] = (),
        skip_special_tokens: bool = True,
        top: int | None = None,
        prompt_top: int | None = None,
        listener: Listener | None = None,
    ) -> list[Request]:
        """Continue a prompt several times, which is read once: see `submit`.

        Raises:
            ConfigError, also: samples below 1 or beyond the engine's batch.
        """
        engine = self.engine
        if not is_whole(samples) or not 1 <= samples <= engine.batch:
            raise ConfigError(f"samples is {samples!r}; allowed: 1 to {engine.batch}, the engine's batch")
        for name, count in (("top", top), ("prompt_top", prompt_top)):
            check_top(count, engine.decoder.vocabulary, name)
        options = Options(max_new_tokens, min_new_tokens, sampling, stop, skip_special_tokens)
        (ids, *more), _ = engine.checked(cast(Prompts, prompt if _is_text(prompt) else [prompt]), False)
        if more:
            raise ShapeError(f"{1 + len(more)} prompts; allowed: one in a request")
        make = partial(Request, top=top, prompt_top=prompt_top, listener=listener)
        fewest = 1 if prompt_top is None else 0
        requests = engine.sequences(make, [ids] * samples, [len(ids)] * samples, options, fewest)
        with self._lock:
            if self.error is not None:
                raise BusyError(f"the scheduler has ended, and takes no further prompt: {self.error}")
            if self._is_closing:
                raise BusyError("the scheduler closes; no further prompt is taken")
            if len(self._waiting) >= self._most_waiting:
                raise BusyError(f"{len(self._waiting)} prompts wait; allowed: {self._most_waiting}")
            scores: list[LogProbability] | None = None if prompt_top is None else []
            self._waiting.append(_Prompt(ids, list(requests), next(self._numbers), scores))
            self._lock.notify()
        return requests

    @property
    def load(self) -> Load:
        """What is under way, and what has been done."""
        counts = len(self._waiting), len(self._reading), len(self._batch.sequences)
        return Load(*counts, self._prefixes.tokens, **self._done)

    @property
    def cache_bytes(self) -> int:
        """Memory for keys and values: of the batch, of prompts that are being read, and of beginnings."""
        return self.engine.cache.nbytes + self._reader.cache.nbytes + self._prefixes.nbytes

    def warm_up(self) -> None:
        """Serve a request of each size once, before `run`, so that none waits for kernels and graphs of its first time.

        Sizes are those of steps, by the number of sequences and the tokens of the longest, and those of chunks, by
        prompts and tokens. On the CPU nothing is built, and nothing done.
        """
        if not self._batch.runs_ahead:
            return
        batch = self.engine.batch
        for count in sorted({min(1 << i, batch) for i in range(batch.bit_length() + 1)}):
            self._answer(self.submit_samples([0], count, 2))
            self.engine.runner.capture_decode(count)
        for count, length in self._chunk_sizes():
            self._answer([self.submit([0] * length, 2) for _ in range(count)])
        self._done = dict.fromkeys(self._done, 0)

    def _chunk_sizes(self) -> list[tuple[int, int]]:
        """Prompts and tokens of each, one for each size of a chunk: few enough that the graphs of all are kept."""
        counts = [1 << i for i in range(min(self._reader.batch, self._chunk, self._most_waiting).bit_length())]
        most = {count: min(self._chunk // count, self.engine.context) for count in counts}
        return [(n, t) for n in counts for t in sorted({min(size_for(i), most[n]) for i in range(1, most[n] + 1)})]

    def _answer(self, requests: Iterable[Request]) -> None:
        """Turn until nothing is left to do, and forget the prompts' beginnings."""
        while self.turn():
            pass
        self._prefixes.forget()
        for request in requests:
            request.result()  # raises what it has failed with

    # ── turning ──────────────────────────────────────────────────────────────────────────────────

    def run(self) -> Scheduler:
        """Turn in a thread until `close`; returns this scheduler."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._turn_until_closed, name="qcut-scheduler", daemon=True)
            self._thread.start()
        return self

    def close(self, *, cancel: bool = False) -> None:
        """Take no further prompt, finish or cancel what has been taken, and end the thread."""
        with self._lock:
            self._is_closing = True
            self._cancels_all |= cancel
            self._lock.notify()
        if self._thread is not None:
            self._thread.join()
        else:
            while self.turn():
                pass

    def __enter__(self) -> Scheduler:
        """`run`."""
        return self.run()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """`close`; where the block has failed, sequences are cancelled."""
        self.close(cancel=kind is not None)

    @inference()
    def turn(self) -> bool:
        """Take a step, read a chunk, and pass on what has come; False where there was nothing to do.

        Raises:
            DeviceError: the device computes no more.
        """
        self._drop_cancelled()
        busy = bool(self._waiting or self._reading or self._batch.sequences or self._arriving)
        if self._batch.sequences:
            try:
                self._step()
            except BaseException as error:
                self._fail(self._batch.sequences, error)
        self._read()
        while len(self._arriving) > (1 if self._batch.runs_ahead and self._batch.sequences else 0):
            self._deliver(self._arriving.popleft())
        return busy

    def _fail(self, requests: Iterable[Request], error: BaseException) -> None:
        """End requests with an error, and nothing else.

        Raises:
            DeviceError: the device computes no more.
            KeyboardInterrupt: the error, if Ctrl-C has raised it.
        """
        if is_interrupt(error):
            raise error
        check_device(self.engine.decoder.device, error)
        _log.error("requests have failed", exc_info=error)
        failure = as_failure(error)
        for request in list(requests):
            self._batch.retire(request)
            request.fail(failure)
        self._has_failed = True

    def _turn_until_closed(self) -> None:
        device = self.engine.decoder.device
        try:
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                while self.turn() or self._wait():
                    pass
        except BaseException as error:
            with self._lock:
                self._is_closing, self.error = True, error
                left = self._all()
                self._waiting.clear()
            for request in left:
                request.fail(as_failure(error))
            raise

    def _wait(self) -> bool:
        """Wait for a prompt; False where none will come."""
        with self._lock:
            if not self._waiting and not self._is_closing:
                self._lock.wait()
            return bool(self._waiting) or not self._is_closing

    def _all(self) -> list[Request]:
        prompts = (*self._waiting, *self._reading)
        arriving = [request for new in self._arriving for request in new.sequences if request.slot is None]
        return [*(request for prompt in prompts for request in prompt.requests), *self._batch.sequences, *arriving]

    # ── prompts ──────────────────────────────────────────────────────────────────────────────────

    def _read(self) -> None:
        """Read a chunk of the prompts that are next."""
        reader, reading = self._reader, self._reading
        with self._lock:
            taken = len(self._batch.sequences) + sum(len(prompt.requests) for prompt in reading)
            while self._waiting and len(reading) < reader.batch:
                taken += len(self._waiting[0].requests)
                if taken > self.engine.batch:
                    break
                reading.append(self._waiting.popleft())
        if not reading:
            return
        chosen = reading[:1]
        try:
            chosen = self._chosen()
            self._read_chunk(chosen)
        except BaseException as error:
            self._fail([request for prompt in chosen for request in prompt.requests], error)

    def _chosen(self) -> list[_Prompt]:
        """The prompts of the next chunk: the first comes first, and as many beside it as its tokens leave room for."""
        reading = self._reading
        self._begin(0)
        most = min(self._chunk, len(reading[0].ids) - reading[0].read)
        together = next((i for i, prompt in enumerate(reading) if prompt.scores is not None), len(reading)) or 1
        return reading[: _power_of_two(min(together, max(1, self._chunk // most)))]

    def _read_chunk(self, chosen: list[_Prompt]) -> None:
        """Read a chunk of the first prompts; as far of each, since a chunk is padded to its longest."""
        reading, reader = self._reading, self._reader
        for row in range(1, len(chosen)):
            self._begin(row)
        most = min(self._chunk, len(reading[0].ids) - reading[0].read)
        pieces = [prompt.ids[prompt.read : prompt.read + most] for prompt in chosen]
        if chosen[0].scores is None:
            reader.prefill(pieces, [prompt.read for prompt in chosen])
        else:
            self._score(chosen[0], pieces[0])
        for prompt, piece in zip(chosen, pieces, strict=True):
            prompt.read += len(piece)
        for row in reversed(range(len(chosen))):
            if reading[row].read == len(reading[row].ids):
                self._join(row)
                self._release(row)

    def _release(self, row: int) -> None:
        """Free a row of the reader for the last prompt, and the first row for the prompt that came first."""
        reading, cache = self._reading, self._reader.cache

        def move(source: int, target: int) -> None:
            if source != target:
                cache.copy_row(cache, source, target, 0, reading[source].read)
                reading[target] = reading[source]

        if row == 0 and len(reading) > 1:
            row = min(range(1, len(reading)), key=lambda i: reading[i].number)
            move(row, 0)
        move(len(reading) - 1, row)
        reading.pop()

    def _score(self, prompt: _Prompt, piece: Tensor) -> None:
        """Read a piece of a prompt into the reader's first row, and note the likelihoods of what follows each token."""
        scores = cast(list[LogProbability], prompt.scores)
        wanted = max((request.prompt_top or 0 for request in prompt.requests), default=0)
        for _, first, logits in self._reader.prefill_scored([piece], [prompt.read]):
            start = prompt.read + first + 1
            following = prompt.ids[start : start + len(logits)].to(logits.device)
            for rows, tokens in zip(logits.split(_SCORED), following.split(_SCORED), strict=False):
                found = likelihoods(rows[: len(tokens)], tokens, [wanted] * len(tokens))
                scores += cast(list[LogProbability], found)

    def _begin(self, row: int) -> None:
        """Copy the beginning of a prompt to the reader's row where it is known, once."""
        prompt = self._reading[row]
        if prompt.is_begun:
            return
        found = self._prefixes.find(prompt.ids) if prompt.scores is None else Found(0, 0)
        self._prefixes.take(found, self._reader.cache, row)
        prompt.read, prompt.is_begun = found.length, True
        self._done["prompt_tokens"] += len(prompt.ids)
        self._done["found_tokens"] += found.length
        for request in prompt.requests:
            request.found = found.length

    def _join(self, row: int) -> None:
        """Let the sequences of a prompt that the reader has read into a row take part in the next step."""
        prompt, reader = self._reading[row], self._reader
        self._prefixes.keep(prompt.ids, reader.cache, row)
        for request in [each for each in prompt.requests if each.reason is None]:
            request.prompt_log_probabilities = prompt.scores
            try:
                if request.wants_more:
                    self._arriving.append(self._batch.admit(request, reader, row))
                else:
                    request.finish_without_token()
                    request.deliver(Event(request.index, None, None, request.finish_reason))
            except BaseException as error:
                self._fail([request], error)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    def _step(self) -> None:
        """Queue a step of all sequences that run."""
        self._arriving.append(self._batch.step())
        self._done["steps"] += 1
        for request in [each for each in self._batch.sequences if not each.wants_more]:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        """Free a sequence's slot, and keep its beginning."""
        if request.slot is not None:
            tokens = [*request.prompt, *request.tokens][: request.cached]
            ids = torch.tensor(tokens, dtype=torch.int64, device="cpu")
            self._prefixes.keep(ids, self.engine.cache, request.slot)
            self._batch.retire(request)

    def _drop_cancelled(self) -> None:
        """End what has been cancelled."""
        if self._cancels_all:
            for request in self._all():
                request.cancel()
        with self._lock:
            prompts = [*self._waiting, *self._reading]
        cancelled = [request for prompt in prompts for request in prompt.requests if request.is_cancelled]
        for request in [*cancelled, *(each for each in self._batch.sequences if each.is_cancelled)]:
            try:
                self._leave(request)
                if request.reason is None:
                    request.deliver_cancelled()
            except BaseException as error:
                self._fail([request], error)
        if cancelled or self._has_failed:
            self._has_failed = False
            self._drop_ended()

    def _drop_ended(self) -> None:
        """Drop prompts from which no sequence goes on."""
        with self._lock:
            for prompt in (*self._waiting, *self._reading):
                prompt.requests[:] = [request for request in prompt.requests if request.reason is None]
            for prompt in [each for each in self._waiting if not each.requests]:
                self._waiting.remove(prompt)
        for row in reversed(range(len(self._reading))):
            if not self._reading[row].requests:
                self._release(row)

    # ── tokens ───────────────────────────────────────────────────────────────────────────────────

    def _deliver(self, new: NewTokens[Request]) -> None:
        """Pass new tokens on to those who sent the prompts."""
        try:
            found = new.wait()
        except BaseException as error:
            self._fail(new.sequences, error)
            return
        for request, token, log_probability in found:
            if request.reason is not None:
                continue  # a step that was queued before the end was known
            self._done["new_tokens"] += 1
            try:
                text = request.append(token, log_probability)
                if request.finish_reason is not None:
                    self._leave(request)
                request.deliver(Event(request.index, token, text, request.finish_reason, log_probability))
            except BaseException as error:
                self._fail([request], error)


def _is_text(prompt: object) -> bool:
    """Whether a prompt is text or a chat, as an engine takes them; else it is a row of ids."""
    is_chat = isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    return is_chat or isinstance(prompt, str | Mapping)


def _power_of_two(limit: int) -> int:
    """The largest up to ``limit``, which is at least 1."""
    return 1 << (limit.bit_length() - 1)
