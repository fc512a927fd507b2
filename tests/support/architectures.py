"""Small random models of the architectures of transformers, and one check for all of them."""

from __future__ import annotations

import copy
import inspect
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qcut
from qcut.layers.experts.experts import Experts
from qcut.layers.experts.forms import DenseExperts, ParallelExperts
from qcut.layers.quantized import quantized_layers
from qcut.models.modules import output_tensor, tensor_key
from qcut.models.selection import linear_layers

BOUNDS = {"w8a16": 0.05, "w8a8": 0.12, "codebook4": 0.8}
"""Schemes, and how far the output of a random model may go: ``‖y - ŷ‖ / ‖y‖``."""

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "decoder_hidden_size", "model_dim"), 64),
    **dict.fromkeys(("embedding_size", "projection_dim", "rnn_hidden_size", "word_embed_proj_dim", "lru_width"), 64),
    **dict.fromkeys(("attention_hidden_size", "time_step_rank", "kv_lora_rank", "q_lora_rank", "conv_dim_out"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "decoder_num_hidden_layers", "num_blocks"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "decoder_num_attention_heads", "num_q_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_kv_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("hidden_dim", "d_inner", "ffn_hidden_size", "mlp_hidden_size", "inner_dim"), 128),
    **dict.fromkeys(("intermediate_size_mlp", "shared_expert_intermediate_size", "moe_intermediate_size"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "v_head_dim", "attention_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim", "global_head_dim"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("vocab_size", "type_vocab_size_"), 128),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "context_length"), 64),
    **dict.fromkeys(("max_source_positions", "max_target_positions", "sliding_window"), 64),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 16),
    **dict.fromkeys(("image_size",), 32),
    **dict.fromkeys(("patch_size",), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 32),
    **dict.fromkeys(("mamba_d_ssm",), 128),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1),
}

_ALSO: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"expert_ffn_hidden_size": 64, "zero_expert_num": 2, "moe_topk": 2, "num_layers": 1},
    "nllb-moe": {"encoder_sparse_step": 1, "decoder_sparse_step": 1, "expert_capacity": 64},
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "expert_capacity": 64},
    "mamba": {"time_step_rank": 8},
    "mamba2": {"head_dim": 32, "num_heads": 4},
    "falcon_h1": {"mamba_d_state": 16},
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
        "head_dim": 16,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 16,
        "global_head_dim": 16,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite": {"attention_multiplier": 0.25},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "rwkv": {"attention_hidden_size": 64},
    "swin": {"patch_size": 4, "embed_dim": 32, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2},
    "mpt": {},
    "xlnet": {"d_head": 16},
    "funnel": {"block_sizes": [1, 1, 1], "d_head": 16},
    "phi3": {"pad_token_id": 1},
    "reformer": {"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [32, 32], "attn_layers": ["local", "lsh"]},
    "wav2vec2": {"conv_dim": [32, 32], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2},
    "zamba": {"attn_layer_indices": [1]},
    "recurrent_gemma": {"attention_window_size": 16},
}
"""By model type, what the common sizes do not make consistent."""


def tiny_config(config_class: Any) -> Any:
    """A configuration of a few thousand parameters, sizes that go by any of the usual names made small."""
    kind = config_class.model_type
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        default = config_class()
        values = _shrunk(default) | _ALSO.get(kind, {})
        return config_class(**values)


