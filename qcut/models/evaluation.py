"""Perplexity of a causal language model on a text, and the divergence of its predictions from a reference's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qcut.common.progress import with_progress
from qcut.errors import DtypeError, ShapeError, UnsupportedError
from qcut.models.modules import evaluating, forward, model_device, output_tensor, state_kept
from qcut.models.selection import check_model

_POSITIONS = 64
"""Positions with distributions in memory in float64 at once."""


def language_reference() -> str:
    """The topics of Python's help, sorted by name: a text that comes with CPython.

    Raises:
        UnsupportedError: this Python was installed without them.
    """
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError as error:
        raise UnsupportedError("this Python has no module pydoc_data.topics, the built-in text; give a text") from error
    return "\n\n".join(text for _, text in sorted(topics.items()))


def windows_of(token_ids: Tensor, window: int = 512, max_windows: int | None = None) -> Tensor:
    """Cut a token stream into non-overlapping windows; an incomplete last window is dropped.

    Args:
        token_ids: integer tensor ``[T]``.
        window: tokens per window, at least 2.
        max_windows: keep at most this many, from the start.

    Returns:
        int64 ``[min(T // window, max_windows), window]``, on the device of ``token_ids``.

    Raises:
        DtypeError: the ids, or the sizes, are not integers.
        ShapeError: the ids are not one-dimensional or fewer than one window, or a window has fewer than 2 tokens.
    """
    if not isinstance(token_ids, Tensor):
        raise DtypeError(f"token_ids: found {type(token_ids).__name__}; a tensor of integers, shape [T], is needed")
    if token_ids.is_floating_point() or token_ids.is_complex() or token_ids.dtype is torch.bool:
        raise DtypeError(f"token_ids: found {token_ids.dtype}; token ids are integers")
    if token_ids.ndim != 1:
        raise ShapeError(f"token_ids: found shape {tuple(token_ids.shape)}; pass one stream of tokens, shape [T]")
    for what, count in (("window", window), ("max_windows", max_windows)):
        if not (isinstance(count, int) or (what == "max_windows" and count is None)):
            raise DtypeError(f"{what}: found {count!r}; an integer is needed")
    if window < 2:
        raise ShapeError(f"window: found {window}; a window needs 2 tokens or more, the first only predicts")
    if max_windows is not None and max_windows < 1:
        raise ShapeError(f"max_windows: found {max_windows}; at least 1 is allowed")
    count = token_ids.numel() // window
    if count == 0:
        raise ShapeError(f"token_ids: found {token_ids.numel()} tokens, fewer than one window of {window}")
    count = count if max_windows is None else min(count, max_windows)
    return token_ids[: count * window].view(count, window).long()


def token_nll(logits: Tensor, input_ids: Tensor) -> Tensor:
    """Negative log-likelihood of every next token.

    ``nll[b, t] = logsumexp(logits[b, t]) - logits[b, t, input_ids[b, t + 1]]``, in float32, one sequence at a time
    so that no second copy of the batch's logits is made.

    Args:
        logits: ``[B, T, V]``, any floating dtype.
        input_ids: integers ``[B, T]`` on the same device.

    Returns:
        float32 ``[B, T - 1]``.
    """
    return torch.stack(
        [
            F.cross_entropy(row[:-1].float(), ids[1:], reduction="none")
            for row, ids in zip(logits, input_ids, strict=True)
        ]
    )


def perplexity(
    model: nn.Module,
    token_ids: Tensor,
    *,
    window: int = 512,
    batch_size: int = 8,
    progress: bool = True,
    max_windows: int | None = None,
) -> float:
    """Perplexity over non-overlapping windows: ``exp(sum of nll / number of predicted tokens)``.

    The model predicts tokens ``1 .. window - 1`` of each window from the tokens before them in the same window, as
    Hugging Face's shifted loss does. Token losses are float32, their sum is float64.

    Args:
        model: returns logits ``[B, T, V]``, or an output with ``.logits``, or a tuple that begins with the logits.
        token_ids: integer tensor ``[T]`` on any device; windows are moved to the model's.
        window: tokens per window.
        batch_size: windows per forward call.
        progress: show a progress bar.
        max_windows: evaluate at most this many windows, from the start.

    Returns:
        The perplexity; NaN or infinite if logits are NaN or infinite.

    Raises:
        DtypeError: the model is no ``nn.Module``, or the ids are not integers.
        ShapeError: the ids are not one-dimensional, or too few for one window; or the model returns something other
            than ``[B, T, V]``.

    Exactness: the batch size may change the last bits, as far as the model's kernels depend on it.
    """
    check_model(model)
    windows = windows_of(token_ids, window, max_windows)
    total = 0.0
    for ids in _batches(windows, batch_size, "perplexity", progress):
        total += token_nll(logits_of(model, ids), ids.to(model_device(model))).double().sum().item()
    return perplexity_of(total, windows.shape[0] * (window - 1))


def token_divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """Kullback-Leibler divergence of every position's next-token distribution from the reference's, in nats.

    ``KL(p || q) = sum over v of p[v] * (log p[v] - log q[v])`` with ``p = softmax(reference)`` and
    ``q = softmax(logits)``, in float64, a few positions at a time.

    Args:
        reference: logits ``[..., V]``, any floating dtype.
        logits: logits of the same shape on the same device, any floating dtype.

    Returns:
        float64 ``[...]``. Infinite where a token has a logit of -inf, but not in the reference; NaN where a logit is
        NaN. A token with probability 0 in the reference adds 0.

    Raises:
        ShapeError: the shapes differ.

    Exactness: float64 sums over V; their order may change the last bits; equal logits give exactly 0.
    """
    if reference.shape != logits.shape:
        raise ShapeError(
            f"logits: found shape {list(logits.shape)}; allowed: {list(reference.shape)}, as of the reference. Both "
            "models need one vocabulary"
        )
    flat, others = (each.reshape(-1, each.shape[-1]) for each in (reference, logits))
    found = torch.empty(len(flat), dtype=torch.float64, device=flat.device)
    for first in range(0, len(flat), _POSITIONS):
        rows = slice(first, first + _POSITIONS)
        log_p, log_q = (each[rows].double().log_softmax(-1) for each in (flat, others))
        p = log_p.exp()
        found[rows] = torch.where(p == 0, 0.0, p * (log_p - log_q)).sum(-1)
    return found.view(reference.shape[:-1])


@dataclass(frozen=True)
class Comparison:
    """How near the predictions of a model are to those of a reference, on a text.

    Attributes:
        perplexity: of the model; see `perplexity`.
        reference_perplexity: of the reference.
        divergence: mean of `token_divergence` over all positions, in nats.
        divergence_999: its 99.9 % quantile: the least divergence that 99.9 % of the positions do not exceed.
        same_top: share of the positions, 0 to 1, at which both have the same most probable token. Of equal logits the
            first counts; a position of NaN counts as different.
        positions: number of positions, the last one of each window among them.
    """

    perplexity: float
    reference_perplexity: float
    divergence: float
    divergence_999: float
    same_top: float
    positions: int


def compare_logits(windows: Iterable[tuple[Tensor, Tensor, Tensor]]) -> Comparison:
    """Compare predictions of a model with those of a reference.

    Args:
        windows: of each batch of windows, token ids, integers ``[B, T]`` on any device; the reference's logits; and
            the model's, both ``[B, T, V]``, any floating dtype, on one device. Batches are taken one by one, and none
            is kept: if a generator makes them, only one is in memory.

    Raises:
        ShapeError: there is no window of 2 tokens or more, or logits of both differ in shape.

    Exactness: see `token_divergence`; token losses are float32, their sum is float64.
    """
    divergences: list[Tensor] = []
    own = others = 0.0
    predicted = same = 0
    for ids, reference, logits in windows:
        found = token_divergence(reference, logits)
        divergences.append(found.flatten().cpu())
        same += int((reference.argmax(-1).eq(logits.argmax(-1)) & ~found.isnan()).sum())
        own += token_nll(logits, ids.to(logits.device)).double().sum().item()
        others += token_nll(reference, ids.to(reference.device)).double().sum().item()
        predicted += ids.numel() - len(ids)
        del reference, logits
    if not predicted:
        raise ShapeError("windows: found no token to predict; allowed: 1 window and more, of 2 tokens and more")
    every = torch.cat(divergences)
    return Comparison(
        perplexity=perplexity_of(own, predicted),
        reference_perplexity=perplexity_of(others, predicted),
        divergence=every.mean().item(),
        divergence_999=every.kthvalue(math.ceil(0.999 * len(every))).values.item(),
        same_top=same / len(every),
        positions=len(every),
    )


def compare(
    model: nn.Module,
    reference: nn.Module,
    token_ids: Tensor,
    *,
    window: int = 512,
    batch_size: int = 1,
    progress: bool = True,
    max_windows: int | None = None,
) -> Comparison:
    """Compare the predictions of a model with those of a reference over non-overlapping windows of a text.

    Args:
        model: see `perplexity`.
        reference: a model of the same vocabulary, on the same device.
        token_ids: see `perplexity`.
        window: tokens per window.
        batch_size: windows per forward call; the logits of so many windows of both models are in memory.
        progress: show a progress bar.
        max_windows: evaluate at most this many windows, from the start.

    Raises:
        DtypeError: as `perplexity`.
        ShapeError: as `perplexity`, or the vocabularies differ in size.

    Exactness: as `compare_logits`; the batch size may change the last bits of logits.
    """
    check_model(model)
    check_model(reference)
    windows = windows_of(token_ids, window, max_windows)
    return compare_logits(
        (ids, logits_of(reference, ids), logits_of(model, ids))
        for ids in _batches(windows, batch_size, "divergence", progress)
    )


def _batches(windows: Tensor, size: int, what: str, progress: bool) -> Iterable[Tensor]:
    if not isinstance(size, int):
        raise DtypeError(f"batch_size: found {size!r}; an integer is needed")
    if size < 1:
        raise ShapeError(f"batch_size: found {size}; at least 1 is allowed")
    return with_progress(windows.split(size), what, "batch", shown=progress)


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits of a model in evaluation mode, without gradients.

    Args:
        model: see `perplexity`.
        ids: integers ``[B, T]`` on any device.

    Returns:
        ``[B, T, V]``, in the model's dtype and on its device.

    Raises:
        ShapeError: the model returns something of another shape.
    """
    with evaluating(model), state_kept(model), torch.no_grad():
        logits = output_tensor(forward(model, ids.to(model_device(model))))
    if logits.ndim != 3 or logits.shape[:2] != ids.shape:
        raise ShapeError(
            f"{type(model).__name__}: found an output of shape {tuple(logits.shape)} for input ids of shape "
            f"{tuple(ids.shape)}; logits [B, T, V] are needed"
        )
    return logits


def perplexity_of(nll: float, predicted: int) -> float:
    """``exp(nll / predicted)``: perplexity by the sum of token losses and their number; infinite beyond ``e**700``."""
    mean = nll / predicted
    return math.exp(mean) if mean < 700 else math.inf if mean == mean else math.nan
