"""`ModelRunner`: a decoder with a KV cache of some batch slots, run by chunked prefill and by decode steps.

A `DecodeLoop` has the inputs of a decode step on the device: a token and a position for each slot.
"""

from __future__ import annotations

import copy
import weakref
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count, takewhile
from typing import Any, TypeVar

import torch
from torch import Tensor

from qcut.engine.attention import PromptAttention, StepAttention
from qcut.engine.chunked_prefill import Chunk, Span, size_for, size_within, spans
from qcut.engine.decoder import Attention, Decoder
from qcut.engine.graphs import Graphs
from qcut.engine.kv_cache.cache import KVCache, KVDtype
from qcut.engine.kv_cache.ring_cache import Ring
from qcut.errors import DeviceError
from qcut.numerics.plain_state import outside_modes

A = TypeVar("A", bound=Attention)
T = TypeVar("T")

MOST_FUSED_ROWS = 4
"""Most tokens of a sequence that a step attends for in one kernel a layer; more are attended for as a prefill chunk."""
FUSED_QUERIES, FUSED_PLACES = 8, 4096
"""Queries of a head of keys for which that kernel reads the cache once. With more, it is used for so many places of all
sequences together at most: a prefill chunk reads longer caches in less time.
"""
MOST_ROWS = 16
"""Most tokens of a sequence in a step."""
HOST_STEPS = 4
"""Number of recent steps with tokens in pinned host memory; the host may lag one step."""
FIRST_BUCKET = 512
"""Smallest ``max_seq_len`` bucket: up to here attention has few splits, which meet in one cluster, if there are any."""

ForwardStep = Callable[[Tensor, Tensor, Tensor, int, Sequence[int]], Tensor]
"""Logits ``[B, vocabulary]`` of a decode step.

Takes tokens int64, positions and cache slots int32, all ``[B]``; the ``max_seq_len`` bucket that kernels are chosen
for, 0 for the cache's length; and further buckets, to build their kernels too.
"""


@contextmanager
def inference() -> Iterator[None]:
    """Run a block or a decorated function without gradients, autocast and inference mode.

    Autocast would give results other dtypes than the cache's. Tensors of inference mode could not be written by the
    next call, which may come from another thread or from outside the mode.
    """
    with torch.no_grad():
        casts = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        if not (casts or torch.is_inference_mode_enabled()):
            yield
            return
        with outside_modes():
            yield


