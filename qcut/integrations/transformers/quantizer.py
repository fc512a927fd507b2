"""The quantizer that transformers calls while it loads and saves."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.quantizers.base import HfQuantizer

from qcut.checkpoints.marks import ADVICE, NO_FILE
from qcut.common import versions
from qcut.errors import CheckpointError, ConfigError, UnsupportedError
from qcut.integrations.transformers.config import QcutConfig

if TYPE_CHECKING:
    from qcut.conversion.report import Report

_ONE_DEVICE = "one device for the whole model, as in device_map='cpu' or device_map={'': 'cuda:0'}"


class QcutHfQuantizer(HfQuantizer):  # type: ignore[misc]
    """Quantizes a model of transformers while it is loaded, or loads one that is quantized; see `QcutConfig`.

    transformers makes one for each model, and keeps it as ``model.hf_quantizer``.

    Attributes:
        report: what was quantized while loading, if `QcutConfig` requests it; else None.
    """

    requires_calibration = False
    report: Report | None = None

    def __init__(self, quantization_config: QcutConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._loading: Any = None
        self._parallel: Any = None

    @property
    def is_trainable(self) -> bool:
        """Whether `transformers.Trainer` may train adapters over the model: `qcut.enable_input_gradients` lets it."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Whether ``generate`` may compile the model."""
        return True

    def is_serializable(self, **_: Any) -> bool:
        """Whether ``save_pretrained`` can write the model."""
        return True

    def validate_environment(self, *_: Any, **__: Any) -> None:
        """See `qcut.common.versions`."""
        versions.transformers()
        versions.require("torch")
        config = self.quantization_config
        if self.pre_quantized and config.stored is None and config.foreign is None:
            raise CheckpointError(
                "config.json: quantization_config of qcut describes no layers; the model is not qcut's"
            )
        if not self.pre_quantized and config.foreign is not None:
            raise ConfigError("a request for another library's checkpoint; allowed: config=qcut.foreign_config(name)")

    def update_device_map(self, device_map: Any) -> Any:
        """Refuses what would lose the tensors of quantized layers, which are buffers.

        Raises:
            UnsupportedError: a map with several devices, with ``disk``, or with ``meta``.
        """
        _check_devices(device_map)
        return device_map

    def update_attn_implementation(self, config: Any) -> Any:
        """Drops the file name in ``config.json`` that stops programs without qcut; see `qcut.checkpoints.marks`."""
        if getattr(config, NO_FILE, None) == ADVICE:
            delattr(config, NO_FILE)
        return config

    update_tp_plan = update_attn_implementation  # of the hooks that get the configuration, transformers' before 5.19

    def param_needs_quantization(self, model: nn.Module, param_name: str, **_: Any) -> bool:
        """Whether a weight is to be quantized when it arrives."""
        return not self.pre_quantized and self._loading is not None and param_name in self._loading.targets

    def param_element_size(self, model: nn.Module, param_name: str, param: Tensor) -> float:
        """Bytes that transformers sets aside for each element: of a weight that is cut across processes, for a part."""
        size: float = super().param_element_size(model, param_name, param)
        if self._parallel is not None and self.param_needs_quantization(model, param_name):
            return size / self._parallel.size
        return size

    def get_quantize_ops(self) -> Any:
        """What is done with a weight when it arrives."""
        return self._loading.operation()

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> None:
        from qcut.integrations.transformers.parallel import TensorParallel

        config, parallel = self.quantization_config, TensorParallel.of(model)
        if config.foreign is not None:
            if parallel is not None:
                raise UnsupportedError(
                    f"tp_size={parallel.size} for a checkpoint of another library; allowed: one process, and what its "
                    "save_pretrained writes in several"
                )
            from qcut.integrations.transformers.stored import ForeignLoading

            self._loading = ForeignLoading(model, config.foreign, [Path(file) for file in checkpoint_files or ()])
        elif self.pre_quantized:
            from qcut.integrations.transformers.stored import StoredLoading

            self._loading = StoredLoading(model, config.stored, checkpoint_paths(checkpoint_files), parallel)
        else:
            from qcut.checkpoints.builder import check_kinds
            from qcut.checkpoints.detect import headers_of
            from qcut.integrations.transformers.online import OnlineLoading

            paths = checkpoint_paths(checkpoint_files)
            codes = {name: header.code for name, header in headers_of(paths).items()}
            check_kinds(model, codes, paths[0].parent if paths else "from_pretrained")
            self._loading = OnlineLoading(model, config, parallel)
            self._loading.check_stored(codes, paths[0].parent if paths else "from_pretrained")
        self._parallel = parallel

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        loading, self._loading = self._loading, None
        _check_devices(getattr(model, "hf_device_map", None))
        parallel, self._parallel = self._parallel, None
        if getattr(model, "_tp_size", None) is not None and parallel is None:  # requested in an older version's way
            raise UnsupportedError(
                f"tensor parallel of {model._tp_size} for quantized layers, without a distributed_config; allowed: "
                f"transformers>=5.16, or {_ONE_DEVICE}"
            )
        loading.finish(model)
        self.report = loading.report
        attach(model)
        if self.quantization_config.foreign is not None:
            from qcut.integrations.transformers.saving import describe

            describe(model)
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors to save, those of quantized layers as they are stored, and no metadata.

        Raises:
            UnsupportedError: ``save_pretrained`` was given a state dict, which lacks its layers' schemes; or
                would convert quantized tensors.
        """
        caller = sys._getframe(1).f_locals
        if caller.get("state_dict") is not None:
            raise UnsupportedError(
                "save_pretrained(state_dict=…) of a quantized model: a state dict says nothing of schemes; allowed: "
                "save_pretrained(directory) of the model that holds these tensors"
            )
        from qcut.integrations.transformers.saving import describe, state_of

        describe(model)
        return state_of(model, bool(caller.get("save_original_format"))), {}

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        from qcut.integrations.transformers.dequantizing import dequantize

        return dequantize(model, dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> QcutHfQuantizer:
        made = type(self)(self.quantization_config, pre_quantized=self.pre_quantized)
        memo[id(self)] = made
        return made


def attach(model: nn.Module) -> None:
    """Give a model that holds quantized layers, and the models in it, the quantizer that saves and dequantizes them."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return
    for module in model.modules():
        known = isinstance(getattr(module, "hf_quantizer", None), QcutHfQuantizer)
        if isinstance(module, modeling.PreTrainedModel) and not known:
            module.hf_quantizer = QcutHfQuantizer(QcutConfig.describing({}), pre_quantized=True)


def _check_devices(device_map: Any) -> None:
    if device_map is None:
        return
    devices = set(map(str, device_map.values())) if isinstance(device_map, Mapping) else {str(device_map)}
    if len(devices) > 1 or devices & {"disk", "meta"}:
        raise UnsupportedError(
            f"device_map requests {', '.join(sorted(devices))}: quantized layers keep their weights in buffers, which "
            f"offloading and splitting lose; allowed: {_ONE_DEVICE}"
        )


def checkpoint_paths(files: Any) -> list[Path]:
    """The safetensors files that transformers is about to read."""
    return [Path(file) for file in files or () if str(file).endswith(".safetensors")]
