"""How vLLM's mixtures get qcut's experts: quantized while a float checkpoint loads, or read as they are stored.

A mixture of vLLM holds some of the experts, or one GPU's part of each. vLLM chooses the experts of a token, adds shared
experts and the results of other GPUs; `qcut.layers.experts.experts.Experts` computes what is between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.utils import set_weight_attrs
from vllm.utils.torch_utils import set_default_torch_dtype

from qcut.checkpoints.formats.compressed_tensors.reader import CompressedTensors
from qcut.checkpoints.formats.parts import Parts, Stored
from qcut.errors import CheckpointError, UnsupportedError
from qcut.integrations.vllm.linear import token_counts
from qcut.integrations.vllm.product import attach
from qcut.jit.waiting import no_fallbacks
from qcut.layers.experts.experts import Experts
from qcut.layers.experts.linear_stack import LinearStack
from qcut.layers.linear import Known, Linear
from qcut.layers.parallel import CUT, part_layer, part_scheme, part_shapes
from qcut.numerics.gating import Gating
from qcut.ops import paths
from qcut.schemes import Scheme, padded_k

PROJECTIONS = {"up": "w13", "down": "w2"}
"""What vLLM calls the projections of all experts."""
_GATINGS = {
    "silu": Gating("silu"),
    "gelu": Gating("gelu_erf"),
    "gelu_tanh": Gating("gelu_tanh"),
    "silu_no_mul": Gating("silu", gated=False),
    "gelu_no_mul": Gating("gelu_erf", gated=False),
    "gelu_tanh_no_mul": Gating("gelu_tanh", gated=False),
    "relu2_no_mul": Gating("relu2", gated=False),
}
_CLAMPED = "swigluoai_uninterleave"


class QcutMoEMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """What the methods have in common: tensors come in, `Experts` are made of them and compute.

    Args:
        layer: vLLM's, before it has weights.
        name: vLLM's name of it, for messages.
        schemes: of ``up`` and ``down``.

    Attributes:
        gating: of the experts.
        split: whether this GPU has a part of each expert.

    Raises:
        UnsupportedError: a mixture that is not served (named).
    """

    def __init__(self, layer: Any, name: str, schemes: Mapping[str, Scheme]) -> None:
        super().__init__(layer.moe_config)
        self.name, self.schemes, self.gating = name, dict(schemes), gating_of(layer, name)
        parallel = self.moe.moe_parallel_config
        self.split = parallel.tp_size > 1
        refused = {
            "biases": self.moe.has_bias,
            "adapters (LoRA)": self.moe.is_lora_enabled,
            "weights of routes that multiply an expert's input": layer.apply_router_weight_on_input,
            "balanced experts (--enable-eplb)": parallel.enable_eplb,
            "data parallelism": parallel.dp_size * parallel.pcp_size * parallel.sp_size > 1,
        }
        if found := [what for what, given in refused.items() if given]:
            raise UnsupportedError(
                f"layer {name!r}: quantized experts with {found[0]}; allowed: a mixture without, on one GPU, or tensor "
                "or expert parallel; or experts in float (modules_to_not_convert)"
            )

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Register the parameters that vLLM loads; see ``FusedMoEMethodBase``."""
        width = intermediate_size_per_partition
        self.count, self.dtype, self.rows = num_experts, params_dtype, token_counts()
        self.sizes = {"up": (width * (1 + self.gating.gated), hidden_size), "down": (hidden_size, width)}
        if self.split:
            first = self.moe.moe_parallel_config.tp_rank * width
            self.schemes["down"] = part_scheme(self.schemes["down"], first, width, f"{self.name}.down")
        before = set(layer._parameters)
        self.register(layer, extra["weight_loader"])
        self.loaded = [key for key in layer._parameters if key not in before]

    def process_weights_after_loading(self, layer: Any) -> None:
        """Make the experts that compute, once: vLLM calls this a second time after quantizing layer by layer."""
        if not layer._parameters[self.loaded[0]].numel():
            return
        if hasattr(layer, "qcut"):
            raise UnsupportedError(f"layer {self.name!r}: new weights for a running vLLM; start it anew")
        device, stacks = layer._parameters[self.loaded[0]].device, {}
        # vLLM sets a default device and dtype while it loads.
        with torch.device("cpu"), set_default_torch_dtype(torch.float32), torch.no_grad():
            for part, called in PROJECTIONS.items():
                keys = [key for key in self.loaded if key.startswith(f"{called}_")]
                tensors = {key.removeprefix(f"{called}_"): layer._parameters[key].detach() for key in keys}
                stacks[part] = self.make(part, tensors).to(device)
                stacks[part].weight_dtype = self.dtype
                for key in keys:
                    # Tensors of other GPUs' experts still come, and vLLM looks for their parameter.
                    empty = Parameter(torch.empty(0, dtype=torch.float32, device=device), requires_grad=False)
                    set_weight_attrs(empty, {"weight_loader": lambda *_, **__: False})
                    layer.register_parameter(key, empty)
            attach(layer, Experts(stacks["up"], stacks["down"], self.gating, name=self.name).eval())
        self._build_kernels(layer.qcut, device)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: vLLM's kernels compute nothing."""

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """``[M, H]`` of tokens ``[M, H]``: the sum over the routes to experts that are here, as `Experts` computes it.

        Args:
            layer: that was loaded.
            x: tokens.
            topk_weights: of each route, ``[M, k]``.
            topk_ids: the expert of each route among those of all GPUs, integers ``[M, k]``; -1 is a route of none.
            shared_experts: not used: vLLM computes them.
            shared_experts_input: not used.
        """
        ids, weights = topk_ids, topk_weights
        if layer.expert_map is not None:
            here = layer.expert_map[ids.clamp(min=0)]
            elsewhere = (here < 0) | (ids < 0)
            ids, weights = here.masked_fill(elsewhere, self.count), weights.masked_fill(elsewhere, 0)
        return cast(Tensor, layer.qcut(x, ids, weights))

    def register(self, layer: Any, loader: Any) -> None:
        """Register the parameters of the experts that are here; ``loader`` is vLLM's."""
        raise NotImplementedError

    def make(self, part: str, tensors: Mapping[str, Tensor]) -> LinearStack:
        """A projection of the experts, of loaded parameters."""
        raise NotImplementedError

    def _build_kernels(self, experts: Experts, device: torch.device) -> None:
        """Compute with every number of tokens once, and wait for the kernels: a graph keeps those it is captured with.

        Also lets the experts read on the host what they read once.
        """
        if device.type != "cuda" or device.index in paths.refusals():
            return
        most, k = self.rows[-1], self.moe.experts_per_token
        x = torch.zeros(most, self.sizes["up"][1], dtype=self.dtype, device=device)
        ids = (torch.arange(most * k, dtype=torch.int32, device=device) % self.count).view(most, k)
        weights = torch.ones(most, k, dtype=torch.float32, device=device)
        with no_fallbacks(), torch.no_grad():
            for m in self.rows:
                experts(x[:m], ids[:m], weights[:m])


