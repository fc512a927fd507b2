"""How vLLM's linear layers get qcut's weights: quantized while a float checkpoint loads, or read as they are stored.

A layer of vLLM is one GPU's part of one or several layers of a checkpoint. vLLM's own loaders cut the parts out of
the plain tensors of a checkpoint; they are laid out for kernels when all of a layer's tensors are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearMethodBase, RowParallelLinear
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.model_executor.utils import set_weight_attrs
from vllm.utils.torch_utils import set_default_torch_dtype

from qcut.checkpoints.formats.compressed_tensors.reader import CompressedTensors
from qcut.checkpoints.formats.parts import Parts, Stored
from qcut.checkpoints.marks import KEYS
from qcut.conversion.prebuild import prebuild_layer
from qcut.errors import CheckpointError, UnsupportedError
from qcut.integrations.vllm.product import attach, serve
from qcut.layers.int8 import Int8Linear
from qcut.layers.linear import Linear
from qcut.layers.parallel import CUT, part_layer, part_scheme, part_shapes
from qcut.models.modules import float_bias
from qcut.schemes import Scheme, StaticRange, padded_k


class QcutMethod(LinearMethodBase):  # type: ignore[misc]
    """What the methods have in common: tensors come in, a `qcut.Linear` is made of them and computes.

    Attributes:
        scheme: of the layer, or only of this GPU's shard where other GPUs have other input channels.
        name: vLLM's name of the layer, for messages.
        n: output channels of the part.
        k: input channels of the part.
        split: whether other GPUs have other input channels.
    """

    def __init__(self, scheme: Scheme, name: str) -> None:
        self.scheme, self.name = scheme, name

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Register the parameters that vLLM loads; see ``LinearMethodBase``."""
        self.n, self.k = sum(output_partition_sizes), input_size_per_partition
        self.split = self.k != input_size
        if self.split:
            self.scheme = part_scheme(self.scheme, layer.tp_rank * self.k, self.k, self.name)
        self.dtype, self.rows = params_dtype, token_counts()
        self.register(layer, extra["weight_loader"])
        self.loaded = tuple(layer._parameters)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Make the layer that computes, once: vLLM calls this a second time after quantizing layer by layer."""
        if self.loaded[0] not in layer._parameters:
            return
        if hasattr(layer, "qcut"):
            raise UnsupportedError(f"layer {self.name!r}: new weights for a running vLLM; start it anew")
        tensors = {key: layer._parameters[key].detach() for key in self.loaded}
        # Of a layer split by input channels, the first GPU adds the bias.
        later = isinstance(layer, RowParallelLinear) and layer.tp_rank > 0
        bias = None if layer.skip_bias_add or later else layer.bias
        # vLLM sets a default device and dtype while it loads.
        with torch.device("cpu"), set_default_torch_dtype(torch.float32), torch.no_grad():
            made = self.make(tensors).to(tensors[self.loaded[0]].device)
            made.bias = None if bias is None else float_bias(bias.detach(), self.name)
        made.weight_dtype = self.dtype
        prebuild_layer(made, self.dtype, self.rows)
        for key in self.loaded:
            delattr(layer, key)
        attach(layer, made)
        main = made._buffers["qweight" if isinstance(made, Int8Linear) else "units"]
        layer.qcut_weight = Parameter(cast(Tensor, main), requires_grad=False)
        serve(made, layer.qcut_weight)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``[..., N]`` of x ``[..., K]``, the bias added before rounding."""
        if (bias is None) != (layer.qcut.bias is None):
            raise UnsupportedError(f"layer {self.name!r}: its bias is added in some calls only")
        return cast(Tensor, torch.ops.qcut.served_linear.default(x, layer.qcut_weight, self.n))

    def register(self, layer: Any, loader: Any) -> None:
        """Register the parameters of a part, with vLLM's loader."""
        raise NotImplementedError

    def make(self, tensors: Mapping[str, Tensor]) -> Linear:
        """The layer of loaded parameters, without bias."""
        raise NotImplementedError


