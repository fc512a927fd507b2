"""Quantizes a model while transformers loads it: each weight is quantized when it arrives, and then dropped.

Under tensor parallelism every process quantizes every weight in whole, keeps its part, and drops the rest.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps

from qcut.common.memory import return_free_memory
from qcut.conversion.commit import changes_of, commit
from qcut.conversion.embeddings import table_report
from qcut.conversion.fitting import rotatable
from qcut.conversion.inventory import Coverage, count_parameters, coverage, warn_of_float, warn_of_skip
from qcut.conversion.quantize import model_bytes, prepare
from qcut.conversion.report import LayerReport, Report, stack_reports, weight_error
from qcut.conversion.tasks import Task, stack_reasons
from qcut.conversion.verification import SAMPLE_ROWS, Proof, lent_weights
from qcut.errors import CheckpointError, QcutError, UnsupportedError
from qcut.integrations.transformers.config import QcutConfig
from qcut.integrations.transformers.parallel import TensorParallel, Whole
from qcut.integrations.transformers.placing import tie_parameters
from qcut.layers.embedding import Embedding
from qcut.layers.experts.opening import Opened, opened
from qcut.layers.linear import Linear
from qcut.models.modules import float_bias, is_conv1d, keep_hooks, tensor_key, weight_nk, weight_of
from qcut.models.selection import DEFAULT_SKIP, quantized_layers
from qcut.numerics.plain_state import plain_state
from qcut.schemes import Scheme

if TYPE_CHECKING:
    from qcut.integrations.transformers.experts.online import Mixture

_LARGE_BYTES = 1 << 20
"""From here on a weight leaves holes in the heap that count."""


@dataclass
class _Shared:
    """One weight, and all that is quantized from it.

    Attributes:
        names: of the parameter, one for each module that holds it.
        layers: tasks of linear layers, by name.
        tables: embeddings, by name.
        made: the quantized layer that the others share; None until the weight has arrived.
        nbytes: of the float weight.
        errors: of the quantized weights, by layer; see `qcut.conversion.report.weight_error`.
        norm: of the float weight.
    """

    names: list[str] = field(default_factory=list)
    layers: dict[str, Task] = field(default_factory=dict)
    tables: dict[str, nn.Embedding] = field(default_factory=dict)
    made: Linear | None = None
    nbytes: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    norm: float = 0.0


class OnlineLoading:
    """The state of one ``from_pretrained`` that quantizes.

    What to quantize is decided on the model without memory. Modules stay in place until all tensors have arrived, their
    weights on the meta device; then all are replaced at once.

    Args:
        model: on the meta device.
        config: what to do.
        parallel: where the model is cut across processes.

    Attributes:
        report: what `finish` has done, if the configuration needs it.

    Raises:
        QcutError: see `qcut.quantize`.
    """

    report: Report | None = None

    def __init__(self, model: Any, config: QcutConfig, parallel: TensorParallel | None = None) -> None:
        self._config, self._parallel = config, parallel
        asked = {"report=True": config.report, "verify": config.verify is not None and config.verify is not False}
        for option, given in asked.items():
            if given and parallel is not None:
                raise UnsupportedError(
                    f"{option} with tp_size={parallel.size}: a process has parts of the layers; allowed: "
                    f"{option.partition('=')[0]}=False"
                )
        calibrated = None if config.calibration is None or parallel is not None else config.calibration.batch
        self._proof = Proof(config.verify, calibrated)
        self._to_tie = set(getattr(model, "all_tied_weights_keys", {}))
        untied = tie_parameters(model)
        with opened(model) as mixtures:
            self._work = prepare(
                model,
                config.scheme,
                config.calibration,
                config.second_moments,
                None,
                config.include,
                config.modules_to_not_convert,
                config.embeddings,
                config.fuse,
                config.allow_growth,
                mixtures,
            )
        self._opened = mixtures
        self._mixtures: dict[str, Mixture] = {}
        if mixtures.experts:
            self._mixtures = _mixtures_of(model, mixtures, self._work.tasks, parallel)
        self._layers: dict[str, Linear] = {}
        self._tables: dict[str, Embedding] = {}
        self._failure: QcutError | None = None
        self.targets: dict[str, _Shared | Mixture] = {}
        self.targets |= {name: mixture for mixture in self._mixtures.values() for name in mixture.meta}
        shared: dict[tuple[Any, ...], _Shared] = {}
        for name, task in self._single():
            shared.setdefault(tensor_key(weight_of(task.module)), _Shared()).layers[name] = task
        for name, table in self._work.tables.items():
            shared.setdefault(tensor_key(table.weight), _Shared()).tables[name] = table
        for name, module in model.named_modules(remove_duplicate=False):
            weight = module._parameters.get("weight")
            if weight is not None and tensor_key(weight) in shared:
                one = shared[tensor_key(weight)]
                one.names.append(f"{name}.weight")
                self.targets[f"{name}.weight"] = one
        if parallel is not None:
            self._share_out(parallel)
            # transformers cuts tied parameters one by one, and finds none where another holds the same one.
            for name in untied.keys() - self.targets.keys():
                parent, _, key = name.rpartition(".")
                model.get_submodule(parent)._parameters[key] = untied[name]

    def _share_out(self, parallel: TensorParallel) -> None:
        """Settle which process gets what, and keep transformers from cutting weights before they are quantized."""
        tasks = self._work.tasks
        of_tables = {name for one in self._weights().values() if one.tables for name in (*one.tables, *one.layers)}
        parallel.keep_whole(sorted(of_tables))
        wholes = {}
        for name, task in tasks.items():
            n, k = weight_nk(task.module).shape
            wholes[name] = Whole(task.scheme, n, k, task.activation)
        parallel.check(wholes)
        parallel.hide(task.module for name, task in tasks.items() if name not in of_tables)

    def _single(self) -> Iterator[tuple[str, Task]]:
        """Names and tasks of the layers that are no experts."""
        return ((name, task) for name, task in self._work.tasks.items() if self._opened.stack_of(name) is None)

    def _weights(self) -> dict[str, _Shared]:
        """The targets that are no experts'."""
        return {name: one for name, one in self.targets.items() if isinstance(one, _Shared)}

    def check_stored(self, names: Iterable[str], where: object) -> None:
        """Look whether a checkpoint has all experts; see `qcut.integrations.transformers.experts.online`.

        Raises:
            CheckpointError: a tensor of an expert is missing, or superfluous (named).
        """
        if self._mixtures:
            from qcut.integrations.transformers.experts.online import check_experts

            check_experts(names, self._mixtures, where)

    def operation(self) -> ConversionOps:
        """What transformers calls with each weight in `targets`."""
        return _Quantize(self)

    def take(self, name: str, weight: Tensor) -> None:
        """Quantize a weight that has arrived; the first failure is kept for `finish`."""
        if self._failure is None:
            try:
                one = self.targets[name]
                if isinstance(one, _Shared):
                    self._quantize(name, one, weight)
                else:
                    one.take(name, weight, self._config.report or self._proof.active, self._hold)
            except QcutError as error:  # transformers would catch it, and go on with random weights
                self._failure = error
        if weight.device.type == "cpu" and weight.nbytes >= _LARGE_BYTES:
            return_free_memory()

    def settled(self, name: str) -> set[str]:
        """Names of the parameters that are no longer missing when a weight has arrived, except those to be tied."""
        one = self.targets[name]
        return set(one.names) - self._to_tie if isinstance(one, _Shared) else {name}

    def finish(self, model: Any) -> None:
        """Put the quantized modules in place.

        Raises:
            CheckpointError: a weight to quantize was not in the checkpoint (named).
            QcutError: a weight could not be quantized; see `qcut.Linear.from_float`.
        """
        if self._failure is not None:
            raise self._failure
        for name, one in self.targets.items():
            if one.made is None if isinstance(one, _Shared) else name in one.awaited:
                raise CheckpointError(f"the checkpoint has no tensor {name!r}, which was to be quantized")
        for mixture in self._mixtures.values():
            if mixture.left:
                self._work.skipped[mixture.name] = mixture.left
                for name in mixture.tasks:
                    del self._work.tasks[name]
        if self._parallel is not None:
            self._parallel.show()
        replacements: dict[int, nn.Module] = {}
        for name, task in self._single():
            layer = self._layers[name]
            bias = task.module._parameters.get("bias")
            if bias is not None:
                whole = float_bias(bias.detach(), name)
                if self._parallel is None:
                    layer.bias = whole
                else:
                    self._parallel.set_bias(name, layer, whole)
            keep_hooks(task.module, layer)
            replacements[id(task.module)] = layer.train(task.module.training)
        for name, table in self._work.tables.items():
            keep_hooks(table, self._tables[name])
            replacements[id(table)] = self._tables[name].train(table.training)
        sizes = {tensor_key(t): t.nbytes for t in (*model.parameters(), *model.buffers())}
        with self._laid_open(model):
            replaced = {*replacements, *(id(task.module) for task in self._work.tasks.values())}
            kept = self._config.modules_to_not_convert
            covered = coverage(model, replaced, self._work.skipped, DEFAULT_SKIP if kept is None else kept)
            report = self._report(model, replaced, sizes, covered) if self._config.report else None
            warn_of_skip(model, kept or (), stacklevel=6)
        if self._config.include is None and isinstance(self._config.scheme, Scheme):
            warn_of_float(model, covered, stacklevel=6)
        for mixture in self._mixtures.values():
            if mixture.made is not None:
                replacements[id(mixture.module)] = mixture.made.train(mixture.module.training)
        self._commit(model, replacements)
        if self._parallel is not None:
            self._parallel.install()
        if report is not None:
            proof = self._proof
            self.report = replace(
                report, bytes_after=model_bytes(model), verified=proof.calls, held=proof.held, unseen=proof.unseen
            )

    def _laid_open(self, model: nn.Module) -> AbstractContextManager[None]:
        """Let experts stand in the model as linear layers, for a while."""
        if not self._mixtures:
            return nullcontext()
        from qcut.integrations.transformers.experts.online import laid_open

        return laid_open(model, self._mixtures.values())

    def _commit(self, model: nn.Module, replacements: Mapping[int, nn.Module]) -> None:
        """Put the modules in place, and hold the model to what its own modules make of the quantized weights."""
        new: dict[str, Linear | Embedding] = {**self._layers, **self._tables}
        for mixture in self._mixtures.values():
            new |= mixture.layers()
        old = {name: task.module for name, task in self._work.tasks.items()} | self._work.tables
        with plain_state():
            if self._proof.active:
                with self._laid_open(model), lent_weights({old[name]: layer for name, layer in new.items()}):
                    self._proof.record(model, old)
            changes = changes_of(model, replacements, self._work.fused, (), None)
            commit(changes, lambda: self._check(model, new))

    def _check(self, model: nn.Module, names: Iterable[str]) -> None:
        with opened(model):
            self._proof.check(model, {name: model.get_submodule(name) for name in names}, {})

    def _report(
        self, model: nn.Module, replaced: Container[int], sizes: dict[tuple[Any, ...], int], covered: Coverage
    ) -> Report:
        """The report of `qcut.quantize`, before the modules are replaced."""
        by_layer: dict[str, _Shared] = {}
        by_table: dict[str, _Shared] = {}
        for one in self._weights().values():
            by_layer |= dict.fromkeys(one.layers, one)
            by_table |= dict.fromkeys(one.tables, one)
        reports = []
        for name, task in self._work.tasks.items():
            if (stack := self._opened.stack_of(name)) is not None:
                reports.append(self._mixtures[stack.rpartition(".")[0]].reports[name])
                continue
            one, layer, bias = by_layer[name], self._layers[name], task.module._parameters.get("bias")
            first = next(iter(one.layers))
            sizes[tensor_key(weight_of(task.module))] = one.nbytes
            reports.append(
                LayerReport(
                    name,
                    task.scheme.name,
                    layer.in_features,
                    layer.out_features,
                    one.nbytes + (0 if bias is None else bias.nbytes),
                    layer.weight_bytes,
                    one.errors[name],
                    tied_to=None if name == first else first,
                    note=task.note,
                    weight_norm=one.norm,
                )
            )
        for name, table in self._work.tables.items():
            one = by_table[name]
            sizes[tensor_key(table.weight)] = one.nbytes
            error = next(iter(one.errors.values()))
            reports.append(table_report(name, self._tables[name], self._layers, one.nbytes, error))
        parameters, already = count_parameters(model, replaced), tuple(quantized_layers(model))
        made = {name: mixture.made for name, mixture in self._mixtures.items() if mixture.made is not None}
        whole = tuple(stack_reports(reports, self._opened, made, self._config.calibration, self._config.second_moments))
        skipped = stack_reasons(self._work.skipped, self._opened)
        return Report(whole, skipped, sum(sizes.values()), 0, parameters, already, coverage=covered)

    def _quantize(self, name: str, one: _Shared, weight: Tensor) -> None:
        module = next(iter((*(task.module for task in one.layers.values()), *one.tables.values())))
        # Buffers hold it if the model is cut across processes.
        wanted = module._parameters.get("weight", module._buffers.get("weight"))
        assert wanted is not None
        if weight.shape != wanted.shape:
            raise CheckpointError(
                f"tensor {name!r}: found {list(weight.shape)}, the configuration needs {list(wanted.shape)}"
            )
        before = one.made
        one.nbytes = weight.nbytes
        weight_nk = weight.t() if is_conv1d(module) else weight
        for layer_name, task in one.layers.items():
            source = _stand_in(weight_nk)
            layer = task.quantized(source, layer_name)
            _tie(layer, one.made, name, again=before is not None)
            one.made = one.made or layer
            if before is None:
                self._layers[layer_name] = layer
                self._measure(one, layer_name, weight_nk, layer)
                self._hold(layer_name, source, task, layer, one.errors.get(layer_name, 0.0))
        if self._parallel is not None and len(one.layers) == 1 and before is None:
            (layer_name,) = one.layers
            part = self._parallel.part(layer_name, self._layers[layer_name])
            self._layers[layer_name] = one.made = part  # the last reference to the whole layer goes here
        if not one.layers:
            assert self._config.embeddings is not None, "there are tables to quantize only if it is given"
            served, _ = rotatable(self._config.embeddings, weight.shape[1])
            made = Task(module, served).quantized(_stand_in(weight), next(iter(one.tables)))
            _tie(made, one.made, name, again=before is not None)
            one.made = one.made or made
            self._measure(one, next(iter(one.tables)), weight, made)
        for i, table_name in enumerate(one.tables):
            owns = not one.layers and i == 0
            assert one.made is not None
            if before is None:
                self._tables[table_name] = Embedding(one.made, weight.dtype, tied=not owns)
        # Marked, or transformers would draw values for weights that it takes to be missing.
        wanted._is_hf_initialized = True  # type: ignore[attr-defined]

    def _measure(self, one: _Shared, name: str, weight: Tensor, layer: Linear) -> None:
        if self._config.report or self._proof.active:
            one.errors[name] = weight_error(weight, layer.dequantized_weight())
            one.norm = weight.detach().float().norm().item()

    def _hold(self, name: str, source: nn.Module, task: Task, layer: Linear, error: float) -> None:
        calibrated = None if self._config.calibration is None else self._config.calibration.layers.get(name)
        sample = None if calibrated is None else calibrated.sample[:SAMPLE_ROWS]
        with plain_state():
            self._proof.layer(name, source, layer, error, task.is_fitted, sample)