class OnlineExperts(QcutMoEMethod):
    """Quantizes the float weights of a mixture when all have arrived.

    Exactness: each GPU has bitwise its experts, or its part of each, of what one GPU makes of the weights.
    """

    uses_meta_device = True

    def register(self, layer: Any, loader: Any) -> None:
        """One float weight for each projection, without memory until all of it has come."""
        self.row_absmax: dict[int, Tensor] = {}
        for part, called in PROJECTIONS.items():
            empty = torch.empty(self.count, *self.sizes[part], device="meta", dtype=self.dtype)
            param = Parameter(empty, requires_grad=False)
            noted = self.split and part == "down"
            set_weight_attrs(param, {"weight_loader": self._noting(loader) if noted else loader})
            layer.register_parameter(f"{called}_weight", param)
        initialize_online_processing(layer)

    def make(self, part: str, tensors: Mapping[str, Tensor]) -> LinearStack:
        """See `QcutMoEMethod.make`."""
        n, k = self.sizes[part]
        modules = [nn.Linear(k, n, bias=False, device="meta") for _ in range(self.count)]
        for module, weight in zip(modules, tensors["weight"], strict=True):
            module.weight = Parameter(weight, requires_grad=False)
        absmax = self.row_absmax if part == "down" else {}
        known = [Known(row_absmax=absmax.get(e)) for e in range(self.count)]
        names = [f"{self.name}.{part}.{e}" for e in range(self.count)]
        made = Linear.all_from_float(modules, self.schemes[part], ["none"] * self.count, known, names)
        return LinearStack.of(made, f"{self.name}.{part}")

    def _noting(self, loader: Any) -> Any:
        def load(
            param: Parameter,
            loaded_weight: Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
            return_success: bool = False,
        ) -> Any:
            # What was cut before it came here has no whole rows. Where experts are split, all of them are here.
            if loaded_weight.ndim == 2 and loaded_weight.shape[1] > self.sizes["down"][1]:
                extremes = torch.stack(loaded_weight.aminmax(dim=1)).to(param.device, param.dtype)
                self.row_absmax[expert_id] = extremes.float().abs().amax(0)
            return loader(param, loaded_weight, weight_name, shard_id, expert_id, return_success)

        return load


