"""Loads a model and its tokenizer from a directory or the hub, for qcut's commands."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from qcut.checkpoints import hub
from qcut.checkpoints.builder import check_kinds
from qcut.checkpoints.detect import GGUF, detect, load, read_config, refuse_adapter
from qcut.checkpoints.formats.gguf.container import GgufModel
from qcut.checkpoints.formats.gguf.tokenizer import tokenizer_of
from qcut.checkpoints.huggingface import causal_class, is_causal_name, skeleton_model, stated_class
from qcut.checkpoints.tokenizers import DATA_FILES, has_tokenizer
from qcut.common import versions
from qcut.common.failures import failures_as, line_of
from qcut.common.schema import JSON_BYTES, check_extent, open_regular, read_bytes
from qcut.errors import CheckpointError, ConfigError, UnsupportedError
from qcut.text.tokenization import check_decoder, start_process, text_ids

_Stored = dict[str, tuple[str, list[int]]]
"""Code of the dtype and shape of stored tensors, by name."""


def load_pretrained(
    name: str, *, dtype: torch.dtype, device: torch.device, quantization: Any = None, progress: bool = False
) -> tuple[Any, Any]:
    """Read a causal language model: a directory of qcut, of another library or of Hugging Face, or a model of the hub.

    Args:
        name: a directory, which never touches the network, or a model's name on the hub.
        dtype: dtype of floating-point parameters.
        device: device of the model.
        quantization: a `qcut.QcutConfig`, by which float models and GGUF files are quantized while they are loaded; a
            directory of qcut or of another quantizing library is read as it is.
        progress: show progress bars, without ``quantization`` only for directories of qcut.

    Returns:
        The model in evaluation mode, and its tokenizer.

    Raises:
        UnsupportedError: transformers is not installed, or too old.
        CheckpointError: ``name`` names nothing that qcut or transformers can read, no causal language model, has no
            tokenizer, has no values for some of the model's tensors, or has a configuration that is refused; see
            `qcut.load`.
    """
    model, tokenizer = _load(name, causal_class, dtype, device, quantization, progress)
    generates = getattr(model, "can_generate", None)
    if generates is not None and (not generates() or model.config.is_encoder_decoder):
        raise CheckpointError(f"{name}: found a {type(model).__name__}; a causal language model is needed")
    return model, tokenizer


def load_any(
    name: str, *, dtype: torch.dtype, device: torch.device, quantization: Any = None, progress: bool = False
) -> tuple[Any, Any]:
    """Read a model for any task, of the class that its configuration states; arguments and errors as `load_pretrained`.

    Args:
        name: see `load_pretrained`.
        dtype: see `load_pretrained`.
        device: see `load_pretrained`.
        quantization: see `load_pretrained`.
        progress: show progress bars.

    Returns:
        The model, and its tokenizer: None if there is none, which a causal language model has to have.
    """
    return _load(name, stated_class, dtype, device, quantization, progress)


def _load(
    name: str,
    class_of: Callable[[Mapping[str, Any], str], str],
    dtype: torch.dtype,
    device: torch.device,
    quantization: Any,
    progress: bool,
) -> tuple[Any, Any]:
    path, local = Path(name), hub.is_here(name)
    folder = path if path.is_dir() else path.parent
    if local:
        refuse_adapter(folder)
    on_disk = local or not hub.answers(name)
    versions.transformers()
    tensors = _check_folder(folder) if local else {}
    found = detect(path) if local else None
    without = local and not has_tokenizer(folder)
    tokenizer = None
    if without and found is not None and found.format == GGUF:
        tokenizer = _checked(lambda: _described(found.path), str(found.path))
    elif without and (class_of is causal_class or _is_causal(folder)):
        raise CheckpointError(f"{folder}: there is no tokenizer ({', '.join(DATA_FILES)}); {_SAVE_TOKENIZER}")
    if not without:
        start_process()
    with contextlib.nullcontext() if progress and quantization is not None else _no_progress_bars():
        if found is not None and not found.lacks_index:
            given = quantization if found.format == GGUF else None
            model: Any = load(path, device=device, dtype=dtype, progress=progress, quantization_config=given)
        else:
            model = _huggingface(name, tensors if local else None, class_of, dtype, device, quantization, on_disk)
    if not without:
        with _no_progress_bars():
            tokenizer = _tokenizer(str(folder) if local else name, local, model, on_disk)
    with _as_checkpoint_errors(f"{name}: the model cannot be put on {device}"):
        return model.to(device).eval(), tokenizer


_SAVE_TOKENIZER = "tokenizer.save_pretrained(directory) puts one next to the model"


def _is_causal(folder: Path) -> bool:
    path = folder / "config.json"
    return not path.is_file() or is_causal_name(stated_class(read_config(path), str(path)))


def _tokenizer(name: str, local: bool, model: Any, on_disk: bool) -> Any:
    """The tokenizer; None for a model of the hub that reads images or sound, and has none."""
    transformers = versions.transformers()
    try:
        return _checked(
            lambda: transformers.AutoTokenizer.from_pretrained(
                name, local_files_only=on_disk, trust_remote_code=False, config=getattr(model, "config", None)
            ),
            name,
        )
    except CheckpointError:
        if local or getattr(model, "main_input_name", "input_ids") == "input_ids":
            raise
        return None


def _described(path: Path) -> Any:
    """The tokenizer that a GGUF file describes."""
    with GgufModel(path) as file:
        return tokenizer_of(file)


def _checked(read: Callable[[], Any], name: str) -> Any:
    """A tokenizer that has tokens, and takes a text."""
    with _as_checkpoint_errors(f"{name}: its tokenizer cannot be read"):
        tokenizer = read()
        check_decoder(tokenizer)
        # Some of what a tokenizer's files state is looked at when it is used.
        text_ids(tokenizer, "a")
        _ = tokenizer.model_max_length < 1
        empty = not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)
    if empty:
        raise CheckpointError(f"{name}: its tokenizer has no tokens; {_SAVE_TOKENIZER}")
    return tokenizer


def _huggingface(
    name: str,
    tensors: _Stored | None,
    class_of: Callable[[Mapping[str, Any], str], str],
    dtype: torch.dtype,
    device: torch.device,
    quantization: Any,
    on_disk: bool,
) -> nn.Module:
    """A model with weights that transformers reads, from a directory or the hub; the configuration is checked.

    transformers fills what is missing with random numbers, casts whole numbers to weights, and at most warns.
    """
    transformers, local = versions.transformers(), tensors is not None
    if local:
        where = str(Path(name) / "config.json")
        config = read_config(Path(where))
        if not tensors:
            raise CheckpointError(f"{name}: there are no safetensors files, or no tensors in them")
    else:
        where = f"{name}: config.json"
        with _as_checkpoint_errors(name):
            config, _ = transformers.PretrainedConfig.get_config_dict(name, local_files_only=on_disk)
    shapes = None if tensors is None else [shape for _, shape in tensors.values()]
    skeleton: Any = skeleton_model(class_of(config, where), config, where, shapes)
    if tensors is not None:
        _check_sizes(skeleton, tensors, name)
    given = {} if quantization is None else {"quantization_config": quantization}
    if quantization is not None and device.type != "cpu":
        given["device_map"] = {"": str(device)}
    with _as_checkpoint_errors(name):
        model, info = type(skeleton).from_pretrained(
            name,
            config=skeleton.config,
            dtype=dtype,
            local_files_only=on_disk,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **given,
        )
    for problem in ("missing_keys", "mismatched_keys"):
        if info.get(problem):
            first = sorted(map(str, info[problem]))[0]
            raise CheckpointError(f"{name}: {len(info[problem])} {problem.replace('_keys', '')} tensors; first {first}")
    return cast(nn.Module, model)


def _check_sizes(skeleton: nn.Module, tensors: _Stored, name: str) -> None:
    """Hold a model's sizes and dtypes to the stored tensors before transformers makes memory for them."""
    for key, parameter in skeleton.named_parameters():
        if key in tensors and tensors[key][1] != list(parameter.shape):
            raise CheckpointError(
                f"{name}: tensor {key!r}: found {tensors[key][1]}, the configuration needs {list(parameter.shape)}"
            )
    check_kinds(skeleton, {key: code for key, (code, _) in tensors.items()}, name)
    wanted = sum(parameter.numel() for parameter in skeleton.parameters())
    stored = sum(math.prod(shape) for _, shape in tensors.values())
    if wanted > 2 * stored + _FEW_VALUES:  # a tied tensor may be stored once and counted twice
        raise CheckpointError(f"{name}: the configuration needs {wanted} values, and the files have {stored}")


def _check_folder(folder: Path) -> _Stored:
    """Look at a folder before transformers reads it, which waits for pipes and takes JSON of any size.

    Returns:
        The tensors of its safetensors files.

    Raises:
        CheckpointError: something else than regular files, JSON beyond the bounds of `qcut.common.schema`, or a
            safetensors file that is damaged (the file is named).
    """
    try:
        files = [path for path in sorted(folder.iterdir()) if path.exists() and not path.is_dir()]
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error}") from error
    for path in files:
        open_regular(path, CheckpointError).close()
    tensors: _Stored = {}
    for path in files:
        if path.suffix == ".json" and path.name not in _VOCABULARIES:
            check_extent(read_bytes(path, JSON_BYTES, CheckpointError), path, CheckpointError)
        if path.suffix == ".safetensors":
            try:
                with safe_open(path, framework="pt") as file:
                    names = file.keys()
                    views = {name: file.get_slice(name) for name in names}
                    tensors |= {name: (view.get_dtype(), view.get_shape()) for name, view in views.items()}
            except (SafetensorError, OSError, ValueError, MemoryError) as error:
                raise CheckpointError(f"{path}: truncated or not a safetensors file: {error}") from error
    return tensors


_FEW_VALUES = 1 << 20
_VOCABULARIES = ("tokenizer.json", "vocab.json")
"""Of any size; a parser of limited depth reads them."""


