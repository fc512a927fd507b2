"""`ServingConfig`: what vLLM needs to know of each layer, from a scheme, a plan or a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from qcut.integrations.vllm.layers import LOG, Layers

_OF_VLLM = ("total_num_heads", "total_num_kv_heads")
"""What vLLM adds to a configuration of compressed-tensors."""


class ServingConfig(QuantizationConfig):  # type: ignore[misc]
    """The quantization method ``qcut`` of vLLM.

    ``LLM(model, quantization="qcut")`` quantizes a float checkpoint to ``w8a8`` while it loads, one layer at a time,
    ``quantization="qcut-codebook4"`` to another scheme. Folders of ``save_pretrained`` need no argument. Checkpoints
    of compressed-tensors with int8 weights run on qcut's kernels with ``quantization="qcut"``. Everything
    else is set by ``hf_overrides={"quantization_config": config.to_dict()}`` of a `qcut.QcutConfig`.

    Args:
        config: of ``config.json`` or ``hf_overrides``; None takes the method's own scheme.

    Raises:
        QcutError: see `Layers`.

    Exactness: weights are bitwise those of `qcut.quantize`, or of the checkpoint, on any number of GPUs; for outputs
    see `qcut.layers.parallel`. vLLM adds the parts of an output in the model's dtype.
    """

    method = "qcut"
    scheme = "w8a8"

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.method, self.scheme = self.method, self.scheme
        self.__class__ = ServingConfig  # vLLM pickles it, and the classes of shorthands have no place in a module
        asked = config or {"quant_method": "qcut", "scheme": self.scheme}
        self._layers = Layers({key: value for key, value in asked.items() if key not in _OF_VLLM})

    def get_name(self) -> str:
        """The method's name."""
        return self.method

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Dtypes of models; on GPUs kernels of 16-bit products refuse float32 themselves."""
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Ten times the least compute capability."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: a float checkpoint has no configuration besides ``config.json``."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ServingConfig:
        """Read the ``quantization_config`` of a checkpoint or of ``hf_overrides``."""
        return cls(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Take checkpoints of compressed-tensors if the user requests qcut."""
        asked = user_quant == cls.method == "qcut"
        return "qcut" if asked and hf_quant_cfg.get("quant_method") == "compressed-tensors" else None

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """How a layer is quantized: one of `linear` or `experts`, vLLM's own for float, or None.

        Raises:
            QcutError: see `Layers.method`, `Layers.experts` and `Layers.check_float`.
        """
        if isinstance(layer, LinearBase):
            made = self._layers.method(layer, prefix, self._names(prefix))
            return UnquantizedLinearMethod() if made is None else made
        if isinstance(layer, RoutedExperts) and (experts := self._layers.experts(layer, prefix)) is not None:
            return experts
        if isinstance(layer, (RoutedExperts, ParallelLMHead)):
            self._layers.check_float(prefix.strip("."))
            LOG.info("%s stays in float: %s is vLLM's own", prefix, type(layer).__name__)
        return None

    def get_cache_scale_mapper(self) -> Any:
        """vLLM's names of stored tensors, without the marks of quantized experts, which hold nothing."""
        from vllm.model_executor.models.utils import WeightsMapper

        mapper, marks = super().get_cache_scale_mapper(), self._layers.marks
        return mapper if marks is None else mapper | WeightsMapper(orig_to_new_regex={re.compile(marks): None})

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Take vLLM's names of modules in place of the checkpoint's."""
        self._layers.rename(lambda name: next(iter(hf_to_vllm_mapper.apply_list([name])), name))

    def _names(self, prefix: str) -> list[str]:
        """The layers of a checkpoint that one of vLLM's layers holds."""
        parent, dot, last = prefix.rpartition(".")
        return [f"{parent}{dot}{part}" for part in self.packed_modules_mapping.get(last, [last])]
