"""The files of a tokenizer and of the processors of images and sound, next to a model's files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from torch import nn

from qcut.common.files import replacing
from qcut.errors import CheckpointError

DATA_FILES = ("tokenizer.json", "vocab.*", "merges.txt", "tekken.json", "*.model", "*.spm", "*.tiktoken")
"""Patterns of the files that hold a tokenizer's tokens."""
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_OTHER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.*")


def has_tokenizer(folder: Path) -> bool:
    """Whether there is a tokenizer's data: without, transformers makes up an empty tokenizer."""
    return any(True for pattern in DATA_FILES for _ in folder.glob(pattern))


def copy_tokenizer(tokenizer: Any, model: nn.Module, directory: Path) -> None:
    """Put a tokenizer next to a model, and the files that say how images and sound are prepared.

    Args:
        tokenizer: of transformers; or None for the files next to the model that transformers loaded, if it came from a
            directory. With None, no existing file is replaced, and no tokenizer is copied if there is one.
        model: the model.
        directory: where the model was saved.

    Raises:
        CheckpointError: the files cannot be written, or the tokenizer cannot be saved.
    """
    source = _source(model)
    if source is not None:
        _copy(source, directory, _PROCESSOR_FILES)
    if tokenizer is not None:
        if not callable(getattr(tokenizer, "save_pretrained", None)):
            raise CheckpointError(
                f"tokenizer: found a {type(tokenizer).__name__}; a tokenizer of transformers is needed"
            )
        try:
            tokenizer.save_pretrained(str(directory))
        except Exception as error:  # of the many kinds that tokenizers raise
            raise CheckpointError(f"{directory}: the tokenizer cannot be saved: {error}") from error
        return
    if source is not None and has_tokenizer(source) and not has_tokenizer(directory):
        _copy(source, directory, (*_OTHER_FILES, *DATA_FILES))  # data last: with them a tokenizer is there


def fetch_processors(name: str, directory: Path, on_disk: bool) -> None:
    """Put the files that say how images and sound are prepared next to a model that came from the hub.

    Args:
        name: of the model on the hub.
        directory: where the model was saved.
        on_disk: take them only from the hub's cache; see `qcut.checkpoints.hub.answers`.

    Raises:
        CheckpointError: the files cannot be written.
    """
    from transformers.utils import cached_file

    optional = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    for file in _PROCESSOR_FILES:
        found = cached_file(name, file, local_files_only=on_disk, **optional)
        if found is not None:
            _copy(Path(found).parent, directory, (file,))


def _source(model: nn.Module) -> Path | None:
    name = getattr(getattr(model, "config", None), "_name_or_path", None)
    return Path(name) if isinstance(name, str) and name and Path(name).is_dir() else None


def _copy(source: Path, directory: Path, patterns: tuple[str, ...]) -> None:
    """Copy the files that the directory does not have, all or none of them: an existing one is never written again."""
    try:
        found = {path.name: path for pattern in patterns for path in source.glob(pattern) if path.is_file()}
        new = [name for name in found if not (directory / name).exists()]
        with replacing(*(directory / name for name in new)) as files:
            for name, file in zip(new, files, strict=True):
                with open(found[name], "rb") as original:
                    shutil.copyfileobj(original, file)
    except OSError as error:
        raise CheckpointError(f"{directory}: files of {source} cannot be copied: {error}") from error
