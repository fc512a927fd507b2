"""Writes models of transformers as GGUF files, named by the gguf package and converted as llama.cpp's writers do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.decoders import SINCE

gguf = pytest.importorskip("gguf")
Type = gguf.GGMLQuantizationType
HIDDEN, VOCABULARY, HEADS, KV_HEADS, LAYERS = 256, 48, 4, 2, 2
IDS = torch.arange(9)[None] * 4 % VOCABULARY
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
TOKENIZER: dict[str, tuple[str, Any]] = {
    "ggml.model": ("string", "gpt2"),
    "ggml.tokens": ("array", [f"t{i}" for i in range(VOCABULARY)]),
    "ggml.bos_token_id": ("uint32", 1),
    "ggml.eos_token_id": ("uint32", 2),
}
_OF_EXPERTS = {"moe_intermediate_size": 256, "num_experts": 3, "num_experts_per_tok": 2}
_WINDOW = {"attention.sliding_window": ("uint32", 6)}


@dataclass(frozen=True)
class Family:
    """A small model of a family, and what its files state.

    Attributes:
        architecture: of the file.
        changes: of the model's configuration.
        entries: type and value of the file's own entries, next to the usual ones.
        left_out: usual entries that the family's writer leaves out.
    """

    architecture: str
    changes: dict[str, Any]
    entries: dict[str, tuple[str, Any]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


FAMILIES = {
    "llama": Family("llama", {"rope_theta": 30000.0}),
    "mixtral": Family("llama", {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "qwen2": Family("qwen2", {"tie_word_embeddings": True}),
    "qwen2_moe": Family(
        "qwen2moe",
        {**_OF_EXPERTS, "shared_expert_intermediate_size": 512},
        {"expert_feed_forward_length": ("uint32", 256), "expert_shared_feed_forward_length": ("uint32", 512)},
    ),
    "qwen3": Family("qwen3", {"head_dim": 128}),
    "qwen3_moe": Family(
        "qwen3moe",
        {**_OF_EXPERTS, "head_dim": 128, "norm_topk_prob": True},
        {"expert_feed_forward_length": ("uint32", 256), "expert_gating_func": ("uint32", 1)},
    ),
    "gpt_oss": Family(
        "gpt-oss",
        {
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "intermediate_size": 256,
            "head_dim": 64,
            "sliding_window": 6,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 16,
            },
        },
        {
            **_WINDOW,
            "expert_feed_forward_length": ("uint32", 256),
            "rope.scaling.type": ("string", "yarn"),
            "rope.scaling.factor": ("float32", 4.0),
            "rope.scaling.original_context_length": ("uint32", 16),
        },
    ),
    "granitemoe": Family(
        "granitemoe",
        {
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "attention_multiplier": 0.0625,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 3.0,
        },
        {
            "attention.scale": ("float32", 0.0625),
            "embedding_scale": ("float32", 6.0),
            "residual_scale": ("float32", 0.22),
            "logit_scale": ("float32", 3.0),
        },
    ),
    "ernie4_5_moe": Family(
        "ernie4_5-moe",
        {
            "moe_num_experts": 3,
            "moe_k": 2,
            "moe_intermediate_size": 256,
            "moe_num_shared_experts": 2,
            "num_hidden_layers": 3,
            "tie_word_embeddings": True,
        },
        {
            "expert_feed_forward_length": ("uint32", 256),
            "expert_shared_count": ("uint32", 2),
            "expert_shared_feed_forward_length": ("uint32", 256),
            "interleave_moe_layer_step": ("uint32", 1),
            "leading_dense_block_count": ("uint32", 1),
        },
    ),
    "hunyuan_v1_moe": Family(
        "hunyuan-moe",
        {"num_experts": 3, "moe_topk": 2, "head_dim": 64},
        {
            "expert_feed_forward_length": ("uint32", 512),
            "expert_shared_feed_forward_length": ("uint32", 512),
            "expert_shared_count": ("uint32", 1),
        },
    ),
    "gemma": Family("gemma", {"head_dim": 128}, left_out=("rope.freq_base",)),
    "gemma2": Family(
        "gemma2",
        {"head_dim": 128, "query_pre_attn_scalar": 128, "sliding_window": 6, "attn_logit_softcapping": 20.0},
        {
            **_WINDOW,
            "attn_logit_softcapping": ("float32", 20.0),
            "final_logit_softcapping": ("float32", 30.0),
        },
        ("rope.freq_base",),
    ),
    "gemma3_text": Family(
        "gemma3",
        {
            "head_dim": 128,
            "query_pre_attn_scalar": 128,
            "sliding_window": 6,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        {
            **_WINDOW,
            "rope.scaling.type": ("string", "linear"),
            "rope.scaling.factor": ("float32", 8.0),
        },
    ),
    "phi3": Family(
        "phi3",
        {"partial_rotary_factor": 0.75, "sliding_window": 6},
        {**_WINDOW, "rope.dimension_count": ("uint32", 48), "rope.scaling.original_context_length": ("uint32", 64)},
    ),
    "olmo2": Family("olmo2", {}),
    "olmoe": Family("olmoe", {"num_experts": 3, "num_experts_per_tok": 2}),
    "smollm3": Family("smollm3", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "starcoder2": Family("starcoder2", {"use_bias": True, "sliding_window": None}),
    "gpt2": Family("gpt2", {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64}),
    "gpt_neox": Family(
        "gptneox",
        {"rotary_pct": 0.25},
        {"rope.dimension_count": ("uint32", 16), "use_parallel_residual": ("bool", True)},
        ("rope.freq_base", "attention.head_count_kv"),
    ),
}
"""By ``model_type``."""


def small_model(family: str, **changes: Any) -> Any:
    """A small model in float32 with weights large enough that tokens differ."""
    since = SINCE.get(family, "0")
    if Version(transformers.__version__) < Version(since):
        pytest.skip(f"{family} is served from transformers {since} on")
    torch.manual_seed(0)
    own = dict(FAMILIES[family].changes)
    sizes = {k: v for k, v in SIZES.items() if family != "gpt2" or k in ("vocab_size", "bos_token_id", "eos_token_id")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**sizes, **own, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
            else:  # norms and biases that matter
                parameter.add_(torch.randn_like(parameter) * 0.2)
            if "norm" in name and family.startswith("gemma"):
                parameter.copy_((parameter + 1) - 1)  # what is left of it when 1 is added
    return model


def random_blocks(shape: tuple[int, ...], kind: Any, draws: numpy.random.Generator, size: float = 0.1) -> Any:
    """Random blocks of a type, uint8 ``[..., bytes]``: their values have about that standard deviation."""
    values, nbytes = gguf.GGML_QUANT_SIZES[kind]
    if kind is Type.MXFP4:
        weights = draws.standard_normal(shape, numpy.float32) * size
        return gguf.quants.quantize(weights, kind)
    blocks = draws.integers(0, 256, (*shape[:-1], shape[-1] // values, nbytes), dtype=numpy.uint8)
    scales = SCALES[kind.name]
    ratio = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5, "Q4_1": -7.5, "Q5_1": -15.5}.get(kind.name, 1.0)

    def set_scales(d: float) -> Any:
        for at, scale in zip(scales, (d, d * ratio), strict=False):
            blocks[..., at : at + 2] = numpy.array([scale], numpy.float16).view(numpy.uint8)
        blocks[..., scales[0] + 1] ^= signs
        return blocks.reshape(*shape[:-1], -1)

    if kind.name in ("Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS"):  # scales have the sign of the block's largest value
        signs = draws.integers(0, 2, blocks.shape[:-1], dtype=numpy.uint8) << 7
    else:
        signs = numpy.uint8(0)
    unit = float(gguf.quants.dequantize(set_scales(2.0**-8), kind).std()) * 2**8
    return set_scales(size / unit)


SCALES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),
}
"""Where a block has its float16 scales."""


def mixture_of(name: str, tensor: Any, *, attention: Any, values: Any, table: Any) -> Any:
    """The type of a tensor in a file such as ``Q4_K_M``: floats for vectors, another type for values and the table."""
    if tensor.ndim == 1 or name.endswith("bias") or "position" in name or "ffn_gate_inp" in name:
        return Type.F32
    if name.startswith(("token_embd", "output")):
        return table
    return values if "attn_v" in name or "ffn_down" in name else attention


def q4_k_m(name: str, tensor: Any) -> Any:
    """Types as llama.cpp's ``Q4_K_M`` has them, of every layer's values and down projections in Q6_K."""
    return mixture_of(name, tensor, attention=Type.Q4_K, values=Type.Q6_K, table=Type.Q6_K)


def write(
    path: Path,
    family: str,
    types: Callable[[str, Any], Any] = q4_k_m,
    *,
    entries: Mapping[str, tuple[str, Any] | None] | None = None,
    extra: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, tuple[str, Any]] | None = None,
    **changes: Any,
) -> Any:
    """Write a model of random blocks.

    Args:
        path: the file.
        family: a key of `FAMILIES`.
        types: of a tensor, by its name and value in the file.
        entries: other entries, or other values of those of the family; None leaves an entry out.
        extra: other tensors.
        tokenizer: its entries, without their prefix.
        changes: of the model's configuration.

    Returns:
        The model of the values that the gguf package makes of the file, float32.
    """
    kind, draws = FAMILIES[family], numpy.random.default_rng(0)
    model = small_model(family, **changes)
    out = gguf.GGUFWriter(str(path), kind.architecture)
    for key, entry in {**usual_entries(model, kind), **(entries or {})}.items():
        if entry is not None:
            getattr(out, f"add_{entry[0]}")(f"{kind.architecture}.{key}", entry[1])
    for key, entry in (TOKENIZER if tokenizer is None else tokenizer).items():
        getattr(out, f"add_{entry[0]}")(f"tokenizer.{key}", entry[1])
    for name, tensor in (extra or {}).items():
        out.add_tensor(name, tensor)
    with torch.no_grad():
        for name, indices, shift, parameter in converted(model, kind.architecture):
            values = (parameter.flatten()[indices.flatten()].view(indices.shape) + shift).numpy()
            type_ = types(name, values)
            if type_.name in SCALES:
                data = random_blocks(values.shape, type_, draws)
            else:
                data = gguf.quants.quantize(values, type_)
            out.add_tensor(name, data, raw_dtype=type_)
            back = torch.from_numpy(gguf.quants.dequantize(data, type_).copy()).view(indices.shape) - shift
            parameter.view(-1)[indices.flatten()] = back.flatten()
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return model


def usual_entries(model: Any, kind: Family) -> dict[str, tuple[str, Any]]:
    """What llama.cpp's writers state of every model."""
    config = model.config
    found: dict[str, tuple[str, Any]] = {
        "block_count": ("uint32", config.num_hidden_layers),
        "context_length": ("uint32", config.max_position_embeddings),
        "embedding_length": ("uint32", config.hidden_size),
        "feed_forward_length": ("uint32", getattr(config, "intermediate_size", 4 * config.hidden_size)),
        "attention.head_count": ("uint32", config.num_attention_heads),
    }
    if kind.architecture == "gpt2":
        return {**found, "attention.layer_norm_epsilon": ("float32", config.layer_norm_epsilon)}
    found["attention.head_count_kv"] = "uint32", getattr(config, "num_key_value_heads", HEADS)
    norms = [getattr(config, key, None) for key in ("rms_norm_eps", "layer_norm_eps", "norm_epsilon")]
    epsilon = "layer_norm_rms_epsilon" if norms[0] is not None else "layer_norm_epsilon"
    found[f"attention.{epsilon}"] = "float32", next(value for value in norms if value is not None)
    rope = config.rope_parameters
    found["rope.freq_base"] = "float32", rope.get("full_attention", rope)["rope_theta"]
    if getattr(config, "head_dim", None) is not None:
        found |= {f"attention.{key}_length": ("uint32", config.head_dim) for key in ("key", "value")}
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts is not None:
        found |= {"expert_count": ("uint32", experts), "expert_used_count": ("uint32", config.num_experts_per_tok)}
    return {key: value for key, value in found.items() if key not in kind.left_out} | kind.entries


