"""Loads a model that is quantized already, by qcut or another library; transformers reads what is float.

For qcut's models transformers fills plain buffers, and layers are made of these afterwards; the tensors of another
library's layers stay in the files.
"""

from __future__ import annotations

import contextlib
import copy
import re
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qcut.checkpoints.builder import Skeleton, check_kinds, fill_layer, finish, skeleton_of, tie_layers
from qcut.checkpoints.description import Description, description_of, passing_buffers
from qcut.checkpoints.detect import check_layer_sizes, headers_of
from qcut.checkpoints.formats.name_mapping import map_names
from qcut.checkpoints.formats.parts import Stored
from qcut.checkpoints.formats.reader import format_of, stored_in
from qcut.checkpoints.marks import is_mark, marks_among, marks_pattern
from qcut.common.safetensors import TensorFile, TensorHeader, torch_dtype
from qcut.errors import CheckpointError, UnsupportedError
from qcut.integrations.transformers.parallel import TensorParallel, Whole
from qcut.integrations.transformers.placing import (
    ignore_unexpected,
    keep_present_ties,
    loading_dtype,
    tie_parameters,
    without_weight,
)
from qcut.layers.experts.opening import PROJECTIONS
from qcut.layers.linear import Linear
from qcut.layers.quantized import FrozenWeight, QuantizedLayer, StateEntry, set_weight_dtype
from qcut.models.modules import replace_modules
from qcut.numerics.checks import out_of_range
from qcut.numerics.plain_state import outside_modes
from qcut.schemes import scheme_from_json

if TYPE_CHECKING:
    from qcut.integrations.transformers.experts.stored import StoredExperts

_WHERE = Path("config.json")


