"""`Engine`: a decoder-only model with a KV cache, and generation.

`qcut.engine.decoder` computes the model, `qcut.engine.runner` runs it, `qcut.engine.sequence` batches sequences.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from threading import RLock
from time import monotonic
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qcut.common import versions
from qcut.common.numbers import check_integer, is_whole
from qcut.engine.drafters import Drafter, accompany
from qcut.engine.families import decoder_of
from qcut.engine.families.fidelity import base_of
from qcut.engine.families.generation_settings import GenerationSettings
from qcut.engine.kv_cache import calibration, ring_cache
from qcut.engine.kv_cache.cache import KVDtype
from qcut.engine.likelihoods import check_top
from qcut.engine.runner import ModelRunner, inference
from qcut.engine.sequence import Event, Generated, SequenceBatch, SequenceState
from qcut.engine.speculation import capture_drafted
from qcut.engine.token_ids import (
    Options,
    ReusePrefix,
    check_ids,
    end_tokens,
    ids_of,
    prompt_ids,
    reused_tokens,
    stops_of,
)
from qcut.errors import BusyError, ConfigError, ContextError, ShapeError, shown
from qcut.numerics.sampling import Sampling
from qcut.text.constraint import Constraint
from qcut.text.detokenizer import Detokenizer
from qcut.text.matcher import Grammars
from qcut.text.prompts import Chat, as_ids, check_tokenizer
from qcut.text.sequence_text import SequenceText

DEFAULT_CONTEXT = 4096
"""Default context in tokens of an engine with a model made for more."""

Prompts = str | Sequence[str] | Chat | Sequence[Chat] | Sequence[Sequence[int]] | Tensor
OnToken = Callable[[int, int], object]
P = ParamSpec("P")
S = TypeVar("S", bound=SequenceState)
T = TypeVar("T")


class EngineLock:
    """Lets one thread at a time use an engine; the others wait, but not for a callback that does not end.

    A callback that waits for another thread's call would hang both. A wait is the only sign of it.

    Attributes:
        callback_s: seconds for which calls wait for a single callback of another thread.
    """

    def __init__(self) -> None:
        self.callback_s = 30.0
        self._lock = RLock()
        self._callback_began: float | None = None

    def __enter__(self) -> None:
        """Wait for the engine.

        Raises:
            BusyError: a callback of another thread goes on for longer than ``callback_s``.
        """
        while not self._lock.acquire(timeout=self.callback_s):
            began = self._callback_began
            if began is not None and monotonic() - began >= self.callback_s:
                raise BusyError(
                    f"the engine is in an on_token callback of another thread, since {monotonic() - began:.0f} s;"
                    " allowed: callbacks that wait for no call of their engine"
                )

    def __exit__(self, *_: object) -> None:
        """Let the next thread use the engine."""
        self._lock.release()

    @contextmanager
    def calling_back(self) -> Iterator[None]:
        """Run a callback, with the lock held."""
        outer, self._callback_began = self._callback_began, monotonic()
        try:
            yield
        finally:
            self._callback_began = outer


def _exclusive(call: Callable[Concatenate[Engine, P], T]) -> Callable[Concatenate[Engine, P], T]:
    """Let a method wait until no other thread uses the engine, and run it as `inference` does."""

    @wraps(call)
    def run(engine: Engine, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with engine.lock, inference():
            return call(engine, *args, **kwargs)

    return run


class Engine:
    """Runs a Hugging Face GPT-2 or Llama-family model, quantized by any scheme or not at all.

    The model's own modules compute the projections and a mixture's experts, qcut's kernels the norms, attention,
    activations and the choice of experts. Projections of the same input are one product: their weights are stacked, and
    the model's tensors become views of the stacked ones (`qcut.layers.stacking`). No weight is in memory twice, and the
    model and further engines go on working. On a GPU decode steps and prefill chunks are captured as CUDA graphs at
    their first use: decode steps for each power of two of sequences, and each ``max_seq_len`` bucket from 512 up;
    chunks for sizes of a short list (`warm_up`). The 128 sizes used last are kept; all graphs share their memory,
    bounded by the largest.

    Quantize, load or move the model, set adapters and edit configurations before the engine is made: it reads modules,
    their code and their hooks once. After a change, make a new engine. Later hooks are not called by graph replays, nor
    by kernels that compute in a module's place. The model is put in evaluation mode. An engine serves one batch of
    sequences at a time; calls from several threads wait for each other, and raise BusyError if an ``on_token`` callback
    of another thread does not end. Autocast and inference mode around a call change nothing.

    Args:
        model: of a type in `qcut.engine.families.FAMILIES`, computing what transformers' own class does
            (`qcut.engine.families.fidelity`); or one of these in a `PeftModel`, with adapters of LoRA, IA3 or AdaLoRA.
        tokenizer: the model's, of transformers. With it prompts may be text and chats, stops strings, and results have
            text.
        batch: most sequences at once.
        context: most tokens of a sequence, prompt included; None takes what the model was made for, up to
            `DEFAULT_CONTEXT`.
        kv_cache: ``auto`` keeps keys and values in the model's dtype, ``int8`` with a scale for each token and head:
            half the memory of float16; ``int4`` a quarter of it and a little more, for heads of 32, 64, 128 or 256
            columns, on a GPU of float16 and bfloat16 models; ``int8/int4`` keys in int8 and values in 4 bits. Keys of
            ``int4`` are rounded so that errors cancel along the main directions of the model's queries.
        calibration_prompts: token ids that the model reads to find these directions, as `prefill` takes them, any
            number; None reads four sequences of up to 512 tokens that the model draws itself, always the same ones,
            which takes as long as generating them; an empty list rounds each code to the nearest.
        graphs: capture CUDA graphs on a GPU; False launches every kernel.
        ring: tokens beyond the window in the ring of a sliding-window layer, if that takes less memory than the context
            (`qcut.engine.kv_cache.ring_cache.Ring`). Prefill chunks are then no longer than this, and ``reuse_prefix``
            drops no more tokens than this, except all. 0: every layer keeps all tokens.
        stack: one product for queries, keys and values, and one for gate and up, if the modules allow it; False calls
            each module and leaves the weights where they are.
        speculate: a `qcut.Lookup` or `qcut.DraftModel` that finds drafts for `generate`, `stream` and a `Scheduler`; a
            step verifies several (`qcut.engine.speculation`); None: a step gives one token of a sequence.

    Attributes:
        decoder: the model's parts.
        tokenizer: as given.
        end_tokens: ids that end texts, by the model's generation_config and the tokenizer. Nothing stops at them unless
            ``stop`` has them: ``stop=engine.end_tokens``, ``stop=[*engine.end_tokens, "###"]``.
        settings: further settings of the model's generation_config that the engine follows.
        batch: most sequences at once.
        context: most tokens of a sequence.
        cache: the KV cache.
        lock: held by each call, by each step of a stream, and by a scheduler while it decodes or prefills.
        runner: runs the decoder over the cache; ``runner.max_prefill_tokens`` bounds the memory of prefill.

    Raises:
        UnsupportedError: another architecture; a module that computes otherwise than transformers' own; a setting of
            the model's generation_config that changes greedy tokens and that the engine does not have; a cache for
            which the GPU has no kernel. The message names it. Or transformers is too old.
        DtypeError: norms, embeddings and layers in float of several dtypes, or of float64 (named). Routers may be of
            float32.
        ConfigError: a batch or a context below 1, a context beyond what the model was made for, a ring below 0,
            another kind of cache, a 4-bit one for other heads or dtypes, or another kind of tokenizer.
        RuntimeError: torch's, if memory is short. The model's values are as they were.

    Exactness: the model's own arithmetic, with `torch.ops.qcut.prompt_attention` and ``append_attention`` over the
    cache. Padding has no influence. The number of sequences, prefill chunks, and ``stack`` may change the order of sums
    in products of floats. The number of sequences and the ``max_seq_len`` bucket of the longest one decide the order of
    sums of a decode step's attention; a longer context does not, except in layers with windows.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        tokenizer: Any = None,
        batch: int = 1,
        context: int | None = None,
        kv_cache: KVDtype = "auto",
        calibration_prompts: Prompts | None = None,
        graphs: bool = True,
        ring: int = ring_cache.SLACK,
        stack: bool = True,
        speculate: Drafter | None = None,
    ) -> None:
        versions.require("transformers")
        model = base_of(model)
        decoder = decoder_of(model)
        limit = decoder.context
        context = min(limit, DEFAULT_CONTEXT) if context is None else context
        check_integer(batch, "batch")
        if not is_whole(context) or not 1 <= context <= limit:
            raise ConfigError(f"context is {shown(context)}; allowed for {decoder.architecture}: 1 to {limit}")
        check_integer(ring, "ring", 0)
        self.speculate = speculate
        if tokenizer is not None:
            check_tokenizer(tokenizer)
        self.tokenizer = tokenizer
        self._detokenizers: dict[bool, Detokenizer] = {}
        self._detokenizer(True)
        self.settings = GenerationSettings.of(model, decoder.vocabulary)
        self.end_tokens = end_tokens(model, tokenizer, decoder.vocabulary)
        self._grammars = Grammars(tokenizer, decoder.vocabulary, self.end_tokens)
        model.eval()
        self.decoder = decoder.stacked(model) if stack else decoder
        runner = ModelRunner(self.decoder, batch, context, kv_cache=kv_cache, ring=ring, graphs=graphs)
        if speculate is not None:
            accompany(runner, speculate, tokenizer)
        self._use(runner)
        # Graphs hold addresses, and another engine may move weights that this one did not stack.
        held = (*model.parameters(), *model.buffers()) if runner.graphs is not None else ()
        self._held = [tensor.detach() for tensor in held]
        if self.cache.needs_calibration:
            self._calibrate(model, calibration_prompts, graphs=graphs, stack=stack)

    def _use(self, runner: ModelRunner) -> None:
        self.runner, self.batch, self.context, self.cache = runner, runner.batch, runner.context, runner.cache
        self._lengths: list[int] = []
        self.lock = EngineLock()

    def with_batch(self, batch: int) -> Engine:
        """Another engine over the same weights, with memory of its own for ``batch`` sequences of the same context.

        Raises:
            ConfigError: a batch below 1.
        """
        check_integer(batch, "batch")
        other = copy.copy(self)
        other._use(self.runner.with_batch(batch))
        return other

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens in the cache for each sequence."""
        return tuple(self._lengths)

    # ── prefill and decode ───────────────────────────────────────────────────────────────────────

    @_exclusive
    def prefill(self, prompts: Prompts, *, reuse_prefix: ReusePrefix = False) -> Tensor:
        """Append a prompt to each sequence, from the start or after a prefix that the cache holds.

        A chat reuses everything and appends its new message; requests with a common prefix reuse it.

        Args:
            prompts: token ids, of any lengths from 1 up; a tensor has one length for all. Ids on a device are fetched
                to be checked. With a tokenizer also a string, a list of strings, a chat, which is a list of messages
                ``{"role": …, "content": …}``, or a list of chats. Strings get the special tokens that the tokenizer
                adds; chats go through its template, with the beginning of an answer.
            reuse_prefix: how many tokens of each sequence stay, from its first on: False for none, True for all, one
                number for all sequences or a number for each prompt. Prompt i continues sequence i; sequences beyond
                the prompts are dropped.

        Returns:
            Logits ``[B, vocabulary]`` of each prompt's last token, in the model's dtype.

        Raises:
            ContextError: more prompts than the batch, a prompt longer than the rest of the context, or a prefix with a
                window that a layer's ring has dropped in part. The cache stays as it was.
            ShapeError: no prompt, an empty one, a tensor that is not ``[B, T]``, or another number of prompts than of
                prefixes.
            DtypeError: text without a tokenizer, prompts of several kinds, or ids that are no integers.
            ConfigError: an id outside of the vocabulary, text that the tokenizer does not take, a message without role
                or content, chats that the tokenizer has no template for or refuses, or ``reuse_prefix`` of another kind
                or beyond the tokens of a sequence.

        Exactness: chunks of prefill may change the order of sums of floats.
        """
        ids, starts = self.checked(prompts, reuse_prefix)
        self._prefill(ids, starts)
        return self.runner.logits[: len(ids)].clone()

    @_exclusive
    def score(self, prompts: Prompts) -> list[Tensor]:
        """Prefill new sequences, and score their tokens. Logits of a whole chunk are in memory.

        Args:
            prompts: see `prefill`.

        Returns:
            For each prompt of T tokens the negative log-likelihoods of its tokens 1 to T - 1, float32 ``[T - 1]``.

        Raises:
            As `prefill`.
        """

        def losses(logits: Tensor, following: Tensor) -> Tensor:
            return F.cross_entropy(logits[: len(following)].float(), following.to(logits.device), reduction="none")

        return self._by_token(prompts, losses)

    @_exclusive
    def logits(self, prompts: Prompts) -> list[Tensor]:
        """Prefill new sequences, and return the logits after each of their tokens.

        Args:
            prompts: see `prefill`.

        Returns:
            For each prompt of T tokens ``[T, vocabulary]``, in the model's dtype.

        Raises:
            As `prefill`.
        """
        return self._by_token(prompts, lambda logits, _: logits)

    def _by_token(self, prompts: Prompts, reduced: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        """Prefill new sequences; of each, what becomes of the logits of each chunk and of the ids that follow."""
        ids, starts = self.checked(prompts, False)
        found: list[list[Tensor]] = [[] for _ in ids]
        self._lengths = []
        for row, first, logits in self.runner.prefill_scored(ids, starts):
            found[row].append(reduced(logits, ids[row][first + 1 : first + len(logits) + 1]))
        self._lengths = [len(row) for row in ids]
        return [torch.cat(parts) for parts in found]

    @_exclusive
    def decode(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Append a token to each sequence.

        Args:
            tokens: ids ``[B]``, B the number of prompts.

        Returns:
            Logits ``[B, vocabulary]``, in the model's dtype.

        Raises:
            ContextError: a sequence fills the context, or its window is no longer in a layer's ring. The cache stays as
                it was.
            ShapeError: another number of tokens than of prompts, or no prompt yet.
            DtypeError, ConfigError: as in `prefill`.
        """
        flat = ids_of(tokens, None)
        if flat.shape != (len(self._lengths),) or not self._lengths:
            raise ShapeError(f"decode: {list(flat.shape)} tokens; allowed: [{len(self._lengths)}], one for each prompt")
        check_ids(flat, self.decoder.vocabulary)
        full = [i for i, length in enumerate(self._lengths) if length >= self.context]
        if full:
            raise ContextError(f"sequence {full[0]} has {self.context} tokens, the engine's whole context")
        for i, length in enumerate(self._lengths):
            self._check_window(i, length)
        logits = self.runner.decode_step(self.runner.decode_loop(flat, self._lengths)).clone()
        self._lengths = [length + 1 for length in self._lengths]
        return logits

    @_exclusive
    def warm_up(self, lengths: Iterable[int], sequences: int = 1) -> None:
        """Serve requests of some sizes once and empty the cache: later ones do not wait for kernels and graphs.

        The first request of a size builds its kernels, unless the kernel cache has them, and captures its graphs. All
        ``max_seq_len`` buckets of decode steps are captured.

        Args:
            lengths: tokens of prompts. A prefill chunk has the next size of 1, 2, 4 to 64, and then four an octave: 80,
                96, 112, 128, 160 and so on.
            sequences: prompts of a request; a chunk has the next size of 1 to 8, 10, 12, 14, 16, 20 and so on.

        Raises:
            ConfigError: a length or a number of sequences that no request may have, or no list of lengths.
        """
        if not isinstance(lengths, Iterable):
            raise ConfigError(f"lengths is {shown(lengths)}; allowed: a list of numbers, [{shown(lengths)}] for one")
        for what, count, most in (
            ("sequences", sequences, self.batch),
            *(("length", n, self.context) for n in lengths),
        ):
            check_integer(count, what, 1, most)
            if what == "length":
                self.generate(torch.zeros(sequences, count, dtype=torch.int64, device="cpu"), 1)
                self.runner.capture_decode(sequences)
                if self.speculate is not None:
                    capture_drafted(self.runner, sequences, self.speculate)
        self._lengths = []

    # ── generation ───────────────────────────────────────────────────────────────────────────────

    @_exclusive
    def generate(
        self,
        prompts: Prompts,
        max_new_tokens: int | None = None,
        *,
        min_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: Iterable[int | str] = (),
        skip_special_tokens: bool = True,
        constraint: Constraint | None = None,
        top: int | None = None,
        on_token: OnToken | None = None,
        reuse_prefix: ReusePrefix = False,
    ) -> list[Generated]:
        """Continue prompts, each until a stop token or string, ``max_new_tokens``, or the context's end.

        Args:
            prompts: see `prefill`.
            max_new_tokens: for each sequence; None fills the context.
            min_new_tokens: before so many no id of ``stop`` is chosen, and no string of it ends a sequence; None takes
                the model's, by its generation_config: none, mostly.
            sampling: how tokens are chosen; None takes the likeliest, by the model's own repetition penalty. Penalties
                count the tokens of this call's prompts and the new ones, not those of reused prefixes.
            stop: ids that end a sequence, and, with a tokenizer, strings. The string that is complete first ends it. It
                is searched in the text with those special tokens that it names.
            skip_special_tokens: leave special tokens out of texts.
            constraint: the form that each sequence's text must have (`qcut.Constraint`); needs a tokenizer and
                llguidance. Only tokens that the form allows are chosen. `end_tokens` are allowed where the text is
                complete, and end the sequence, as does a token that nothing may follow, even before ``min_new_tokens``.
                The host finds the allowed tokens while the device computes logits, and each choice waits for them.
            top: `Generated.log_probabilities` has those of each token and of so many of the likeliest ones; None: of no
                token. Steps wait for them.
            on_token: called with a sequence's index and its new token, in order, as soon as they are known. Other
                threads' calls wait meanwhile, 30 s at most: the function must not wait for one. The consumer of a
                `stream` may.
            reuse_prefix: see `prefill`. To go on after a call, reuse all and begin each prompt with that call's last
                token.

        Returns:
            One `Generated` for each prompt. The last token of each is not in the cache: `decode` may go on from it.

        Raises:
            As `prefill`; and ConfigError: ``max_new_tokens`` below 1, ``min_new_tokens`` below 0 or beyond it, ``top``
                beyond 20, a bias for a token beyond the vocabulary, or another argument of another kind;
                ConstraintError: a constraint that llguidance does not take; RequestError: the work of a constraint goes
                beyond llguidance's limits midway.
        """
        check_top(top, self.decoder.vocabulary)
        if on_token is not None and not callable(on_token):
            raise ConfigError(f"on_token is {shown(on_token)}; allowed: a function of an index and a token, or None")
        options = Options(max_new_tokens, min_new_tokens, sampling, stop, skip_special_tokens, constraint)
        sequences = self._prefilled(prompts, options, reuse_prefix, top)
        for event in self._decoded(sequences, self._lengths):
            if on_token is not None and event.token is not None:
                with self.lock.calling_back():
                    on_token(event.sequence, event.token)
        return [sequence.generated for sequence in sequences]

    @_exclusive
    def stream(
        self,
        prompts: Prompts,
        max_new_tokens: int | None = None,
        *,
        min_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: Iterable[int | str] = (),
        skip_special_tokens: bool = True,
        constraint: Constraint | None = None,
        top: int | None = None,
        reuse_prefix: ReusePrefix = False,
    ) -> Generator[Event, None, None]:
        """Continue prompts as `generate` does, and yield each token and its text as they come.

        Prefill ends before the call returns. Closing the generator, or leaving a loop over it, ends generation: the
        cache holds prompts and tokens up to each sequence's last event, except for its token.

        Args:
            prompts: see `prefill`.
            max_new_tokens: see `generate`.
            min_new_tokens: see `generate`.
            sampling: see `generate`.
            stop: see `generate`.
            skip_special_tokens: see `generate`.
            constraint: see `generate`.
            top: see `generate`; events have them.
            reuse_prefix: see `prefill`.

        Returns:
            A generator of `qcut.engine.sequence.Event`, in order of the sequences at each step.

        Raises:
            As `generate`. The generator raises ConfigError if the engine has served another call since.
        """
        check_top(top, self.decoder.vocabulary)
        options = Options(max_new_tokens, min_new_tokens, sampling, stop, skip_special_tokens, constraint)
        return self._decoded(self._prefilled(prompts, options, reuse_prefix, top), self._lengths)

    def _prefilled(
        self, prompts: Prompts, options: Options, reuse_prefix: ReusePrefix, top: int | None
    ) -> list[SequenceState]:
        """Check the arguments of `generate`, make the sequences, and prefill them."""
        ids, starts = self.checked(prompts, reuse_prefix)
        lengths = [start + len(row) for start, row in zip(starts, ids, strict=True)]
        sequences = self.sequences(partial(SequenceState, top=top), ids, lengths, options)
        self._prefill(ids, starts)
        return sequences

    def _prefill(self, prompts: list[Tensor], starts: list[int]) -> None:
        self._lengths = starts if any(starts) else []
        self.runner.prefill(prompts, starts)
        self._lengths = [start + len(prompt) for start, prompt in zip(starts, prompts, strict=True)]

    def sequences(
        self,
        make: Callable[..., S],
        prompts: Sequence[Tensor],
        lengths: Sequence[int],
        options: Options,
        fewest: int = 1,
    ) -> list[S]:
        """Sequences to be continued, of checked prompts.

        Args:
            make: takes the arguments of `SequenceState`.
            prompts: ids of each.
            lengths: tokens of each sequence in the cache after prefill.
            options: of the caller.
            fewest: least ``max_new_tokens``.

        Raises:
            ConfigError: see `generate`.
        """
        options.check(self.decoder.vocabulary, fewest)
        detokenizer = self._detokenizer(options.skip_special_tokens)
        stops, strings = stops_of(options.stop, text=detokenizer is not None)
        settings, least = self.settings, options.min_new_tokens
        constraint = options.constraint
        if constraint is not None:
            stops = stops.union(self.end_tokens)
        return [
            make(
                ids,
                length,
                self.context,
                options.max_new_tokens,
                stops,
                None if detokenizer is None else SequenceText(detokenizer, ids, strings, options.keep_special_tokens),
                index=i,
                sampling=settings.sampling(options.sampling),
                bans=settings.bans(sorted(stops), length, least),
                least=least or 0,
                matcher=None if constraint is None else self._grammars.matcher(constraint),
            )
            for i, (ids, length) in enumerate(zip([prompt.tolist() for prompt in prompts], lengths, strict=True))
        ]

    def _detokenizer(self, skip_special_tokens: bool) -> Detokenizer | None:
        if self.tokenizer is None:
            return None
        found = self._detokenizers.get(skip_special_tokens)
        if found is None:
            found = Detokenizer(self.tokenizer, skip_special_tokens=skip_special_tokens)
            self._detokenizers[skip_special_tokens] = found
        return found

    def _decoded(self, sequences: list[SequenceState], lengths: list[int]) -> Generator[Event, None, None]:
        """Decode prefilled sequences until all have ended; updates ``lengths``, their tokens in the cache."""

        # Not around the whole body: a generator enters and leaves its contexts for every token.
        def exclusive(work: Callable[..., T], *given: Any) -> T:
            with self.lock, inference():
                self.check_current(lengths)
                return work(*given)

        batch = exclusive(SequenceBatch[SequenceState], self.runner, len(sequences), self.speculate)
        new, step = exclusive(batch.start, sequences), partial(exclusive, batch.step)
        while True:
            # The device computes the next step while the host waits; the step is wasted if stops end all sequences.
            ahead = step() if batch.runs_ahead and any(s.has_next for s in sequences) else None
            for sequence, token, log_probability in new.wait():
                if sequence.finish_reason is not None:
                    exclusive(batch.pad, sequence)
                    continue
                text = sequence.append(token, log_probability)
                lengths[sequence.index] = sequence.length
                yield Event(sequence.index, token, text, sequence.finish_reason, log_probability)
                self.check_current(lengths)
            if all(s.finish_reason for s in sequences):
                return
            new = ahead or step()

    def _calibrate(self, model: nn.Module, prompts: Prompts | None, *, graphs: bool, stack: bool) -> None:
        """Calibrate the rounding of 4-bit keys: an engine over a cache of floats prefills the prompts."""
        given = None if prompts is None else self._ids(prompts)
        if given == []:
            return
        batch = calibration.PROMPTS if given is None else min(calibration.PROMPTS, len(given))
        longest = calibration.TOKENS if given is None else max(1, *map(len, given))
        other = Engine(model, batch=batch, context=min(self.context, longest), graphs=graphs, stack=stack)
        given = calibration.drawn(other, self.decoder.vocabulary) if given is None else given
        with inference():
            lists = [prompt.tolist() for prompt in given]
            ids = [each for i in range(0, len(lists), batch) for each in other.checked(lists[i : i + batch], False)[0]]
            self.cache.set_calibration(calibration.calibrate_keys(other.runner, ids, self.runner.tables))

    # ── checks ───────────────────────────────────────────────────────────────────────────────────

    def begin(self) -> list[int]:
        """Take the cache for other sequences than the last call's; returns a list that `is_current` knows it by."""
        self._lengths = []
        return self._lengths

    def is_current(self, lengths: list[int]) -> bool:
        """Whether the cache is still of the call with this list: each that writes the cache makes a new one."""
        return self._lengths is lengths

    def check_current(self, lengths: list[int], what: str = "stream") -> None:
        """Refuse to go on if the engine has served another call.

        Raises:
            ConfigError: it has.
        """
        if not self.is_current(lengths):
            raise ConfigError(f"this {what} is over: the engine has served another call since")

    def _check_window(self, slot: int, length: int) -> None:
        """Refuse to go on after tokens of a sequence if a layer's ring has dropped part of the window before them."""
        if 0 < length < (least := self.cache.least(slot)):
            raise ContextError(
                f"sequence {slot} would go on after {length} tokens, some of which the ring KV cache has"
                f" dropped; allowed: 0, {least} and more, or an engine with ring=0"
            )

    def _ids(self, prompts: Prompts) -> list[Tensor]:
        """Ids of each prompt, ``[T]`` on the host, not checked yet."""
        return prompt_ids(as_ids(prompts, self.tokenizer, self.decoder.vocabulary))

    def checked(self, prompts: Prompts, reuse_prefix: ReusePrefix) -> tuple[list[Tensor], list[int]]:
        """Ids of each prompt, int64 ``[T]`` on the host, and the tokens of its reused prefix."""
        ids = self._ids(prompts)
        if not ids:
            raise ShapeError("no prompt; allowed: 1 and more")
        if len(ids) > self.batch:
            raise ContextError(f"{len(ids)} prompts; this engine's batch is {self.batch}")
        starts = reused_tokens(reuse_prefix, self._lengths, len(ids))
        for i, (prompt, start) in enumerate(zip(ids, starts, strict=True)):
            if not len(prompt):
                raise ShapeError(f"prompt {i} is empty; allowed: 1 token and more")
            if start + len(prompt) > self.context:
                found = f"{len(prompt)} tokens after {start}" if start else f"{len(prompt)} tokens"
                raise ContextError(f"prompt {i} has {found}; this engine's context is {self.context}")
            self._check_window(i, start)
        for prompt in ids:
            check_ids(prompt, self.decoder.vocabulary)
        return [prompt.long() for prompt in ids], starts
