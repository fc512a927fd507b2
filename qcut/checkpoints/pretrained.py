"""Loads a causal language model and its tokenizer from a directory or the hub, for qcut's commands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qcut.checkpoints import qcut_format
from qcut.checkpoints.turboquant import reader as turboquant_reader
from qcut.errors import CheckpointError, UnsupportedError


def load_pretrained(name: str, *, dtype: torch.dtype, device: torch.device, progress: bool = False) -> tuple[Any, Any]:
    """Read a directory of qcut, of the turboquant-model package or of Hugging Face, or a model of the hub.

    Args:
        name: a directory, which never touches the network, or a model's name on the hub.
        dtype: dtype of floating-point parameters.
        device: device of the model.
        progress: show a progress bar, for directories of qcut.

    Returns:
        The model in evaluation mode, and its tokenizer.

    Raises:
        UnsupportedError: transformers is not installed.
        CheckpointError: ``name`` names nothing that qcut or transformers can read; see `qcut.load`.
    """
    try:
        import transformers
    except ImportError as error:
        raise UnsupportedError("transformers is not installed: pip install 'qcut[hf]'") from error
    folder = Path(name)
    local = folder.is_dir()
    if not local and (name.startswith((".", "/", "~")) or folder.exists()):
        raise CheckpointError(f"{name}: not a directory")
    try:
        with _no_progress_bars():
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, local_files_only=local)
            if local and ((folder / qcut_format.CONFIG_NAME).exists() or turboquant_reader.is_turboquant(folder)):
                return qcut_format.load(folder, device=device, dtype=dtype, progress=progress), tokenizer
            model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
                name, dtype=dtype, local_files_only=local, use_safetensors=True
            )
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{name}: {error}") from error
    return model.to(device).eval(), tokenizer


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Switch the bars of transformers and of its hub off for a block, and back to what they were."""
    import huggingface_hub.utils as hub
    from transformers import logging

    shown, shown_by_hub = logging.is_progress_bar_enabled(), not hub.are_progress_bars_disabled()
    logging.disable_progress_bar()  # the hub's too
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
        if shown_by_hub and not shown:
            hub.enable_progress_bars()
        if shown and not shown_by_hub:
            hub.disable_progress_bars()


def device_of(name: str) -> torch.device:
    """The device of ``--device``; ``auto`` is a GPU where there is one, else the CPU.

    Raises:
        UnsupportedError: ``cuda`` where torch finds none.
    """
    available = torch.cuda.is_available()
    if name.startswith("cuda") and not available:
        raise UnsupportedError(f"--device {name}: torch finds no CUDA device; allowed: auto, cpu")
    return torch.device("cuda" if name == "auto" and available else "cpu" if name == "auto" else name)


def dtype_for(name: str, device: torch.device) -> torch.dtype:
    """The dtype of ``--dtype``; ``auto`` is float16 on a GPU, float32 on a CPU."""
    if name == "auto":
        return torch.float16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype
