"""A tokenizer's files beside a model's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from torch import nn

from qcut.errors import CheckpointError

DATA_FILES = ("tokenizer.json", "vocab.*", "merges.txt", "tekken.json", "*.model", "*.spm", "*.tiktoken")
"""Patterns of the files that hold a tokenizer's tokens."""
_OTHER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.*")


def has_tokenizer(folder: Path) -> bool:
    """Whether there is a tokenizer's data: without, transformers makes up an empty tokenizer."""
    return any(True for pattern in DATA_FILES for _ in folder.glob(pattern))


def copy_tokenizer(tokenizer: Any, model: nn.Module, directory: Path) -> None:
    """Put a tokenizer beside a model.

    Args:
        tokenizer: of transformers; or None for the files beside which transformers found the model, where that is a
            directory. Then no file of the directory is replaced, and nothing is copied where a tokenizer is.
        model: the model.
        directory: where the model was saved.

    Raises:
        CheckpointError: the files cannot be written, or the tokenizer cannot be saved.
    """
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
    source = getattr(getattr(model, "config", None), "_name_or_path", None)
    if not isinstance(source, str) or not source or not Path(source).is_dir() or not has_tokenizer(Path(source)):
        return
    if has_tokenizer(directory):
        return
    try:
        for pattern in (*DATA_FILES, *_OTHER_FILES):
            for path in Path(source).glob(pattern):
                if path.is_file() and not (directory / path.name).exists():
                    shutil.copyfile(path, directory / path.name)
    except OSError as error:
        raise CheckpointError(f"{directory}: the tokenizer of {source} cannot be copied: {error}") from error
