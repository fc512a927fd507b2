"""LoRA of the package PEFT over quantized layers: tells PEFT which of its layers wraps a `qcut.Linear`.

PEFT chooses a wrapper by the class of the layer, and lets a `LoraConfig` name wrappers for classes that it does not
know. Each config gets that entry at its first quantized layer, so that ``get_peft_model`` and
``PeftModel.from_pretrained`` need nothing from the user. PEFT is not imported here: the entry is made once it is.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import cache, wraps
from types import ModuleType
from typing import Any

from torch import nn

from qcut.errors import UnsupportedError, layer_prefix
from qcut.layers.base import Linear
from qcut.layers.embedding import Embedding
from qcut.process.imports import when_imported


@cache
def wrapper_class() -> type[nn.Module]:
    """PEFT's LoRA layer for `qcut.Linear`: a float product of low rank beside the quantized one."""
    from peft.tuners.lora.layer import Linear as FloatLora

    class QuantizedLoraLinear(FloatLora):  # type: ignore[misc]
        """``y = layer(x) + scaling * (dropout(x) @ A.T) @ B.T`` over a quantized layer, which stays as it is.

        Raises:
            UnsupportedError: the layer computes an activation, which would come before the sum.
        """

        def __init__(self, base_layer: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
            layer = _base(base_layer)
            if layer is not None and layer.activation != "none":
                raise UnsupportedError(
                    f"{layer_prefix(layer.name)}it computes its activation ({layer.activation}), and an adapter's "
                    "product is added before that; quantize with fuse=False, or leave the layer out of target_modules"
                )
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Unsupported layer type")
                super().__init__(base_layer, adapter_name, *args, **kwargs)
            self.fan_in_fan_out = False  # qcut's weights are [N, K], those of a former Conv1D, too

    QuantizedLoraLinear.__qualname__ = QuantizedLoraLinear.__name__  # pickle finds it by `__getattr__`
    return QuantizedLoraLinear


def __getattr__(name: str) -> Any:
    if name == "QuantizedLoraLinear":
        return wrapper_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _base(module: Any) -> Linear | None:
    """The quantized layer that a module is or wraps."""
    while not isinstance(module, Linear):
        module = getattr(module, "base_layer", None)
        if module is None:
            return None
    return module


def _teach(peft: ModuleType) -> None:
    """Have PEFT's LoRA wrap quantized layers, find them as ``"all-linear"``, and merge nothing into them."""
    make: Callable[..., Any] = peft.LoraModel._create_new_module

    @wraps(make)
    def make_over_quantized(lora_config: Any, adapter_name: str, target: Any, **kwargs: Any) -> Any:
        layer = _base(target)
        if layer is not None:
            if not hasattr(lora_config, "_register_custom_module"):
                raise UnsupportedError(f"{layer_prefix(layer.name)}LoRA over quantized layers needs peft >= 0.13")
            lora_config._register_custom_module({Linear: wrapper_class()})
        return make(lora_config, adapter_name, target, **kwargs)

    peft.LoraModel._create_new_module = staticmethod(make_over_quantized)

    tuners: Any = sys.modules["peft.tuners.tuners_utils"]
    expand: Callable[..., Any] = tuners._maybe_include_all_linear_layers

    @wraps(expand)
    def expand_with_quantized(peft_config: Any, model: nn.Module) -> Any:
        asked = getattr(peft_config, "target_modules", None)
        expanded = expand(peft_config, model)
        if isinstance(asked, str) and asked.lower() == "all-linear":
            expanded.target_modules |= _quantized_names(model)
        return expanded

    tuners._maybe_include_all_linear_layers = expand_with_quantized

    # This class wraps the float layers, too, that are quantized when they are wrapped.
    float_lora: Any = sys.modules["peft.tuners.lora.layer"].Linear
    merge: Callable[..., None] = float_lora.merge

    @wraps(merge)
    def merge_floats(self: Any, *args: Any, **kwargs: Any) -> None:
        layer = _base(self)
        if layer is not None:
            raise UnsupportedError(
                f"{layer_prefix(layer.name)}an adapter cannot be merged into a quantized weight ({layer.scheme.name}); "
                "load the adapter over the float model, merge it there, and quantize the result; or keep it unmerged, "
                "where it costs two small products"
            )
        merge(self, *args, **kwargs)

    float_lora.merge = merge_floats


def _quantized_names(model: nn.Module) -> set[str]:
    """Names of a model's quantized layers: tables and the classifier, which PEFT leaves out too, are not among them."""
    classifier = getattr(model, "get_output_embeddings", lambda: None)()
    modules = dict(model.named_modules())
    inside = {f"{name}.table" for name, module in modules.items() if isinstance(module, Embedding)}
    inside |= {f"{name}.base_layer" for name in modules}  # the wrapper's own name stands for it
    return {
        name
        for name, module in modules.items()
        if isinstance(module, Linear) and module is not classifier and name not in inside
    }


when_imported("peft.tuners.lora.model", "qcut.layers.lora:_teach")