class StoredExperts(QcutMoEMethod):
    """Reads experts as ``save_pretrained`` stored them, or int8 weights of another library's checkpoint.

    Args:
        format: of the other library.
    """

    def __init__(
        self, layer: Any, name: str, schemes: Mapping[str, Scheme], format: CompressedTensors | None = None
    ) -> None:
        super().__init__(layer, name, schemes)
        self.format = format
        called = {"up": layer.ckpt_gate_proj_name, "down": layer.ckpt_down_proj_name}
        self.stored_names = {part: f"{name}.0.{last}" for part, last in called.items()}  # as all the others are stored
        self.awaited: set[tuple[str, str, int]] = set()

    def register(self, layer: Any, loader: Any) -> None:
        """The tensors that are stored, those of all experts that are here in one, with a loader of qcut's."""
        for part, called in PROJECTIONS.items():
            n, k = self.sizes[part]
            shapes = part_shapes(self.schemes[part], n, k, f"{self.name}.{part}")
            if self.format is not None:
                shapes = {"weight": ([n, k], torch.int8), "weight_scale": ([n, 1], torch.float32)}
            elif "qweight" in shapes and not (self.split and part == "down"):
                shapes["qweight"] = [n, padded_k(k)], shapes["qweight"][1]
            for key, (shape, dtype) in shapes.items():
                empty = torch.empty([self.count, *shape], dtype=dtype, device=torch.get_default_device())
                param = Parameter(empty, requires_grad=False)
                set_weight_attrs(param, {"weight_loader": self._loader(layer, part, key)})
                layer.register_parameter(f"{called}_{key}", param)
                self.awaited |= {(shard, key, e) for shard in self._shards(part) for e in range(self.count)}

    def make(self, part: str, tensors: Mapping[str, Tensor]) -> LinearStack:
        """See `QcutMoEMethod.make`.

        Raises:
            CheckpointError: a tensor of an expert is missing, or holds what quantizing never gives (named).
        """
        if self.awaited:
            shard, key, e = min(self.awaited)
            raise CheckpointError(f"layer {self.name!r}: the checkpoint has no {key} of {shard} of expert {e} here")
        (n, k), layers = self.sizes[part], []
        for e in range(self.count):
            own = {key: tensor[e] for key, tensor in tensors.items()}
            if self.format is None:
                layers.append(part_layer(self.schemes[part], n, k, own, f"{self.name}.{part}.{e}"))
            else:
                stored = {key: Stored.of(tensor) for key, tensor in own.items()}
                layers.append(self.format.layer(Parts(self.stored_names[part], "checkpoint", n, k, stored)))
        return LinearStack.of(layers, f"{self.name}.{part}")

    def _shards(self, part: str) -> list[str]:
        return ["w2"] if part == "down" else ["w1", "w3"][: 1 + self.gating.gated]

    def _loader(self, layer: Any, part: str, key: str) -> Any:
        """A loader of one tensor of one expert's layer: this GPU's rows of ``up``, and columns of ``down``."""
        cut, dim, shards = CUT.get(key, ()), 0 if part == "up" else 1, self._shards(part)
        rank = self.moe.moe_parallel_config.tp_rank

        def load(
            param: Parameter,
            loaded_weight: Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
            return_success: bool = False,
        ) -> bool:
            e = layer._map_global_expert_id_to_local_expert_id(expert_id)
            if e == -1:
                return False
            place, given = param.data[e], loaded_weight.to(param.device, param.dtype)
            if part == "up" and cut:
                place = place.chunk(len(shards))[shards.index(shard_id)]
            if self.split and dim in cut:
                size = place.shape[dim]
                given = given[(slice(None),) * dim + (slice(rank * size, (rank + 1) * size),)]
            # What is no tensor of rows, a codebook, is one for the gate and the up of an expert.
            first = cut or all((shard, key, e) in self.awaited for shard in shards)
            if given.shape != place.shape or not (first or torch.equal(given, place)):
                found = f"{list(loaded_weight.shape)}, or other values than those of the gate"
                raise CheckpointError(
                    f"layer {self.name!r}: {key} of {shard_id} of expert {expert_id} is {found}; allowed: "
                    f"{list(place.shape)} of each of {self.moe.moe_parallel_config.tp_size} GPUs"
                )
            place.copy_(given)
            self.awaited.discard((shard_id, key, e))
            return True

        return load


def gating_of(layer: Any, name: str) -> Gating:
    """What the experts of a mixture of vLLM compute between their products.

    Raises:
        UnsupportedError: an activation that no `Gating` has, or one with interleaved gates and ups.
    """
    kind, limit, alpha, beta = layer.activation.value, layer.swiglu_limit, layer.swiglu_alpha, layer.swiglu_beta
    if kind == _CLAMPED and beta in (None, 0.0, 1.0):
        return Gating("silu", alpha=alpha or 1.0, limit=limit, plus_one=beta == 1.0)
    plain = alpha in (None, 1.0) and beta in (None, 0.0)
    if kind not in _GATINGS or not plain or (limit is not None and kind != "silu"):
        raise UnsupportedError(
            f"layer {name!r}: activation {kind}, limit {limit}, alpha {alpha}, beta {beta}; allowed for quantized "
            f"experts: {', '.join(_GATINGS)}, with a limit silu, and {_CLAMPED} with beta 0 or 1"
        )
    return replace(_GATINGS[kind], limit=limit)
