"""Tensor parallel: which part of each quantized layer a process holds, and transformers' own hooks around the part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from qcut.errors import UnsupportedError
from qcut.layers.linear import Linear
from qcut.layers.parallel import CUT, part_layer, part_scheme
from qcut.schemes import Scheme

_OUTPUTS, _INPUTS = 0, 1
_CUT_ALONG = {
    **dict.fromkeys(("colwise", "colwise_gather_output", "colwise_rep"), _OUTPUTS),
    **dict.fromkeys(("rowwise", "rowwise_split_input", "rowwise_rep"), _INPUTS),
}
_WHOLE = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj")


class Whole(NamedTuple):
    """A quantized layer as one device would hold it.

    Attributes:
        scheme: its scheme.
        n: output channels.
        k: input channels.
        activation: that it computes after its bias.
    """

    scheme: Scheme
    n: int
    k: int
    activation: str


class TensorParallel:
    """The parts of one model's quantized layers, for one ``from_pretrained`` with a plan for tensor parallelism.

    A layer with the style ``colwise``, ``colwise_gather_output`` or the like is cut along its output
    channels N, one of ``rowwise``, ``rowwise_split_input`` or the like along its input channels K. Parts are cut from
    whole quantized layers, so that their integers, scales, indices and norms are the slices of those. Layers that the
    plan does not name, quantized tables of tokens, and classifiers tied to them are whole in every process.

    Exactness, against one device:

    - Cut along N, results are bitwise those of the layer's channels where products are of int8. Other sums of floats
      may have another order, because kernels are chosen by N.
    - Cut along K, parts' results, each rounded to the dtype of x, are added across processes in that dtype. The scales
      of int8 weights are those of whole rows. Calibrated tokens have the integers of one device. Tokens that become
      int8 or int16 by their own largest magnitude take that of the process's columns, so that results are near those
      of one device, not equal: each rounding is off by half a step at most, and the parts' steps are the smaller ones.
      ``fold`` of codebooks with int8 products is that of the process's columns, too.
    - The first process adds the bias of a layer that is cut along K.

    A process holds one layer in whole while that is quantized, or one stored tensor while that is read; see
    `qcut.integrations.transformers.online` and `qcut.integrations.transformers.stored`.

    Args:
        model: on the meta device, before transformers cuts it.
        size: processes.

    Attributes:
        size: processes.
    """

    def __init__(self, model: Any, size: int) -> None:
        from transformers.distributed.tensor_parallel import replace_layer_number_by_wildcard

        self.size = size
        self._model = model
        self._generic = replace_layer_number_by_wildcard
        override = model.config.distributed_config.tp_plan
        self._override: dict[str, str] | None = override if isinstance(override, dict) else None
        # What transformers makes of it when it cuts the model.
        self._plan: dict[str, str] = {} if override == {} else model.tp_plan | (self._override or {})
        self._layers: dict[str, Whole] = {}
        self._hidden: list[nn.Module] = []

    @classmethod
    def of(cls, model: Any) -> TensorParallel | None:
        """The parallelism of a model's configuration; None for one process.

        Raises:
            UnsupportedError: other kinds of parallelism, or a transformers of another age.
        """
        config = getattr(model.config, "distributed_config", None)
        if config is None:
            return None
        keys = ("tp_size", "fsdp_size", "dp_replicate_size", "pp_size", "ep_size")
        sizes = {key: getattr(config, key, 1) for key in keys}
        if all(size in (1, None) for size in sizes.values()):
            return None
        others = {key: size for key, size in sizes.items() if key != "tp_size" and size not in (1, None)}
        if others:
            raise UnsupportedError(f"distributed_config of quantized layers: found {others}; allowed: only tp_size")
        try:
            from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

            if not hasattr(ALL_PARALLEL_STYLES["rowwise"], "install_forward"):
                raise ImportError("its styles have no install_forward")
        except ImportError as error:
            import transformers

            raise UnsupportedError(
                f"tensor parallel of quantized layers with transformers {transformers.__version__} ({error}); "
                "allowed: transformers>=5.16"
            ) from error
        return cls(model, sizes["tp_size"])

    def keep_whole(self, names: Iterable[str]) -> None:
        """Let every process have all of some modules: tables of tokens, and classifiers tied to them.

        Raises:
            UnsupportedError: the plan has one rule for such a module and others, or is the caller's own (named).
        """
        for name in names:
            generic = self._generic(name)
            if generic not in self._plan:
                continue
            if generic != name or generic not in self._model.tp_plan or generic in (self._override or ()):
                raise UnsupportedError(
                    f"{name}: quantized tables of tokens, and classifiers tied to them, are whole in every process; "
                    f"the plan has {self._plan[generic]!r} for {generic!r}; allowed: leave it in float"
                )
            del self._plan[generic], self._model.tp_plan[generic]

    def check(self, layers: Mapping[str, Whole]) -> None:
        """State all quantized layers, and look whether they can be cut as the plan says, before anything is loaded.

        Raises:
            UnsupportedError: a layer that cannot be cut into equal parts of whole groups, has an activation that parts
                along K cannot compute, has hooks on its forward, or has another style (named).
        """
        self._layers = dict(layers)
        for name, whole in self._layers.items():
            self._check_rules(name)
            along = self._along(name)
            if along is None:
                continue
            module = self._model.get_submodule(name)
            for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
                raise UnsupportedError(
                    f"layer {name!r}: tp_size={self.size}, and {getattr(hook, '__qualname__', hook)!r}, a hook on its "
                    "forward, would see the channels of one process; allowed: one process, or a layer without hooks"
                )
            channels, what = ((whole.n, "output"), (whole.k, "input"))[along]
            if channels % self.size:
                raise UnsupportedError(
                    f"layer {name!r}: {channels} {what} channels over tp_size={self.size}; allowed: a tp_size that "
                    "divides them"
                )
            if along == _INPUTS:
                if whole.activation != "none":
                    raise UnsupportedError(
                        f"layer {name!r}: its activation ({whole.activation}) would come before the sum over "
                        "processes; allowed: fuse=False"
                    )
                self._part_scheme(name, 0)

    def hide(self, modules: Iterable[nn.Module]) -> None:
        """Make buffers of the parameters of layers to quantize: transformers then hands them over whole."""
        for module in modules:
            self._hidden.append(module)
            for key in ("weight", "bias"):
                if module._parameters.get(key) is not None:
                    module._buffers[key] = module._parameters.pop(key)

    def show(self) -> None:
        """Make parameters again of what `hide` took."""
        for module in self._hidden:
            for key in ("weight", "bias"):
                if (tensor := module._buffers.pop(key, None)) is not None:
                    module._parameters[key] = nn.Parameter(tensor.detach(), requires_grad=False)

    def is_cut(self, name: str) -> bool:
        """Whether processes have parts of a layer."""
        return self._along(name) is not None

    def cut(self, name: str, key: str, tensor: Tensor) -> Tensor:
        """This process's part of a stored tensor of a layer, in memory of its own, or the tensor if it is whole.

        Args:
            name: of the layer.
            key: of the tensor, in the layer's state dict.
            tensor: of the whole layer.
        """
        along = self._along(name)
        if key == "bias" and along == _INPUTS:
            return tensor
        if along is None or along not in CUT.get(key, (_OUTPUTS,) if key == "bias" else ()):
            return tensor
        channels = self._layers[name].k if (key, along) == ("qweight", _INPUTS) else tensor.shape[along]
        length = channels // self.size
        return tensor.narrow(along, self._rank * length, length).clone()

    def part(self, name: str, layer: Linear) -> Linear:
        """This process's part of a whole layer, or the layer if the plan leaves it whole; the bias is left out."""
        if not self.is_cut(name):
            return layer
        stored = {key: entry for key, entry in layer.stored().items() if key != "bias"}
        part = self.made_of(name, {key: self.cut(name, key, entry.read()) for key, entry in stored.items()})
        part.weight_dtype = layer.weight_dtype
        return part.train(layer.training)

    def made_of(self, name: str, tensors: Mapping[str, Tensor]) -> Linear:
        """The shard of the given stored tensors, without the bias.

        Raises:
            CheckpointError: values that quantizing never gives.
        """
        scheme, n, k, activation = self._layers[name]
        if self._along(name) == _INPUTS:
            scheme, k = self._part_scheme(name, self._rank), k // self.size
        else:
            n //= self.size
        part = part_layer(scheme, n, k, tensors, name)
        part.activation, part.parts = activation, self.size
        return part

    def set_bias(self, name: str, part: Linear, bias: Tensor) -> None:
        """Give a part its bias: that of its output channels, or of all, only in the first process.

        Args:
            name: of the layer.
            part: of the layer, or the layer itself if it is whole.
            bias: float32 ``[N]`` of the whole layer.
        """
        if self._along(name) != _INPUTS or self._rank == 0:
            part.bias = self.cut(name, "bias", bias)

    def install(self) -> None:
        """Put transformers' hooks around the layers of the model: what is done with x before, and with y after.

        The hooks work on a stand-in of the whole layer's sizes, which they ask for, and which they take for a linear
        layer in float: these have the shortest way, a plain all-reduce.
        """
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

        for name, whole in self._layers.items():
            style = self._style(name)
            if style is None:
                continue
            layer = self._model.get_submodule(name)
            stand_in: Any = nn.Linear(whole.k, whole.n, bias=False, device="meta")
            stand_in.register_parameter("weight", None)
            stand_in._hf_quantized_needs_local_tp = True
            stand_in.config = self._model.config.get_text_config()
            stand_in.forward = layer.forward
            ALL_PARALLEL_STYLES[style].install_forward(stand_in, self._mesh)
            layer.forward = stand_in.forward

    @property
    def _mesh(self) -> Any:
        manager = getattr(self._model, "_mesh_manager", None)
        # Before transformers 5.19 the model has the mesh itself; `of` admits no other dimension than this one.
        return self._model._device_mesh if manager is None else manager.get_mesh("tp")

    @property
    def _rank(self) -> int:
        rank: int = self._mesh.get_local_rank()
        return rank

    def _check_rules(self, name: str) -> None:
        style = self._style(name)
        if style not in (None, *_CUT_ALONG, *_WHOLE):
            raise UnsupportedError(
                f"layer {name!r}: the plan's style {style!r} for a quantized layer; allowed: "
                f"{', '.join((*_CUT_ALONG, *_WHOLE))}"
            )
        of_weight = self._plan.get(f"{self._generic(name)}.weight")
        if of_weight not in (None, style, "replicate"):
            raise UnsupportedError(
                f"layer {name!r}: the plan has {of_weight!r} for its weight and {style!r} for the layer; allowed: "
                "only a rule for the layer"
            )

    def _style(self, name: str) -> str | None:
        style: str | None = self._plan.get(self._generic(name))
        return style

    def _along(self, name: str) -> int | None:
        return _CUT_ALONG.get(self._style(name) or "")

    def _part_scheme(self, name: str, rank: int) -> Scheme:
        scheme, _, k, _ = self._layers[name]
        try:
            return part_scheme(scheme, rank * (k // self.size), k // self.size, name)
        except UnsupportedError as error:
            raise UnsupportedError(f"tp_size={self.size} for {k} input channels: {error}") from None
