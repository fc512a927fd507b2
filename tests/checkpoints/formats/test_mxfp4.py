"""GPT-OSS as it is published, in MXFP4: its weights are those that transformers dequantizes, or it is refused."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import qcut
from qcut.checkpoints.formats.experts.layers import expert_layers
from qcut.checkpoints.formats.experts.whole import whole_stacks
from qcut.checkpoints.formats.floats.mxfp4 import Mxfp4
from qcut.checkpoints.formats.parts import Stored
from qcut.errors import CheckpointError, QcutError, UnsupportedError
from qcut.layers.experts.experts import Experts
from qcut.layers.experts.linear_stack import LinearStack
from tests.checkpoints.formats import samples
from tests.support.architectures import tiny_model
from tests.support.decoders import prompts_of, theirs

EXPERTS = "model.layers.0.mlp.experts"
SCHEME = "mxfp4"
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initial_context_length": 32,
}


def write(folder: Path, **changes: Any) -> Any:
    """Write a tiny GPT-OSS of random blocks; returns transformers' float model of the same weights, in float64."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((torch.randn_like(parameter) * 0.2).bfloat16())
    tensors = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    for name, module in samples.expert_modules(model).items():
        for key in ("gate_up_proj", "down_proj"):
            experts, k, n = getattr(module, key).shape
            blocks = torch.randint(0, 256, (experts, n, k // 32, 16), dtype=torch.uint8)
            scales = torch.randint(120, 125, (experts, n, k // 32), dtype=torch.uint8)
            del tensors[f"{name}.{key}"]
            tensors |= {f"{name}.{key}_blocks": blocks, f"{name}.{key}_scales": scales}
            getattr(module, key).data.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    samples.save(folder, tensors)
    described = json.loads(model.config.to_json_string(use_diff=False)) | changes
    described["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps({**described, "architectures": ["GptOssForCausalLM"]}))
    model = model.double()
    model.set_experts_implementation("eager")
    return model


def in_rows(weight: Tensor, turns: bool) -> Tensor:
    """A weight of transformers' experts, ``[E, K, N]``, as layers have it."""
    rows = weight.transpose(1, 2)
    return torch.cat([rows[:, 0::2], rows[:, 1::2]], 1) if turns else rows


@samples.newer_experts
def test_weights_and_biases_are_transformers(tmp_path: Path) -> None:
    expected = write(tmp_path)
    model = samples.loaded(tmp_path)
    for name, module in samples.expert_modules(expected).items():
        experts = model.get_submodule(name)
        assert isinstance(experts, Experts)
        assert (experts.gating.alpha, experts.gating.limit, experts.gating.plus_one) == (1.702, 7.0, True)
        for stack, key in ((experts.up, "gate_up_proj"), (experts.down, "down_proj")):
            turns = key == "gate_up_proj"
            assert stack.scheme.name == SCHEME
            assert torch.equal(stack.dequantized_weight().double(), in_rows(getattr(module, key), turns)), name
            bias = getattr(module, f"{key}_bias")
            bias = torch.cat([bias[:, 0::2], bias[:, 1::2]], 1) if turns else bias
            assert torch.equal(stack.bias.double(), bias)
    samples.assert_serves(model, expected, tmp_path / "saved")


@samples.newer_experts
def test_engines_serve_the_loaded_model(tmp_path: Path) -> None:
    """Prompts and steps beyond the window, with the tokens of transformers on the same modules."""
    write(tmp_path, sliding_window=8)
    model = qcut.load(tmp_path, dtype=torch.float32, progress=False)
    prompts = prompts_of(SIZES["vocab_size"], 5, 21)
    engine = qcut.Engine(model, batch=2)
    assert [block.attention.window for block in engine.decoder.blocks] == [8, 0]
    assert [made.tokens for made in engine.generate(prompts, 9)] == [theirs(model, prompt, 9) for prompt in prompts]


@samples.newer_experts
def test_one_stack_is_held_at_a_time(tmp_path: Path) -> None:
    write(tmp_path)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    held: list[weakref.ref[Tensor]] = []

    def counted(tensor: Tensor) -> Stored:
        def read() -> Tensor:
            copy = tensor.clone()
            held.append(weakref.ref(copy))
            return copy

        return replace(Stored.of(tensor), read=read)

    tensors = {name: counted(tensor) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    form = Mxfp4({}, "here")
    for stack in whole_stacks(model, form, tensors, "here"):
        made = LinearStack.of(list(expert_layers(form, stack.layers)), stack.parameter)
        assert made.experts == 4
        assert sum(one() is not None for one in held) <= 3
    assert len(held) == 4 * 3  # two mixtures of two projections: blocks, scales and bias of each, read once


def test_other_classes_of_experts_are_refused() -> None:
    model = tiny_model("JetMoeForCausalLM")
    name, weight = next((n, p) for n, p in model.named_parameters() if p.ndim == 3)
    tensors = {f"{name}_blocks": Stored.of(torch.zeros(*weight.shape[:2], 2, 16, dtype=torch.uint8))}
    with pytest.raises(UnsupportedError, match="does not say how the rows of its weights lie"):
        whole_stacks(model, Mxfp4({}, "here"), tensors, "here")


def changed(key: str, edit: Callable[[Tensor], Tensor | None]) -> Callable[[dict[str, Tensor]], None]:
    """Changes a tensor of the first mixture; None takes it away."""

    def change(tensors: dict[str, Tensor]) -> None:
        new = edit(tensors.pop(f"{EXPERTS}.{key}"))
        if new is not None:
            tensors[f"{EXPERTS}.{key}"] = new

    return change


def with_scale(expert: int, row: int, exponent: int) -> Callable[[Tensor], Tensor]:
    def edit(scales: Tensor) -> Tensor:
        scales[expert, row, 1] = exponent
        return scales

    return edit


@samples.newer_experts
@pytest.mark.parametrize(
    ("edit", "error", "text"),
    [
        (
            changed("down_proj_scales", with_scale(2, 5, 255)),
            CheckpointError,
            rf"expert 2: tensor '{EXPERTS}.down_proj_scales': found 255 at \[5, 1\], which is NaN",
        ),
        (
            changed("gate_up_proj_scales", with_scale(1, 6, 254)),
            UnsupportedError,
            rf"expert 1: tensor '{EXPERTS}.gate_up_proj_scales': found 254 at \[3, 1\]; up to 252",
        ),
        (
            changed("down_proj_scales", with_scale(0, 0, 60)),
            UnsupportedError,
            r"found 2\*\*-67 at \[0, 1\], in a row with 2\*\*-\d; scales .* 2\*\*24 apart",
        ),
        (changed("down_proj_scales", lambda t: None), CheckpointError, "down_proj_scales': is missing"),
        (changed("down_proj_blocks", lambda t: None), CheckpointError, "down_proj_blocks': is missing"),
        (changed("gate_up_proj_bias", lambda t: None), CheckpointError, "gate_up_proj_bias': is missing"),
        (
            changed("gate_up_proj_blocks", lambda t: t[:3].contiguous()),
            CheckpointError,
            r"gate_up_proj_blocks': found U8 \[3, 192, 2, 16\]; needed: \[4, 192, ...\]",
        ),
        (
            changed("gate_up_proj_blocks", lambda t: t[..., 1:].contiguous()),
            CheckpointError,
            r"gate_up_proj_blocks': found U8 \[96, 2, 15\]; needed: U8 \[96, 2, 16\]",
        ),
        (
            changed("down_proj_scales", lambda t: t.half()),
            CheckpointError,
            "down_proj_scales': found F16",
        ),
    ],
)
def test_bad_tensors_are_refused(
    tmp_path: Path, edit: Callable[[dict[str, Tensor]], None], error: type[QcutError], text: str
) -> None:
    write(tmp_path)
    samples.change(tmp_path, edit)
    samples.refused(tmp_path, error, text)


@samples.newer_experts
def test_unknown_fields_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    samples.change_config(tmp_path, lambda config: config.update(block_size=16))
    samples.refused(tmp_path, UnsupportedError, "found the field 'block_size' with '16'")