class StoredLoading:
    """The state of one ``from_pretrained`` of a quantized model.

    Modules stay in place until all tensors have arrived, with the buffers that the checkpoint stores in place of their
    weights: transformers sets attributes, and knows no layer that lays its tensors out anew.

    Under tensor parallelism transformers would read tensors ahead, in whole. Those of quantized layers therefore stay
    in the files until the float ones have arrived. Each is read into memory of the CPU and cut there, and the shard
    goes to the process's device: a process holds its shards and one stored tensor.

    Args:
        model: on the meta device.
        stored: ``quantization_config`` of the checkpoint.
        files: safetensors files of the checkpoint; none where transformers was given a state dict.
        parallel: where the model is cut across processes.

    Raises:
        CheckpointError: a description that is damaged, newer, or does not fit the model; a tensor that is missing,
            superfluous, or of another dtype or shape (named).
        UnsupportedError: a layer that cannot be cut (named); or, of a model that is cut, no safetensors files, or
            tensors that are stored under other names than the model's.
    """

    report = None

    def __init__(
        self, model: Any, stored: Mapping[str, Any], files: list[Path], parallel: TensorParallel | None = None
    ) -> None:
        if parallel is not None and not files:
            raise UnsupportedError(
                f"tp_size={parallel.size} for a quantized model in a state dict; allowed: a folder of safetensors files"
            )
        where = files[0].parent / _WHERE if files else _WHERE
        self._where = where
        whole = description_of(stored, f"{where}: quantization_config")
        other_class = _is_other_class(model)
        self._new_head = other_class and _has_base(model)
        self._added = _added_to_base(model) if other_class else set()
        renamed = _renamed(whole, model, self._new_head)
        self._saved = _with_own_tables(whole, _present(renamed, model) if other_class else renamed)
        self._other_class = other_class
        if parallel is not None and self._saved.experts:
            raise UnsupportedError(
                f"{next(iter(self._saved.experts))}: tp_size={parallel.size} for quantized experts, which are not cut; "
                "allowed: one process"
            )
        marks = marks_pattern({*whole.layers, *self._saved.layers}, {**whole.embeddings, **self._saved.embeddings})
        self._paths = files
        stored_headers = headers_of(files)
        marked = {name for name in marks_among(stored_headers) if is_mark(stored_headers.get(name))}
        headers = {name: header for name, header in stored_headers.items() if name not in marked}
        if files:
            check_layer_sizes(self._saved.layers, sum(header.nbytes for header in headers.values()), where)
        self._ignored = model._keys_to_ignore_on_load_unexpected
        elsewhere = {*self._saved.tied.values()} - {*whole.tied.values()}  # read from the files
        ignore_unexpected(model, [marks, *(rf"(^|\.){re.escape(name)}$" for name in sorted(elsewhere))])
        self._skeleton: Skeleton = skeleton_of(self._saved, model, None, where)
        self._experts: StoredExperts | None = None
        if self._saved.experts:
            self._experts = self._with_experts(model, files)
        self._keys: dict[str, dict[str, Tensor]] = {}
        for name, layer in self._skeleton.layers.items():
            wanted = {key: entry.read() for key, entry in layer.stored().items()}
            self._keys[name] = wanted
            self._make_room(model, name, wanted)
        for name in self._saved.embeddings:
            without_weight(model.get_submodule(name))
        keep_present_ties(model)
        if files:
            self._check(model, headers if self._experts is None else self._experts.headers(model, headers))
        self._parallel = parallel
        self._files = ExitStack()
        weakref.finalize(self, self._files.close)
        if parallel is not None:
            self._leave_in_files(model, parallel)

    def _leave_in_files(self, model: Any, parallel: TensorParallel) -> None:
        tables = {spec["table"] for spec in self._saved.embeddings.values()}
        parallel.keep_whole(sorted({*self._saved.embeddings, *tables}))
        layers = self._skeleton.layers.items()
        parallel.check(
            {name: Whole(one.scheme, one.out_features, one.in_features, one.activation) for name, one in layers}
        )
        self._base = f"{model.base_model_prefix}."
        self._file_of: dict[str, tuple[TensorFile, str]] = {}
        for path in self._paths:
            file = self._files.enter_context(TensorFile(path, CheckpointError))
            self._file_of |= {name.removeprefix(self._base): (file, name) for name in file.headers}
        for name, wanted in self._keys.items():
            module = model.get_submodule(name)
            for key in wanted:
                full = f"{name}.{key}"
                self._place(self._saved.tied.get(full, full), parallel)
                module._buffers.pop(key, None)
            module.__dict__.setdefault("bias", None)
        ignore_unexpected(model, [rf"(^|\.){re.escape(name.removeprefix(self._base))}\." for name in self._keys])

    def finish(self, model: Any) -> None:
        """Make the layers of what has arrived, one after another, and put them in place.

        Raises:
            CheckpointError: a tensor did not arrive, or holds what quantizing never gives (named).
        """
        model._keys_to_ignore_on_load_unexpected = self._ignored
        self._fill(model)
        if self._experts is not None:
            self._experts.close()
        for name in self._saved.experts:
            experts = self._skeleton.modules[name]
            for part in PROJECTIONS:
                experts._modules[part] = self._skeleton.layers.get(f"{name}.{part}", experts._modules[part])
        self._skeleton.put_into(model)
        tie_layers(dict(model.named_modules(remove_duplicate=False)), self._saved.tied)
        for name, parameter in model.named_parameters():
            if isinstance(parameter, FrozenWeight):
                continue
            arrived = getattr(parameter, "_is_hf_initialized", False)
            if not arrived and not _may_miss(model, name) and not self._is_new(model, name):
                raise CheckpointError(f"{self._where}: tensor {name!r} is missing")
            if found := out_of_range(_own(parameter.detach())):
                raise CheckpointError(f"{self._where}: tensor {name!r}: found {found}; finite values are needed")
        dtype = loading_dtype(model)
        set_weight_dtype(model, dtype)
        for name in self._saved.embeddings:
            model.get_submodule(name).dtype = dtype
        if self._parallel is not None:
            self._parallel.install()

    def _with_experts(self, model: Any, files: list[Path]) -> StoredExperts:
        """Put the experts that are to be filled in place of the model's own."""
        from qcut.integrations.transformers.experts.stored import StoredExperts  # most models have none

        made = StoredExperts(self._saved.experts, self._skeleton.layers, files, self._where)
        ignore_unexpected(model, made.unexpected(f"{model.base_model_prefix}."))
        for name in self._saved.experts:
            replace_modules(model, {id(model.get_submodule(name)): self._skeleton.modules[name]})
        return made

    def _file(self, name: str) -> Path:
        return self._where if self._experts is None else self._experts.file(name)

    def _in_pieces(self, name: str) -> bool:
        """Whether a layer is a stack with each expert stored by itself in the files."""
        return self._experts is not None and name in self._experts

    def _own_keys(self, name: str) -> list[str]:
        """The tensors of a layer that are stored under its own name."""
        return [key for key in self._keys[name] if f"{name}.{key}" not in self._saved.tied]

    def _fill(self, model: Any) -> None:
        if self._parallel is not None:
            self._fill_shards(model, self._parallel)
            return
        held: dict[str, dict[str, Tensor]] = {}
        for name, layer in self._skeleton.layers.items():
            state = {}
            for key, wanted in self._keys[name].items():
                owner = self._saved.tied.get(f"{name}.{key}", f"{name}.{key}")
                parent, _, owner_key = owner.rpartition(".")
                if parent in self._keys and parent not in held:
                    held[parent] = self._arrived(model, parent)
                tensor = held.get(parent, {}).get(owner_key)
                if tensor is None and parent not in self._keys:
                    tensor = self._read_stored(owner, _device_of(model))
                if tensor is None:
                    raise CheckpointError(f"{self._where}: tensor {owner!r} is missing")
                if tensor.dtype != wanted.dtype and not (tensor.is_floating_point() and wanted.is_floating_point()):
                    raise CheckpointError(
                        f"{self._where}: tensor {owner!r}: found {tensor.dtype}, {wanted.dtype} is needed"
                    )
                state[key] = tensor.to(wanted.dtype)  # transformers may have widened it, which loses nothing
            self._fill_layer(name, layer, state)
            layer.train(False)
            self._drop(model, name, held)

    def _fill_layer(self, name: str, layer: QuantizedLayer, state: Mapping[str, Tensor]) -> None:
        try:
            fill_layer(layer, state, name, self._where)
        except CheckpointError as error:
            whole = self._experts is not None and name in self._experts and len(self._own_keys(name)) == len(state)
            problem = self._experts.problem(name, list(state)) if self._experts is not None and whole else None
            raise problem or error from None

    def _fill_shards(self, model: Any, parallel: TensorParallel) -> None:
        """Read the layers from the files, and make this process's shards of them; the bias is read whole."""
        device: torch.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        with self._files:
            for name, layer in self._skeleton.layers.items():
                state = {key: self._shard(name, key, parallel).to(device) for key in self._keys[name]}
                if not parallel.is_cut(name):
                    fill_layer(layer, state, name, self._where)
                    layer.train(False)
                    continue
                bias = state.pop("bias", None)
                shard = parallel.made_of(name, state)
                if bias is not None:
                    parallel.set_bias(name, shard, bias)
                self._skeleton.layers[name] = self._skeleton.modules[name] = shard

    def _shard(self, name: str, key: str, parallel: TensorParallel) -> Tensor:
        full = f"{name}.{key}"
        file, stored = self._place(self._saved.tied.get(full, full), parallel)
        tensor = file.read(stored)
        return tensor if key == "bias" else parallel.cut(name, key, tensor)

    def _place(self, name: str, parallel: TensorParallel) -> tuple[TensorFile, str]:
        place = self._file_of.get(name.removeprefix(self._base))
        if place is None:
            raise UnsupportedError(
                f"{self._where}: tp_size={parallel.size}, and tensor {name!r} is not stored under the name that the "
                "model has; allowed: one process"
            )
        return place

    def _read_stored(self, name: str, device: torch.device) -> Tensor | None:
        """A tensor of the files that has no place in the model."""
        for path in self._paths:
            with TensorFile(path, CheckpointError) as file:
                if name in file.headers:
                    return file.read(name).to(device)
        return None

    def _is_new(self, model: Any, name: str) -> bool:
        """Whether the saved model had no such tensor, of a head or a pooler, and transformers initializes it."""
        prefix = f"{model.base_model_prefix}."
        return (self._new_head and not name.startswith(prefix)) or name.removeprefix(prefix) in self._added

    def _make_room(self, model: nn.Module, name: str, wanted: Mapping[str, Tensor]) -> None:
        """Let transformers find the buffers that it is to fill."""
        table_of = name.removesuffix(".table")
        if table_of in self._saved.embeddings and name.endswith(".table"):
            module: nn.Module = nn.Module()
            model.get_submodule(table_of).add_module("table", module)
        elif isinstance(self._skeleton.layers[name], Linear):
            module = model.get_submodule(name)
            without_weight(module)
            if "bias" in module._parameters:
                del module._parameters["bias"]
            if "bias" not in wanted:
                module.__dict__["bias"] = None
        else:
            outer, _, part = name.rpartition(".")
            module = model.get_submodule(outer)._modules[part] = nn.Module()
            if self._in_pieces(name):
                return
        for key, tensor in wanted.items():
            if f"{name}.{key}" not in self._saved.tied:
                module.register_buffer(key, tensor)

    def _arrived(self, model: nn.Module, name: str) -> dict[str, Tensor]:
        if self._experts is not None and name in self._experts:
            return self._experts.read(name, self._own_keys(name), _device_of(model))
        buffers = model.get_submodule(name)._buffers
        given = {key: buffers.get(key) for key in self._keys[name]}
        # transformers fills what is missing with memory as it finds it, and marks what it has loaded.
        return {key: t for key, t in given.items() if t is not None and getattr(t, "_is_hf_initialized", False)}

    def _drop(self, model: nn.Module, name: str, held: dict[str, dict[str, Tensor]]) -> None:
        """Let go of tensors that no other layer is made of."""
        if name not in {owner.rpartition(".")[0] for owner in self._saved.tied.values()}:
            held.get(name, {}).clear()
            model.get_submodule(name)._buffers.clear()

    def _wanted(self) -> Iterator[tuple[str, StateEntry | Tensor]]:
        """What the files have of quantized layers, by the names that the model has."""
        for name, wanted in self._keys.items():
            if self._experts is not None and name in self._experts:
                yield from self._experts.wanted(name, wanted.keys() - self._own_keys(name))
            else:
                yield from ((f"{name}.{key}", tensor) for key, tensor in wanted.items())

    def _check(self, model: Any, headers: Mapping[str, TensorHeader]) -> None:
        base = f"{model.base_model_prefix}."
        converted = _converted(model)
        by_name = {name.removeprefix(base): header for name, header in headers.items()}
        for full, tensor in self._wanted():
            stored = self._saved.tied.get(full, full)
            header = by_name.get(stored.removeprefix(base))
            if header is None and converted and self._experts is None:
                continue  # stored under another name; `finish` looks whether it has arrived
            if header is None:
                raise CheckpointError(f"{self._where}: tensor {full!r} is missing")
            dtype = torch_dtype(header.code)
            if dtype != tensor.dtype or header.shape != list(tensor.shape):
                raise CheckpointError(
                    f"{self._file(stored)}: tensor {full!r}: found {dtype} {header.shape}, {tensor.dtype} "
                    f"{list(tensor.shape)} is needed"
                )
        codes = {name: header.code for name, header in headers.items()}
        check_kinds(model, codes, self._where)
        known = {name.removeprefix(base) for name in (*model.state_dict(), *passing_buffers(model))}
        known |= {name.removeprefix(base) for name, _ in self._wanted()}
        layers = tuple(f"{name.removeprefix(base)}." for name in (*self._keys, *self._saved.experts))
        children = [name for name, _ in model.named_children()]
        inside = ("",) if model.base_model_prefix in children else (base, *(f"{child}." for child in children))
        ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
        foreign = [name for name in headers if name.removeprefix(base) not in known and name.startswith(inside)]
        read = {name.removeprefix(base) for name in self._saved.tied.values()}
        for name in foreign:
            if name.removeprefix(base) in read or self._is_new(model, name):
                continue
            expected = converted or self._other_class or any(pattern.search(name) for pattern in ignored)
            if name.removeprefix(base).startswith(layers) or not expected:
                raise CheckpointError(f"{self._file(name)}: tensor {name!r} does not belong to the model")
        tied = model.all_tied_weights_keys
        optional = {*tied, *tied.values()}
        for name, parameter in model.named_parameters():
            header = by_name.get(name.removeprefix(base))
            # transformers would allocate what is missing, as large as the configuration states.
            may_miss = converted or name in optional or _may_miss(model, name) or self._is_new(model, name)
            if header is None and not may_miss:
                raise CheckpointError(f"{self._where}: tensor {name!r} is missing")
            if header is not None and header.shape != list(parameter.shape):
                raise CheckpointError(
                    f"{self._where}: tensor {name!r}: found {header.shape}, {list(parameter.shape)} is needed"
                )


