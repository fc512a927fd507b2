"""`ServingConfig`: what vLLM asks of each layer of a model, answered from a scheme, a plan or a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import vllm
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from qcut.errors import UnsupportedError
from qcut.integrations.vllm.layers import LOG, Layers

_RELEASES = ("0.26", "0.27", "0.28", "0.29", "0.30", "0.31", "0.32")
_EXPERTS = ("FusedMoE", "RoutedExperts")
_OF_VLLM = ("total_num_heads", "total_num_kv_heads")
"""What vLLM adds to a configuration of compressed-tensors."""


class ServingConfig(QuantizationConfig):  # type: ignore[misc]
    """The quantization method ``qcut`` of vLLM.

    ``LLM(model, quantization="qcut")`` quantizes a float checkpoint to ``w8a8`` while it loads, one layer at a time,
    ``quantization="qcut-codebook4"`` to another scheme. Folders of ``save_pretrained`` need no argument. Checkpoints
    of compressed-tensors with int8 weights run on qcut's kernels where ``quantization="qcut"`` asks for it. Everything
    else is said by ``hf_overrides={"quantization_config": config.to_dict()}`` of a `qcut.QcutConfig`.

    Args:
        config: what ``config.json`` or ``hf_overrides`` say; None asks for the method's own scheme.

    Raises:
        UnsupportedError: a vLLM that is not tested, or something that is not served (named).
        CheckpointError: a configuration that cannot be read.
        ConfigError: an unknown scheme.

    Exactness: weights are bitwise those of `qcut.quantize`, or of the checkpoint, on any number of GPUs. Outputs of
    layers that are split by columns are bitwise those of one GPU. Where a layer is split by rows of its input, each GPU
    quantizes its part of a token by that part's largest magnitude (``w8a8``, codebooks ``_int8``), and vLLM adds the
    parts in the model's dtype.
    """

    method: ClassVar[str] = "qcut"
    scheme: ClassVar[str] = "w8a8"

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        release = ".".join(vllm.__version__.split(".")[:2])
        if release not in _RELEASES:
            raise UnsupportedError(f"vLLM {vllm.__version__}; tested: {', '.join(_RELEASES)}")
        asked = config or {"quant_method": "qcut", "scheme": self.scheme}
        self._layers = Layers({key: value for key, value in asked.items() if key not in _OF_VLLM})

    @classmethod
    def get_name(cls) -> str:
        """The method's name."""
        return cls.method

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Dtypes of models; on GPUs kernels of 16-bit products refuse float32 themselves."""
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Compute capability 8.0."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: a float checkpoint has no configuration beside ``config.json``."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ServingConfig:
        """Read the ``quantization_config`` of a checkpoint or of ``hf_overrides``."""
        return cls(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Take checkpoints of compressed-tensors where the user asks for qcut."""
        asked = user_quant == cls.method == "qcut"
        return "qcut" if asked and hf_quant_cfg.get("quant_method") == "compressed-tensors" else None

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """How a layer is quantized: one of `qcut.integrations.vllm.linear`, vLLM's own for float, or None.

        Raises:
            UnsupportedError: layers that vLLM computes as one have different schemes, or the checkpoint has quantized
                what vLLM computes itself.
            PlanError, QuantizationError: see `qcut.quantize`.
        """
        if isinstance(layer, LinearBase):
            made = self._layers.method(layer, prefix, self._names(prefix))
            return UnquantizedLinearMethod() if made is None else made
        kind = next((c.__name__ for c in type(layer).__mro__ if c.__name__ in _EXPERTS), None)
        if kind is not None or isinstance(layer, ParallelLMHead):
            self._layers.check_float(prefix)
            LOG.info("%s stays in float: %s is vLLM's own", prefix, type(layer).__name__)
        return None

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Take vLLM's names of modules in place of the checkpoint's."""
        self._layers.rename(lambda name: next(iter(hf_to_vllm_mapper.apply_list([name])), name))

    def _names(self, prefix: str) -> list[str]:
        """The layers of a checkpoint that one of vLLM's layers holds."""
        parent, dot, last = prefix.rpartition(".")
        return [f"{parent}{dot}{part}" for part in self.packed_modules_mapping.get(last, [last])]