def converted(model: Any, architecture: str) -> Iterator[tuple[str, Tensor, float, Tensor]]:
    """The tensors of a file: name, the index of each of its values in the parameter, what is added, the parameter."""
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    for full, parameter in model.named_parameters():
        full = full.replace("block_sparse_moe", "mlp").replace("mlp.router.w", "mlp.gate.w")  # of Granite
        module, _, key = full.rpartition(".")
        indices = torch.arange(parameter.numel()).view(parameter.shape)
        shift = 1.0 if architecture.startswith("gemma") and module.endswith("norm") else 0.0
        if module.endswith(".experts"):
            for part, one in parts_of_experts(key, indices, in_turn=architecture == "gpt-oss").items():
                suffix = "bias" if key.endswith("_bias") else "weight"
                yield f"{names.get_name(f'{module}.{part}')}.{suffix}", one, shift, parameter
            continue
        if key == "sinks":
            yield f"{names.get_name(full)}.weight", indices, shift, parameter
            continue
        if key == "e_score_correction_bias":
            place = names.get_name(full.replace("gate.", "").removesuffix("_bias"))
            yield f"{place}.bias", indices[0], shift, parameter
            continue
        new = names.get_name(module)
        assert new is not None, full
        yield f"{new}.{key}", reordered(model.config, architecture, new, indices), shift, parameter