def check_device(device: torch.device, error: BaseException) -> None:
    """Check whether a device still computes after an error.

    Raises:
        DeviceError: it does not, and will not in this process.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.ones(1, dtype=torch.uint8, device=device).item()
    except torch.OutOfMemoryError:
        return
    except Exception as lost:
        message = f"{device} computes no more in this process ({lost}); start it anew. It failed with: {error}"
        raise DeviceError(message) from error


class ModelRunner:
    """Runs a decoder over a KV cache of its own: sequence i of a call is in batch slot i.

    Args:
        decoder: the model's parts.
        batch: batch slots.
        context: most tokens of a sequence.
        kv_cache: see `qcut.Engine`, as the arguments after it.

    Attributes:
        cache: the KV cache.
        rings: of each layer; None: the layer's KV cache has a position for each token of the context.
        tables: cosines and sines ``[context, D]`` of each layer.
        logits: of each prompt's last token after `prefill`, ``[batch, vocabulary]``; the next call overwrites them.
        likeliest: the first largest of each row of ``logits``, int64 ``[batch]``.
        graphs: captured graphs; None captures nothing.
        companion: a runner of another decoder that has the same sequences, and prefills what this one does; or None.
        step_us: microseconds of drafted steps that were timed, by what finds drafts and the number of sequences, and by
            the tokens of each and whether they are drawn; runners of one decoder share them.
        max_prefill_tokens: most tokens that a prefill chunk has in all sequences together, which bounds the memory of
            each layer's result. May be changed between calls.
    """

    max_prefill_tokens = 8192

    def __init__(
        self, decoder: Decoder, batch: int, context: int, *, kv_cache: KVDtype, ring: int, graphs: bool
    ) -> None:
        self.decoder, self.context, self._kv_dtype = decoder, context, kv_cache
        windows = [block.attention.window for block in decoder.blocks]
        self.rings = [Ring.of(window, ring, context, decoder.heads.size) for window in windows]
        with inference():
            self.tables = decoder.rotary_tables(context)
        self.graphs = Graphs(decoder.device) if graphs and decoder.device.type == "cuda" else None
        self.companion: ModelRunner | None = None
        self.step_us: dict[Hashable, dict[tuple[int, bool], float]] = {}
        self._last: tuple[Tensor, Tensor | None]
        self._allocate(batch)

    def accompany(self, companion: ModelRunner) -> None:
        """Take another runner of as many batch slots as `companion`."""
        self.companion, self.cache.companion = companion, companion.cache

    def with_batch(self, batch: int) -> ModelRunner:
        """Another runner of the same decoder, with a KV cache and graphs of its own."""
        other = copy.copy(self)
        other.graphs = None if self.graphs is None else Graphs(self.decoder.device)
        other._allocate(batch)
        other.cache.share_calibration(self.cache)
        if self.companion is not None:
            other.accompany(self.companion.with_batch(batch))
        return other

    @inference()
    def _allocate(self, batch: int) -> None:
        decoder, self.batch = self.decoder, batch
        dtype, device = decoder.dtype, decoder.device
        self.cache = self.new_cache(batch)
        # Each runner has counters of its own, since graphs of two runners may run at once.
        queries = batch * MOST_FUSED_ROWS * decoder.heads.queries
        self._counters = torch.zeros(queries, dtype=torch.int32, device=device)
        ascending = torch.arange(self.context + MOST_ROWS, dtype=torch.int32, device=device)
        self._places = ascending.clamp(max=self.context - 1), ascending.clamp(max=self.context)
        self.logits = torch.zeros(batch, decoder.vocabulary, dtype=dtype, device=device)
        self.likeliest = torch.zeros(batch, dtype=torch.int64, device=device)

    def new_cache(self, batch: int) -> KVCache:
        """An empty KV cache of this runner's kind and context, with one of its companion's."""
        decoder = self.decoder
        cache = KVCache(
            len(decoder.blocks),
            batch,
            decoder.heads.keys,
            self.context + 1,  # padding writes to the position after the context
            decoder.heads.size,
            dtype=decoder.dtype,
            device=decoder.device,
            kv_dtype=self._kv_dtype,
            rings=self.rings,
        )
        if self.companion is not None:
            cache.companion = self.companion.new_cache(batch)
        return cache

    # ── prefill ──────────────────────────────────────────────────────────────────────────────────

    def prefill(self, prompts: list[Tensor], starts: list[int]) -> None:
        """Append a prompt to each sequence; `logits` and `likeliest` are of the prompts' last tokens then.

        Args:
            prompts: checked ids of each, int64 ``[T]`` on the host, T at least 1, that fit the context.
            starts: tokens of each sequence that stay in the cache before its prompt.
        """
        if self.companion is not None:
            self.companion.prefill(prompts, starts)
        for chunk, _ in self._chunks(prompts, starts):
            if chunk.graph is not None:
                chunk.graph.replay()
            elif self.graphs is not None:
                chunk.graph = self.graphs.run_and_capture(partial(self._prefill_chunk, chunk))
            else:
                self._launched(partial(self._prefill_chunk, chunk))

    def prefill_scored(self, prompts: list[Tensor], starts: list[int]) -> Iterator[tuple[int, int, Tensor]]:
        """Append prompts as `prefill` does, and yield the logits after each of their tokens, chunk by chunk.

        Yields:
            Index of a prompt, index of its first token in a chunk, and logits ``[T, vocabulary]`` after each token.
        """
        if self.companion is not None:
            self.companion.prefill(prompts, starts)
        for chunk, span in self._chunks(prompts, starts):

            def run(chunk: Chunk = chunk) -> Tensor:
                logits = self.decoder.logits(*self._prefill_chunk(chunk))
                return logits.unflatten(0, (chunk.sequences, chunk.tokens))

            for i, (logits, first, length) in enumerate(zip(self._launched(run), *span, strict=False)):
                yield i, first, logits[:length]

    def prefill_observed(self, prompts: list[Tensor], observe: Callable[[PromptAttention], A]) -> list[A]:
        """Prefill new sequences through observed attention; returns the observer of each chunk."""

        def run(chunk: Chunk) -> A:
            inner = self._prompt_attention(chunk)
            attention = observe(inner)
            self.decoder(chunk.ids.flatten(), inner.positions, chunk.sequences, attention)
            return attention

        return [self._launched(partial(run, chunk)) for chunk, _ in self._chunks(prompts, [0] * len(prompts))]

    def _chunks(self, prompts: list[Tensor], starts: list[int]) -> Iterator[tuple[Chunk, Span]]:
        """Chunks that cover the prompts in order, filled, and the tokens of the prompts in each."""
        if self.graphs is not None:
            self.graphs.refresh()
        sequences = min(self.batch, size_for(len(prompts), doubling=1))
        rooms = [ring.room for ring in self.rings if ring is not None]
        most = size_within(min([max(1, self.max_prefill_tokens // sequences), *rooms]))
        for slot, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
            self.cache.wrote(slot, start, start + len(prompt))
        for span in spans([len(prompt) for prompt in prompts], most):
            size = sequences, min(size_for(max(span.counts)), self.context)
            make = partial(Chunk, *size, self.context, self.decoder.device)
            chunk = make() if self.graphs is None else self.graphs.get(("chunk", *size), make)
            chunk.fill(prompts, starts, span)
            yield chunk, span

    def _launched(self, run: Callable[[], T]) -> T:
        """Result of ``run``, which may run twice: on a GPU, missing kernels are built together first."""
        if self.decoder.device.type != "cuda":
            return run()
        from qcut.jit.waiting import dry_run_first

        return dry_run_first(run)

    def _prefill_chunk(self, chunk: Chunk) -> tuple[Tensor, Tensor | None]:
        """Prefill S sequences of T tokens; `logits` and `likeliest` are of each sequence's last token then.

        Returns:
            Hidden states ``[S T, hidden]`` of all tokens, as `Decoder.logits` takes them.
        """
        attention: PromptAttention | StepAttention = self._prompt_attention(chunk)
        if chunk.tokens == 1:
            attention = StepAttention(self.cache, self.tables, attention.positions, attention.slots, self._counters)
        x, residual = self.decoder(chunk.ids.flatten(), attention.positions, chunk.sequences, attention)
        last, n = chunk.last_tokens(), chunk.sequences
        logits = self.decoder.logits(x[last], None if residual is None else residual[last])
        self.logits[:n].copy_(logits)
        self.likeliest[:n].copy_(torch.ops.qcut.argmax(logits))
        return x, residual

    def _prompt_attention(self, chunk: Chunk) -> PromptAttention:
        return PromptAttention(self.cache, self.tables, *chunk.positions(), chunk.starts, chunk.lengths)

    # ── decode ───────────────────────────────────────────────────────────────────────────────────

    def decode_loop(self, tokens: Tensor, lengths: Sequence[int]) -> DecodeLoop:
        """A loop of decode steps of the sequences in the first n batch slots.

        Args:
            tokens: the next of each, int64 ``[n]``.
            lengths: tokens of each before it.
        """
        n, size = len(lengths), len(lengths)
        if self.graphs is not None:
            size = min(self.batch, 1 << (n - 1).bit_length())
            self.graphs.refresh()
        make = partial(DecodeLoop, self.forward_step, size, self.context, self.decoder.device, self.graphs)
        loop = make() if self.graphs is None else self.graphs.get(("steps", size), make)
        loop.start(tokens, torch.tensor(lengths, dtype=torch.int32, device="cpu"))
        return loop

    def decode_step(self, loop: DecodeLoop) -> Tensor:
        """Queue a decode step; logits ``[n, vocabulary]`` in memory that the next step may overwrite."""
        logits = loop.step()
        for slot, length in enumerate(loop.lengths):
            self.cache.wrote(slot, 1, length)
        return logits

    @inference()
    def capture_decode(self, sequences: int) -> None:
        """Capture the decode steps of so many sequences for all ``max_seq_len`` buckets, if graphs are used."""
        self.decode_loop(torch.zeros(sequences, dtype=torch.int64, device="cpu"), [0] * sequences).capture()

    def forward_step(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, max_seq_len: int, other_buckets: Sequence[int]
    ) -> Tensor:
        """A `ForwardStep`."""
        # A graph starts when all before it has ended, and holds one step, which writes positions and slots at its end.
        # Steps that are tried before a capture may read slots of before: rows that the next step writes anew.
        early_read = self.graphs is not None
        inputs = (self.cache, self.tables, positions, slots, self._counters)
        attention = StepAttention(*inputs, max_seq_len, other_buckets, early_read)
        return self._logits(*self.decoder(tokens, positions, len(tokens), attention))

    def forward_tokens(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, max_seq_len: int = 0, other_buckets: Sequence[int] = ()
    ) -> Tensor:
        """A step of several tokens of each sequence; the cache takes all of them, as far as it has room.

        Args:
            tokens: int64 ``[T, n]``.
            positions: int32 ``[n]``, of each sequence's first token.
            slots: int32 ``[n]``, its place in the cache; the context for padding.
            max_seq_len: as of a `ForwardStep`, up to `MOST_FUSED_ROWS` tokens.
            other_buckets: as of a `ForwardStep`.

        Returns:
            Logits ``[n T, vocabulary]`` after each token, a sequence's side by side.
        """
        rows, n = tokens.shape
        at, places = (
            table.unfold(0, rows, 1).index_select(0, first).flatten()
            for table, first in zip(self._places, (positions, slots), strict=True)
        )
        attention: PromptAttention | StepAttention
        fused = self._fuses(rows, n, max_seq_len)
        if not fused:
            lengths = (self.context - positions).clamp_(max=rows)
            attention = PromptAttention(self.cache, self.tables, at, places, positions, lengths)
        # A copy even where tokens lie so: torch launches it when positions and places have been written.
        ids = torch.empty((n, rows), dtype=tokens.dtype, device=tokens.device).copy_(tokens.t()).flatten()
        if fused:
            inputs = (self.cache, self.tables, at, places, self._counters)
            attention = StepAttention(*inputs, max_seq_len, other_buckets, self.graphs is not None, rows)
        return self._logits(*self.decoder(ids, at, n, attention))

    def _fuses(self, rows: int, n: int, max_seq_len: int) -> bool:
        heads, places = self.decoder.heads, max_seq_len or self.context + 1
        reads_once = rows * heads.queries <= FUSED_QUERIES * heads.keys
        return rows == 1 or (rows <= MOST_FUSED_ROWS and (reads_once or n * (places - 1) <= FUSED_PLACES))

    def last_hidden(self) -> Tensor:
        """States ``[M, H]`` before the last norm, of the tokens of the last `forward_step` or `forward_tokens`."""
        x, branch = self._last
        return x if branch is None else x + branch

    def _logits(self, x: Tensor, branch: Tensor | None) -> Tensor:
        self._last = x, branch
        return self.decoder.logits(x, branch)


def buckets(context: int) -> list[int]:
    """``max_seq_len`` buckets of decode steps: powers of two from `FIRST_BUCKET` on, and the context."""
    doublings = (FIRST_BUCKET << i for i in count())
    return [*takewhile(lambda bucket: bucket < context, doublings), context]


class MaxSeqLens:
    """The ``max_seq_len`` of each bucket, as a `ForwardStep` takes it.

    Args:
        context: most tokens of a sequence.

    Attributes:
        all: of the buckets, in ascending order.
    """

    def __init__(self, context: int) -> None:
        self._bounds = buckets(context)
        # A bucket counts the padding position of a cache as long: results are those of an engine of that context.
        self.all = [*(bound + 1 for bound in self._bounds[:-1]), 0]

    def of(self, lengths: Iterable[int], new: int = 1) -> int:
        """That of a step of so many new tokens of sequences with these tokens."""
        return self.all[bisect_left(self._bounds, min(max(lengths, default=0) + new, self._bounds[-1]))]


class DecodeLoop:
    """Decodes one token of each sequence a step; the likeliest token comes next, unless `set_tokens` names another.

    No step waits for the device. A step's kernels are chosen for the ``max_seq_len`` bucket of the longest sequence
    that is not padded. Keys and values of full, padded and unused slots go to the position after the context; padded
    and unused slots attend to no more positions than the others.

    Args:
        forward: computes a step. A captured graph reads weights at the addresses that they have now.
        size: batch slots.
        context: most tokens of a sequence.
        device: device of all tensors.
        graphs: captures steps here; None captures no graph.

    Attributes:
        lengths: tokens of each sequence, including those that steps so far have appended.
    """

    def __init__(
        self, forward: ForwardStep, size: int, context: int, device: torch.device, graphs: Graphs | None = None
    ) -> None:
        self._forward, self._context, self._used, self._graphs = forward, context, size, graphs
        self._tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self._positions = torch.zeros(size, dtype=torch.int32, device=device)
        self._slots = torch.full((size,), context, dtype=torch.int32, device=device)
        self._host: HostTokens | None = None
        if graphs is not None and device.type == "cuda":
            self._host = HostTokens((size,), device)
            # A step may still write to the memory when nobody holds the loop any more.
            weakref.finalize(self, self._host.settle).atexit = False
        self._max_seq_lens = MaxSeqLens(context)
        self._graph_of: dict[int, torch.cuda.CUDAGraph] = {}
        self._logits_of: dict[int, Tensor] = {}
        self.lengths: list[int] = []
        self._padded: set[int] = set()
        self._is_set = False

    @property
    def tokens(self) -> Tensor:
        """Tokens that the next step reads, int64 ``[n]``; every step overwrites them."""
        return self._tokens[: self._used]

    def start(self, tokens: Tensor, positions: Tensor) -> None:
        """Start with n tokens, int64 ``[n]``, at positions int32 ``[n]``, which are on the host.

        Raises:
            RuntimeError: torch's, if the step cannot be captured.
        """
        n = self._used = len(tokens)
        self.lengths, self._padded, self._is_set = positions.tolist(), set(), True
        self._tokens[:n].copy_(tokens, non_blocking=True)
        self._slots[:n].copy_(positions, non_blocking=True)
        self._slots[n:].fill_(self._context)
        torch.clamp(self._slots, max=self._context - 1, out=self._positions)
        self._positions[n:].zero_()
        self._capture(self._max_seq_len())

    def set_tokens(self, tokens: Tensor) -> None:
        """Set the tokens that the next step reads, int64 ``[n]`` on the device."""
        self.tokens.copy_(tokens)
        self._is_set = True

    def host_copy(self) -> HostCopy:
        """An asynchronous host copy of the tokens that the next step reads."""
        if self._host is None or self._is_set:
            return HostCopy(self.tokens)
        return self._host.copy(self._used)

    def pad(self, slot: int) -> None:
        """Make a slot padding: further steps keep no keys and values of its sequence."""
        if slot not in self._padded:
            self._padded.add(slot)
            self._slots[slot].fill_(self._context)
            self._positions[slot].zero_()

    def step(self) -> Tensor:
        """Append the tokens and return logits ``[n, vocabulary]``, in memory that the next step may overwrite.

        Raises:
            RuntimeError: torch's, if the step cannot be captured. No token has been appended then.
        """
        max_seq_len = self._max_seq_len()
        # Captured when a sequence first comes to a bucket: the capture takes as long as some of the 512 steps and more
        # up to there, and most sequences may never come.
        self._capture(max_seq_len)
        if self._host is not None:
            self._host.make_room()
        if self._graphs is None:
            logits = self._run(max_seq_len)
        else:
            self._graph_of[max_seq_len].replay()
            logits = self._logits_of[max_seq_len]
        if self._host is not None:
            self._host.queued()
        self._is_set = False
        for slot, length in enumerate(self.lengths):
            self.lengths[slot] = length if slot in self._padded else min(length + 1, self._context)
        return logits[: self._used]

    def launch(self) -> Tensor:
        """Launch a step's kernels one by one, as its graph holds them, for profilers.

        Steps after it go on from its tokens; `lengths` and `host_copy` do not know of it.
        """
        return self._run(self._max_seq_len())

    def capture(self) -> None:
        """Capture the steps of all `buckets`, if graphs are used."""
        for max_seq_len in self._max_seq_lens.all:
            self._capture(max_seq_len)

    def _max_seq_len(self) -> int:
        """Bucket of the next step; 0: the cache's length."""
        return self._max_seq_lens.of(length for slot, length in enumerate(self.lengths) if slot not in self._padded)

    def _run(self, max_seq_len: int, other_buckets: Sequence[int] = ()) -> Tensor:
        logits = self._forward(self._tokens, self._positions, self._slots, max_seq_len, other_buckets)
        host = () if self._host is None else (self._host.memory, self._host.row)
        torch.ops.qcut.advance(logits, self._tokens, self._positions, self._slots, self._context, *host)
        return logits

    def _capture(self, max_seq_len: int) -> None:
        """Capture a step once, if graphs are used. The inputs of the next step stay as they are."""
        if self._graphs is None or max_seq_len in self._graph_of:
            return

        def step() -> None:
            self._logits_of[max_seq_len] = self._run(max_seq_len)

        others = [other for other in self._max_seq_lens.all if other != max_seq_len]
        with parked(self._context, self._tokens, self._positions, self._slots, host=self._host):
            # Kernels of all buckets are built and loaded now: no build delays running sequences.
            self._graph_of[max_seq_len] = self._graphs.run_and_capture(step, lambda: self._run(max_seq_len, others))


