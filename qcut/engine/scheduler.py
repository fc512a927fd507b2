"""Continuous batching: sequences join and leave a batch that keeps running."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import cast

import torch
from torch import Tensor

from qcut.common.failures import is_interrupt
from qcut.engine.chunked_prefill import size_for
from qcut.engine.decode_loop import DecodeLoop, Fetched
from qcut.engine.engine import Engine, Prompts
from qcut.engine.failures import as_failure, check_device
from qcut.engine.kv_cache.prefix_cache import Found, Prefixes
from qcut.engine.likelihoods import check_top, likelihoods
from qcut.engine.modes import inference
from qcut.engine.request import Listener, Request
from qcut.engine.sequence import Event, LogProbability, Running
from qcut.engine.token_ids import Options, is_whole
from qcut.errors import BusyError, ConfigError, QcutError, ShapeError
from qcut.numerics.sampling import History, Rows, Sampling, sample
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
class _Sequence:
    """A sequence of the batch.

    Attributes:
        request: its sender's.
        index: among the samples of its prompt, which its draws depend on.
        read: tokens in the cache, those of steps on the way included.
        chosen: new tokens, those on the way included.
        row: in the batch, while the sequence is in it.
    """

    request: Request
    index: int
    read: int = 0
    chosen: int = 0
    row: int | None = None

    @property
    def running(self) -> Running:
        """The sequence on the host."""
        return self.request.running

    def cancel(self) -> None:
        """Tell its sender that the sequence has been cancelled."""
        self.request.tell(Event(self.index, None, self.running.cancel(), "cancelled"))

    def fail(self, error: QcutError) -> None:
        """Tell its sender what the sequence has failed with, unless it has ended."""
        if self.request.reason is None:
            self.request.error = error
            self.request.tell(Event(self.index, None, None, "failed"))


@dataclass(eq=False)
class _Prompt:
    """A prompt, and the sequences that go on from it.

    Attributes:
        ids: int64 ``[T]``.
        sequences: those that have not ended.
        number: of those that came before.
        scores: log-probabilities of the tokens that have been read; None: nobody wants them.
        read: tokens that have been read.
        is_begun: whether the prefix cache has been looked at.
    """

    ids: Tensor
    sequences: list[_Sequence]
    number: int
    scores: list[LogProbability] | None = None
    read: int = 0
    is_begun: bool = False


@dataclass(eq=False)
class _Arriving:
    """Tokens on their way to the host, one for each sequence."""

    tokens: Fetched
    sequences: list[_Sequence]
    found: list[LogProbability | None] = field(default_factory=list)


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
        self._reader = engine.beside(min(READERS, engine.batch))
        kept = engine.cache_of(prefixes, engine.cache.kv_dtype) if prefixes else None
        self._prefixes = Prefixes(kept, prefixes, engine.context)
        device, vocabulary = engine.decoder.device, engine.decoder.vocabulary
        self._ahead = device.type == "cuda"
        """Whether the device computes the next step while the host waits for the last one's tokens."""
        self._next = torch.zeros(engine.batch, dtype=torch.int64, device=device)
        self._history: Callable[[], History] = lambda: History.empty(engine.batch, vocabulary, device)
        self._counts: History | None = None
        self._waiting: deque[_Prompt] = deque()
        self._reading: list[_Prompt] = []
        self._running: list[_Sequence] = []
        self._arriving: deque[_Arriving] = deque()
        self._loop: DecodeLoop | None = None  # None: the sequences are others than in the last step
        self._settings: Rows | None = None
        self._places: tuple[Tensor, Tensor] | None = None
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
        given, fewest = tuple(ids.tolist()), 1 if prompt_top is None else 0
        sequences = [
            _Sequence(Request(given, running, top, prompt_top, listener), i)
            for i, running in enumerate(engine.sequences([ids] * samples, [len(ids)] * samples, options, fewest))
        ]
        with self._lock:
            if self.error is not None:
                raise BusyError(f"the scheduler has ended, and takes no further prompt: {self.error}")
            if self._is_closing:
                raise BusyError("the scheduler closes; no further prompt is taken")
            if len(self._waiting) >= self._most_waiting:
                raise BusyError(f"{len(self._waiting)} prompts wait; allowed: {self._most_waiting}")
            scores: list[LogProbability] | None = None if prompt_top is None else []
            self._waiting.append(_Prompt(ids, sequences, next(self._numbers), scores))
            self._lock.notify()
        return [sequence.request for sequence in sequences]

    @property
    def load(self) -> Load:
        """What is under way, and what has been done."""
        counts = len(self._waiting), len(self._reading), len(self._running)
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
        if not self._ahead:
            return
        batch = self.engine.batch
        for count in sorted({min(1 << i, batch) for i in range(batch.bit_length() + 1)}):
            self._answer(self.submit_samples([0], count, 2))
            self.engine.capture_steps(count)
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
        busy = bool(self._waiting or self._reading or self._running or self._arriving)
        if self._running:
            try:
                self._step()
            except BaseException as error:
                self._fail(self._running, error)
        self._read()
        while len(self._arriving) > (1 if self._ahead and self._running else 0):
            self._deliver(self._arriving.popleft())
        return busy

    def _fail(self, sequences: Iterable[_Sequence], error: BaseException) -> None:
        """End sequences with an error, and nothing else.

        Raises:
            DeviceError: the device computes no more.
            KeyboardInterrupt: the error, if Ctrl-C has raised it.
        """
        if is_interrupt(error):
            raise error
        check_device(self._next.device, error)
        _log.error("requests have failed", exc_info=error)
        failure = as_failure(error)
        for sequence in list(sequences):
            self._leave(sequence, keep=False)
            sequence.fail(failure)
        self._has_failed = True

    def _turn_until_closed(self) -> None:
        device = self._next.device
        try:
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                while self.turn() or self._wait():
                    pass
        except BaseException as error:
            with self._lock:
                self._is_closing, self.error = True, error
                left = self._all()
                self._waiting.clear()
            for sequence in left:
                sequence.fail(as_failure(error))
            raise

    def _wait(self) -> bool:
        """Wait for a prompt; False where none will come."""
        with self._lock:
            if not self._waiting and not self._is_closing:
                self._lock.wait()
            return bool(self._waiting) or not self._is_closing

    def _all(self) -> list[_Sequence]:
        prompts = (*self._waiting, *self._reading)
        arriving = [s for each in self._arriving for s in each.sequences if s.row is None]
        return [*(s for prompt in prompts for s in prompt.sequences), *self._running, *arriving]

    # ── prompts ──────────────────────────────────────────────────────────────────────────────────

    def _read(self) -> None:
        """Read a chunk of the prompts that are next."""
        reader, reading = self._reader, self._reading
        with self._lock:
            taken = len(self._running) + sum(len(prompt.sequences) for prompt in reading)
            while self._waiting and len(reading) < reader.batch:
                taken += len(self._waiting[0].sequences)
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
            self._fail([sequence for prompt in chosen for sequence in prompt.sequences], error)

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
            reader.fill(pieces, [prompt.read for prompt in chosen])
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
        wanted = max((each.request.prompt_top or 0 for each in prompt.sequences), default=0)
        for _, first, logits in self._reader.fill_scored([piece], [prompt.read]):
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
        for sequence in prompt.sequences:
            sequence.request.found = found.length

    def _join(self, row: int) -> None:
        """Let the sequences of a prompt that the reader has read into a row take part in the next step."""
        prompt, reader = self._reading[row], self._reader
        self._prefixes.keep(prompt.ids, reader.cache, row)
        for sequence in [s for s in prompt.sequences if s.request.reason is None]:
            sequence.request.prompt_log_probabilities = prompt.scores
            try:
                self._enter(sequence, row)
            except BaseException as error:
                self._fail([sequence], error)

    def _enter(self, sequence: _Sequence, row: int) -> None:
        """Choose the first token of a sequence whose prompt is in a row of the reader, and let it run."""
        reader, running, n = self._reader, sequence.running, len(self._running)
        length, logits = len(sequence.request.prompt), reader.logits[row : row + 1]
        if running.most < 1:
            running.end()
            sequence.request.tell(Event(sequence.index, None, None, running.reason))
            return
        history = self._started(n, sequence.request.prompt) if running.sampling.penalizes else None
        if running.takes_likeliest:
            first = reader.likeliest[row : row + 1].clone()
        else:
            settings = Rows.of([running.sampling], logits.device, [running.bans])
            places = torch.tensor([[sequence.index], [length]], dtype=torch.int64, device="cpu")
            index, position = places.to(logits.device, non_blocking=True)
            first = sample(logits, settings, index, position, None if history is None else history.of(n))
        sequence.read, sequence.chosen = length, 1
        self._arriving.append(_Arriving(Fetched(first), [sequence], self._asked([sequence], logits, first)))
        if running.most > 1:
            self.engine.cache.copy_row(reader.cache, row, n, 0, length)
            self._next[n : n + 1] = first
            if history is not None:
                history.of(n).add(first)
            sequence.row = n
            self._running.append(sequence)
            self._loop = None

    def _started(self, row: int, prompt: Sequence[int]) -> History:
        """The tokens before of all rows, with one row begun anew."""
        if self._counts is None:
            self._counts = self._history()
        self._counts.start(row, torch.tensor(prompt, dtype=torch.int64, device="cpu"))
        return self._counts

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    def _step(self) -> None:
        """Queue a step of all sequences that run."""
        running, n = self._running, len(self._running)
        if self._loop is None:
            lengths = [sequence.read for sequence in running]
            self._loop = self.engine.loop_from(self._next[:n], lengths)
            self._settings = self._places = None
            if not all(sequence.running.takes_likeliest for sequence in running):
                device = self._next.device
                bans = [sequence.running.bans for sequence in running]
                self._settings = Rows.of([sequence.running.sampling for sequence in running], device, bans)
                numbers = [sequence.index for sequence in running]
                places = torch.tensor([numbers, lengths], dtype=torch.int64, device="cpu")
                indices, positions = places.to(device, non_blocking=True)
                self._places = indices, positions
        logits = self.engine.take_step(self._loop)
        if self._settings is not None and self._places is not None:
            indices, positions = self._places
            chosen = sample(logits, self._settings, indices, positions.add_(1), self._counts)
            self._loop.choose(chosen)
        tokens = self._next[:n].copy_(self._loop.tokens)
        if self._counts is not None and self._settings is not None:
            self._counts.add(tokens)
        self._done["steps"] += 1
        # A step in the meantime would overwrite tokens that the host has not fetched.
        fetched = Fetched(tokens if tokens.is_cuda else tokens.clone())
        self._arriving.append(_Arriving(fetched, list(running), self._asked(running, logits, tokens)))
        for sequence in running:
            sequence.read += 1
            sequence.chosen += 1
        for sequence in [s for s in running if s.chosen == s.running.most]:
            self._leave(sequence)

    def _leave(self, sequence: _Sequence, *, keep: bool = True) -> None:
        """Free a sequence's row for the last one, and keep its beginning, unless something has failed."""
        row, sequence.row, cache = sequence.row, None, self.engine.cache
        if row is None:
            return
        if keep:
            tokens = [*sequence.request.prompt, *sequence.request.tokens][: sequence.read]
            self._prefixes.keep(torch.tensor(tokens, dtype=torch.int64, device="cpu"), cache, row)
        last = self._running.pop()
        if last is not sequence:
            end = len(self._running)
            cache.copy_row(cache, end, row, 0, last.read)
            self._next[row] = self._next[end]
            if self._counts is not None:
                self._counts.move(end, row)
            last.row, self._running[row] = row, last
        self._loop = None

    def _drop_cancelled(self) -> None:
        """End what has been cancelled."""
        if self._cancels_all:
            for sequence in self._all():
                sequence.request.cancel()
        with self._lock:
            prompts = [*self._waiting, *self._reading]
        cancelled = [s for prompt in prompts for s in prompt.sequences if s.request.is_cancelled]
        for sequence in [*cancelled, *(s for s in self._running if s.request.is_cancelled)]:
            try:
                self._leave(sequence)
                if sequence.request.reason is None:
                    sequence.cancel()
            except BaseException as error:
                self._fail([sequence], error)
        if cancelled or self._has_failed:
            self._has_failed = False
            self._drop_ended()

    def _drop_ended(self) -> None:
        """Drop prompts from which no sequence goes on."""
        with self._lock:
            for prompt in (*self._waiting, *self._reading):
                prompt.sequences[:] = [s for s in prompt.sequences if s.request.reason is None]
            for prompt in [p for p in self._waiting if not p.sequences]:
                self._waiting.remove(prompt)
        for row in reversed(range(len(self._reading))):
            if not self._reading[row].sequences:
                self._release(row)

    # ── tokens ───────────────────────────────────────────────────────────────────────────────────

    def _asked(self, sequences: Sequence[_Sequence], logits: Tensor, tokens: Tensor) -> list[LogProbability | None]:
        """The log-probabilities that senders have asked for; empty where none has."""
        return likelihoods(logits, tokens, [sequence.request.top for sequence in sequences])

    def _deliver(self, arriving: _Arriving) -> None:
        """Pass tokens on to those who sent the prompts."""
        found = arriving.found or [None] * len(arriving.sequences)
        try:
            tokens = arriving.tokens.wait()
        except BaseException as error:
            self._fail(arriving.sequences, error)
            return
        for sequence, token, each in zip(arriving.sequences, tokens, found, strict=True):
            running = sequence.running
            if sequence.request.reason is not None:
                continue  # a step that was queued before the end was known
            self._done["new_tokens"] += 1
            try:
                text = running.take(token, each)
                if running.reason is not None:
                    self._leave(sequence)
                sequence.request.tell(Event(sequence.index, token, text, running.reason, each))
            except BaseException as error:
                self._fail([sequence], error)


def _is_text(prompt: object) -> bool:
    """Whether a prompt is text or a chat, as an engine takes them; else it is a row of ids."""
    is_chat = isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    return is_chat or isinstance(prompt, str | Mapping)


def _power_of_two(limit: int) -> int:
    """The largest up to ``limit``, which is at least 1."""
    return 1 << (limit.bit_length() - 1)