def parts_of_experts(key: str, indices: Tensor, in_turn: bool) -> dict[str, Tensor]:
    """All experts' gates and ups, or downs, rows before columns. Of GPT-OSS columns are first, and rows take turns."""
    rows = indices.swapaxes(1, 2) if in_turn and indices.dim() == 3 else indices
    if key.startswith("down_proj"):
        return {"down_proj": rows}
    both = (rows[:, ::2], rows[:, 1::2]) if in_turn else rows.chunk(2, 1)
    return dict(zip(("gate_proj", "up_proj"), both, strict=True))


def reordered(config: Any, architecture: str, name: str, rows: Tensor) -> Tensor:
    """What llama.cpp's writers do to the rows of a tensor."""
    stem = name.rpartition(".")[2]
    if architecture in ("llama", "smollm3", "granitemoe") and stem in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if stem == "attn_q" else config.num_key_value_heads
        return rows.unflatten(0, (heads, 2, -1)).swapaxes(1, 2).reshape(rows.shape)
    if architecture == "gptneox" and stem == "attn_qkv":
        heads = rows.unflatten(0, (config.num_attention_heads, 3, -1))
        return torch.cat([part.flatten(0, 1) for part in heads.unbind(1)])
    if architecture == "gpt2" and rows.dim() == 2 and name.startswith("blk"):
        return rows.t()
    return rows[0] if stem == "ffn_gate_inp_shexp" else rows