class ForeignLoading:
    """The state of one ``from_pretrained`` of a model that another library quantized.

    The tensors of quantized layers stay in the files until all others have arrived.

    Args:
        model: on the meta device.
        config: the ``quantization_config`` of the checkpoint, as JSON holds it.
        files: that transformers is about to read.

    Raises:
        CheckpointError, UnsupportedError: see `qcut.checkpoints.formats.name_mapping.map_names`; a file that is no
            safetensors file.
    """

    report = None

    def __init__(self, model: Any, config: Mapping[str, Any], files: list[Path]) -> None:
        where = str(files[0].parent) if files else "from_pretrained"
        if not files or any(path.suffix != ".safetensors" for path in files):
            raise CheckpointError(f"{where}: there are no safetensors files; pickles are not read")
        self._open = ExitStack()
        weakref.finalize(self, self._open.close)
        tie_parameters(model)
        tensors = _inside(model, stored_in(files, self._open))
        self._mapping = map_names(model, format_of(dict(config), where), tensors, where)
        for name in (*self._mapping.layers, *self._mapping.tied):
            module = model.get_submodule(name)
            if "weight" in module._parameters:
                without_weight(module)
            if "bias" in module._parameters:
                del module._parameters["bias"]
                module.__dict__["bias"] = None
        for stack in self._mapping.stacks:
            for key in stack.replaced:
                without_weight(model.get_submodule(stack.experts), key)
        keep_present_ties(model)
        self._ignored = model._keys_to_ignore_on_load_unexpected
        quantized = (*self._mapping.layers, *dict.fromkeys(stack.experts for stack in self._mapping.stacks))
        ignore_unexpected(model, [rf"(^|\.){re.escape(name)}\." for name in quantized])

    @outside_modes()
    def finish(self, model: Any) -> None:
        """Read the quantized layers, one after another, and put them in place.

        Raises:
            CheckpointError: a tensor cannot be read, or holds what it cannot (named).
            UnsupportedError: a layer cannot be served exactly.
        """
        from transformers.utils.logging import is_progress_bar_enabled

        model._keys_to_ignore_on_load_unexpected = self._ignored
        where = self._mapping.where
        tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        for names in self._mapping.holders:
            tensor = tensors.get(names[0])
            if tensor is None:
                continue  # a buffer that the model's class computes
            if tensor.is_floating_point() and (found := out_of_range(tensor.detach())):
                raise CheckpointError(f"{where}: tensor {names[0]!r}: found {found}; finite values are needed")
        floats = next(
            (p for p in model.parameters() if p.is_floating_point()), torch.empty(0, dtype=torch.float32, device="cpu")
        )
        with self._open:
            new = self._mapping.build(floats.device, floats.dtype, is_progress_bar_enabled())
        finish(model, new, floats.dtype, Path(where))
        model.eval()