@contextlib.contextmanager
def _as_checkpoint_errors(what: str) -> Iterator[None]:
    """Turn what other libraries raise in a block, and what is wrong in a configuration, into a CheckpointError."""
    with failures_as(CheckpointError, what):
        try:
            yield
        except ConfigError as error:
            raise CheckpointError(f"{what}: {line_of(error, 600)}") from error


def token_ids(tokenizer: Any, text: str, what: str) -> list[int]:
    """Token ids of a text that a user gave.

    Raises:
        ConfigError: the text is not valid Unicode, or the tokenizer does not take it.
    """
    try:
        text.encode()
        return text_ids(tokenizer, text)
    except (UnicodeError, ConfigError) as error:
        raise ConfigError(f"{what} is no text that the tokenizer takes: {error}") from error


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Switch the bars of transformers and of its hub off for a block, and back to what they were."""
    from huggingface_hub import utils
    from transformers import logging

    shown, shown_by_hub = logging.is_progress_bar_enabled(), not utils.are_progress_bars_disabled()
    logging.disable_progress_bar()  # the hub's too
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
        if shown_by_hub and not shown:
            utils.enable_progress_bars()
        if shown and not shown_by_hub:
            utils.disable_progress_bars()


def device_of(name: str) -> torch.device:
    """The device of ``--device``; ``auto`` is a GPU if there is one, else the CPU.

    Raises:
        UnsupportedError: a name that is none of ``auto``, ``cpu`` and ``cuda[:N]``, or ``cuda`` where torch finds no
            such GPU.
    """
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if found else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    match = re.fullmatch(r"cuda(?::(\d{1,4}))?", name, re.ASCII)
    if match is None:
        raise UnsupportedError(f"--device {name}: no device that qcut runs on; allowed: auto, cpu, cuda, cuda:N")
    if not found:
        raise UnsupportedError(f"--device {name}: torch finds no CUDA device; allowed: auto, cpu")
    if int(match[1] or 0) >= found:
        allowed = ", ".join(f"cuda:{i}" for i in range(found))
        raise UnsupportedError(f"--device {name}: torch finds {found}; allowed: auto, cpu, {allowed}")
    return torch.device(name)


def dtype_for(name: str, device: torch.device) -> torch.dtype:
    """The dtype of ``--dtype``; ``auto`` is float16 on a GPU, float32 on a CPU."""
    if name == "auto":
        return torch.float16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype
