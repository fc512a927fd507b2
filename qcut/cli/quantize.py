"""``qcut quantize``: reads a float model, quantizes it, and writes a folder."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcut.cli.command import Answer, Command
from qcut.cli.models import (
    QUANTIZING,
    Quantizing,
    check_inputs,
    conversion_options,
    device_options,
    open_quantized,
    shown,
    window_options,
)
from qcut.common.files import flush_directory, make_directory
from qcut.errors import CheckpointError, ConfigError, QuantizationError

if TYPE_CHECKING:
    from qcut.conversion.report import Report

_MODEL_FILES = ("config.json", "qcut_config.json")
_LOCK = ".writing"

_DESCRIPTION = """\
Quantizes the linear layers of a model and writes the result to a folder for `qcut generate`, `qcut eval`, `qcut info`,
qcut.load and transformers. MODEL itself is not changed. The folder appears when it is complete; after a failure nothing
is left.

MODEL may be a model of any task, for text, images or sound. Layers are quantized one by one while loading, so that the
memory is that of the quantized model and one float layer; with --calibrate, that of the float model.

w8a8 keeps weights and activations in 8 bits and suits long prompts and many sequences; codebook4 keeps weights in 4
bits and suits few sequences and little memory; w8a16 loses the least. --bits mixes codebooks of 2, 3, 4 and 4+4 bits
and w8a16 so that the model loses the least for its size.
"""

FIELDS = {
    "model": "MODEL as given",
    "out": "the written folder",
    "schemes": "number of layers by scheme",
    "bytes_before, bytes_after": "bytes of the model in memory, shared tensors once",
    "file_bytes": "bytes of the folder's files",
    "report": "result of each layer: {layers, skipped, bytes_before, bytes_after, parameters, already, verified, "
    "held, unseen, coverage, smoothed}, see qcut.conversion.report.Report",
}


_REQUIRED = """\
options:
--require-quantized S: share
    fail, and write nothing, if less than the share S of the parameters outside of embeddings, norms and what --skip
    and --include leave out is quantized, such as 0.95 (default: warn below 0.9)
--format qcut|compressed-tensors = qcut
    format of the folder; compressed-tensors, for other readers, has w8a8, w8a16, fp8, fp8_dynamic,
    fp8_static, int4, mxfp4 and nvfp4 (default: qcut)
"""
_CONVERSION = conversion_options("DIR", "the folder to write", window_options(8, 32))
COMMAND = Command(
    "quantize",
    QUANTIZING + _CONVERSION + _REQUIRED + device_options(dtype="that of the model's files"),
    help="quantize a model and write it to a folder",
    description=_DESCRIPTION,
    example="qcut quantize models/gpt2-5m --scheme codebook4 --out gpt2-4bit\n"
    "qcut quantize models/gpt2-5m --scheme w8a8_static --calibrate book.txt --out gpt2-int8\n"
    "qcut quantize models/gpt2-5m --bits 3.5 --calibrate book.txt --out gpt2-mixed",
    fields=FIELDS,
)


def run(arguments: argparse.Namespace) -> Answer:
    """Run the command."""
    out: Path = arguments.out
    quantizing = Quantizing.of(arguments)
    if quantizing.scheme is None and arguments.bits is None:
        raise ConfigError("quantize: give --scheme NAME, such as w8a8 or codebook4, --plan FILE, or --bits B")
    check_inputs(arguments, "--out", out)
    with new_folder(out, arguments.overwrite) as folder:  # before computing for a folder that cannot be written
        report = _write(arguments, quantizing, folder)
    sizes = [path.stat().st_size for path in out.iterdir() if path.is_file()]
    schemes: dict[str, int] = {}
    for layer in report.layers:
        schemes[layer.scheme] = schemes.get(layer.scheme, 0) + 1
    data = {"model": arguments.model, "out": str(out), "schemes": schemes}
    data |= {"bytes_before": report.bytes_before, "bytes_after": report.bytes_after, "file_bytes": sum(sizes)}
    text = f"{report}\n{out}: {sum(sizes) / 1e6:.2f} MB in {len(sizes)} files"
    return Answer({**data, "report": report.to_json()}, text)


def _write(arguments: argparse.Namespace, quantizing: Quantizing, folder: Path) -> Report:
    """Quantize the model and write it to an empty folder."""
    import qcut
    from qcut.checkpoints import hub
    from qcut.checkpoints.tokenizers import copy_tokenizer, fetch_processors

    name = arguments.model
    is_here = hub.is_here(name)
    on_disk = is_here or not hub.answers(name)
    model, tokenizer, report = open_quantized(arguments, quantizing, _stored_dtype(name, on_disk))
    required, covered = arguments.require_quantized, report.coverage
    if required is not None and covered is not None and covered.share < required:
        raise QuantizationError(f"--require-quantized {required}: {covered}")
    try:
        if arguments.format == "qcut":
            qcut.save(model, folder, progress=shown(), tokenizer=tokenizer)
        else:
            qcut.save_compressed_tensors(model, folder, progress=shown())
            copy_tokenizer(tokenizer, model, folder)
        if not is_here:
            fetch_processors(name, folder, on_disk)
    except CheckpointError as error:
        raise CheckpointError(str(error).replace(str(folder), str(arguments.out))) from error
    except OSError as error:
        raise CheckpointError(f"{arguments.out}: cannot be written: {error.strerror or error}") from error
    return report


def _stored_dtype(name: str, on_disk: bool) -> Any:
    """The floating dtype that a model's configuration states; float32 by default."""
    import torch

    from qcut.checkpoints import hub
    from qcut.checkpoints.detect import read_config
    from qcut.common import versions

    folder = Path(name) if Path(name).is_dir() else Path(name).parent
    config: dict[str, Any] = {}
    if hub.is_here(name):
        if (folder / "config.json").is_file():
            config = read_config(folder / "config.json")
    else:
        transformers = versions.transformers()
        try:
            config, _ = transformers.PretrainedConfig.get_config_dict(name, local_files_only=on_disk)
        except Exception as error:  # many kinds from the hub's client
            raise CheckpointError(f"{name}: {' '.join(str(error).split())[:600]}") from error
    stated = config.get("dtype") or config.get("torch_dtype")
    return getattr(torch, stated) if stated in ("float16", "bfloat16", "float32") else torch.float32


