"""`Engine`: a decoder-only model with memory for its context allocated once, and generation on top."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qcut.engine.decoder import DecoderLayer, NotedRows, decoder_of, is_dynamic, project
from qcut.engine.kv_cache import KVCache, KVDtype
from qcut.engine.steps import Fetched, Steps
from qcut.errors import ConfigError, ContextError, DtypeError, ShapeError
from qcut.models.evaluation import token_nll
from qcut.numerics.sampling import Sampling, sample
from qcut.ops.linear import FEW_ELEMENTS, FEW_ROWS

DEFAULT_CONTEXT = 4096
"""Tokens that an engine has memory for unless told otherwise, where the model was made for more."""

_ROWS = 16384
"""Tokens of prompts that go through a layer at once, whole sequences: what a layer's results take is bounded."""

Prompts = Sequence[Sequence[int]] | Tensor
OnToken = Callable[[int, int], object]
Reason = Literal["stop", "length", "context"]


@dataclass(frozen=True)
class Generated:
    """What a sequence got.

    Attributes:
        tokens: new ones, the stop token included.
        reason: ``stop``: a stop token; ``length``: ``max_new_tokens``; ``context``: no room for more.
    """

    tokens: list[int] = field(default_factory=list)
    reason: Reason = "length"


class Engine:
    """Runs a Hugging Face GPT-2 or Llama-family model, quantized by any scheme or not at all.

    The model's own modules do the projections, kernels of qcut what lies between them. Projections that read the same
    rows are one product: their weights are put side by side, and the model's tensors become views of them
    (`qcut.layers.stacking`), so that nothing is there twice, and model and further engines go on working. On a GPU
    steps are captured as CUDA graphs, one for each power of two of sequences. Quantize, load or move the model, or put
    hooks on it, first, or make a new engine. The model is put in evaluation mode. An engine serves one batch of
    sequences at a time and is not to be shared by threads.

    Args:
        model: see `qcut.engine.decoder.MODEL_TYPES`.
        batch: most sequences at once.
        context: most tokens of a sequence, prompt included; None takes what the model was made for, up to
            `DEFAULT_CONTEXT`.
        kv_cache: ``auto`` keeps keys and values as they are, ``int8`` with a scale for each token and head: half the
            memory of float16.
        graphs: capture steps on a GPU; False launches every kernel of every step.
        stack: one product for queries, keys and values, and one for gate and up, where their modules allow it; False
            calls each module and leaves the weights where they are.

    Raises:
        UnsupportedError: another architecture; the message names it.
        ConfigError: a batch or a context below 1, a context beyond what the model was made for or beyond the window
            that it attends to, or another kind of cache.
        RuntimeError: torch's, where memory is short. The model's values are as they were.

    Exactness: the model's own arithmetic, with torch's scaled dot product attention over the cache. Tokens that a
    batch is padded with have no influence; the number of sequences, and ``stack``, may change the order of sums in
    products of floats.
    """

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
        self.decoder = decoder_of(model)
        d = self.decoder
        limit = min(d.context, d.window or d.context)
        context = min(limit, DEFAULT_CONTEXT) if context is None else context
        if batch < 1:
            raise ConfigError(f"batch is {batch}; allowed: 1 and more")
        if not 1 <= context <= limit:
            why = "" if limit == d.context else f", the window of its attention; it was made for {d.context}"
            raise ConfigError(f"context is {context}; allowed for {d.architecture}: 1 to {limit}{why}")
        model.eval()
        if stack:
            self.decoder = d = d.stacked(model)
        self.batch, self.context = batch, context
        # One place more: sequences that have ended write there.
        self.cache = KVCache(
            len(d.layers), batch, d.kv_heads, context + 1, d.head_size, dtype=d.dtype, device=d.device, kind=kv_cache
        )
        self._rotary = d.rotary_tables(context)
        # The engine's own: graphs of two engines may run at once, on streams that nobody knew when they were captured.
        self._counters = torch.zeros(batch * d.heads, dtype=torch.int32, device=d.device)
        self._lengths: list[int] = []
        self._captures = graphs and d.device.type == "cuda"
        # Graphs know addresses, and another engine may stack what this one did not.
        self._held = [t.detach() for t in (*model.parameters(), *model.buffers())] if self._captures else []
        self._steps: dict[int, Steps] = {}
        self._pool: Any = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens in the cache, of each sequence."""
        return tuple(self._lengths)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def prefill(self, prompts: Prompts) -> Tensor:
        """Forget everything, and read a prompt for each sequence.

        Args:
            prompts: token ids, of any lengths from 1 up; a tensor has one length for all.

        Returns:
            Logits ``[B, vocabulary]`` of each prompt's last token, in the model's dtype.

        Raises:
            ContextError: more prompts than the batch, or a prompt longer than the context. What was there stays.
            ShapeError: no prompt, an empty one, or a tensor that is not ``[B, T]``.
            DtypeError: ids that are no integers.
            ConfigError: an id outside of the vocabulary.
        """
        ids, lengths = self._checked(prompts)
        d = self.decoder
        x, pending = self._read(ids.to(d.device))
        last = torch.tensor([i * ids.shape[1] + n - 1 for i, n in enumerate(lengths)], device=d.device)
        logits: Tensor = d.head(d.norm.of_sum(x[last], pending[last])[1])
        self._lengths = lengths
        return logits

    @torch.no_grad()
    def score(self, prompts: Prompts) -> list[Tensor]:
        """Forget everything, read prompts, and say how they surprise the model; `prefill` with all the logits.

        Args:
            prompts: see `prefill`.

        Returns:
            For each prompt of T tokens the negative log-likelihoods of its tokens 1 to T - 1, float32 ``[T - 1]``.

        Raises:
            As `prefill`.
        """
        ids, lengths = self._checked(prompts)
        ids = ids.to(self.decoder.device)
        x, pending = self._read(ids)
        logits = self.decoder.head(self.decoder.norm.of_sum(x, pending)[1])
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
        flat = torch.as_tensor(tokens)
        if flat.shape != (len(self._lengths),) or not self._lengths:
            raise ShapeError(f"decode: {list(flat.shape)} tokens; allowed: [{len(self._lengths)}], one for each prompt")
        self._check_ids(flat)
        full = [i for i, length in enumerate(self._lengths) if length >= self.context]
        if full:
            raise ContextError(f"sequence {full[0]} has {self.context} tokens, the engine's whole context")
        logits = self._started(flat).step().clone()
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
            As `prefill`; and ConfigError: ``max_new_tokens`` below 1.
        """
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {max_new_tokens}; allowed: 1 and more, or None")
        options = sampling or Sampling()
        stops = frozenset(stop)
        logits = self.prefill(prompts)
        prompt_lengths, device = list(self._lengths), self.decoder.device
        sequences = torch.arange(len(prompt_lengths), device=device)
        positions = torch.tensor(prompt_lengths, device=device)
        room = [self.context - length + 1 for length in prompt_lengths]  # the last token is not read
        most = [r if max_new_tokens is None else min(r, max_new_tokens) for r in room]
        results = [Generated() for _ in most]
        running = [True] * len(most)
        greedy = options.greedy
        steps = self._started(
            torch.ops.qcut.argmax(logits) if greedy else sample(logits, options, sequences, positions)
        )

        def advance() -> Fetched:
            following = steps.step()
            positions.add_(1)
            if not greedy:
                steps.choose(sample(following, options, sequences, positions))
            return Fetched(steps.tokens)

        pending: Fetched | None = Fetched(steps.tokens)
        while pending is not None:
            arriving, pending = pending, None
            goes_on = any(r and len(g.tokens) + 1 < n for r, g, n in zip(running, results, most, strict=True))
            if goes_on and device.type == "cuda":
                pending = advance()  # the device computes while the host reads; in vain where a stop token ends all
            for i, token in enumerate(arriving.wait()):
                if not running[i]:
                    continue
                results[i].tokens.append(token)
                self._lengths[i] = prompt_lengths[i] + len(results[i].tokens) - 1
                if token in stops:
                    results[i] = Generated(results[i].tokens, "stop")
                elif len(results[i].tokens) == most[i]:
                    results[i] = Generated(results[i].tokens, "length" if most[i] == max_new_tokens else "context")
                running[i] = results[i].reason != "stop" and len(results[i].tokens) < most[i]
                if on_token is not None:
                    on_token(i, token)
            if not any(running):
                break
            pending = pending or advance()
        return results

    def _started(self, tokens: Tensor) -> Steps:
        """Steps that read a token of each sequence next, by their graph where there are any."""
        n, device = len(self._lengths), self.decoder.device
        if not self._captures:
            steps = Steps(self._step, n, self.context, device)
        else:
            size = min(self.batch, 1 << (n - 1).bit_length())
            if size not in self._steps:
                pool, self._pool = self._pool or torch.cuda.graph_pool_handle(), None
                self._steps[size] = Steps(self._step, size, self.context, device, pool)
                self._pool = pool  # not where the capture failed: torch takes no other into that pool
            steps = self._steps[size]
        steps.start(tokens, torch.tensor(self._lengths, dtype=torch.int32))
        return steps

    # ── arithmetic ───────────────────────────────────────────────────────────────────────────────

    def _read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Prompts ``[B, T]`` through all layers: two summands of the result ``[B T, hidden]``.

        Padding on the right has no influence: attention looks back, so nobody sees it, and later tokens take its place.
        """
        self._lengths = []
        size = max(1, _ROWS // ids.shape[1])
        parts = [self._read_part(part, i * size) for i, part in enumerate(ids.split(size))]
        if len(parts) == 1:
            return parts[0]
        x, pending = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return x, pending

    def _read_part(self, ids: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """`_read` of some sequences, of which ``first`` is the first."""
        d, (batch, longest) = self.decoder, ids.shape
        # Every token's place, in the tables and in the cache.
        places = torch.arange(longest, dtype=torch.int32, device=d.device).repeat(batch)
        x, pending = d.embed(ids.flatten(), places, batch), None
        for i, layer in enumerate(d.layers):
            x, projected = layer.project(x, pending)
            mixed = self._attend_prompt(i, layer, projected, places, batch, first)
            x, pending = layer.mlp(layer.mlp_norm, x, layer.output(mixed))
        return x, cast(Tensor, pending)

    def _step(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """Logits of one token for each sequence, at its position, kept at its slot; both int32."""
        d = self.decoder
        x, pending = d.embed(tokens, positions, len(tokens)), None
        cos, sin = self._rotary or (None, None)
        noted = self._noted(len(tokens))
        for i, layer in enumerate(d.layers):
            x, projected = layer.project(x, pending)
            q, k, v = d.heads_of(projected)
            step = (q, k, v, cos, sin, positions, slots, *self.cache.layer(i))
            of_mixed, of_middle = noted[i]
            mixed = torch.ops.qcut.append_attention(*step, layer.scaling, self._counters, of_mixed).flatten(1)
            attended = project(layer.output, mixed if of_mixed is None else NotedRows(mixed, of_mixed))
            x, pending = layer.mlp(layer.mlp_norm, x, attended, of_middle)
        _, h = d.norm.of_sum(x, pending)
        logits: Tensor = d.head(h)
        return logits

    def _noted(self, rows: int) -> list[tuple[Tensor | None, Tensor | None]]:
        """Zeros for the largest magnitudes of what each layer's output and MLP's last projection read, where int8."""
        d = self.decoder
        wanted = [[_is_noted(m, rows) for m in (layer.output, layer.mlp.down)] for layer in d.layers]
        if not any(map(any, wanted)):
            return [(None, None)] * len(wanted)
        zeros = torch.zeros((len(wanted), 2, rows), dtype=torch.float32, device=d.device)
        return [(z[0] if mixed else None, z[1] if mid else None) for z, (mixed, mid) in zip(zeros, wanted, strict=True)]

    def _attend_prompt(
        self, index: int, layer: DecoderLayer, projected: tuple[Tensor, ...], places: Tensor, batch: int, first: int
    ) -> Tensor:
        """Heads side by side ``[B T, heads D]`` of prompts ``[B T, hidden]``, which fill the cache from its start."""
        q, k, v = self.decoder.heads_of(projected)
        length, (cos, sin) = len(places) // batch, self._rotary or (None, None)
        kept = self.cache.layer(index, first)
        torch.ops.qcut.append_kv(q, k, v, cos, sin, places, places, *kept, length)
        k, v = self.cache.read(index, batch, length, first)
        q = q.unflatten(0, (batch, length)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scaling, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(len(places), -1)

    # ── checks ───────────────────────────────────────────────────────────────────────────────────

    def _checked(self, prompts: Prompts) -> tuple[Tensor, list[int]]:
        """Ids ``[B, T]``, shorter prompts padded on the right, and each one's length."""
        if isinstance(prompts, Tensor):
            if prompts.dim() != 2:
                raise ShapeError(f"prompts have shape {list(prompts.shape)}; allowed: [B, T], or a list of lists")
            lengths, rows = [prompts.shape[1]] * len(prompts), []
        else:
            rows = [list(row) for row in prompts]
            lengths = [len(row) for row in rows]
        if not lengths:
            raise ShapeError("no prompt; allowed: 1 and more")
        if len(lengths) > self.batch:
            raise ContextError(f"{len(lengths)} prompts; this engine's batch is {self.batch}")
        for i, length in enumerate(lengths):
            if length < 1:
                raise ShapeError(f"prompt {i} is empty; allowed: 1 token and more")
            if length > self.context:
                raise ContextError(f"prompt {i} has {length} tokens; this engine's context is {self.context}")
        if isinstance(prompts, Tensor):
            ids = prompts
        else:
            tensors = [torch.as_tensor(row) for row in rows]
            for tensor in tensors:
                self._check_ids(tensor)
            ids = nn.utils.rnn.pad_sequence(tensors, batch_first=True)
        self._check_ids(ids)
        return ids.long(), lengths

    def _check_ids(self, ids: Tensor) -> None:
        if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
            raise DtypeError(f"token ids are {str(ids.dtype).removeprefix('torch.')}; allowed: integers")
        low, high = (int(v) for v in ids.aminmax()) if ids.numel() else (0, 0)
        if low < 0 or high >= self.decoder.vocabulary:
            wrong = low if low < 0 else high
            raise ConfigError(f"token id {wrong}; allowed: 0 to {self.decoder.vocabulary - 1}")


def _is_noted(module: nn.Module, rows: int) -> bool:
    """Whether a projection is told the largest magnitudes of so many rows, and quantizes them itself."""
    return is_dynamic(module) and rows <= FEW_ROWS and rows * module.in_features <= FEW_ELEMENTS