def _inside(model: nn.Module, tensors: dict[str, Stored]) -> dict[str, Stored]:
    """The tensors that are this model's: all, or those of its base if it is the base of what was saved."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    if prefix == "." or hasattr(model, prefix[:-1]) or not any(name.startswith(prefix) for name in tensors):
        return tensors
    return {name.removeprefix(prefix): stored for name, stored in tensors.items() if name.startswith(prefix)}


def _own(tensor: Tensor) -> Tensor:
    """What this process has of a tensor that transformers may have cut across processes."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]
    return local


def _may_miss(model: Any, name: str) -> bool:
    """Whether a model's class lets checkpoints lack a tensor."""
    return any(re.search(pattern, name) for pattern in model._keys_to_ignore_on_load_missing or ())


def _converted(model: Any) -> bool:
    """Whether transformers stores some tensors of a model under other names than the model has."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(get_model_conversion_mapping(model, add_legacy=False))


def _is_other_class(model: Any) -> bool:
    """Whether a model's class does not come of the saved one: it is only the base, or the base with another head."""
    saved = getattr(model.config, "architectures", None) or ()
    return bool(saved) and not any(cls.__name__ in saved for cls in type(model).__mro__)


def _has_base(model: Any) -> bool:
    return model.base_model_prefix in {name for name, _ in model.named_children()}


