"""Loads a causal language model and its tokenizer from a directory or the hub, for qcut's commands."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from qcut.checkpoints import qcut_format
from qcut.checkpoints.limits import check_counts, limited_modules
from qcut.checkpoints.turboquant import reader as turboquant_reader
from qcut.errors import CheckpointError, QcutError, UnsupportedError
from qcut.storage.reading import JSON_BYTES, check_extent, open_regular, read_bytes

_TOKENS = ("tokenizer.json", "vocab.json")
"""Vocabularies, of any size; a parser of limited depth reads them."""


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
        CheckpointError: ``name`` names nothing that qcut or transformers can read (see `qcut.load`), or the model has
            tensors that the files have not.
    """
    try:
        import transformers
    except ImportError as error:
        raise UnsupportedError("transformers is not installed: pip install 'qcut[hf]'") from error
    folder = Path(name)
    local = folder.is_dir()
    if not local and (name.startswith((".", "/", "~")) or folder.exists()):
        raise CheckpointError(f"{name}: not a directory")
    tensors = _check_folder(folder) if local else None
    with _no_progress_bars(), _refusing(name):
        # Without the answer, transformers asks the terminal whether to run a checkpoint's code.
        options: dict[str, Any] = {"local_files_only": local, "trust_remote_code": False}
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **options)
        tokenizer("a")  # Some of what a tokenizer's files state is looked at when it is used.
        if local and ((folder / qcut_format.CONFIG_NAME).exists() or turboquant_reader.is_turboquant(folder)):
            return qcut_format.load(folder, device=device, dtype=dtype, progress=progress), tokenizer
        model: nn.Module
        with contextlib.nullcontext() if tensors is None else limited_modules(len(tensors), folder):
            model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
                name, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
            )
        _check_loaded(model, loaded, tensors or {}, name)
        return model.to(device).eval(), tokenizer


def _check_loaded(model: nn.Module, loaded: dict[str, Any], tensors: dict[str, str], name: str) -> None:
    """Whether every tensor of a model is in the files, as a number of its kind.

    transformers fills what is missing with random numbers, casts whole numbers to weights, and at most warns.
    """
    for what in ("missing_keys", "mismatched_keys", "error_msgs"):
        if found := sorted(map(str, loaded.get(what) or ())):
            raise CheckpointError(
                f"{name}: {len(found)} tensors of {type(model).__name__} are missing or of another shape, {found[0]} "
                "for one"
            )
    for key, parameter in model.named_parameters():
        if parameter.is_floating_point() and tensors.get(key, "F32").startswith(("I", "U", "BOOL")):
            raise CheckpointError(f"{name}: tensor {key!r}: found {tensors[key]}, a floating dtype is needed")


def _check_folder(folder: Path) -> dict[str, str]:
    """Look at a folder before transformers reads it, which waits for pipes and builds whatever sizes are stated.

    Returns:
        The tensors of its safetensors files, and the codes of their dtypes.

    Raises:
        CheckpointError: something else than regular files, JSON beyond the bounds of `qcut.storage.reading`, a
            safetensors file that is damaged, or numbers of layers that the tensors do not bear out (the file is named).
    """
    try:
        files = [path for path in sorted(folder.iterdir()) if path.exists() and not path.is_dir()]
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error}") from error
    for path in files:
        open_regular(path, CheckpointError).close()
    for path in files:
        if path.suffix == ".json" and path.name not in _TOKENS:
            check_extent(read_bytes(path, JSON_BYTES, CheckpointError), path, CheckpointError)
    tensors: dict[str, str] = {}
    for path in files:
        if path.suffix == ".safetensors":
            try:
                with safe_open(path, framework="pt") as file:
                    tensors |= {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 (no mapping)
            except (SafetensorError, OSError, ValueError, MemoryError) as error:
                raise CheckpointError(f"{path}: truncated or not a safetensors file: {error}") from error
    config = folder / "config.json"
    if config in files:
        with _refusing(str(config)):
            check_counts(json.loads(config.read_bytes()), len(tensors), config)
    return tensors


@contextlib.contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Turn whatever transformers and tokenizers raise on a broken file into a `CheckpointError` with a name.

    They have no class of exceptions for it: TypeError, KeyError, RuntimeError and plain Exception come out of
    configurations with other types than expected.
    """
    try:
        yield
    except BaseException as error:
        # A panic in the Rust of tokenizers is no Exception.
        is_panic = type(error).__module__ == "pyo3_runtime"
        if isinstance(error, QcutError) or not (isinstance(error, Exception) or is_panic):
            raise
        text = str(error)
        raise CheckpointError(f"{name}: {'' if text else type(error).__name__}{text[:2000]}") from error


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