# ── writing a folder completely or not at all ─────────────────────────────────────────────


def check_folder(path: Path, overwrite: bool) -> None:
    """Check that a model may be written to a folder.

    Args:
        path: path of the folder.
        overwrite: whether an existing model may be replaced.

    Raises:
        ConfigError: the path exists without ``overwrite``, or is not a folder with a model.
    """
    if path.is_dir():
        if not any(path.iterdir()):
            return
        if not any((path / name).is_file() for name in _MODEL_FILES):
            raise ConfigError(f"--out {path}: a folder with other things than a model; it is not replaced")
        if path.is_symlink() or path.resolve() == Path.cwd():
            raise ConfigError(f"--out {path}: a link, or the working directory; it is not replaced")
    elif not path.exists() and not path.is_symlink():
        return
    else:
        raise ConfigError(f"--out {path}: there is something that is no folder; it is not replaced")
    if not overwrite:
        raise ConfigError(f"--out {path}: there is a model already; --overwrite replaces it")


@contextlib.contextmanager
def new_folder(path: Path, overwrite: bool) -> Iterator[Path]:
    """Give an empty temporary folder next to a path; rename it to the path when the block ends.

    If the block raises or is interrupted, the old folder stays and the temporary one is removed. Folders left by
    killed processes are deleted.

    Args:
        path: path of the folder; see `check_folder`.
        overwrite: replace an existing model.

    Raises:
        ConfigError: see `check_folder`, called before and after the block; or the folder cannot be written.
    """
    _clear_up(path)
    check_folder(path, overwrite)
    work = path.parent / f".{path.name}.{secrets.token_hex(4)}.partial"
    created: list[Path] = []
    with contextlib.ExitStack() as stack:
        stack.callback(_remove_empty, created)
        stack.callback(_remove, work)
        try:
            created += make_directory(path.parent)
            work.mkdir()
            lock = os.open(work / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"--out {path}: cannot be written: {error.strerror or error}") from error
        stack.callback(os.close, lock)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield work
        check_folder(path, overwrite)
        try:
            (work / _LOCK).unlink()
            _put(work, path)
        except OSError as error:
            raise ConfigError(f"--out {path}: cannot be written: {error.strerror or error}") from error


def _remove(folder: Path) -> None:
    """Delete a folder, even if a signal arrives meanwhile."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _remove_empty(folders: list[Path]) -> None:
    with contextlib.suppress(OSError):  # where something lies in them
        for folder in folders:
            folder.rmdir()


def _put(work: Path, path: Path) -> None:
    """Rename a folder to a path; an existing folder is moved aside, and restored on failure."""
    old = work.with_suffix(".old")
    replaced = path.is_dir() and any(path.iterdir())
    try:
        if replaced:
            path.rename(old)
        work.rename(path)
    except BaseException:
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    finally:
        if path.exists():
            _remove(old)
    flush_directory(path.parent)


def _clear_up(path: Path) -> None:
    """Delete unfinished folders of dead writers, and restore a folder that one had moved aside."""
    name = glob.escape(path.name)
    for work in path.parent.glob(f".{name}.*.partial"):
        with contextlib.suppress(OSError):
            lock = os.open(work / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(work)
            finally:
                os.close(lock)
    for old in path.parent.glob(f".{name}.*.old"):
        with contextlib.suppress(OSError):
            if path.exists():
                shutil.rmtree(old)
            else:
                old.rename(path)
