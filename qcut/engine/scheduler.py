"""Continuous batching: a batch that keeps running admits sequences and retires them."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import cast

import torch
from torch import Tensor

from qcut.common.failures import is_interrupt
from qcut.common.numbers import check_integer
from qcut.engine.chunked_prefill import size_for
from qcut.engine.engine import Engine, Prompts
from qcut.engine.kv_cache.prefix_cache import Match, PrefixCache
from qcut.engine.likelihoods import LogProbability, check_top, likelihoods
from qcut.engine.request import Iteration, Listener, Request, as_failure
from qcut.engine.runner import check_device, inference
from qcut.engine.sequence import DraftedTokens, Event, NewTokens, SequenceBatch
from qcut.engine.speculation import capture_drafted
from qcut.engine.token_ids import Options
from qcut.errors import BusyError, ConfigError, RequestError, ShapeError, shown
from qcut.numerics.sampling import Sampling
from qcut.text.constraint import Constraint
from qcut.text.prompts import Chat

Prompt = str | Chat | Sequence[int] | Tensor
"""A text, a chat or token ids."""

MAX_PREFILLS = 8
"""Most prompts in prefill at once."""
_SCORED_TOKENS = 64
"""Most tokens with log-probabilities in memory at once."""

_log = logging.getLogger("qcut")


@dataclass(frozen=True)
class Load:
    """Current and past work of a scheduler.

    Attributes:
        waiting: prompts in the queue.
        prefilling: prompts in prefill.
        running: sequences that are decoded.
        prefix_cache_tokens: tokens in the prefix cache.
        prompt_tokens: tokens of all prompts so far.
        reused_tokens: prompt tokens with keys and values from the prefix cache.
        new_tokens: new tokens so far.
        steps: decode steps so far.
        drafted_tokens: drafts that steps have verified so far.
        accepted_tokens: those that were right: new tokens, too.
    """

    waiting: int
    prefilling: int
    running: int
    prefix_cache_tokens: int
    prompt_tokens: int
    reused_tokens: int
    new_tokens: int
    steps: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(eq=False)
class _Prompt:
    """A prompt, and the requests that continue it.

    Attributes:
        ids: int64 ``[T]``.
        requests: those that have not ended.
        number: of earlier prompts.
        scores: log-probabilities of the tokens so far; None: not asked for.
        prefilled: tokens in the KV cache.
        is_begun: whether the prefix cache has been searched.
    """

    ids: Tensor
    requests: list[Request]
    number: int
    scores: list[LogProbability] | None = None
    prefilled: int = 0
    is_begun: bool = False


class Scheduler:
    """Continues prompts that arrive at any time, all in one batch.

    Each iteration runs one decode step of all running sequences and one prefill chunk of at most ``chunk`` tokens, so
    that a long prompt delays running sequences by one chunk an iteration. Prefill has a KV cache of its own; then a
    sequence is admitted to the next batch slot. When a sequence finishes, the last sequence moves into its batch slot
    and its KV cache is copied.

    `run` iterates in a thread of its own, until `close`; or call `step` yourself. Only one thread may do so.

    Args:
        engine: its ``batch`` bounds the running sequences. It is the scheduler's while the scheduler lives: a call of
            its own, or of another scheduler, ends the requests that run.
        chunk: most prompt tokens of an iteration.
        prefix_cache: sequences in the prefix cache, each of the memory of a running sequence; 0: no prefix cache.
        max_waiting: prompts that may wait.

    Exactness: with greedy sampling and layers of int8 products a sequence's tokens do not depend on other sequences,
    except for the order of float sums in attention, which depends on the prefill chunks and on kernels chosen by the
    number of sequences and the longest one; in other layers products sum in such an order, too. Draws depend only on
    the seed, the index among the prompt's samples, and the position.

    Raises:
        ConfigError: no engine, or a number below its least.

    A failure ends as few requests as possible: that of a listener or a tokenizer its own request, that of a decode step
    or a prefill chunk the requests in it (`Request.error`). Others go on, and new ones are taken, unless the device
    computes no more.

    Attributes:
        error: failure that ended the thread; further requests are refused.
    """

    @inference()
    def __init__(self, engine: Engine, *, chunk: int = 512, prefix_cache: int = 8, max_waiting: int = 1024) -> None:
        if not isinstance(engine, Engine):
            raise ConfigError(f"engine is a {type(engine).__name__}; allowed: a qcut.Engine")
        check_integer(chunk, "chunk")
        check_integer(prefix_cache, "prefix_cache", 0)
        check_integer(max_waiting, "max_waiting")
        self.engine, self._chunk, self._max_waiting = engine, chunk, max_waiting
        self._batch = SequenceBatch[Request](engine.runner, engine.batch, engine.speculate)
        self._prefill_runner = engine.runner.with_batch(min(MAX_PREFILLS, engine.batch))
        cache = engine.runner.new_cache(prefix_cache) if prefix_cache else None
        self._prefix_cache = PrefixCache(cache, prefix_cache, engine.context)
        self._waiting: deque[_Prompt] = deque()
        self._prefilling: list[_Prompt] = []  # by slot of the prefill runner
        self._pending: deque[NewTokens[Request]] = deque()
        self._lengths: list[int] = []  # the engine's, as long as its cache is of this batch
        counted = ("prompt_tokens", "reused_tokens", "new_tokens", "steps", "drafted_tokens", "accepted_tokens")
        self._done = dict.fromkeys(counted, 0)
        self._lock, self._iteration = threading.Condition(), Iteration()
        self._thread: threading.Thread | None = None
        self._is_closing = self._cancels_all = self._has_failed = False
        self._numbers = itertools.count()
        self.error: BaseException | None = None

    def __del__(self) -> None:
        """End the requests that nothing goes on with: their consumers would wait forever."""
        if hasattr(self, "error"):  # else the scheduler has been refused
            for request in self._all():
                request.fail(RequestError("the scheduler is gone; allowed: to keep it until its requests have ended"))

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
        constraint: Constraint | None = None,
        top: int | None = None,
        prompt_top: int | None = None,
        speculate: bool = True,
        listener: Listener | None = None,
    ) -> Request:
        """Continue a prompt, until a stop token, ``max_new_tokens``, or the context's end. May be called in any thread.

        Args:
            prompt: ids, 1 and more; or, with a tokenizer, a text or a chat.
            max_new_tokens: None fills the context. 0, with ``prompt_top``, only scores the prompt.
            min_new_tokens: see `qcut.Engine.generate`.
            sampling: see `qcut.Engine.generate`.
            stop: see `qcut.Engine.generate`.
            skip_special_tokens: see `qcut.Engine.generate`.
            constraint: see `qcut.Engine.generate`. Steps verify no drafts while such a sequence is in the batch. If the
                constraint fails midway, the request ends with an error of its own.
            top: each event has the log-probabilities of its token and of so many of the likeliest ones; None: of no
                token. Steps wait for them.
            prompt_top: `Request.prompt_log_probabilities` has those of the prompt's tokens, each with so many of the
                likeliest ones; None: of none. No prefix is reused for such a prompt.
            speculate: whether steps may be made wider for its drafts, if the engine has any; its tokens are the same.
            listener: called with each `Event` in the scheduler's thread, in place of the request's own queue. It may
                call `submit`, `close` and `Request.cancel`, and the engine, which ends the requests that run; not
                `step`, nor wait for a request that goes on.

        Raises:
            BusyError: ``max_waiting`` prompts wait already; or the scheduler closes.
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
            constraint=constraint,
            top=top,
            prompt_top=prompt_top,
            speculate=speculate,
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
        keep_special_tokens: Collection[str] = (),
        constraint: Constraint | None = None,
        top: int | None = None,
        prompt_top: int | None = None,
        speculate: bool = True,
        listener: Listener | None = None,
    ) -> list[Request]:
        """Continue a prompt several times after a single prefill: see `submit`.

        Texts have the special tokens with the spellings ``keep_special_tokens``, although others are skipped.

        Raises:
            ConfigError, also: samples below 1 or beyond the engine's batch.
        """
        engine = self.engine
        check_integer(samples, "samples", 1, engine.batch)
        for name, count in (("top", top), ("prompt_top", prompt_top)):
            check_top(count, engine.decoder.vocabulary, name)
        if not isinstance(speculate, bool):
            raise ConfigError(f"speculate is {shown(speculate)}; allowed: True or False")
        if listener is not None and not callable(listener):
            raise ConfigError(f"listener is {shown(listener)}; allowed: a function of an Event, or None")
        options = Options(
            max_new_tokens, min_new_tokens, sampling, stop, skip_special_tokens, constraint, keep_special_tokens
        )
        (ids, *more), _ = engine.checked(cast(Prompts, prompt if _is_text(prompt) else [prompt]), False)
        if more:
            raise ShapeError(f"{1 + len(more)} prompts; allowed: one in a request")
        observed = partial(Request, listener=listener, iteration=self._iteration)
        make = partial(observed, top=top, prompt_top=prompt_top, speculate=speculate)
        fewest = 1 if prompt_top is None else 0
        requests = engine.sequences(make, [ids] * samples, [len(ids)] * samples, options, fewest)
        with self._lock:
            if self.error is not None:
                raise BusyError(f"the scheduler has ended, and takes no further prompt: {self.error}")
            if self._is_closing:
                raise BusyError("the scheduler closes; no further prompt is taken")
            if len(self._waiting) >= self._max_waiting:
                raise BusyError(f"{len(self._waiting)} prompts wait; allowed: {self._max_waiting}")
            scores: list[LogProbability] | None = None if prompt_top is None else []
            self._waiting.append(_Prompt(ids, list(requests), next(self._numbers), scores))
            self._lock.notify()
        return requests

    @property
    def load(self) -> Load:
        """Current and past work."""
        counts = len(self._waiting), len(self._prefilling), len(self._batch.sequences)
        return Load(*counts, self._prefix_cache.tokens, **self._done)

    @property
    def cache_bytes(self) -> int:
        """Memory for keys and values: of the batch, of prefill, and of the prefix cache."""
        return self.engine.cache.nbytes + self._prefill_runner.cache.nbytes + self._prefix_cache.nbytes

    def warm_up(self) -> None:
        """Serve a request of each size once, before `run`: later ones do not wait for kernels and graphs.

        Sizes are those of decode steps, by the number of sequences and the ``max_seq_len`` bucket, and those of prefill
        chunks, by prompts and tokens. Does nothing on the CPU.
        """
        if not self._batch.runs_ahead:
            return
        batch = self.engine.batch
        for count in sorted({min(1 << i, batch) for i in range(batch.bit_length() + 1)}):
            self._serve(self.submit_samples([0], count, 2))
            with self.engine.lock:
                self.engine.runner.capture_decode(count)
                if self.engine.speculate is not None:
                    capture_drafted(self.engine.runner, count, self.engine.speculate)
        for count, length in self._chunk_sizes():
            self._serve([self.submit([0] * length, 2) for _ in range(count)])
        self._done = dict.fromkeys(self._done, 0)

    def _chunk_sizes(self) -> list[tuple[int, int]]:
        """Number of prompts and tokens of each, for each size of a chunk: the graphs of all sizes fit `MAX_GRAPHS`."""
        counts = [1 << i for i in range(min(self._prefill_runner.batch, self._chunk, self._max_waiting).bit_length())]
        most = {count: min(self._chunk // count, self.engine.context) for count in counts}
        return [(n, t) for n in counts for t in sorted({min(size_for(i), most[n]) for i in range(1, most[n] + 1)})]

    def _serve(self, requests: Iterable[Request]) -> None:
        """Serve requests, and clear the prefix cache."""
        while self.step():
            pass
        self._prefix_cache.clear()
        for request in requests:
            request.result()  # raises its error

    # ── iterations ───────────────────────────────────────────────────────────────────────────────

    def run(self) -> Scheduler:
        """Iterate in a thread until `close`; returns this scheduler."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_until_closed, name="qcut-scheduler", daemon=True)
            self._thread.start()
        return self

    def close(self, *, cancel: bool = False) -> None:
        """Refuse further prompts, finish or cancel all requests, and end the thread; in a listener without waiting."""
        with self._lock:
            self._is_closing = True
            self._cancels_all |= cancel
            self._lock.notify()
        if self._iteration.is_here:
            return
        if self._thread is not None:
            self._thread.join()
        else:
            while self.step():
                pass

    def __enter__(self) -> Scheduler:
        """`run`."""
        return self.run()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """`close`; sequences are cancelled if the block has failed."""
        self.close(cancel=kind is not None)

    @inference()
    def step(self) -> bool:
        """Run one decode step and one prefill chunk, then deliver new tokens. Returns False if idle.

        Raises:
            DeviceError: the device computes no more.
            ConfigError: another thread is in a step, or a listener calls.
        """
        with self._iteration.begun(waits=threading.current_thread() is self._thread):
            self._drop_cancelled()
            busy = bool(self._waiting or self._prefilling or self._batch.sequences or self._pending)
            if self._batch.sequences:
                try:
                    self._decode()
                except BaseException as error:
                    self._fail(self._batch.sequences, error)
            self._prefill()
            while len(self._pending) > (1 if self._batch.runs_ahead and self._batch.sequences else 0):
                self._deliver(self._pending.popleft())
            return busy

    def _fail(self, requests: Iterable[Request], error: BaseException) -> None:
        """End requests with an error.

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
            self._remove(request)
            request.fail(failure)
        self._has_failed = True

    def _run_until_closed(self) -> None:
        device = self.engine.decoder.device
        try:
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                while self.step() or self._wait():
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
        """Wait for a prompt; returns False if the scheduler closes."""
        with self._lock:
            if not self._waiting and not self._is_closing:
                self._lock.wait()
            return bool(self._waiting) or not self._is_closing

    def _all(self) -> list[Request]:
        prompts = (*self._waiting, *self._prefilling)
        pending = [request for new in self._pending for request in new.sequences if request.slot is None]
        return [*(request for prompt in prompts for request in prompt.requests), *self._batch.sequences, *pending]

    # ── prefill ──────────────────────────────────────────────────────────────────────────────────

    def _prefill(self) -> None:
        """Run a chunk of the next prompts."""
        prefilling = self._prefilling
        with self._lock:
            taken = len(self._batch.sequences) + sum(len(prompt.requests) for prompt in prefilling)
            while self._waiting and len(prefilling) < self._prefill_runner.batch:
                taken += len(self._waiting[0].requests)
                if taken > self.engine.batch:
                    break
                prefilling.append(self._waiting.popleft())
        if not prefilling:
            return
        chosen = prefilling[:1]
        try:
            # The oldest prompt, and as many more as its tokens leave room for: a chunk is padded to its longest.
            self._reuse_prefix(0)
            most = min(self._chunk, len(chosen[0].ids) - chosen[0].prefilled)
            unscored = next((i for i, each in enumerate(prefilling) if each.scores is not None), len(prefilling)) or 1
            room = min(unscored, max(1, self._chunk // most))
            chosen = prefilling[: 1 << (room.bit_length() - 1)]
            self._prefill_chunk(chosen, most)
        except BaseException as error:
            self._fail([request for prompt in chosen for request in prompt.requests], error)

    def _prefill_chunk(self, chosen: list[_Prompt], most: int) -> None:
        """Prefill a number of tokens of each of the first prompts, and admit those that are complete."""
        prefilling, runner = self._prefilling, self._prefill_runner
        for slot in range(1, len(chosen)):
            self._reuse_prefix(slot)
        chunks = [prompt.ids[prompt.prefilled : prompt.prefilled + most] for prompt in chosen]
        with self.engine.lock:
            if chosen[0].scores is None:
                runner.prefill(chunks, [prompt.prefilled for prompt in chosen])
            else:
                self._prefill_scored(chosen[0], chunks[0])
        for prompt, chunk in zip(chosen, chunks, strict=True):
            prompt.prefilled += len(chunk)
        for slot in reversed(range(len(chosen))):
            if prefilling[slot].prefilled == len(prefilling[slot].ids):
                self._admit(slot)
                self._release(slot)

    def _release(self, slot: int) -> None:
        """Free a slot of the prefill runner: the last prompt moves there, and the oldest prompt into slot 0."""
        prefilling, cache = self._prefilling, self._prefill_runner.cache

        def move(source: int, target: int) -> None:
            if source != target:
                cache.copy_sequence(cache, source, target, 0, prefilling[source].prefilled)
                prefilling[target] = prefilling[source]

        if slot == 0 and len(prefilling) > 1:
            slot = min(range(1, len(prefilling)), key=lambda i: prefilling[i].number)
            move(slot, 0)
        move(len(prefilling) - 1, slot)
        prefilling.pop()

    def _prefill_scored(self, prompt: _Prompt, chunk: Tensor) -> None:
        """Prefill a chunk in slot 0, and add the log-probabilities of the token that follows each token."""
        scores = cast(list[LogProbability], prompt.scores)
        wanted = max((request.prompt_top or 0 for request in prompt.requests), default=0)
        for _, first, logits in self._prefill_runner.prefill_scored([chunk], [prompt.prefilled]):
            start = prompt.prefilled + first + 1
            following = prompt.ids[start : start + len(logits)].to(logits.device)
            for part, tokens in zip(logits.split(_SCORED_TOKENS), following.split(_SCORED_TOKENS), strict=False):
                found = likelihoods(part[: len(tokens)], tokens, [wanted] * len(tokens))
                scores += cast(list[LogProbability], found)

    def _reuse_prefix(self, slot: int) -> None:
        """Copy the longest cached prefix of a prompt to its slot of the prefill runner, once."""
        prompt = self._prefilling[slot]
        if prompt.is_begun:
            return
        match = self._prefix_cache.find(prompt.ids) if prompt.scores is None else Match(0, 0)
        self._prefix_cache.copy_to(match, self._prefill_runner.cache, slot)
        prompt.prefilled, prompt.is_begun = match.length, True
        self._done["prompt_tokens"] += len(prompt.ids)
        self._done["reused_tokens"] += match.length
        for request in prompt.requests:
            request.reused_tokens = match.length

    def _admit(self, slot: int) -> None:
        """Admit the requests of a prefilled prompt to the batch."""
        prompt, runner = self._prefilling[slot], self._prefill_runner
        self._prefix_cache.insert(prompt.ids, runner.cache, slot)
        for request in [each for each in prompt.requests if each.reason is None]:
            request.prompt_log_probabilities = prompt.scores
            try:
                for score in prompt.scores or ():
                    _check(score)
                if request.has_next:
                    with self.engine.lock:
                        if not self._batch.sequences:
                            self._lengths = self.engine.begin()
                        self.engine.check_current(self._lengths, "request")
                        self._pending.append(self._batch.admit(request, runner, slot))
                else:
                    request.finish_without_token()
                    request.deliver(Event(request.index, None, None, request.finish_reason))
            except BaseException as error:
                self._fail([request], error)

    # ── decode ───────────────────────────────────────────────────────────────────────────────────

    def _decode(self) -> None:
        """Queue a decode step, and retire sequences that get their last token in it.

        Raises:
            ConfigError: others use the engine.
        """
        with self.engine.lock:
            self.engine.check_current(self._lengths, "request")
            self._pending.append(self._batch.step())
        self._done["steps"] += 1
        for request in [each for each in self._batch.sequences if not each.has_next]:
            self._retire(request)

    def _retire(self, request: Request) -> None:
        """Copy a sequence with a batch slot to the prefix cache, and free the slot."""
        with self._own_cache() as is_current:
            if request.slot is not None and is_current:
                tokens = [*request.prompt, *request.tokens][: request.cached]
                ids = torch.tensor(tokens, dtype=torch.int64, device="cpu")
                self._prefix_cache.insert(ids, self.engine.cache, request.slot)
            self._remove(request)

    def _remove(self, request: Request) -> None:
        """Remove a request from the batch; the cache is written only if it is still of this scheduler."""
        with self._own_cache() as is_current:
            (self._batch.retire if is_current else self._batch.forget)(request)

    @contextlib.contextmanager
    def _own_cache(self) -> Iterator[bool]:
        """Whether the engine's cache is of this scheduler, and stays so in the block."""
        if not self.engine.is_current(self._lengths):  # nor ever again: whatever holds the lock, there is no wait
            yield False
            return
        with self.engine.lock:
            yield self.engine.is_current(self._lengths)

    def _drop_cancelled(self) -> None:
        """End cancelled requests."""
        if self._cancels_all:
            for request in self._all():
                request.cancel()
        with self._lock:
            prompts = [*self._waiting, *self._prefilling]
        cancelled = [request for prompt in prompts for request in prompt.requests if request.is_cancelled]
        for request in [*cancelled, *(each for each in self._batch.sequences if each.is_cancelled)]:
            try:
                self._retire(request)
                if request.reason is None:
                    request.deliver_cancelled()
            except BaseException as error:
                self._fail([request], error)
        if cancelled or self._has_failed:
            self._has_failed = False
            self._drop_ended()

    def _drop_ended(self) -> None:
        """Drop prompts whose requests have all ended."""
        with self._lock:
            for prompt in (*self._waiting, *self._prefilling):
                prompt.requests[:] = [request for request in prompt.requests if request.reason is None]
            for prompt in [each for each in self._waiting if not each.requests]:
                self._waiting.remove(prompt)
        for slot in reversed(range(len(self._prefilling))):
            if not self._prefilling[slot].requests:
                self._release(slot)

    def _deliver(self, new: NewTokens[Request]) -> None:
        """Append new tokens to their sequences, and send events."""
        try:
            found = new.wait()
        except BaseException as error:
            self._fail(new.sequences, error)
            return
        drafted, accepted = new if isinstance(new, DraftedTokens) else None, self._done["accepted_tokens"]
        if drafted is not None:
            self._done["drafted_tokens"] += drafted.verified
        for request, token, log_probability in found:
            if request.reason is not None:
                continue  # the step was queued before the end was known
            self._done["new_tokens"] += 1
            if drafted is not None:
                self._done["accepted_tokens"] = accepted + drafted.right
            try:
                _check(log_probability)
                text = request.append(token, log_probability)
                if request.finish_reason is not None:
                    self._retire(request)
                request.deliver(Event(request.index, token, text, request.finish_reason, log_probability))
            except BaseException as error:
                self._fail([request], error)


def _check(found: LogProbability | None) -> None:
    """Check a token's log-probability.

    Raises:
        RequestError: it is NaN.
    """
    if found is not None and math.isnan(found.chosen):
        raise RequestError("log-probabilities are NaN; allowed: a model whose logits are finite for this prompt")


def _is_text(prompt: object) -> bool:
    """Whether a prompt is a text or a chat; otherwise it is token ids."""
    is_chat = isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    return is_chat or isinstance(prompt, str | Mapping)
