"""Loads a model that is quantized already into several processes: each reads the layers and keeps its parts of them."""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor, device

from qcut.checkpoints.description import fill_layer
from qcut.common.safetensors_file import TensorFile
from qcut.errors import CheckpointError, UnsupportedError
from qcut.integrations.transformers.parallel import TensorParallel, Whole
from qcut.integrations.transformers.placing import ignore_unexpected
from qcut.integrations.transformers.stored import StoredLoading


class StoredPartsLoading(StoredLoading):
    """The state of one ``from_pretrained`` of a quantized model under tensor parallelism.

    transformers reads what is float, cut by its own plan. The tensors of quantized layers stay in the files until then,
    because transformers would read all of them ahead, in whole. They are read one at a time into memory of the CPU, cut
    there, and the part goes to the process's device: a process holds its parts and one stored tensor.

    Args:
        model: on the meta device.
        stored: ``quantization_config`` of the checkpoint.
        files: safetensors files of the checkpoint.
        parallel: says which part is whose.

    Raises:
        CheckpointError: see `StoredLoading`.
        UnsupportedError: no safetensors files, tensors that are stored under other names than the model's, or a layer
            that cannot be cut (named).
    """

    def __init__(self, model: Any, stored: Mapping[str, Any], files: list[Path], parallel: TensorParallel) -> None:
        if not files:
            raise UnsupportedError(
                f"tp_size={parallel.size} for a quantized model in a state dict; allowed: a folder of safetensors files"
            )
        super().__init__(model, stored, files)
        self._parallel = parallel
        tables = {spec["table"] for spec in self._saved.embeddings.values()}
        parallel.keep_whole(sorted({*self._saved.embeddings, *tables}))
        layers = self._skeleton.layers.items()
        parallel.check(
            {name: Whole(one.scheme, one.out_features, one.in_features, one.activation) for name, one in layers}
        )
        self._files = ExitStack()
        weakref.finalize(self, self._files.close)
        self._base = f"{model.base_model_prefix}."
        self._file_of: dict[str, tuple[TensorFile, str]] = {}
        for path in files:
            file = self._files.enter_context(TensorFile(path, CheckpointError))
            self._file_of |= {name.removeprefix(self._base): (file, name) for name in file.headers}
        for name, wanted in self._keys.items():
            module = model.get_submodule(name)
            for key in wanted:
                full = f"{name}.{key}"
                self._place(self._saved.tied.get(full, full))
                module._buffers.pop(key, None)
            module.__dict__.setdefault("bias", None)
        ignore_unexpected(model, [rf"(^|\.){re.escape(name.removeprefix(self._base))}\." for name in self._keys])

    def finish(self, model: Any) -> None:
        """Read the layers, put the parts in place, and transformers' hooks around them; errors as `StoredLoading`."""
        super().finish(model)
        self._parallel.install()

    def _fill(self, model: Any) -> None:
        where: device = next((p.device for p in model.parameters()), device("cpu"))
        with self._files:
            for name, layer in self._skeleton.layers.items():
                state = {key: self._read(name, key).to(where) for key in self._keys[name]}
                if self._parallel.is_cut(name):
                    bias = state.pop("bias", None)
                    part = self._parallel.made_of(name, state)
                    if bias is not None:
                        self._parallel.set_bias(name, part, bias)
                    self._skeleton.layers[name] = self._skeleton.modules[name] = part
                    continue
                if problem := layer.state_problem(state):
                    raise CheckpointError(f"{self._where}: tensor {f'{name}.{problem[0]}'!r}: {problem[1]}")
                fill_layer(layer, state, f"{self._where}: layer {name!r}")
                layer.train(False)

    def _read(self, name: str, key: str) -> Tensor:
        """This process's part of a tensor; the bias in whole."""
        full = f"{name}.{key}"
        file, stored = self._place(self._saved.tied.get(full, full))
        tensor = file.read(stored)
        return tensor if key == "bias" else self._parallel.cut(name, key, tensor)

    def _place(self, name: str) -> tuple[TensorFile, str]:
        place = self._file_of.get(name.removeprefix(self._base))
        if place is None:
            raise UnsupportedError(
                f"{self._where}: tp_size={self._parallel.size}, and tensor {name!r} is not stored under the name that "
                "the model has; allowed: one process"
            )
        return place
