"""Tiny Llamas in other libraries' formats: packed here from the formats' definitions, integer by integer."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.integrations import moe

import qcut
from qcut.errors import QcutError
from tests.support.files import write_tensors

HIDDEN, MLP, VOCABULARY = 64, 128, 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
IDS = torch.arange(9)[None] * 4 % VOCABULARY

Packed = tuple[dict[str, Tensor], Tensor]
"""A layer's tensors by the ends of their names, and the weight that they stand for, float64 ``[N, K]``."""
Tokens = Callable[[str, Tensor], Tensor]
"""What a library makes of tokens float32 ``[M, 1, K]``, quantized and dequantized, by the name of their layer."""


def llama(**changes: Any) -> Any:
    """A Llama with weights large enough that tokens differ."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter * (5 if parameter.dim() > 1 else 1)).half())
    return model


def refused(path: Path, error: type[QcutError] | tuple[type[QcutError], ...], text: str) -> None:
    """Check that both doors refuse a checkpoint, with one message."""
    said = []
    for door in (lambda: qcut.load(path, progress=False), lambda: served(path)):
        with pytest.raises(error, match=text) as caught:
            door()
        said.append((type(caught.value), str(caught.value)))
    assert said[0] == said[1]


_FLAGS = signature(moe.use_experts_implementation).parameters
newer_experts = pytest.mark.skipif("is_concatenated" not in _FLAGS, reason="experts of this transformers say less")
"""Of tests of mixtures, which are held to what newer versions of transformers make of the same files."""


def served(folder: Path, **options: Any) -> Any:
    """A checkpoint as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(folder, config=qcut.foreign_config(folder), **options)


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A checkpoint through `qcut.load`, and through transformers, which gives the same tensors."""
    model, other = qcut.load(folder, dtype=dtype, progress=False), served(folder, dtype=dtype)
    mine, its = model.state_dict(), other.state_dict()
    assert list(mine) == list(its)
    assert all(mine[key].dtype == its[key].dtype and torch.equal(mine[key], its[key]) for key in mine)
    for name, layer in other.named_modules():
        if isinstance(layer, qcut.Linear):
            assert layer.scheme == model.get_submodule(name).scheme
    return model


def assert_serves(model: Any, expected: Any, folder: Path, tokens: Tokens | None = None) -> None:
    """Check a model's logits against those in float64, and that it computes the same bits after `qcut.save`.

    A token in the middle of two values of e4m3 goes to either, by the rounding of what is before it, and layers behind
    it follow: of quantized tokens only the distance of all logits is bounded.
    """
    if tokens is not None:
        _quantize_tokens(expected, model, tokens)
    with torch.no_grad():
        logits = model(IDS).logits
        want = expected(IDS).logits
        if tokens is None:
            torch.testing.assert_close(logits.double(), want, rtol=1e-3, atol=1e-3)
        assert (logits - want).norm() < 0.1 * want.norm()
        qcut.save(model, folder)
        assert torch.equal(qcut.load(folder, progress=False)(IDS).logits, logits)


def _quantize_tokens(expected: Any, model: Any, tokens: Tokens) -> None:
    """Have a float model quantize the tokens of layers that another has quantized."""

    def hook(name: str) -> Callable[[Any, tuple[Tensor]], Tensor]:
        return lambda _, inputs: tokens(name, inputs[0].float().flatten(0, -2)[:, None]).view_as(inputs[0]).double()

    for name, layer in model.named_modules():
        if isinstance(layer, qcut.Linear):
            expected.get_submodule(name).register_forward_pre_hook(hook(name))


def _assert_tokens(layer: Any, weight: Tensor, made: Callable[[Tensor], Tensor]) -> None:
    """Check a layer's tokens, and its result against that in float64."""
    x = torch.randn(7, 1, layer.in_features, generator=torch.Generator().manual_seed(0)) * 3
    q = made(x)[:, 0]
    assert torch.equal(layer.quantized_tokens(x[:, 0]), q)
    exact, sizes = q.double() @ weight.t(), q.double().abs() @ weight.abs().t()
    assert ((layer(x)[:, 0].double() - exact).abs() <= (layer.in_features + 2) * 2.0**-23 * sizes).all()


def linears(model: Any) -> dict[str, Any]:
    """The layers that writers quantize: all but the classifier."""
    return {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}


