"""`qcut.load`: reads a quantized model, whatever its format."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import cast

import torch
from torch import nn

from qcut.checkpoints.detect import PRETRAINED, QCUT, READERS, Detected, Options, detect, require_method
from qcut.checkpoints.headers import refuse_adapter
from qcut.numerics.plain_state import in_plain_state


@in_plain_state
def load(
    directory: str | Path,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    progress: bool = True,
    verify: bool = True,
) -> nn.Module:
    """Read a quantized model and return it, ready to run, in evaluation mode.

    Read are directories of `save`, of ``save_pretrained`` of a quantized model, and of other libraries; and models of
    the hub by name, where transformers finds them.

    The model is built on the meta device, without memory; its quantized layers are put in; names, shapes and dtypes
    of all tensors are checked against the files' headers; then tensors are read one at a time. At no moment does a
    second copy of the model, or a full-precision one, exist. What was saved with digests is compared with them, and the
    values of quantized layers are checked. No code of the checkpoint is run, and no pickle read. For directories with
    a ``turboquant_config.json`` and no ``qcut_config.json`` see `qcut.checkpoints.formats.turboquant.reader.load`. What
    ``save_pretrained`` wrote is read by transformers, with the same checks of names, shapes, dtypes and values.

    For checkpoints of compressed-tensors, GPTQ, AWQ and bitsandbytes, and GGUF files, see docs/foreign-checkpoints.md.

    Args:
        directory: the checkpoint, a folder or a ``.gguf`` file, or a name on the hub.
        model: for models that are not of a class in transformers: a function that builds the model (called on the
            meta device), or the model itself, which is filled and returned; what it holds is dropped.
        device: where the tensors shall be.
        dtype: what floating parameters are cast to, and quantized embeddings return; None keeps what was saved. Scales
            and biases of quantized layers are float32 always, buffers keep their dtype.
        progress: show a progress bar.
        verify: compare digests. False saves the time (a SHA-256 of every byte) and reads files that were changed by
            hand.

    Raises:
        CheckpointError: a file is missing, truncated, damaged or foreign; a tensor is missing, superfluous, of a wrong
            shape or dtype, or holds what quantizing never gives (named); or the model cannot be built without
            ``model``. A model passed in is then incomplete only if reading fails after all checks have passed.
        UnsupportedError: what qcut does not read of another library's format (named).

    Exactness: tensors come back bit by bit, but for ``dtype``.
    """
    name, path = str(directory), Path(directory)
    refuse_adapter(path)
    found = detect(path)
    if found is None and model is None and "/" in name:
        from qcut.checkpoints import hub

        if hub.is_name(name):
            found = Detected(PRETRAINED, path, {})
    if found is None or found.lacks_index or (found.format == PRETRAINED and model is not None):
        found = Detected(QCUT, path, {})
    if found.format not in READERS:
        require_method(found.config, str(path / "config.json"))
    read = import_module(READERS[found.format]).load
    return cast(nn.Module, read(found, Options(model, torch.device(device), dtype, progress, verify)).eval())
