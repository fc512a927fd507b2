"""What the benchmarks of this folder share: float models with their texts, and processes that fit layers on the CPU."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import REFERENCE
from qcut.models.evaluation import Comparison, compare, language_reference, perplexity, windows_of


def text_of(path: Path | None) -> str:
    """The text of a file, or the Python language reference."""
    return language_reference() if path in (None, REFERENCE) else path.read_text(encoding="utf-8")


def tokens_of(tokenizer: Any, text: str) -> Tensor:
    """Ids of a text, int64 ``[tokens]``."""
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"])


def fit_option(parser: argparse.ArgumentParser) -> None:
    """``--fit-processes``, the number of `Processes`."""
    parser.add_argument("--fit-processes", type=int, default=0, help="that fit layers on the CPU; 0: --device does [0]")


class Evaluated:
    """A float model and the text that it is evaluated on.

    Args:
        path: folder of the model.
        options: ``device``, ``text``, ``window`` and ``max_windows`` of the command line.
        dtype: of the model.

    Attributes:
        name: of the folder.
        model: the float model.
        tokenizer: its tokenizer.
        tokens: ids of the text.
        windows: windows of the text, int64 ``[windows, tokens]``.
        progress: whether bars are shown.
    """

    def __init__(self, path: Path, options: argparse.Namespace, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.name, self.options, self.progress = path.name, options, sys.stderr.isatty()
        self.tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        self.tokens = tokens_of(self.tokenizer, text_of(options.text))
        self.windows = windows_of(self.tokens, options.window, options.max_windows)
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
        self.model = model.to(options.device).eval()

    def reference(self, count: int) -> Tensor:
        """So many windows of the Python language reference, which is not the evaluated text."""
        return windows_of(tokens_of(self.tokenizer, language_reference()), self.options.window, count)

    def perplexity(self, model: Any = None, **more: Any) -> float:
        """Perplexity of the text, of the float model as it is now or of another one."""
        sizes = {"window": self.options.window, "max_windows": self.options.max_windows, "progress": self.progress}
        return perplexity(self.model if model is None else model, self.tokens, **sizes, **more)

    def compared(self, model: nn.Module) -> Comparison:
        """Predictions of another model on the text, compared with those of the float model as it is now."""
        sizes = {"window": self.options.window, "max_windows": self.options.max_windows, "progress": self.progress}
        return compare(model, self.model, self.tokens, batch_size=4, **sizes)

    def columns(self) -> dict[str, object]:
        """The columns of a row that name the text."""
        text = self.options.text
        return {
            "windows": len(self.windows),
            "window": self.windows.shape[1],
            "text": "the Python language reference" if text is None else text.name,
        }


def divergence_columns(found: Comparison) -> dict[str, object]:
    """The columns of a row that say how far predictions are from the float model's."""
    return {
        "divergence": float(f"{found.divergence:.4g}"),
        "divergence_999": float(f"{found.divergence_999:.4g}"),
        "same_top_percent": round(100 * found.same_top, 3),
    }


@torch.no_grad()
def own_text(model: nn.Module, count: int, length: int, vocabulary: int, seed: int = 0) -> Tensor:
    """Return a model's continuations of random tokens, sampled at temperature 1, int64 ``[count, length]``."""
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    ids = torch.randint(0, vocabulary, (count, 1), generator=generator)
    past = None
    for _ in range(length - 1):
        output = model(ids[:, -1:].to(device), past_key_values=past, use_cache=True)
        past = output.past_key_values
        # Drawn on the CPU: the same generator everywhere.
        sums = output.logits[:, -1].float().softmax(-1).cumsum(-1)
        drawn = torch.searchsorted(sums, torch.rand(count, 1, generator=generator).to(device) * sums[:, -1:])
        ids = torch.cat((ids, drawn.clamp(max=vocabulary - 1).cpu()), 1)
    return ids


class Processes:
    """A pool of processes, of one thread each, which start at once; with 0 of them, calls are made here.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self._pool: ProcessPoolExecutor | None = None
        if count:
            context = get_context("spawn")
            self._pool = ProcessPoolExecutor(count, context, initializer=torch.set_num_threads, initargs=(1,))
            for _ in range(count):
                self._pool.submit(int)

    def map(self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Results of calls, in their order. Arguments and results are copied: tensors of other devices are not taken.

        Args:
            function: of a module, so that a process finds it.
            calls: the arguments of each.
        """
        if self._pool is None:
            return [function(*arguments) for arguments in calls]
        futures = [self._pool.submit(_call, function, _packed(arguments)) for arguments in calls]
        return [_unpacked(future.result()) for future in futures]

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _call(function: Callable[..., Any], arguments: bytes) -> bytes:
    return _packed(function(*_unpacked(arguments)))


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)