def _added_to_base(model: Any) -> set[str]:
    """Parameters of a model's base that the saved model, with a base of the same class, was built without: a pooler."""
    import transformers

    names = set()
    for name in model.config.architectures:
        cls: Any = getattr(transformers, name, None) if isinstance(name, str) else None
        if getattr(cls, "config_class", None) is not type(model.config):
            continue
        with contextlib.suppress(Exception), torch.device("meta"):  # else nothing may be missing
            base = cls(copy.deepcopy(model.config)).base_model
            if type(base) is type(model.base_model):
                names |= {key for key, _ in model.base_model.named_parameters()}
                names -= {key for key, _ in base.named_parameters()}
    return names


def _device_of(model: nn.Module) -> torch.device:
    tensors = (*model.parameters(), *model.buffers())
    return next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))


def _renamed(saved: Description, model: Any, new_head: bool) -> Description:
    """The description with the names that modules have in this model: of the whole that was saved, or of its base.

    Args:
        saved: of the whole.
        model: on the meta device.
        new_head: the model has the base that was saved, and another head: what is outside the base is left out.
    """
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    names |= {f"{name}.{part}" for name in saved.experts if name in names for part in PROJECTIONS}
    prefix = f"{model.base_model_prefix}."
    tops = {name for name, _ in model.named_children()}
    prefixed = any(name.startswith(prefix) for name in (*saved.layers, *saved.fused, *saved.embeddings))
    if model.base_model_prefix in tops or not prefixed:
        if model.base_model_prefix in tops and not prefixed and saved.layers and not set(saved.layers) <= names:
            return _mapped(saved, lambda name: prefix + name)
        return _mapped(saved, lambda name: name if name.startswith(prefix) else None) if new_head else saved

    def inside(name: str) -> str | None:
        return name.removeprefix(prefix) if name.startswith(prefix) else None

    return _mapped(saved, inside)