@contextmanager
def parked(
    context: int, tokens: Tensor, positions: Tensor, slots: Tensor, *more: Tensor, host: HostTokens | None
) -> Iterator[None]:
    """Run and capture steps that write keys and values to padding; afterwards all inputs are as they were.

    Args:
        context: most tokens of a sequence.
        tokens: inputs of a step, as positions and slots.
        positions: see ``tokens``.
        slots: see ``tokens``.
        more: further tensors that a step changes.
        host: what steps write to.
    """
    state = [tokens, positions, slots, *more]
    if host is not None:
        host.wait()
        state.append(host.row)
    with torch.inference_mode(False), torch.no_grad():  # its tensors are written in other modes, too
        kept = [tensor.clone() for tensor in state]
        try:
            tokens.zero_()
            positions.zero_()
            slots.fill_(context)
            yield
        finally:
            for tensor, before in zip(state, kept, strict=True):
                tensor.copy_(before)


class HostCopy:
    """An asynchronous copy of tokens to the host, after the work that makes them and before work queued later.

    Args:
        tokens: int64 ``[n]``, or ``[n, W]`` of W numbers for each sequence.
        event: after it, a device has written the tokens, which are in pinned host memory; None: they are copied.
    """

    def __init__(self, tokens: Tensor, event: torch.cuda.Event | None = None) -> None:
        self._event = event
        self._tokens = tokens
        self._found: list[Any] | None = None
        if event is None:
            self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=tokens.is_cuda, device="cpu")
            self._tokens.copy_(tokens, non_blocking=True)
        if tokens.is_cuda:
            from qcut.backends.cuda.launch.streams import recorded_event

            self._event = recorded_event(tokens.device)

    def wait(self) -> list[Any]:
        """Wait for the tokens and return them, as nested lists."""
        if self._found is None:
            if self._event is not None:
                self._event.synchronize()
            self._found = self._tokens.tolist()
        return self._found


