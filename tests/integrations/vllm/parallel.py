"""vLLM's parallel layers with weights of the tests, in one process or in several."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

K, N, HEADS, KV_HEADS = 256, 192, 8, 4
SHAPES = {"column": [N], "merged": [N, 2 * N], "qkv": [HEADS * 16, KV_HEADS * 16, KV_HEADS * 16], "row": [N]}
"""By kind of layer, output channels of the layers of a checkpoint that it holds."""
PARTS = {"column": ["up"], "merged": ["gate", "up"], "qkv": ["q", "k", "v"], "row": ["down"]}
SHARDS: dict[str, list[Any]] = {"column": [()], "merged": [(0,), (1,)], "qkv": [("q",), ("k",), ("v",)], "row": [()]}


@contextmanager
def processes(rank: int, world: int, store: Path) -> Iterator[None]:
    """vLLM's groups of processes, on the CPU."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # vLLM's workers name the memory that they share; where the processor has AVX-512, its groups ask for the name.
    os.environ["VLLM_DIST_IDENT"] = f"qcut-{zlib.crc32(str(store).encode()):x}"
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state as state

    config = VllmConfig(parallel_config=ParallelConfig(tensor_parallel_size=world))
    with set_current_vllm_config(config):
        state.init_distributed_environment(world, rank, f"file://{store}", rank, backend="gloo")
        state.initialize_model_parallel(world, backend="gloo")
        try:
            yield
        finally:
            state.destroy_model_parallel()
            state.destroy_distributed_environment()


def weights(kind: str) -> list[tuple[Tensor, Tensor]]:
    """Weight and bias of each layer of the checkpoint."""
    generator = torch.Generator().manual_seed(sum(map(ord, kind)))
    return [(torch.randn(n, K, generator=generator), torch.randn(n, generator=generator)) for n in SHAPES[kind]]


def tokens(rows: int = 5) -> Tensor:
    """``[rows, K]``"""
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(7))


def layer(kind: str, config: Any, tensors: list[dict[str, Tensor]], bias: bool = True) -> Any:
    """A layer of vLLM, loaded as a model loads it.

    Args:
        kind: see `SHAPES`.
        config: vLLM's configuration.
        tensors: of each layer of the checkpoint, by the end of their names.
        bias: whether it has one.
    """
    made = unloaded(kind, config, bias)
    for shard, named in zip(SHARDS[kind], tensors, strict=True):
        for key, tensor in named.items():
            parameter = getattr(made, key)
            parameter.weight_loader(parameter, tensor, *shard)
    made.quant_method.process_weights_after_loading(made)
    if hasattr(made, "qcut"):  # where weights were quantized one by one, vLLM calls it once more
        made.quant_method.process_weights_after_loading(made)
    return made


def unloaded(kind: str, config: Any, bias: bool = True) -> Any:
    """A layer of vLLM before it is loaded; see `layer`."""
    from vllm.model_executor.layers import linear

    common = {"bias": bias, "quant_config": config, "params_dtype": torch.float32}
    config.packed_modules_mapping = {name: parts for name, parts in PARTS.items() if len(parts) > 1}
    if kind == "column":
        return linear.ColumnParallelLinear(K, N, prefix="h.up", **common)
    if kind == "merged":
        return linear.MergedColumnParallelLinear(K, SHAPES[kind], prefix="h.merged", **common)
    if kind == "qkv":
        return linear.QKVParallelLinear(K, 16, HEADS, KV_HEADS, prefix="h.qkv", **common)
    return linear.RowParallelLinear(K, N, prefix="h.down", **common)


H, I, EXPERTS, TOP_K = 128, 256, 4, 2  # noqa: E741
"""Of a mixture: columns of tokens, width of an expert, experts, and those of a token."""
MIXTURE = "model.layers.0.mlp.experts"


def expert_weights() -> dict[str, Tensor]:
    """By the end of their names in a checkpoint, the float weights of a mixture."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
    return {
        f"{e}.{key}.weight": torch.randn(shape, generator=generator) * 0.1
        for e in range(EXPERTS)
        for key, shape in shapes.items()
    }


def routes(rows: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, and the weights and experts of their routes."""
    generator = torch.Generator().manual_seed(5)
    x, weights = torch.randn(rows, H, generator=generator), torch.rand(rows, TOP_K, generator=generator)
    ids = torch.rand(rows, EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
    return x, weights, ids.to(torch.int32)


def mixture(config: Any, tensors: dict[str, Tensor], name: str = MIXTURE, **options: Any) -> Any:
    """The routed experts of a mixture of vLLM, loaded as a model loads them.

    Args:
        config: vLLM's configuration.
        tensors: by the end of their names.
        name: of the module.
        options: of vLLM's mixture.
    """
    made = mixture_without_weights(config, name, **options)
    list(made.load_weights(iter(tensors.items())))
    routed = made.routed_experts
    routed.quant_method.process_weights_after_loading(routed)
    routed.quant_method.process_weights_after_loading(routed)  # vLLM does, where weights were quantized one by one
    return routed


def mixture_without_weights(config: Any, name: str = MIXTURE, **options: Any) -> Any:
    """A mixture of vLLM before it is loaded; see `mixture`."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers import fused_moe

    get_current_vllm_config().compilation_config.static_forward_context.pop(name, None)
    build = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE  # its name since 0.28, and before
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": H, "intermediate_size": I}
    return build(**{**sizes, "params_dtype": torch.float32, "quant_config": config, "prefix": name, **options})