def _mixtures_of(
    model: nn.Module, mixtures: Opened, tasks: Mapping[str, Task], parallel: TensorParallel | None
) -> dict[str, Mixture]:
    from qcut.integrations.transformers.experts.online import mixtures_of

    found = mixtures_of(model, mixtures, tasks)
    if found and parallel is not None:
        raise UnsupportedError(
            f"{next(iter(found))}: tp_size={parallel.size} for experts to quantize, which are not cut; allowed: one "
            "process, or modules_to_not_convert=['lm_head', '*.experts.*']"
        )
    return found


def _stand_in(weight: Tensor) -> nn.Linear:
    stand_in = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    stand_in.weight = nn.Parameter(weight, requires_grad=False)
    return stand_in


def _tie(layer: Linear, owner: Linear | None, name: str, *, again: bool) -> None:
    """Share the owner's tensors; where the weight is stored a second time, check that it is the same one."""
    if owner is None:
        return
    layer.tie_to(owner)
    if again and any(layer._buffers[key] is not owner._buffers[key] for key in owner._buffers if key != "bias"):
        raise CheckpointError(
            f"tensor {name!r}: the configuration ties it to another, and the checkpoint has two that differ; load with "
            "tie_word_embeddings=False"
        )


class _Quantize(ConversionOps):  # type: ignore[misc]
    """Takes weights to quantize out of what transformers puts into the model."""

    def __init__(self, loading: OnlineLoading) -> None:
        self._loading = loading

    def convert(self, input_dict: Mapping[str, Any], missing_keys: set[str] | None = None, **_: Any) -> dict[str, Any]:
        rest = {}
        for name, value in input_dict.items():
            tensor = value[0] if isinstance(value, list) else value
            if name in self._loading.targets:
                self._loading.take(name, tensor)
                if missing_keys is not None:
                    missing_keys -= self._loading.settled(name)
            else:
                rest[name] = value
        return rest