class HostTokens:
    """Memory on the host to which the last steps write their tokens, so that no copy stands between two steps.

    Args:
        shape: of a step's numbers, ``[size]`` or ``[size, W]``.
        device: that runs the steps; for a GPU the memory is pinned.

    Attributes:
        memory: int64 ``[HOST_STEPS, *shape]`` on the host.
        row: int32 ``[size]`` on the device, the row of ``memory`` that the next step writes.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.memory = torch.zeros((HOST_STEPS, *shape), dtype=torch.int64, pin_memory=pinned, device="cpu")
        self.row = torch.zeros(shape[0], dtype=torch.int32, device=device)
        self._device, self._steps = device, 0
        self._event: torch.cuda.Event | None = None
        self._copies: dict[int, HostCopy] = {}

    def make_room(self) -> None:
        """Wait for the copy in the row that the next step overwrites."""
        self.wait([self._steps % HOST_STEPS])

    def wait(self, rows: Iterable[int] = range(HOST_STEPS)) -> None:
        """Wait for the copies in some rows."""
        for row in rows:
            if row in self._copies:
                self._copies.pop(row).wait()

    def queued(self) -> None:
        """Note that a step has been queued."""
        if self._device.type == "cuda":
            from qcut.backends.cuda.launch.streams import recorded_event

            self._event = recorded_event(self._device)
        self._steps += 1

    def copy(self, length: int) -> HostCopy:
        """The first tokens of the last step."""
        row = (self._steps - 1) % HOST_STEPS
        self._copies[row] = HostCopy(self.memory[row, :length], self._event)
        return self._copies[row]

    def settle(self) -> None:
        """Wait for the last step."""
        if self._event is not None:
            self._event.synchronize()
