"""LoRA of the package PEFT over quantized layers: registers the PEFT layer that wraps a `qcut.Linear`.

PEFT chooses a wrapper by the class of the layer, and lets a `LoraConfig` name wrappers for classes that it does not
know. Each config gets that entry when PEFT settles its targets, so that ``get_peft_model`` and
``PeftModel.from_pretrained`` need nothing from the user. PEFT is not imported here: the entry is made once it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, wraps
from inspect import signature
from types import ModuleType
from typing import Any

from torch import nn

from qcut.errors import UnsupportedError, layer_prefix
from qcut.layers.embedding import Embedding
from qcut.layers.linear import Linear
from qcut.layers.parallel import refuse_parts
from qcut.layers.quantized import quantized_layers


@cache
def wrapper_class() -> type[nn.Module]:
    """PEFT's LoRA layer for `qcut.Linear`: a float product of low rank, added to the quantized one."""
    from peft.tuners.lora.layer import Linear as FloatLora

    class QuantizedLoraLinear(FloatLora):  # type: ignore[misc]
        """``y = layer(x) + scaling * (dropout(x) @ A.T) @ B.T`` over a quantized layer, which stays as it is.

        Raises:
            UnsupportedError: the layer computes an activation, which would come before the sum, or is a part of one
                that is cut across processes.
        """

        def __init__(self, base_layer: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
            layer = _base(base_layer)
            if layer is not None and layer.activation != "none" and not layer.apart:
                raise UnsupportedError(
                    f"{layer_prefix(layer.name)}it computes its activation ({layer.activation}), and an adapter's "
                    "product is added before that; quantize with fuse=False, or leave the layer out of target_modules"
                )
            if layer is not None:
                refuse_parts(layer, "an adapter")
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Unsupported layer type")
                super().__init__(base_layer, adapter_name, *args, **kwargs)
            self.fan_in_fan_out = False  # qcut's weights are [N, K], those of a former Conv1D, too

        def merge(self, *args: Any, **kwargs: Any) -> None:
            """PEFT's, over a float layer.

            Raises:
                UnsupportedError: the layer is quantized. PEFT's own wrapper, over a layer that was quantized after it
                    was wrapped, raises one, too, if it reads the weight.
            """
            layer = _base(self)
            if layer is not None:
                raise UnsupportedError(
                    f"{layer_prefix(layer.name)}an adapter cannot be merged into a quantized weight "
                    f"({layer.scheme.name}); load the adapter over the float model, merge it there, and quantize the "
                    "result; or keep it unmerged, where it costs two small products"
                )
            super().merge(*args, **kwargs)

    QuantizedLoraLinear.__qualname__ = QuantizedLoraLinear.__name__  # pickle finds it by `__getattr__`
    return QuantizedLoraLinear


def __getattr__(name: str) -> Any:
    if name == "QuantizedLoraLinear":
        return wrapper_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _base(module: Any) -> Linear | None:
    while not isinstance(module, Linear):
        module = getattr(module, "base_layer", None)
        if module is None:
            return None
    return module


def register(tuners: ModuleType) -> None:
    """Have PEFT wrap the quantized layers of a model, and find them as ``"all-linear"``.

    PEFT calls one function with config and model before it wraps anything, and has no public place there. Where that
    function is another than the one known here, quantized models are refused.

    Args:
        tuners: the module ``peft.tuners.tuners_utils``.
    """
    name = "_maybe_include_all_linear_layers"
    if problem := _difference(tuners, name, ["peft_config", "model"]):
        tuners.BaseTuner.__init__ = _refusing(tuners.BaseTuner.__init__, problem)
        return
    found = getattr(tuners, name)
    expand: Callable[[Any, nn.Module], Any] = getattr(found, "of_peft", found)

    @wraps(expand)
    def expand_with_quantized(peft_config: Any, model: nn.Module) -> Any:
        if not _has_quantized(model):
            return expand(peft_config, model)
        asked = getattr(peft_config, "target_modules", None)
        expanded = expand(peft_config, model)
        if isinstance(asked, str) and asked.lower() == "all-linear":
            expanded.target_modules |= _quantized_names(model)
        if hasattr(expanded, "_custom_modules"):  # those of LoRA
            if problem := _difference(type(expanded), "_register_custom_module", ["self", "mapping"]):
                raise UnsupportedError(problem)
            expanded._register_custom_module({Linear: wrapper_class()})
        return expanded

    expand_with_quantized.of_peft = expand  # type: ignore[attr-defined]
    setattr(tuners, name, expand_with_quantized)


def _difference(owner: Any, name: str, parameters: list[str]) -> str | None:
    """What is wrong with a function of PEFT that is not as this module knows it, or None."""
    function = getattr(owner, name, None)
    found = None if function is None else list(signature(function).parameters)
    if found == parameters:
        return None
    import peft

    takes = "is missing" if found is None else f"takes ({', '.join(found)})"
    return (
        f"adapters over quantized layers need {name}({', '.join(parameters)}) of PEFT, which peft 0.18 to 0.21 have; "
        f"in peft {peft.__version__} it {takes}"
    )


def _refusing(init: Callable[..., None], problem: str) -> Callable[..., None]:
    @wraps(init)
    def refuse_quantized(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        if _has_quantized(model):
            raise UnsupportedError(problem)
        init(self, model, *args, **kwargs)

    return refuse_quantized


def _has_quantized(model: nn.Module) -> bool:
    return bool(quantized_layers(model))


def _quantized_names(model: nn.Module) -> set[str]:
    """Names of a model's quantized layers: without stacks of experts, and tables and the classifier, as PEFT's own."""
    classifier = getattr(model, "get_output_embeddings", lambda: None)()
    modules = dict(model.named_modules())
    inside = {f"{name}.table" for name, module in modules.items() if isinstance(module, Embedding)}
    inside |= {f"{name}.base_layer" for name in modules}  # the wrapper's own name stands for it
    layers = {name: layer for name, layer in quantized_layers(model).items() if isinstance(layer, Linear)}
    return {name for name, layer in layers.items() if layer is not classifier and name not in inside}