def _present(saved: Description, model: nn.Module) -> Description:
    """The description without modules that a model of another class does not have: a pooler, a layer of the head."""
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    names |= {f"{name}.table" for name in saved.embeddings if name in names}
    names |= {f"{name}.{part}" for name in saved.experts if name in names for part in PROJECTIONS}
    names |= {name for name in saved.tied if name.rpartition(".")[0] in names}
    return _mapped(saved, lambda name: name if name in names or name in saved.tied.values() else None)


def _mapped(saved: Description, rename: Any) -> Description:
    """A description with other names, without what has none; a table that has none keeps its own."""
    layers = {new: spec for name, spec in saved.layers.items() if (new := rename(name))}
    fused = {new: activation for name, activation in saved.fused.items() if (new := rename(name))}
    tied = {new: owner for name, o in saved.tied.items() if (new := rename(name)) and (owner := rename(o))}
    embeddings = {
        new: {**spec, "table": rename(spec["table"]) or spec["table"]}
        for name, spec in saved.embeddings.items()
        if (new := rename(name))
    }
    experts = {new: spec for name, spec in saved.experts.items() if (new := rename(name))}
    return Description(layers, embeddings, fused, tied, experts)


def _with_own_tables(whole: Description, saved: Description) -> Description:
    """Let an embedding hold its table itself if the table is a layer, a classifier, that the model does not have."""
    layers, embeddings, tied = dict(saved.layers), dict(saved.embeddings), dict(saved.tied)
    for name, spec in saved.embeddings.items():
        table, own = spec["table"], f"{name}.table"
        if table not in saved.layers and table in whole.layers:
            layers[own] = {**whole.layers[table], "bias": False, "activation": "none"}
            embeddings[name] = {**spec, "table": own}
            sizes = layers[own]["in_features"], layers[own]["out_features"]
            entries = Linear(*sizes, False, scheme_from_json(layers[own]["scheme"]), device="meta").stored()
            tied |= {f"{own}.{key}": f"{table}.{key}" for key in entries}
    return Description(layers, embeddings, saved.fused, tied, saved.experts)
