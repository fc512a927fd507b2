"""`Engine`: a decoder-only model with memory for its context allocated once, and generation on top.

`qcut.engine.decoder` computes the model, `qcut.engine.decode_loop` runs the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from qcut.engine.arguments import is_whole, listed_prompts, stop_ids, token_row
from qcut.engine.attention import PromptAttention, StepAttention
from qcut.engine.decode_loop import DecodeLoop, Fetched
from qcut.engine.families import decoder_of
from qcut.engine.kv_cache import KVCache, KVDtype
from qcut.errors import ConfigError, ContextError, DtypeError, ShapeError
from qcut.models.evaluation import token_nll
from qcut.numerics.sampling import Sampling, sample
from qcut.process import versions

DEFAULT_CONTEXT = 4096
"""Default context in tokens of an engine whose model was made for more."""

Prompts = Sequence[Sequence[int]] | Tensor
OnToken = Callable[[int, int], object]
Reason = Literal["stop", "length", "context"]


@dataclass(frozen=True)
class Generated:
    """The continuation of a prompt.

    Attributes:
        tokens: ids of the new tokens, a stop token included.
        reason: why generation ended: ``stop`` at a stop token, ``length`` at ``max_new_tokens``, ``context`` where the
            context was full.
    """

    tokens: list[int] = field(default_factory=list)
    reason: Reason = "length"


class _Running:
    """A sequence that is being continued.

    Args:
        length: tokens of the prompt.
        context: tokens that the cache has room for. The last new token is not read and needs no room.
        max_new_tokens: most new tokens, or None.
        stops: ids that end the sequence.

    Attributes:
        tokens: ids of the new tokens.
        reason: why the sequence ended; None while it goes on.
    """

    def __init__(self, length: int, context: int, max_new_tokens: int | None, stops: frozenset[int]) -> None:
        self.tokens: list[int] = []
        self.reason: Reason | None = None
        self._prompt_length, self._stops = length, stops
        room = context - length + 1
        self._most = room if max_new_tokens is None else min(room, max_new_tokens)
        self._end: Reason = "length" if self._most == max_new_tokens else "context"

    @property
    def length(self) -> int:
        """Tokens that have been read."""
        return self._prompt_length + max(0, len(self.tokens) - 1)

    @property
    def may_want_two(self) -> bool:
        """Whether there may be a token after the next."""
        return self.reason is None and len(self.tokens) + 1 < self._most

    def take(self, token: int) -> None:
        """Append a token, which may be the last."""
        self.tokens.append(token)
        if token in self._stops:
            self.reason = "stop"
        elif len(self.tokens) == self._most:
            self.reason = self._end


class Engine:
    """Runs a Hugging Face GPT-2 or Llama-family model, quantized by any scheme or not at all.

    The model's own modules do the projections; kernels of qcut do the norms, the attention and the activations between
    them. Projections that read the same rows are one product: their weights are put side by side, and the model's
    tensors become views of them (`qcut.layers.stacking`). No weight is in memory twice, and the model and further
    engines go on working. On a GPU steps are captured as CUDA graphs, one for each power of two of sequences.

    Quantize, load or move the model, or put hooks on it, before the engine is made; afterwards, make a new engine. The
    model is put in evaluation mode. An engine serves one batch of sequences at a time, in one thread.

    Args:
        model: of a type in `qcut.engine.families.FAMILIES`.
        batch: most sequences at once.
        context: most tokens of a sequence, prompt included; None takes what the model was made for, up to
            `DEFAULT_CONTEXT`.
        kv_cache: ``auto`` keeps keys and values as they are, ``int8`` with a scale for each token and head: half the
            memory of float16.
        graphs: capture steps on a GPU; False launches every kernel of every step.
        stack: one product for queries, keys and values, and one for gate and up, where their modules allow it; False
            calls each module and leaves the weights where they are.

    Attributes:
        decoder: the model's parts.
        batch: most sequences at once.
        context: most tokens of a sequence.
        cache: keys and values.
        prompt_rows: most tokens of prompts that a layer computes at once, in whole sequences, which bounds the memory
            of its results. May be changed between calls.

    Raises:
        UnsupportedError: another architecture, which the message names; or transformers is too old.
        ConfigError: a batch or a context below 1, a context beyond what the model was made for or beyond the window
            that it attends to, or another kind of cache.
        RuntimeError: torch's, where memory is short. The model's values are as they were.

    Exactness: the model's own arithmetic, with torch's scaled dot product attention over the cache. Tokens that a
    batch is padded with have no influence; the number of sequences, and ``stack``, may change the order of sums in
    products of floats.
    """

    prompt_rows = 16384

    def __init__(
        self,
        model: nn.Module,
        *,
        batch: int = 1,
        context: int | None = None,
        kv_cache: KVDtype = "auto",
        graphs: bool = True,
        stack: bool = True,
    ) -> None:
        versions.require("transformers")
        decoder = decoder_of(model)
        limit = min(decoder.context, decoder.window or decoder.context)
        context = min(limit, DEFAULT_CONTEXT) if context is None else context
        if not is_whole(batch) or batch < 1:
            raise ConfigError(f"batch is {batch!r}; allowed: 1 and more")
        if not is_whole(context) or not 1 <= context <= limit:
            allowed = f"1 to {limit}"
            if limit < decoder.context:
                allowed += f", the window of its attention; it was made for {decoder.context}"
            raise ConfigError(f"context is {context!r}; allowed for {decoder.architecture}: {allowed}")
        model.eval()
        self.decoder = decoder.stacked(model) if stack else decoder
        self.batch, self.context = batch, context
        heads, dtype, device = decoder.heads, decoder.dtype, decoder.device
        # Sequences that have ended write to the place behind the context.
        self.cache = KVCache(
            len(decoder.blocks),
            batch,
            heads.keys,
            context + 1,
            heads.size,
            dtype=dtype,
            device=device,
            kv_dtype=kv_cache,
        )
        self._cos, self._sin = decoder.rotary_tables(context)
        # Each engine has counters of its own, since graphs of two engines may run at once.
        self._counters = torch.zeros(batch * heads.queries, dtype=torch.int32, device=device)
        self._lengths: list[int] = []
        self._captures = graphs and device.type == "cuda"
        # Graphs hold addresses, and another engine may move weights that this one did not stack.
        self._held = [t.detach() for t in (*model.parameters(), *model.buffers())] if self._captures else []
        self._loops: dict[int, DecodeLoop] = {}
        self._pool: Any = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens in the cache for each sequence."""
        return tuple(self._lengths)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def prefill(self, prompts: Prompts) -> Tensor:
        """Empty the cache and read a prompt for each sequence.

        Args:
            prompts: token ids, of any lengths from 1 up; a tensor has one length for all.

        Returns:
            Logits ``[B, vocabulary]`` of each prompt's last token, in the model's dtype.

        Raises:
            ContextError: more prompts than the batch, or a prompt longer than the context. The cache stays as it was.
            ShapeError: no prompt, an empty one, or a tensor that is not ``[B, T]``.
            DtypeError: text, or ids that are no integers.
            ConfigError: an id outside of the vocabulary.
        """
        ids, lengths = self._checked(prompts)
        device = self.decoder.device
        x, unadded = self._read(ids.to(device))
        last = torch.tensor([i * ids.shape[1] + n - 1 for i, n in enumerate(lengths)], device=device)
        logits = self.decoder.logits(x[last], unadded[last])
        self._lengths = lengths
        return logits

    @torch.no_grad()
    def score(self, prompts: Prompts) -> list[Tensor]:
        """Empty the cache, read a prompt for each sequence, and score its tokens. All logits are in memory.

        Args:
            prompts: see `prefill`.

        Returns:
            For each prompt of T tokens the negative log-likelihoods of its tokens 1 to T - 1, float32 ``[T - 1]``.

        Raises:
            As `prefill`.
        """
        ids, lengths = self._checked(prompts)
        ids = ids.to(self.decoder.device)
        logits = self.decoder.logits(*self._read(ids))
        nll = token_nll(logits.unflatten(0, ids.shape), ids)
        self._lengths = lengths
        return [one[: length - 1] for one, length in zip(nll, lengths, strict=True)]

    @torch.no_grad()
    def decode(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Read one more token for each sequence.

        Args:
            tokens: ids ``[B]``, B the number of prompts.

        Returns:
            Logits ``[B, vocabulary]``, in the model's dtype.

        Raises:
            ContextError: a sequence fills the context. The engine stays as it is.
            ShapeError: another number of tokens than of prompts, or no prompt yet.
            DtypeError, ConfigError: as in `prefill`.
        """
        flat = token_row(tokens, None)
        if flat.shape != (len(self._lengths),) or not self._lengths:
            raise ShapeError(f"decode: {list(flat.shape)} tokens; allowed: [{len(self._lengths)}], one for each prompt")
        self._check_ids(flat)
        full = [i for i, length in enumerate(self._lengths) if length >= self.context]
        if full:
            raise ContextError(f"sequence {full[0]} has {self.context} tokens, the engine's whole context")
        logits = self._loop_from(flat).step().clone()
        self._lengths = [length + 1 for length in self._lengths]
        return logits

    # ── generation ───────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def generate(
        self,
        prompts: Prompts,
        max_new_tokens: int | None = None,
        *,
        sampling: Sampling | None = None,
        stop: Iterable[int] = (),
        on_token: OnToken | None = None,
    ) -> list[Generated]:
        """Continue prompts, each until a stop token, ``max_new_tokens``, or the context's end.

        Args:
            prompts: see `prefill`.
            max_new_tokens: for each sequence; None fills the context.
            sampling: how tokens are chosen; None takes the likeliest.
            stop: ids that end a sequence.
            on_token: called with a sequence's index and its new token, in order, as soon as they are known.

        Returns:
            One `Generated` for each prompt. The last token of each has not been read: `decode` may go on from it.

        Raises:
            As `prefill`; and ConfigError: ``max_new_tokens`` below 1, or ``stop`` or ``sampling`` of another kind.
        """
        if max_new_tokens is not None and (not is_whole(max_new_tokens) or max_new_tokens < 1):
            raise ConfigError(f"max_new_tokens is {max_new_tokens!r}; allowed: 1 and more, or None")
        if sampling is not None and not isinstance(sampling, Sampling):
            raise ConfigError(f"sampling is {sampling!r}; allowed: a qcut.Sampling, or None")
        options = sampling or Sampling()
        stops = stop_ids(stop)
        logits = self.prefill(prompts)
        running = [_Running(length, self.context, max_new_tokens, stops) for length in self._lengths]
        device = self.decoder.device
        sequences, positions = torch.arange(len(running), device=device), torch.tensor(self._lengths, device=device)
        first = torch.ops.qcut.argmax(logits) if options.greedy else sample(logits, options, sequences, positions)
        loop = self._loop_from(first)

        def advance() -> Fetched:
            following = loop.step()
            positions.add_(1)
            if not options.greedy:
                loop.choose(sample(following, options, sequences, positions))
            return Fetched(loop.tokens)

        arriving = Fetched(loop.tokens)
        while True:
            # The device computes the next step while the host waits; wasted where stop tokens end all sequences.
            ahead = advance() if device.type == "cuda" and any(s.may_want_two for s in running) else None
            for i, token in enumerate(arriving.wait()):
                sequence = running[i]
                if sequence.reason is None:
                    sequence.take(token)
                    self._lengths[i] = sequence.length
                    if on_token is not None:
                        on_token(i, token)
            if all(s.reason for s in running):
                return [Generated(s.tokens, s.reason) for s in running if s.reason]
            arriving = ahead or advance()

    def _loop_from(self, tokens: Tensor) -> DecodeLoop:
        """The decode loop for all sequences, started at these tokens; captured in a graph where graphs are used."""
        n, device = len(self._lengths), self.decoder.device
        if not self._captures:
            loop = DecodeLoop(self._step, n, self.context, device)
        else:
            size = min(self.batch, 1 << (n - 1).bit_length())
            if size not in self._loops:
                pool, self._pool = self._pool or torch.cuda.graph_pool_handle(), None
                self._loops[size] = DecodeLoop(self._step, size, self.context, device, pool)
                self._pool = pool  # not where the capture failed: torch takes no other into that pool
            loop = self._loops[size]
        loop.start(tokens, torch.tensor(self._lengths, dtype=torch.int32))
        return loop

    # ── arithmetic ───────────────────────────────────────────────────────────────────────────────

    def _read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Prompts ``[B, T]`` through all blocks: two summands of the result, ``[B T, hidden]`` each.

        Padding on the right has no influence: attention looks back and never sees it, and later tokens overwrite it.
        """
        self._lengths = []
        size = max(1, self.prompt_rows // ids.shape[1])
        parts = []
        for i, part in enumerate(ids.split(size)):
            batch, length = part.shape
            positions = torch.arange(length, dtype=torch.int32, device=ids.device).repeat(batch)
            attention = PromptAttention(self.cache, self._cos, self._sin, positions, batch, i * size)
            parts.append(self.decoder(part.flatten(), positions, batch, attention))
        if len(parts) == 1:
            return parts[0]
        x, unadded = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return x, unadded

    def _step(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """Logits of one token of each sequence, at its position, kept at its slot; both int32."""
        attention = StepAttention(self.cache, self._cos, self._sin, positions, slots, self._counters)
        return self.decoder.logits(*self.decoder(tokens, positions, len(tokens), attention))

    # ── checks ───────────────────────────────────────────────────────────────────────────────────

    def _checked(self, prompts: Prompts) -> tuple[Tensor, list[int]]:
        """Ids ``[B, T]``, shorter prompts padded on the right, and each one's length."""
        if isinstance(prompts, Tensor):
            if prompts.dim() != 2:
                raise ShapeError(f"prompts have shape {list(prompts.shape)}; allowed: [B, T], or a list of lists")
            lengths, tensors = [prompts.shape[1]] * len(prompts), [prompts]
        else:
            tensors = [token_row(row, i) for i, row in enumerate(listed_prompts(prompts))]
            lengths = [len(row) for row in tensors]
        if not lengths:
            raise ShapeError("no prompt; allowed: 1 and more")
        if len(lengths) > self.batch:
            raise ContextError(f"{len(lengths)} prompts; this engine's batch is {self.batch}")
        for i, length in enumerate(lengths):
            if length < 1:
                raise ShapeError(f"prompt {i} is empty; allowed: 1 token and more")
            if length > self.context:
                raise ContextError(f"prompt {i} has {length} tokens; this engine's context is {self.context}")
        for tensor in tensors:
            self._check_ids(tensor)
        if isinstance(prompts, Tensor):
            return prompts.long(), lengths
        return nn.utils.rnn.pad_sequence([tensor.long().cpu() for tensor in tensors], batch_first=True), lengths

    def _check_ids(self, ids: Tensor) -> None:
        if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
            raise DtypeError(f"token ids are {str(ids.dtype).removeprefix('torch.')}; allowed: integers")
        low, high = (int(v) for v in ids.aminmax()) if ids.numel() else (0, 0)
        if low < 0 or high >= self.decoder.vocabulary:
            wrong = low if low < 0 else high
            raise ConfigError(f"token id {wrong}; allowed: 0 to {self.decoder.vocabulary - 1}")
