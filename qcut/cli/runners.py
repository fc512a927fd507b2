"""Runners of causal language models: qcut's engine, or transformers for architectures that the engine lacks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from qcut.common.progress import with_progress
from qcut.engine.drafters import Drafter
from qcut.engine.engine import Engine
from qcut.engine.sequence import Generated
from qcut.errors import QcutError, UnsupportedError
from qcut.models.evaluation import logits_of, perplexity, perplexity_of
from qcut.models.modules import model_device
from qcut.numerics.sampling import Sampling
from qcut.text.constraint import Constraint


class Runner(Protocol):
    """Runs one model.

    Attributes:
        name: ``qcut`` or ``transformers``.
        why: why transformers runs the model; empty for ``qcut``.
        context: most tokens of a sequence; None: unbounded.
        device: device of the model.
    """

    name: str
    why: str
    context: int | None
    device: torch.device

    def generate(
        self,
        ids: Sequence[int],
        steps: int,
        sampling: Sampling,
        stop: Sequence[int],
        show: Callable[[int], object],
        constraint: Constraint | None = None,
    ) -> Generated:
        """Continue a prompt by at most ``steps`` tokens, up to one of ``stop``; call ``show`` with each token.

        With a constraint, which needs a tokenizer, the text has its form.
        """

    def greedy(self, prompts: Sequence[Sequence[int]], new: int) -> None:
        """Continue prompts of one length together by exactly ``new`` likeliest tokens each, which nothing ends."""

    def perplexity(self, windows: Tensor, batch: int, progress: bool) -> float:
        """Perplexity over windows ``[W, T]`` of token ids, ``batch`` windows per forward pass."""

    def logits(self, window: Tensor) -> Tensor:
        """Logits ``[1, T, V]`` after each token of a window of token ids, int64 ``[1, T]``."""


def runner_for(
    model: nn.Module,
    *,
    kv_cache: str = "auto",
    batch: int = 1,
    context: int | None = None,
    speculate: Drafter | None = None,
    tokenizer: Any = None,
    note: bool = True,
) -> Runner:
    """The engine if it supports the architecture, else transformers.

    Args:
        model: a causal language model.
        kv_cache: see `qcut.Engine`.
        batch: most sequences at once.
        context: most tokens of a sequence; None: the model's own.
        speculate: see `qcut.Engine`.
        tokenizer: see `qcut.Engine`; constraints need it.
        note: say on standard error why transformers runs the model.

    Raises:
        UnsupportedError: the engine lacks the architecture, and ``kv_cache`` or ``speculate`` needs the engine.
    """
    try:
        options: dict[str, Any] = {"kv_cache": kv_cache, "speculate": speculate, "tokenizer": tokenizer}
        engine = Engine(model, batch=batch, context=context, **options)
        return EngineRunner(engine)
    except UnsupportedError as error:
        if kv_cache != "auto":
            raise UnsupportedError(f"--kv-cache {kv_cache} is for qcut's engine: {error}") from error
        if speculate is not None:
            raise UnsupportedError(f"--speculate {speculate.drafts} is for qcut's engine: {error}") from error
        if note:
            print(
                f"qcut: running on transformers, since the engine does not support the model: {error}", file=sys.stderr
            )
        return TransformersRunner(model, str(error))


class EngineRunner:
    """See `Runner`."""

    name, why = "qcut", ""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.context: int | None = engine.context
        self.device = engine.decoder.device

    def generate(
        self,
        ids: Sequence[int],
        steps: int,
        sampling: Sampling,
        stop: Sequence[int],
        show: Callable[[int], object],
        constraint: Constraint | None = None,
    ) -> Generated:
        """See `Runner`."""
        (result,) = self._engine.generate(
            [ids],
            steps,
            sampling=sampling,
            stop=stop,
            constraint=constraint,
            on_token=lambda _, token: show(token),
        )
        return result

    def greedy(self, prompts: Sequence[Sequence[int]], new: int) -> None:
        """See `Runner`."""
        self._engine.generate(prompts, new)

    def perplexity(self, windows: Tensor, batch: int, progress: bool) -> float:
        """See `Runner`."""
        total = 0.0
        for part in with_progress(windows.split(batch), "perplexity", "batch", shown=progress):
            total += sum(float(scores.double().sum()) for scores in self._engine.score(part))
        return perplexity_of(total, len(windows) * (windows.shape[1] - 1))

    def logits(self, window: Tensor) -> Tensor:
        """See `Runner`."""
        return self._engine.logits(window)[0][None]


class _Streamer:
    """Streamer of transformers' ``generate``; the first call has the prompt."""

    def __init__(self, show: Callable[[int], object]) -> None:
        self._show, self._prompt = show, True

    def put(self, value: Tensor) -> None:
        """Called with the prompt, then with each token."""
        if not self._prompt:
            for token in value.flatten().tolist():
                self._show(int(token))
        self._prompt = False

    def end(self) -> None:
        """Called at the end."""


