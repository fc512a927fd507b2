"""The engine computes what the model does, or names the module in which it would not."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PrefixTuningConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrize
from transformers import AttentionInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM, LlamaMLP, LlamaRMSNorm

import qcut
from qcut.engine.engine import Engine
from qcut.engine.families import FAMILIES
from qcut.engine.families.fidelity import check_model
from qcut.errors import UnsupportedError
from qcut.layers.experts.forms import DenseExperts
from tests.support.decoders import KINDS, VOCABULARY, prompts_of, small

Change = Callable[[Any], object]


def served(model: Any) -> None:
    """Whether the engine's logits are the model's."""
    (prompt,) = prompts_of(VOCABULARY, 11)
    with torch.no_grad():
        want = model.eval()(torch.tensor([prompt])).logits[:, -1]
    torch.testing.assert_close(Engine(model, context=32).prefill([prompt]), want)


def refused(model: Any, *words: str) -> None:
    with pytest.raises(UnsupportedError) as found:
        Engine(model, context=32)
    for word in words:
        assert word in str(found.value)


def made(base: type, **overrides: Any) -> type:
    """A subclass."""
    return type(f"Own{base.__name__}", (base,), overrides)


def as_own(module: nn.Module, **overrides: Any) -> None:
    module.__class__ = made(type(module), **overrides)


def double(self: Any, *arguments: Any, **options: Any) -> Any:
    return 2 * super(type(self), self).forward(*arguments, **options)


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


# ── what computes otherwise ──────────────────────────────────────────────────────────────────────

LAYER = "model.layers.1"
OTHERWISE: dict[str, tuple[str, Change, tuple[str, ...]]] = {
    "model": ("llama", lambda m: as_own(m, forward=double), ("OwnLlamaForCausalLM", "forward")),
    "body": ("llama", lambda m: as_own(m.model, forward=double), ("model:", "OwnLlamaModel", "forward")),
    "attention": ("qwen3", lambda m: as_own(m.model.layers[1].self_attn, forward=double), (f"{LAYER}.self_attn",)),
    "mlp": ("gemma2", lambda m: as_own(m.model.layers[1].mlp, forward=double), (f"{LAYER}.mlp", "OwnGemma2MLP")),
    "norm": ("olmo2", lambda m: as_own(m.model.norm, forward=double), ("model.norm",)),
    "helper": ("gemma", lambda m: as_own(m.model.norm, _norm=lambda self, x: x), ("model.norm", "_norm")),
    "call": ("phi3", lambda m: as_own(m.model.layers[0].mlp, __call__=double), ("__call__",)),
    "property": ("llama", lambda m: as_own(m.model.layers[1].mlp, act_fn=property(lambda _: torch.relu)), ("act_fn",)),
    "list": ("llama", lambda m: as_own(m.model.layers, __iter__=lambda s: iter(())), ("model.layers", "__iter__")),
    "dropout": ("gpt2", lambda m: as_own(m.transformer.drop, forward=double), ("transformer.drop",)),
    "generation": (
        "llama",
        lambda m: as_own(m, prepare_inputs_for_generation=lambda self, *a, **b: {}),
        ("prepare_inputs_for_generation",),
    ),
    "another norm": (
        "mistral",
        lambda m: setattr(m.model, "norm", nn.RMSNorm(48)),
        ("model.norm", "torch.nn.modules.normalization.RMSNorm", "MistralRMSNorm"),
    ),
    "no norm": (
        "starcoder2",
        lambda m: setattr(m.model.layers[1], "input_layernorm", nn.Identity()),
        (f"{LAYER}.input_layernorm", "Identity"),
    ),
    "set forward": (
        "gpt_neox",
        lambda m: setattr(m.gpt_neox.layers[0], "forward", types.MethodType(lambda s, x, *a, **b: x, m)),
        ("gpt_neox.layers.0: forward was set on the module itself",),
    ),
    "set call": ("llama", lambda m: setattr(m.model.norm, "_call_impl", lambda x: x), ("model.norm: _call_impl",)),
    "hook on a block": (
        "llama",
        lambda m: m.model.layers[1].register_forward_hook(lambda *a: None),
        (f"{LAYER} has a hook", "remove the hook"),
    ),
    "keyword hook": (
        "gpt2",
        lambda m: m.transformer.h[0].attn.register_forward_pre_hook(lambda *a: None, with_kwargs=True),
        ("transformer.h.0.attn has a hook",),
    ),
    "hook on a layer": ("llama", lambda m: m.lm_head.register_forward_hook(lambda *a: None), ("lm_head has a hook",)),
    "weight norm": ("llama", lambda m: torch.nn.utils.weight_norm(m.model.layers[0].mlp.up_proj), ("up_proj", "hook")),
    "parametrization": (
        "llama",
        lambda m: parametrize.register_parametrization(m.model.layers[1].mlp.up_proj, "weight", Doubled()),
        (f"{LAYER}.mlp.up_proj has a parametrized weight",),
    ),
    "linear layer": ("llama", lambda m: as_own(m.lm_head, forward=double), ("lm_head", "OwnLinear")),
    "embedding": ("llama", lambda m: as_own(m.model.embed_tokens, forward=double), ("model.embed_tokens",)),
    "activation by a known name": (
        "llama",
        lambda m: setattr(m.model.layers[1].mlp, "act_fn", type("SiLUActivation", (nn.ReLU,), {})()),
        (f"{LAYER}.mlp.act_fn",),
    ),
    "activation over tokens": (
        "llama",
        lambda m: setattr(m.model.layers[1].mlp, "act_fn", nn.Softmax(1)),
        ("activation.Softmax",),
    ),
    "activation's attribute": (
        "gemma",
        lambda m: setattr(m.model.layers[1].mlp.act_fn, "act", torch.relu),
        ("act_fn computes otherwise",),
    ),
    "parameter": (
        "llama",
        lambda m: m.model.norm.register_parameter("bias", nn.Parameter(torch.ones(48))),
        ("model.norm has a parameter 'bias'",),
    ),
    "attribute": (
        "llama",
        lambda m: setattr(m.model.layers[1].self_attn, "is_causal", False),
        (f"{LAYER}.self_attn has is_causal False",),
    ),
    "window": (
        "gemma2",
        lambda m: setattr(m.model.layers[0].self_attn, "sliding_window", 2),
        ("sliding_window 2", "sliding_window is 9"),
    ),
    "edited configuration": (
        "llama",
        lambda m: setattr(m.config, "num_hidden_layers", 1),
        ("model.layers has 2 modules where its configuration has 1",),
    ),
    "attention to later tokens": ("mistral", lambda m: setattr(m.config, "is_causal", False), ("is_causal False",)),
    "classes": ("llama", lambda m: setattr(m, "lm_head", nn.Linear(48, 7)), ("lm_head has 7 outputs",)),
    "vocabulary": ("gpt2", lambda m: setattr(m.config, "vocab_size", 50), ("lm_head has", "by its configuration 50")),
    "heads": (
        "qwen3",
        lambda m: setattr(m.model.layers[1].self_attn, "q_proj", nn.Linear(48, 8)),
        (f"{LAYER}.self_attn.q_proj has 8 outputs",),
    ),
    "window of no token": (
        "mistral_window",
        lambda m: setattr(m.config, "sliding_window", 0),
        ("sliding_window is 0",),
    ),
    "kind of attention": (
        "gemma3",
        lambda m: setattr(m.model.layers[1].self_attn, "layer_type", "sliding_attention"),
        ("layer_type 'sliding_attention'",),
    ),
    "norm without a weight": (
        "gpt2",
        lambda m: setattr(m.transformer.h[1], "ln_2", nn.LayerNorm(48, elementwise_affine=False)),
        ("transformer.h.1.ln_2 has no parameter 'weight'",),
    ),
    "softcap of 0": ("gemma2", lambda m: setattr(m.config, "final_logit_softcapping", 0.0), ("softcap is 0.0",)),
    "bounded rows of a tied embedding": (
        "gpt2",
        lambda m: setattr(m.transformer.wte, "max_norm", 0.5),
        ("transformer.wte has max_norm",),
    ),
    "no layers": ("llama", lambda m: setattr(m.model, "layers", nn.ModuleList()), ("model.layers is empty",)),
    "no weights": ("llama", lambda m: m.to("meta"), ("model.embed_tokens.weight is on the meta device",)),
    "only the body": ("llama", lambda m: setattr(m, "__class__", type(m.model)), ("is not the", "LlamaForCausalLM")),
    "layer used twice": (
        "llama",
        lambda m: m.model.layers.__setitem__(1, m.model.layers[0]),
        ("model.layers", "layer_idx"),
    ),
    "configuration of one layer": (
        "mistral",
        lambda m: setattr(m.model.layers[1].self_attn, "config", deepcopy_with(m.config, sliding_window=3)),
        (f"{LAYER}.self_attn has a configuration of its own",),
    ),
    "router": (
        "mixtral",
        lambda m: as_own(m.model.layers[1].mlp.gate, forward=double),
        (f"{LAYER}.mlp.gate", "OwnMixtralTopKRouter"),
    ),
    "router with a bias": (
        "gpt_oss",
        lambda m: as_own(m.model.layers[1].mlp.router, forward=double),
        (f"{LAYER}.mlp.router", "OwnGptOssTopKRouter"),
    ),
    "window next to sinks": (
        "gpt_oss",
        lambda m: setattr(m.model.layers[0].self_attn, "sliding_window", None),
        ("sliding_window None", "sliding_window is 9"),
    ),
    "mixture": ("qwen2_moe", lambda m: as_own(m.model.layers[1].mlp, forward=double), (f"{LAYER}.mlp: its class",)),
    "hook on experts": (
        "qwen3_moe",
        lambda m: m.model.layers[1].mlp.experts.register_forward_pre_hook(lambda *a: None),
        (f"{LAYER}.mlp.experts has a hook",),
    ),
    "dense layer of a mixture": (
        "qwen3_moe",
        lambda m: setattr(m.config, "mlp_only_layers", [1]),
        (f"{LAYER}.mlp is a", "Qwen3MoeSparseMoeBlock", "Qwen3MoeMLP"),
    ),
}


def deepcopy_with(config: Any, **changes: Any) -> Any:
    config = deepcopy(config)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize("what", OTHERWISE)
def test_what_computes_otherwise_is_refused_by_name(what: str) -> None:
    kind, change, words = OTHERWISE[what]
    model = small(kind)
    change(model)
    refused(model, *words)


def test_heads_of_one_column_are_refused() -> None:
    refused(small("llama", head_dim=1), "positions rotate 2 columns of heads of 1")


def test_parts_of_another_version_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "llama", lambda model: model.model.blocks)
    refused(small("llama"), "LlamaForCausalLM of transformers", "has no attribute 'blocks'", "allowed: a version")


def test_attention_of_ones_own_is_refused() -> None:
    model = small("llama")
    AttentionInterface.register("of_ones_own", lambda *a, **b: None)
    model.set_attn_implementation("of_ones_own")
    refused(model, "attention is computed by 'of_ones_own'")


def test_experts_of_ones_own_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "of_ones_own", lambda *a, **b: None)
    model = small("qwen3_moe")
    model.set_experts_implementation("of_ones_own")
    refused(model, "experts are computed by 'of_ones_own'")


EXPERTS: dict[str, tuple[Change, tuple[str, ...]]] = {
    "forward": (lambda experts: as_own(experts, forward=double), ("mlp.experts", "OwnExperts")),
    "another form": (lambda experts: setattr(experts, "__class__", DenseExperts), ("mlp.experts", "DenseExperts")),
    "hook": (lambda experts: experts.register_forward_hook(lambda *a: None), ("mlp.experts has a hook",)),
    "hook on a stack": (lambda experts: experts.up.register_forward_hook(lambda *a: None), ("experts.up has a hook",)),
    "layers": (
        lambda experts: as_own(experts.down, expert=lambda self, e: None),
        ("mlp.experts.down", "OwnLinearStack", "expert"),
    ),
    "fewer": (lambda experts: setattr(experts, "num_experts", 5), ("has 5 experts", "by its configuration 6")),
}


@pytest.mark.parametrize("what", EXPERTS)
def test_changed_quantized_experts_are_refused_by_name(what: str) -> None:
    model, (change, words) = small("qwen3_moe"), EXPERTS[what]
    qcut.quantize(model, "w8a8", progress=False)
    change(model.model.layers[1].mlp.experts)
    refused(model, "model.layers.1.mlp.experts", *words)


@pytest.mark.parametrize(
    ("owner", "name"), [(LlamaMLP, "forward"), (modeling_llama, "apply_rotary_pos_emb"), (modeling_llama, "repeat_kv")]
)
def test_code_replaced_in_transformers_is_refused(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *a, **b: before(*a, **b))
    refused(small("llama"), "test_code_replaced_in_transformers_is_refused")


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("linear", "q_proj: Linear.forward"),
        ("silu", "act_fn: SiLUActivation.forward"),
        ("embedding", "model.embed_tokens: Embedding.forward"),
        ("scaled_dot_product_attention", "attention is computed by 'sdpa', which"),
    ],
)
def test_functions_replaced_in_torch_are_refused(name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, before = small("llama"), getattr(nn.functional, name)
    model.set_attn_implementation("sdpa")
    for other in (lambda *a, **b: 2 * before(*a, **b), partial(before)):
        monkeypatch.setattr(nn.functional, name, other)
        refused(model, f"{where} runs another {name} than that of torch")


def test_masks_of_ones_own_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("llama")
    model.set_attn_implementation("sdpa")
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", lambda *a, **b: None)
    refused(model, "attention is computed by 'sdpa', which runs")


def test_callables_in_place_of_functions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def turned(self: Any, *a: Any, **b: Any) -> Any:
        raise AssertionError

    own = type("Own", (), {"turned": turned, "__call__": turned})()
    scripted = torch.jit.script(torch.nn.functional.mish)
    for found in (partial(turned, None), own, own.turned, scripted):
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", found)
        refused(small("llama"), "LlamaAttention.forward runs")


def test_class_replaced_in_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", made(LlamaRMSNorm, __module__=modeling_llama.__name__))
    refused(small("llama"), "OwnLlamaRMSNorm has been put in place")


def test_global_hooks_are_refused() -> None:
    hook = nn.modules.module.register_module_forward_hook(lambda *a: None)
    try:
        refused(small("gpt2"), "a hook on the forward of all modules")
    finally:
        hook.remove()


def test_remote_class_of_a_known_type_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    name = "modeling_copied_llama"
    source = (
        Path(modeling_llama.__file__).read_text().replace("from .configuration", "from ...models.llama.configuration")
    )
    (tmp_path / f"{name}.py").write_text(source.replace("from ...", "from transformers."))
    monkeypatch.syspath_prepend(tmp_path)
    copied: Any = __import__(name)
    refused(
        copied.LlamaForCausalLM(small("llama").config), f"{name}.LlamaForCausalLM is not the transformers.models.llama"
    )
    del sys.modules[name]


def test_dispatch_of_accelerate_is_refused_with_what_to_do() -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

    model = small("llama")
    add_hook_to_module(model.model.layers[0], AlignDevicesHook("cpu"))
    refused(model, "model.layers.0: accelerate moves its tensors", "remove_hook_from_module")
    remove_hook_from_module(model, recurse=True)
    served(model)


# ── what computes the same ───────────────────────────────────────────────────────────────────────


def affine(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ self.weight.T


def narrower(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.gate_proj, mlp.up_proj = nn.Linear(48, 32), nn.Linear(48, 32)
    mlp.down_proj = nn.Linear(32, 48)


SAME: dict[str, tuple[str, Change]] = {
    "training wrapper": (
        "llama",
        lambda m: as_own(m, _init_weights=lambda s, x: None, __repr__=lambda s: "", steps=property(lambda s: 1)),
    ),
    "another name": ("llama", lambda m: setattr(m, "__class__", type("Chat", (type(m),), {}))),
    "width of one block": ("llama", narrower),
    "names of a block": ("gemma2", lambda m: as_own(m.model.layers[0].mlp, extra_repr=lambda s: "")),
    "affine subclass": ("llama", lambda m: as_own(m.model.layers[0].mlp.up_proj, forward=affine)),
    "sequence of known layers": ("llama", lambda m: setattr(m, "lm_head", nn.Sequential(m.lm_head, nn.Tanh()))),
    "activation": ("llama", lambda m: setattr(m.model.layers[1].mlp, "act_fn", nn.Mish())),
    "scaling": ("qwen2", lambda m: setattr(m.model.layers[1].self_attn, "scaling", 0.9)),
    "eps": ("llama", lambda m: setattr(m.model.layers[1].input_layernorm, "variance_epsilon", 0.5)),
    "eps of LayerNorm": ("gpt2", lambda m: setattr(m.transformer.h[1].ln_2, "eps", 0.5)),
    "frequencies": ("phi3", lambda m: m.model.rotary_emb.inv_freq.mul_(0.25)),
    "softcap": ("gemma2", lambda m: setattr(m.config, "final_logit_softcapping", 2.0)),
    "window by configuration": ("starcoder2", lambda m: setattr(m.config, "sliding_window", 4)),
    "window of a model without": ("llama", lambda m: setattr(m.config, "sliding_window", 4)),
    "softcap that Gemma ignores": ("gemma", lambda m: setattr(m.config, "final_logit_softcapping", 0.5)),
    "softcap that Gemma 3 ignores": (
        "gemma3",
        lambda m: setattr(m.model.layers[1].self_attn, "attn_logit_softcapping", 0.5),
    ),
    "bias of a router": (
        "hunyuan_v1_moe",
        lambda m: setattr(m.model.layers[1].mlp.gate.wg, "bias", nn.Parameter(torch.randn(6))),
    ),
    "eager experts": ("qwen2_moe", lambda m: m.set_experts_implementation("eager")),
    "activation of experts": (
        "qwen3_moe",
        lambda m: setattr(m.model.layers[1].mlp.experts, "act_fn", nn.GELU()),
    ),
    "experts of a token": ("ernie4_5_moe", lambda m: setattr(m.model.layers[1].mlp.gate, "top_k", 3)),
    "fewer layers": ("llama", lambda m: m.model.layers.__delitem__(1)),
    "bounded rows of an embedding": ("llama", lambda m: setattr(m.model.embed_tokens, "max_norm", 1.0)),
    "gradients of inputs": ("llama", lambda m: m.enable_input_require_grads()),
    "hooks that capture": ("llama", lambda m: m(torch.tensor([[1, 2]]), output_hidden_states=True)),
}


@pytest.mark.parametrize("what", SAME)
def test_what_computes_the_same_is_served(what: str) -> None:
    kind, change = SAME[what]
    model = small(kind)
    change(model)
    served(model)


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_transformers_pass(kind: str) -> None:
    model = small(kind)
    check_model(model)
    qcut.quantize(model, "w8a8", progress=False)
    check_model(model)


def test_random_numbers_and_configuration_stay() -> None:
    model, state = small("llama"), torch.random.get_rng_state()
    before = model.config.to_dict()
    check_model(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.config.to_dict() == before


# ── adapters ─────────────────────────────────────────────────────────────────────────────────────

_TARGETS = {"gpt2": ["c_attn"], "phi3": ["qkv_proj", "down_proj"], "gpt_neox": ["query_key_value"]}


def adapted(kind: str = "llama", model: Any = None, **options: Any) -> Any:
    options = {"target_modules": _TARGETS.get(kind, ["q_proj"]), "init_lora_weights": False, "r": 4, **options}
    return get_peft_model(model or small(kind), LoraConfig(task_type="CAUSAL_LM", **options))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "phi3", "gpt_neox", "gemma3", "olmo2", "qwen3_moe", "gpt_oss"])
def test_adapters_are_served(kind: str) -> None:
    served(adapted(kind))


def test_adapters_in_every_state_are_served() -> None:
    model = adapted()
    with model.disable_adapter():
        served(model)
    model.merge_adapter()
    served(model)
    model.unmerge_adapter()
    model.add_adapter("second", LoraConfig(target_modules=["v_proj"], init_lora_weights=False))
    model.set_adapter("second")
    served(model)


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True},
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [1, 2]},
    ],
)
def test_kinds_of_adapters_are_served(options: Any) -> None:
    served(adapted(**options))


def test_adapters_over_quantized_layers_are_served() -> None:
    model = small("llama")
    qcut.quantize(model, "w8a8", fuse=False, progress=False)
    served(adapted(model=model))


def test_scaled_keys_are_served() -> None:
    config = IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[], init_ia3_weights=False)
    served(get_peft_model(small("llama"), config))


def test_adapters_beside_layers_are_refused_by_name() -> None:
    prefix = PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    refused(get_peft_model(small("llama"), prefix), "adapter 'default'", "PrefixTuningConfig")
    model = adapted()
    as_own(model, forward=double)
    refused(model, "OwnPeftModelForCausalLM", "forward")
    refused(adapted(modules_to_save=["norm"]), "model.layers.0.input_layernorm is a peft", "LlamaRMSNorm")


def test_attention_of_another_layers_class_is_refused() -> None:
    model = small("mistral")
    model.model.layers[0].self_attn = LlamaAttention(LlamaForCausalLM.config_class(**model.config.to_dict()), 0)
    refused(model, "model.layers.0.self_attn is a transformers.models.llama", "MistralAttention")