def _shrunk(default: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    names = set(inspect.signature(type(default).__init__).parameters) | set(vars(default))
    mapped = getattr(type(default), "attribute_map", {})
    for name in sorted(names):
        try:
            value = getattr(default, name, None)
        except Exception:  # a value that may differ from layer to layer has none for all
            value = None
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            fields[name] = _shrunk(value)
        elif name in _SIZES and name not in mapped and not isinstance(value, (list, tuple, dict)):
            if value is None and name not in ("num_key_value_heads", "intermediate_size", "head_dim"):
                continue
            fields[name] = _SIZES[name]
    heads = [getattr(default, name, None) for name in ("num_attention_heads", "num_key_value_heads")]
    if heads[0] == heads[1] and "num_key_value_heads" in fields:
        fields["num_key_value_heads"] = fields.get("num_attention_heads", heads[0])
    return fields


def tiny_model(name: str, seed: int = 0) -> Any:
    """A random model of a class of transformers, in evaluation mode."""
    import transformers

    cls: Any = getattr(transformers, name)
    config = tiny_config(cls.config_class)
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
    if size > 20_000_000:
        raise ValueError(f"{name}: {size} parameters with the sizes that are known here")
    torch.manual_seed(seed)
    model = cls(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            # Some classes leave memory as they find it, or begin with values so small that they hide an error.
            if not parameter.any() or not 1e-8 < parameter.abs().max() <= 100:
                parameter.normal_(std=0.02, generator=generator)
    return model.eval()


def inputs_of(model: Any) -> dict[str, Any] | None:
    """A batch for a model, by the names that its forward takes; None if no batch that is known here runs."""
    for batch in _batches(model):
        try:
            with torch.no_grad():
                run(model, batch)
            return batch
        except Exception:  # a foreign forward may raise anything at inputs that it does not take
            continue
    return None


def _batches(model: Any) -> Iterator[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    names = inspect.signature(model.forward).parameters
    config = model.config
    vision = getattr(config, "vision_config", config)
    side = getattr(vision, "image_size", 32)
    side = side if isinstance(side, int) else 32
    ids = torch.randint(2, 100, (2, 12), generator=generator)
    bins = getattr(config, "num_mel_bins", None) or getattr(config, "feature_size", None) or 80
    frames = 2 * (getattr(config, "max_source_positions", None) or 32)
    known: dict[str, Any] = {
        "input_ids": ids,
        "pixel_values": torch.randn(2, getattr(vision, "num_channels", None) or 3, side, side, generator=generator),
        "input_values": torch.randn(2, 800, generator=generator),
        "input_features": torch.randn(2, bins, frames, generator=generator),
    }
    extra: dict[str, Any] = {"use_cache": False} if "use_cache" in names else {}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        extra["decoder_input_ids"] = ids[:, :8]
    main = getattr(model, "main_input_name", "input_ids")
    for chosen in ([main], ["input_ids", "pixel_values"], ["pixel_values"], ["input_ids"], ["input_features"]):
        if all(key in known and key in names for key in chosen):
            yield {**extra, **{key: known[key] for key in chosen}}
    if "input_features" in names:
        yield {**extra, "input_features": known["input_features"].transpose(1, 2)}


@dataclass(frozen=True)
class Outcome:
    """What quantizing one model under one scheme came to."""

    layers: int
    left: int
    error: float
    percent: dict[str, float]


def check(model: Any, batch: dict[str, Any] | None, scheme: str, build: Any = None) -> Outcome:
    """Quantize a copy, run it, save and load it; every promise is asserted.

    Args:
        model: the float model.
        batch: for its forward; with None it is not run, and what is loaded is compared by its state.
        scheme: one of `BOUNDS`.
        build: makes a model of its class, where qcut.load cannot.
    """
    changed = copy.deepcopy(model)
    total = sum({tensor_key(p): p.numel() for p in model.parameters()}.values()) - unread_parameters(model)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        report = qcut.quantize(changed, scheme, skip=(), progress=False)
        assert sum(report.parameters.values()) == total, (report.parameters, total)
        _, cannot = linear_layers(model)
        assert set(cannot) <= set(report.skipped)
        assert all(reason for reason in report.skipped.values())
        assert str(report)
        qcut.save(changed, Path(folder) / "saved")
        back = qcut.load(Path(folder) / "saved", model=build, progress=False)
        assert set(report.schemes) == set(quantized_layers(changed))
        error = _compare_states(changed, back) if batch is None else _compare_runs(model, changed, back, batch)
    assert error <= BOUNDS[scheme], f"{scheme}: error {error:.3f}"
    return Outcome(len(report.layers), len(report.skipped), error, report.percent)


def _compare_states(changed: nn.Module, back: nn.Module) -> float:
    a, b = changed.state_dict(), back.state_dict()
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) or not a[key].isfinite().all() for key in a)
    return 0.0


def _compare_runs(model: nn.Module, changed: nn.Module, back: nn.Module, batch: dict[str, Any]) -> float:
    """The relative error of the quantized model's output; the loaded model's is the same, bit by bit.

    Routers of random models are near ties, and the output jumps where one token gets another expert: the quantized
    models take the float model's routes.
    """
    with recorded_routes(model) as record:
        want = run(model, batch)
    with forced_routes(changed, record):
        got = run(changed, batch)
    again = run(model, batch)
    if not torch.equal(want, again) or want.shape != got.shape:
        return 0.0  # noise in the forward, or a length that depends on values
    with forced_routes(back, record):
        assert torch.equal(run(back, batch), got), "the loaded model computes something else"
    if record:
        assert torch.equal(run(back, batch), run(changed, batch)), "the loaded model has other routes"
    finite = want.isfinite()
    assert torch.equal(finite, got.isfinite())
    a, b = want[finite].double(), got[finite].double()
    return ((b - a).norm() / a.norm().clamp_min(1e-12)).item()


def run(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The model's output, from one state of the generator."""
    torch.manual_seed(5)
    return output_tensor(model(**batch)).float()


def unread_parameters(model: nn.Module) -> int:
    """Parameters of experts that are the identity, which LongCat's class has and never reads: nothing keeps them."""
    found: list[Any] = [m for m in model.modules() if type(m).__name__ == "LongcatFlashExperts"]
    return sum(m.gate_up_proj[m.num_routed_experts :].numel() for m in found)


Routes = dict[str, list[Any]]
"""By module, what the router gave in each call: what experts got besides tokens, or a router's result."""


@contextmanager
def recorded_routes(model: nn.Module) -> Iterator[Routes]:
    """Records the routes of every mixture of a float model."""
    found: Routes = {}
    handles = []
    for name, module in model.named_modules():
        calls = found.setdefault(name, []) if _routed(module) or _router(model, name) else None
        if calls is None:
            continue
        if _routed(module):
            handles.append(module.register_forward_pre_hook(lambda _, args, calls=calls: calls.append(args[1:])))
        else:
            handles.append(module.register_forward_hook(lambda _, __, result, calls=calls: calls.append(result)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def forced_routes(model: nn.Module, record: Routes) -> Iterator[None]:
    """Lets a quantized model take the routes that the float model took."""
    handles = []
    for name, calls in record.items():
        module, left = model.get_submodule(name), iter(calls)
        if _router(model, name):
            handles.append(module.register_forward_hook(lambda _, __, ___, left=left: next(left)))
        else:
            handles.append(module.register_forward_pre_hook(lambda _, args, left=left: (args[0], *next(left))))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _routed(module: nn.Module) -> bool:
    """Whether a module gets routes as arguments."""
    own_routes = type(module).__name__ in ("Llama4TextExperts", "JetMoeParallelExperts")
    if isinstance(module, Experts):
        return not isinstance(module, (DenseExperts, ParallelExperts))
    return type(module).__name__.endswith("Experts") and not own_routes


def _router(model: nn.Module, name: str) -> bool:
    """Whether a module is the router of experts that get none as arguments."""
    return type(model.get_submodule(name)).__name__ in ("Llama4Router", "JetMoeTopKGating")