class TransformersRunner:
    """See `Runner`."""

    name = "transformers"

    def __init__(self, model: Any, why: str) -> None:
        self._model, self.why = model.eval(), why
        context = getattr(model.config, "max_position_embeddings", None)
        self.context = context if isinstance(context, int) and context > 0 else None
        self.device = model_device(model)

    def generate(
        self,
        ids: Sequence[int],
        steps: int,
        sampling: Sampling,
        stop: Sequence[int],
        show: Callable[[int], object],
        constraint: Constraint | None = None,
    ) -> Generated:
        """See `Runner`.

        Raises:
            UnsupportedError: transformers cannot generate with the model, or lacks the penalty or the constraint.
        """
        if constraint is not None:
            raise UnsupportedError(f"a constraint, {constraint}, is for qcut's engine, which does not know the model")
        if sampling.presence_penalty or sampling.frequency_penalty:
            raise UnsupportedError(
                f"presence_penalty {sampling.presence_penalty}, frequency_penalty {sampling.frequency_penalty}; "
                "allowed on transformers: 0. qcut's engine, which has them, does not know the model"
            )
        room = steps if self.context is None else min(steps, self.context - len(ids))
        if room < 1:
            return Generated([], "context")
        tokens: list[int] = []

        def take(token: int) -> None:
            tokens.append(token)
            show(token)

        prompt = torch.tensor([list(ids)], device=self.device, dtype=torch.int64)
        options: dict[str, Any] = {"do_sample": sampling.temperature > 0}
        if sampling.repetition_penalty is not None:
            options["repetition_penalty"] = sampling.repetition_penalty
        if sampling.temperature > 0:
            names = ("temperature", "top_k", "top_p", "min_p")
            options |= {name: getattr(sampling, name) for name in names}
        torch.manual_seed(sampling.seed)
        options |= {"eos_token_id": list(stop) or None, "pad_token_id": stop[0] if stop else 0}
        self._continue(prompt, room, streamer=_Streamer(take), **options)
        ended = bool(tokens) and tokens[-1] in stop
        return Generated(tokens, "stop" if ended else "length" if room == steps else "context")

    def _continue(self, prompts: Tensor, new: int, **options: Any) -> None:
        try:
            self._model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new, **options)
        except QcutError:
            raise
        except Exception as error:  # many kinds, if the model does not work with this version of transformers
            if isinstance(error, (torch.OutOfMemoryError, OSError, MemoryError)):
                raise
            raise UnsupportedError(
                f"transformers cannot generate with {type(self._model).__name__}: {' '.join(str(error).split())[:300]}"
            ) from error

    def greedy(self, prompts: Sequence[Sequence[int]], new: int) -> None:
        """See `Runner`."""
        ids = torch.tensor([list(prompt) for prompt in prompts], device=self.device, dtype=torch.int64)
        self._continue(ids, new, min_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)

    def perplexity(self, windows: Tensor, batch: int, progress: bool) -> float:
        """See `Runner`."""
        return perplexity(self._model, windows.flatten(), window=windows.shape[1], batch_size=batch, progress=progress)

    def logits(self, window: Tensor) -> Tensor:
        """See `Runner`."""
        return logits_of(self._model, window)