def write(folder: Path, config: dict[str, Any], pack: Callable[[str, Tensor], Packed], **changes: Any) -> Any:
    """Write a checkpoint.

    Args:
        folder: where.
        config: the ``quantization_config``.
        pack: of a layer's name and float weight.
        changes: of the model's sizes.

    Returns:
        The float model with the weights that the tensors stand for, in float64.
    """
    model = llama(**changes)
    tensors = {name: p.detach().half() for name, p in model.state_dict().items()}
    weights = {}
    for name, module in linears(model).items():
        del tensors[f"{name}.weight"]
        packed, weights[name] = pack(name, module.weight.detach())
        tensors |= {f"{name}.{key}": tensor.contiguous() for key, tensor in packed.items()}
    save(folder, tensors)
    described = {**json.loads(model.config.to_json_string(use_diff=False)), "quantization_config": config}
    (folder / "config.json").write_text(json.dumps({**described, "architectures": ["LlamaForCausalLM"]}))
    model = model.double()
    with torch.no_grad():
        for name, module in linears(model).items():
            module.weight.copy_(weights[name])
    return model


MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [1]},
    "mixtral": {"intermediate_size": 64, "num_local_experts": 3, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
}
"""Sizes of tiny mixtures, by their ``model_type``: one dense layer and one of experts, or two of experts."""
EXPERT_NAMES = {"mixtral": ("w1", "w3", "w2")}
"""What writers call the gate, up and down of one expert; of the others gate_proj, up_proj, down_proj."""


def mixture(family: str) -> Any:
    """A tiny mixture with weights large enough that tokens and experts differ."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **MIXTURES[family]})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter * (5 if parameter.dim() > 1 else 1)).half())
    return model


def expert_modules(model: Any) -> dict[str, Any]:
    """The modules of a model's experts, float or quantized."""
    return {name: module for name, module in model.named_modules() if name.endswith(".experts")}


def stored_experts(model: Any) -> dict[str, Tensor]:
    """The weights of experts as views, one by one, by the names of their layers in files."""
    weights = {}
    for name, module in expert_modules(model).items():
        names = EXPERT_NAMES.get(model.config.model_type, ("gate_proj", "up_proj", "down_proj"))
        place = name.replace(".mlp.", ".block_sparse_moe.") if names[0] == "w1" else name
        for e in range(len(module.down_proj)):
            gate, up = module.gate_up_proj[e].detach().chunk(2)
            for key, weight in zip(names, (gate, up, module.down_proj[e].detach()), strict=True):
                weights[f"{place}.{e}.{key}"] = weight
    return weights


def write_mixture(
    folder: Path, family: str, config: dict[str, Any], pack: Callable[[str, Tensor], Packed | None]
) -> Any:
    """Write a mixture as libraries do, with tensors of their own for each expert.

    Args:
        folder: where.
        family: one of `MIXTURES`.
        config: the ``quantization_config``.
        pack: of the name of a layer, in the files, and its float weight; None leaves it in float.

    Returns:
        The float model with the weights that the tensors stand for, in float64.
    """
    model = mixture(family)
    fused = {f"{name}.{key}" for name in expert_modules(model) for key in ("gate_up_proj", "down_proj")}
    tensors = {name: p.detach().half() for name, p in model.named_parameters() if name not in fused}
    tensors |= {name: b for name, b in model.named_buffers() if name in model.state_dict()}
    if family == "mixtral":
        tensors = {name.replace(".mlp.", ".block_sparse_moe."): p for name, p in tensors.items()}
    model = model.double()
    model.set_experts_implementation("eager")  # no other computes in float64
    dense = {name: module.weight.detach() for name, module in linears(model).items()}
    for name, weight in {**dense, **stored_experts(model)}.items():
        packed = pack(name, weight.float())
        if packed is None:
            tensors[f"{name}.weight"] = weight.half()
            continue
        tensors.pop(f"{name}.weight", None)
        tensors |= {f"{name}.{key}": tensor.contiguous() for key, tensor in packed[0].items()}
        weight.copy_(packed[1])
    save(folder, tensors)
    described = {**json.loads(model.config.to_json_string(use_diff=False)), "quantization_config": config}
    described |= {"architectures": [type(model).__name__], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(described))
    return model


def save(folder: Path, tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "model.safetensors", {name: t.contiguous() for name, t in tensors.items()})


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save(folder, tensors)


