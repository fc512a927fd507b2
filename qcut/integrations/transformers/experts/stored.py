"""Reads the tensors of quantized experts that lie in files by themselves, a stack at a time, past transformers.

transformers spends more on each of so many small tensors than reading them takes.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from qcut.checkpoints.expert_tensors import join, one_piece, piece_entries, pieces_of
from qcut.checkpoints.marks import expert_marks_pattern, is_mark
from qcut.common.safetensors import TensorFile, TensorHeader
from qcut.errors import CheckpointError
from qcut.integrations.transformers.placing import names_here
from qcut.layers.experts.linear_stack import LinearStack
from qcut.layers.quantized import QuantizedLayer, StateEntry


class StoredExperts:
    """The experts of one checkpoint, and the names and files of their tensors.

    Args:
        described: what is described of experts, by their names in the model.
        layers: every quantized layer by name, without memory; stacks among them.
        files: of the checkpoint; none where transformers was given a state dict, which has stacks.
        where: the file of the description, for messages.

    Raises:
        CheckpointError: a file, or the names of pieces, cannot be.
    """

    def __init__(
        self, described: Mapping[str, Any], layers: Mapping[str, QuantizedLayer], files: list[Path], where: Path
    ) -> None:
        self._experts, self._where = described, where
        pieces = pieces_of(described, where) if files else {}
        self._pieces = {name: names for name, names in pieces.items() if name in layers}
        self._stacks = {name: cast(LinearStack, layers[name]) for name in self._pieces}
        self._stored_as: dict[str, tuple[TensorFile, str]] = {}
        self._files = ExitStack()
        weakref.finalize(self, self._files.close)
        self._open = [self._files.enter_context(TensorFile(path, CheckpointError)) for path in files]

    def __contains__(self, stack: str) -> bool:
        """Whether the pieces of a stack lie in the files by themselves."""
        return stack in self._pieces

    def unexpected(self, base: str) -> list[str]:
        """Regular expressions for names that transformers finds in the files and is not to load: pieces, and marks.

        Args:
            base: prefix of the model's base, which names may lack.
        """
        patterns = [expert_marks_pattern(name.removeprefix(base) for name in self._experts)]
        for stack, names in self._pieces.items():
            experts = stack.rpartition(".")[0].removeprefix(base)
            patterns.append(rf"(^|\.){re.escape(experts)}\.\d+\.({'|'.join(names)})\.")
        return patterns

    def headers(self, model: Any, headers: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
        """Headers by the names that the model has, without marks, and without float weights that are stored in parts.

        transformers stores the tensors of several families under other names, and the parts of some float weights.

        Args:
            model: on the meta device.
            headers: by the names in the files.
        """
        marks = re.compile(expert_marks_pattern(self._experts))
        files = {name: file for file in self._open for name in file.headers}
        base, found = f"{model.base_model_prefix}.", {}
        for name, (new, in_parts) in names_here(model, headers).items():
            if is_mark(headers[name]) and (marks.search(new) or marks.search(base + new)):
                continue
            self._stored_as[new.removeprefix(base)] = files[name], name
            if not in_parts:
                found[new] = headers[name]
        self._base = base
        return found

    def file(self, name: str) -> Path:
        """The file of a tensor, by the name that the model has; that of the description if it is in none."""
        place = self._stored_as.get(name.removeprefix(self._base))
        return self._where if place is None else place[0].path

    def wanted(self, stack: str, tied: Collection[str]) -> Iterator[tuple[str, StateEntry]]:
        """What is stored of a stack, by name, except the keys that are stored elsewhere."""
        outer = stack.rpartition(".")[0]
        for piece, entries in piece_entries(self._stacks[stack], self._pieces[stack]).items():
            yield from ((f"{outer}.{piece}.{key}", entry) for key, entry in entries.items() if key not in tied)

    def read(self, stack: str, keys: Collection[str], device: torch.device) -> dict[str, Tensor]:
        """The tensors of a stack, joined of its pieces.

        Raises:
            CheckpointError: a piece cannot be read, or pieces contradict one another (named).
        """
        outer = stack.rpartition(".")[0]
        joined = {}
        for key in keys:
            pieces = {piece: self._read(f"{outer}.{piece}.{key}") for piece in self._of(stack)}
            where = f"{self._where}: {outer}"
            joined[key] = join(self._stacks[stack], self._pieces[stack], key, pieces, where).to(device)
        return joined

    def problem(self, stack: str, keys: Collection[str]) -> CheckpointError | None:
        """What is wrong with the values of a piece of a stack (file and tensor are named); None if nothing is."""
        outer, one = stack.rpartition(".")[0], one_piece(self._stacks[stack], len(self._pieces[stack]))
        for piece in self._of(stack):
            if found := one.state_problem({key: self._read(f"{outer}.{piece}.{key}") for key in keys}):
                name = f"{outer}.{piece}.{found[0]}"
                return CheckpointError(f"{self.file(name)}: tensor {name!r}: {found[1]}")
        return None

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _of(self, stack: str) -> list[str]:
        return [f"{e}.{name}" for e in range(self._stacks[stack].experts) for name in self._pieces[stack]]

    def _read(self, name: str) -> Tensor:
        file, stored = self._stored_as[name.removeprefix(self._base)]
        return file.read(stored)