class OnlineMethod(QcutMethod):
    """Quantizes a float weight when it has arrived, one layer's at a time.

    Exactness: each GPU has bitwise its part of what one GPU makes of the weight. Scales of int8 weights are those of
    whole rows, which pass through the loader of each GPU; rotated rows have scales of each GPU's columns.
    """

    uses_meta_device = True

    def __init__(self, scheme: Scheme, name: str, static_range: StaticRange | None = None) -> None:
        super().__init__(scheme, name)
        self.static_range = static_range
        self.row_absmax: Tensor | None = None

    def register(self, layer: Any, loader: Any) -> None:
        """One float weight, without memory until all of it has come."""
        data = torch.empty(self.n, self.k, device="meta", dtype=self.dtype)
        loader = self._noting(loader) if self.split else loader
        layer.weight = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
        initialize_online_processing(layer)

    def make(self, tensors: Mapping[str, Tensor]) -> Linear:
        """See `QcutMethod.make`."""
        module = nn.Linear(self.k, self.n, bias=False, device="meta")
        module.weight = Parameter(tensors["weight"], requires_grad=False)
        known = {"static_range": self.static_range, "row_absmax": self.row_absmax}
        return Linear.from_float(module, self.scheme, **known, name=self.name)  # type: ignore[arg-type]

    def _noting(self, loader: Any) -> Any:
        def load(param: Parameter, loaded_weight: Tensor) -> None:
            # What was cut before it came here has no whole rows.
            if loaded_weight.shape[1] > self.k:
                extremes = torch.stack(loaded_weight.aminmax(dim=1)).to(param.device, param.dtype)
                self.row_absmax = extremes.float().abs().amax(0)
            loader(param, loaded_weight)

        return load


class StoredMethod(QcutMethod):
    """Reads a layer as ``save_pretrained`` stored it, or int8 weights of another library's checkpoint.

    Attributes:
        format: of the other library.
        stored_name: the checkpoint's name of the layer, by which the format knows it.
    """

    def __init__(
        self, scheme: Scheme, name: str, format: CompressedTensors | None = None, stored_name: str = ""
    ) -> None:
        super().__init__(scheme, name)
        self.format, self.stored_name = format, stored_name

    def register(self, layer: Any, loader: Any) -> None:
        """The tensors that are stored, each with vLLM's loader."""
        shapes = part_shapes(self.scheme, self.n, self.k, self.name)
        if self.format is not None:
            shapes = {"weight": ([self.n, self.k], torch.int8), "weight_scale": ([self.n, 1], torch.float32)}
        elif "qweight" in shapes and not self.split:
            shapes["qweight"] = [self.n, padded_k(self.k)], shapes["qweight"][1]
        for key, (shape, dtype) in shapes.items():
            param = Parameter(torch.empty(shape, dtype=dtype, device=torch.get_default_device()), requires_grad=False)
            cut = dict(zip(("output_dim", "input_dim"), CUT.get(key, ()), strict=False))
            set_weight_attrs(param, {**cut, "weight_loader": loader if cut else _one_for_all(self.name, key)})
            layer.register_parameter(key, param)
        for key in () if self.format else KEYS:
            param = Parameter(torch.empty(1, dtype=torch.uint8, device=torch.get_default_device()), requires_grad=False)
            set_weight_attrs(param, {"weight_loader": _ignore})
            layer.register_parameter(key, param)

    def make(self, tensors: Mapping[str, Tensor]) -> Linear:
        """See `QcutMethod.make`."""
        if self.format is None:
            stated = {key: tensor for key, tensor in tensors.items() if key not in KEYS}
            return part_layer(self.scheme, self.n, self.k, stated, self.name)
        stored = {key: Stored.of(tensor) for key, tensor in tensors.items()}
        return self.format.layer(Parts(self.stored_name, "checkpoint", self.n, self.k, stored))


def token_counts() -> list[int]:
    """Numbers of tokens that vLLM captures graphs of, and powers of two up to its largest batch."""
    config = get_current_vllm_config()
    most = config.scheduler_config.max_num_batched_tokens
    captured = config.compilation_config.cudagraph_capture_sizes or ()
    return sorted({*captured, most, *(1 << i for i in range(most.bit_length()))})


def _ignore(param: Parameter, loaded_weight: Tensor, shard: Any = None) -> None:
    """A loader of `qcut.checkpoints.marks`, which hold nothing."""


def _one_for_all(name: str, key: str) -> Any:
    """A loader of a tensor that layers which vLLM computes as one must have in common."""
    loaded = False

    def load(param: Parameter, loaded_weight: Tensor, shard: Any = None) -> None:
        nonlocal loaded
        given = loaded_weight.to(param.device, param.dtype)
        if given.shape != param.shape or (loaded and not torch.equal(given, param.data)):
            found = f"{list(given.shape)}, or other values than those of another layer that vLLM computes with it"
            raise CheckpointError(f"layer {name!r}: {key} is {found}; allowed: {list(param.shape)}, one for all")
        param.data.copy_(given)
        loaded = True

    return load
