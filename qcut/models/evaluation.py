"""Perplexity of a causal language model on a text, as plans, examples and benchmarks measure it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qcut.common.progress import with_progress
from qcut.errors import DtypeError, ShapeError, UnsupportedError
from qcut.models.modules import evaluating, forward, model_device, output_tensor
from qcut.models.selection import check_model


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
    if batch_size < 1:
        raise ShapeError(f"batch_size: found {batch_size}; at least 1 is allowed")
    device = model_device(model)
    total = 0.0
    batches = with_progress(windows.split(batch_size), "perplexity", "batch", shown=progress)
    with evaluating(model), torch.no_grad():
        for batch in batches:
            ids = batch.to(device)
            logits = output_tensor(forward(model, ids))
            if logits.ndim != 3 or logits.shape[:2] != ids.shape:
                raise ShapeError(
                    f"{type(model).__name__}: found an output of shape {tuple(logits.shape)} for input ids of shape "
                    f"{tuple(ids.shape)}; perplexity needs logits [B, T, V]"
                )
            total += token_nll(logits, ids).double().sum().item()
    mean = total / (windows.shape[0] * (window - 1))
    return math.exp(mean) if mean < 700 else math.inf if mean == mean else math.nan