def change_config(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the ``quantization_config`` of a checkpoint."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config["quantization_config"])
    path.write_text(json.dumps(config))


def asymmetric(weight: Tensor, size: int, bits: int = 4, *, symmetric: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Integers ``[N, K]`` from 0 up, float16 scales ``[N, G]`` and zero points ``[N, G]`` of groups of neighbours."""
    n, k = weight.shape
    most = (1 << bits) - 1
    groups = weight.view(n, k // size, size)
    if symmetric:
        scales = (groups.abs().amax(2) / (most // 2)).half()
        zeros = torch.full(scales.shape, (most + 1) // 2)
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = ((high - low) / most).half()
        zeros = (-low / scales.float()).round().clamp(0, most).int()
    q = (groups / scales.float()[..., None]).round() + zeros[..., None]
    return q.clamp(0, most).int().view(n, k), scales, zeros.int()


def words(q: Tensor, bits: int = 4) -> Tensor:
    """int32 words of integers along the last dimension, the lowest bits first."""
    parts = q.long().reshape(*q.shape[:-1], -1, 32 // bits) << torch.arange(0, 32, bits)
    words = parts.sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def gptq(weight: Tensor, *, size: int, bits: int = 4, added: int = 1, order: Tensor | None = None,
         symmetric: bool = False) -> Packed:  # fmt: skip
    """A layer as GPTQ stores it; ``order`` says which columns make a group, one after another."""
    k = weight.shape[1]
    order = torch.arange(k) if order is None else order
    q, scales, zeros = asymmetric(weight[:, order], size, bits, symmetric=symmetric)
    groups = torch.empty(k, dtype=torch.int32)
    groups[order] = torch.arange(k, dtype=torch.int32) // size
    back = torch.empty_like(q)
    back[:, order] = q
    stored = {
        "qweight": words(back, bits).t(),  # along K
        "qzeros": words((zeros - added).t() % (1 << bits), bits),  # along N
        "scales": scales.t(),
        "g_idx": groups,
    }
    exact = scales.double()[:, groups.long()] * (back - zeros[:, groups.long()]).double()
    return stored, exact


def awq(weight: Tensor, size: int) -> Packed:
    """A layer as AWQ's gemm version stores it."""
    q, scales, zeros = asymmetric(weight, size)

    def pack(by_row: Tensor) -> Tensor:
        eights = by_row.reshape(len(by_row), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return words(eights.reshape(len(by_row), -1))

    exact = scales.double().repeat_interleave(size, 1) * (q - zeros.repeat_interleave(size, 1)).double()
    return {"qweight": pack(q.t()), "qzeros": pack(zeros.t()), "scales": scales.t()}, exact


def _bitsandbytes(folder: Path) -> None:
    from tests.checkpoints.formats.test_bitsandbytes import FOUR, four

    write(folder, FOUR, lambda _, weight: four(weight))


def compressed_tensors(weight: Tensor, size: int) -> Packed:
    """A layer as compressed-tensors stores 4 bits without symmetry."""
    q, scales, zeros = asymmetric(weight, size)
    exact = scales.double().repeat_interleave(size, 1) * (q - zeros.repeat_interleave(size, 1)).double()
    stored = {"weight_packed": words(q), "weight_scale": scales, "weight_zero_point": words(zeros.t()).t()}
    return {**stored, "weight_shape": torch.tensor(weight.shape)}, exact


def mxfp4(weight: Tensor) -> Packed:
    """A layer as compressed-tensors stores e2m1 with a power of two for each 32 columns."""
    groups = weight.double().view(len(weight), -1, 32)
    exponent = torch.log2(groups.abs().amax(2).clamp(min=1e-9)).floor() - 2
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    scaled = groups / torch.exp2(exponent)[:, :, None]
    place = (scaled.abs()[..., None] - values).abs().argmin(-1)
    exact = values[place].copysign(scaled) * torch.exp2(exponent)[:, :, None]
    codes = (place + 8 * (scaled < 0)).to(torch.uint8).view(len(weight), -1)
    stored = {"weight_packed": codes[:, 0::2] | codes[:, 1::2] << 4, "weight_scale": (exponent + 127).to(torch.uint8)}
    return stored, exact.view(weight.shape)


def nvfp4(weight: Tensor) -> Packed:
    """A layer as compressed-tensors stores e2m1 with an e4m3 scale for each 16 columns and a scale of the layer."""
    groups = weight.float().view(len(weight), -1, 16)
    whole = 2688 / groups.abs().amax()
    scales = (whole * (groups.abs().amax(2) / 6)).clamp(2.0**-9, 448).to(torch.float8_e4m3fn)
    step = scales.float() / whole
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    place = ((groups / step[..., None]).abs()[..., None] - values).abs().argmin(-1)
    codes = (place + 8 * (groups < 0)).to(torch.uint8).flatten(1)
    exact = (values[place].copysign(groups) * step[..., None]).flatten(1)
    stored = {"weight_packed": codes[:, 0::2] | codes[:, 1::2] << 4, "weight_scale": scales}
    return {**stored, "weight_global_scale": whole.reshape(1)}, exact.double()


def assert_weights(folder: Path, expected: Any, scheme: str, tokens: Tokens | None = None) -> None:
    """Check that both doors read layers of a scheme with exactly the expected weights and tokens, and they serve."""
    model = loaded(folder)
    for name, module in linears(expected).items():
        layer = model.get_submodule(name)
        assert layer.scheme.name == scheme
        assert torch.equal(layer.dequantized_weight(), module.weight.float()), name
        if tokens is not None:
            _assert_tokens(layer, module.weight, partial(tokens, name))
    assert_serves(model, expected, folder / "saved", tokens)


def assert_expert_weights(folder: Path, expected: Any, scheme: str, tokens: Tokens | None = None) -> None:
    """Check the same of a mixture's experts. Tokens are those of its dense layers."""
    model = loaded(folder)
    for name, module in expert_modules(expected).items():
        experts = model.get_submodule(name)
        assert experts.up.scheme.name == experts.down.scheme.name == scheme
        assert torch.equal(experts.up.dequantized_weight(), module.gate_up_proj.float()), name
        assert torch.equal(experts.down.dequantized_weight(), module.down_proj.float()), name
    assert_serves(model, expected, folder / "saved", tokens)


def float8(weight: Tensor, *, rows: bool = False, scales: str = "weight_scale") -> Packed:
    """e4m3 with a scale for each row or for the layer."""
    scale = weight.float().abs().amax(1 if rows else (0, 1)) / 448
    q = (weight.float() / scale.reshape(-1, 1)).to(torch.float8_e4m3fn)
    return {"weight": q, scales: scale}, q.double() * scale.double().reshape(-1, 1)


def input_scale(name: str) -> Tensor:
    """A scale of the tokens of a layer, another one for each layer of a block."""
    return torch.tensor(0.007 * (1 + sum(map(ord, name)) % 7))


def static_tokens(name: str, x: Tensor) -> Tensor:
    """Tokens rounded to e4m3 with the layer's scale, by definition."""
    scale = input_scale(name)
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def dynamic_tokens(_: str, x: Tensor) -> Tensor:
    """Tokens rounded to e4m3 with a scale each, by definition."""
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def _gguf(folder: Path) -> None:
    from tests.checkpoints.formats.gguf.test_llama import Type
    from tests.checkpoints.formats.gguf.test_llama import write as write_gguf

    write_gguf(folder / "model.gguf", Type.Q4_0)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 32},
        }
    },
}
E2M1 = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        }
    },
}
GLOBALLY_SCALED = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        }
    },
}
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "ignore": ["lm_head"],
    "producer": {"name": "modelopt", "version": "0.47.0"},
}
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None}
CHECKPOINTS: dict[str, Callable[[Path], Any]] = {
    "modelopt": lambda folder: write(folder, MODELOPT, lambda _, w: float8(w)),
    "fbgemm_fp8": lambda folder: write(folder, FBGEMM, lambda _, w: float8(w, rows=True)),
    "fp8": lambda folder: write(folder, FP8, lambda _, w: float8(w, scales="weight_scale_inv")),
    "gptq": lambda folder: write(folder, GPTQ, lambda _, weight: gptq(weight, size=32)),
    "awq": lambda folder: write(folder, AWQ, lambda _, weight: awq(weight, 32)),
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": lambda folder: write(folder, PACKED, lambda _, weight: compressed_tensors(weight, 32)),
    "mxfp4": lambda folder: write(folder, E2M1, lambda _, weight: mxfp4(weight)),
    "nvfp4": lambda folder: write(folder, GLOBALLY_SCALED, lambda _, weight: nvfp4(weight)),
    "gguf": _gguf,
}
"""What writes a small checkpoint of each library into an empty folder."""
