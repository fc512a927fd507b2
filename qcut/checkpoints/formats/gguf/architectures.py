"""Architectures of GGUF files as families of transformers: names of tensors, entries of metadata, what is converted.

Source: llama.cpp, ``conversion`` (what its writers do to tensors), ``src/models`` (what it computes by) and
``gguf-py/gguf/constants.py`` (names).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from torch import Tensor

Config = Mapping[str, Any]


class Number(NamedTuple):
    """A number above 0 in the metadata, or a truth value.

    Attributes:
        key: of the configuration.
        kind: int, float or bool.
        default: makes the number that a file without the entry has of the configuration so far; None: the entry is
            needed.
        or_zero: whether it may be 0.
    """

    key: str
    kind: type[int] | type[float] | type[bool] = int
    default: Callable[[Config], Any] | None = None
    or_zero: bool = False


class Change(NamedTuple):
    """What becomes of a tensor that has been read.

    Attributes:
        apply: of the tensor and a number of heads. Blocks of quantized rows are changed only in the order of rows.
        heads: key of the configuration with that number; empty: none is needed.
        pieces: how many equal pieces the rows of a head consist of.
        shape: of a shape, what becomes of it.
        linear: whether quantized rows are changed too: those of a linear layer are in the order of ``nn.Linear``.
    """

    apply: Callable[[Tensor, int], Tensor]
    heads: str = ""
    pieces: int = 1
    shape: Callable[[tuple[int, ...]], tuple[int, ...]] = tuple
    linear: bool = True


@dataclass(frozen=True)
class Architecture:
    """How files of one architecture hold a model of transformers.

    Attributes:
        model_type: of the configuration.
        class_name: of the model.
        prefix: of the names of all layers.
        outside: places of the tensors outside of layers, by their stem.
        layer: places of a layer's tensors, by their stem; ``{}`` is an expert's number.
        numbers: by entry of the metadata.
        fixed: of the configuration, what llama.cpp has in its code.
        neutral: by entry, values that change nothing; those of `qcut.checkpoints.formats.gguf.metadata` hold too.
        sizes: entries that are held to nothing, since the shapes of tensors say what they say.
        changes: by stem.
        count: key of the configuration with the number of experts; empty: there are none.
        experts: stems of tensors of all experts. Where their place has no ``{}``, gates and ups are one parameter.
        in_turn: whether rows of gate and up take turns in it, and columns come before rows; else gates are above ups.
        bare: stems of tensors that are a parameter of their own, not a module's weight.
        model_types: of a ``config.json`` next to a file; empty: only ``model_type``.
        rotation: how positions are rotated: ``whole`` heads, ``part`` of them, by type of layer (``local``), or not.
        yarn: of ``rope_parameters``, what files do not state of that type.
        floats: stems of tensors that no quantized module replaces; these are always dequantized.
        wide: of families with a ``query_pre_attn_scalar``, the number of layers of the one model for which that is the
            width divided by the heads; of the others it is the size of a head.
    """

    model_type: str
    class_name: str
    prefix: str
    outside: Mapping[str, str]
    layer: Mapping[str, str]
    numbers: Mapping[str, Number]
    fixed: Config = field(default_factory=dict)
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    sizes: tuple[str, ...] = ()
    changes: Mapping[str, Change] = field(default_factory=dict)
    count: str = ""
    bare: tuple[str, ...] = ()
    experts: tuple[str, ...] = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    in_turn: bool = False
    model_types: tuple[str, ...] = ()
    rotation: Literal["whole", "part", "local", "none"] = "whole"
    yarn: Config = field(default_factory=dict)
    floats: tuple[str, ...] = ()
    wide: int | None = None


def _halves(rows: Tensor, heads: int) -> Tensor:
    """Rows with the first elements of all pairs of a head before the second ones, as transformers rotates them."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _by_head(rows: Tensor, heads: int) -> Tensor:
    """Rows of q, k and v with those of one head next to each other."""
    return rows.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)


def _experts(module: str, router: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Places of a mixture's router and experts; the latter are below ``module.experts``."""
    parts = {"gate": gate, "up": up, "down": down}
    stacks = {f"ffn_{part}_exps": f"{module}.experts.{name}" for part, name in parts.items()}
    return {"ffn_gate_inp": f"{module}.{router}", **stacks}


def _shared(name: str) -> dict[str, str]:
    """Places of the experts that all tokens take."""
    return {f"ffn_{part}_shexp": f"mlp.{name}.{part}_proj" for part in ("gate", "up", "down")}


_QUERIES, _KEYS = Change(_halves, "num_attention_heads", 2), Change(_halves, "num_key_value_heads", 2)
_HEADS = Change(_by_head, "num_attention_heads", 3)
_GAIN = Change(lambda weight, _: weight.float() - 1, linear=False)
"""llama.cpp multiplies by what it stores, transformers by one more."""
_CONV1D = Change(lambda weight, _: weight.t(), shape=lambda shape: shape[::-1], linear=False)
_ROW = Change(lambda weight, _: weight.view(1, -1), shape=lambda shape: (1, math.prod(shape)))

_EVERY = {
    "block_count": Number("num_hidden_layers"),
    "embedding_length": Number("hidden_size"),
    "feed_forward_length": Number("intermediate_size"),
    "attention.head_count": Number("num_attention_heads"),
    "context_length": Number("max_position_embeddings"),
}
_NUMBERS = {
    **_EVERY,
    "attention.head_count_kv": Number("num_key_value_heads", default=lambda config: config["num_attention_heads"]),
}
_RMS = {"attention.layer_norm_rms_epsilon": Number("rms_norm_eps", float)}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_EXPERTS = _experts("mlp", "gate", "{}.gate_proj", "{}.up_proj", "{}.down_proj")
_FUSED = "router", "gate_up_proj", "gate_up_proj", "down_proj"
_SOFTMAX = {"expert_gating_func": (0, 1), "expert_weights_scale": (0, 1)}
_COUNTS = {"expert_count": Number("num_experts"), "expert_used_count": Number("num_experts_per_tok")}
_SILU = {"hidden_act": "silu"}

_LLAMA = Architecture(
    "llama",
    "LlamaForCausalLM",
    "model.layers.",
    _OUTSIDE,
    {**_ATTENTION, **_MLP},
    {**_NUMBERS, **_RMS},
    _SILU,
    {"tensor_data_layout": ("Meta AI original pth",)},
    changes={"attn_q": _QUERIES, "attn_k": _KEYS},
    model_types=("llama", "mistral"),
)
_MIXTRAL = replace(
    _LLAMA,
    model_type="mixtral",
    class_name="MixtralForCausalLM",
    layer={**_ATTENTION, **_experts("block_sparse_moe", "gate", "{}.w1", "{}.w3", "{}.w2")},
    numbers={**_LLAMA.numbers, **_COUNTS, "expert_count": Number("num_local_experts")},
    neutral={**_LLAMA.neutral, **_SOFTMAX, "expert_weights_norm": (True,)},
    count="num_local_experts",
    model_types=("mixtral",),
)
_QWEN2 = replace(
    _LLAMA,
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    neutral={},
    changes={},
    model_types=(),
)
_QWEN3 = replace(_QWEN2, model_type="qwen3", class_name="Qwen3ForCausalLM", layer={**_ATTENTION, **_HEAD_NORMS, **_MLP})
_EXPERT_SIZE = {"expert_feed_forward_length": Number("moe_intermediate_size")}
_QWEN2_MOE = replace(
    _QWEN2,
    model_type="qwen2_moe",
    class_name="Qwen2MoeForCausalLM",
    layer={
        **_ATTENTION,
        **_EXPERTS,
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        **_shared("shared_expert"),
    },
    numbers={
        **_QWEN2.numbers,
        **_COUNTS,
        **_EXPERT_SIZE,
        "expert_shared_feed_forward_length": Number("shared_expert_intermediate_size"),
    },
    fixed={**_SILU, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    neutral={**_SOFTMAX, "expert_weights_norm": (False,)},
    changes={"ffn_gate_inp_shexp": _ROW},
    count="num_experts",
)
_QWEN3_MOE = replace(
    _QWEN3,
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    layer={**_ATTENTION, **_HEAD_NORMS, **_EXPERTS},
    numbers={**_QWEN3.numbers, **_COUNTS, **_EXPERT_SIZE},
    fixed={**_SILU, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    neutral={**_SOFTMAX, "expert_weights_norm": (True,)},
    count="num_experts",
)
_OLMOE = replace(
    _QWEN3_MOE,
    model_type="olmoe",
    class_name="OlmoeForCausalLM",
    numbers={**_QWEN3.numbers, **_COUNTS},
    fixed={**_SILU, "norm_topk_prob": False},
    neutral={**_SOFTMAX, "expert_weights_norm": (False,)},
)
_GPT_OSS = replace(
    _QWEN3_MOE,
    model_type="gpt_oss",
    class_name="GptOssForCausalLM",
    layer={
        **{stem: _ATTENTION[stem] for stem in ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output")},
        "attn_sinks": "self_attn.sinks",
        "post_attention_norm": "post_attention_layernorm",
        **_experts("mlp", *_FUSED),
    },
    numbers={
        **_QWEN3.numbers,
        **_COUNTS,
        "expert_count": Number("num_local_experts"),
        "expert_feed_forward_length": Number("intermediate_size"),
        "attention.sliding_window": Number("sliding_window"),
    },
    fixed={},
    neutral={
        "attention.sliding_window_pattern": (2,),
        "expert_gating_func": (0, 3),
        "expert_weights_scale": (0, 1),
    },
    count="num_local_experts",
    in_turn=True,
    bare=("attn_sinks",),
    yarn={"truncate": False},
)
_GRANITE_MOE = replace(
    _LLAMA,
    model_type="granitemoe",
    class_name="GraniteMoeForCausalLM",
    layer={**_ATTENTION, **_experts("block_sparse_moe", *_FUSED)},
    numbers={
        **_MIXTRAL.numbers,
        "attention.scale": Number(
            "attention_multiplier",
            float,
            lambda config: (config["hidden_size"] / config["num_attention_heads"]) ** -0.5,
        ),
        "embedding_scale": Number("embedding_multiplier", float, lambda _: 1.0),
        "residual_scale": Number("residual_multiplier", float, lambda _: 1.0),
        "logit_scale": Number("logits_scaling", float),
    },
    neutral={**_SOFTMAX, "expert_weights_norm": (True,), "rope.scaling.finetuned": (True,)},  # False: no rotation
    count="num_local_experts",
    model_types=(),
)
_ERNIE_MOE = replace(
    _QWEN2,
    model_type="ernie4_5_moe",
    class_name="Ernie4_5_MoeForCausalLM",
    layer={
        **_ATTENTION,
        **_MLP,
        **_EXPERTS,
        "exp_probs_b": "mlp.gate.moe_statics.e_score_correction_bias",
        **_shared("shared_experts"),
    },
    numbers={
        **_QWEN2.numbers,
        **_EXPERT_SIZE,
        "expert_count": Number("moe_num_experts"),
        "expert_used_count": Number("moe_k"),
        "expert_shared_count": Number("moe_num_shared_experts", default=lambda _: 0, or_zero=True),
        "leading_dense_block_count": Number("moe_layer_start_index", default=lambda _: 0, or_zero=True),
        "interleave_moe_layer_step": Number("moe_layer_interval"),
    },
    fixed={**_SILU, "use_bias": False},
    neutral={**_SOFTMAX, "expert_weights_norm": (True,)},
    sizes=("expert_shared_feed_forward_length",),
    changes={"exp_probs_b": _ROW},
    count="moe_num_experts",
    bare=("exp_probs_b",),
)
_HUNYUAN_MOE = replace(
    _QWEN2,
    model_type="hunyuan_v1_moe",
    class_name="HunYuanMoEV1ForCausalLM",
    layer={
        **_ATTENTION,
        **_EXPERTS,
        "attn_q_norm": "self_attn.query_layernorm",
        "attn_k_norm": "self_attn.key_layernorm",
        "ffn_gate_inp": "mlp.gate.wg",
        **_shared("shared_mlp"),
    },
    numbers={
        **_QWEN2.numbers,
        "expert_count": Number("num_experts"),
        "expert_used_count": Number("moe_topk"),
    },
    neutral={**_SOFTMAX, "expert_weights_norm": (True,), "expert_shared_count": (1,)},
    sizes=("expert_feed_forward_length", "expert_shared_feed_forward_length"),
    count="num_experts",
)
_OLMO2 = replace(
    _QWEN2,
    model_type="olmo2",
    class_name="Olmo2ForCausalLM",
    layer={
        **{stem: _ATTENTION[stem] for stem in ("attn_q", "attn_k", "attn_v", "attn_output")},
        **_HEAD_NORMS,
        **_MLP,
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
)
_SMOLLM3 = replace(
    _LLAMA,
    model_type="smollm3",
    class_name="SmolLM3ForCausalLM",
    fixed={**_SILU, "no_rope_layer_interval": 4},
    model_types=(),
)
_GEMMA = replace(
    _QWEN2,
    model_type="gemma",
    class_name="GemmaForCausalLM",
    fixed={"hidden_act": "gelu_pytorch_tanh"},
    changes=dict.fromkeys(("output_norm", "attn_norm", "ffn_norm"), _GAIN),
    floats=("token_embd",),  # a class of its own, which scales
)
_WINDOW = Number("sliding_window")
_FOUR_NORMS = {
    **_ATTENTION,
    **_MLP,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA2 = replace(
    _GEMMA,
    model_type="gemma2",
    class_name="Gemma2ForCausalLM",
    layer=_FOUR_NORMS,
    numbers={
        **_GEMMA.numbers,
        "attention.sliding_window": _WINDOW,
        "attn_logit_softcapping": Number("attn_logit_softcapping", float),
        "final_logit_softcapping": Number("final_logit_softcapping", float),
    },
    fixed={"hidden_activation": "gelu_pytorch_tanh"},
    neutral={"attention.sliding_window_pattern": (2,)},
    changes={**_GEMMA.changes, **dict.fromkeys(("post_attention_norm", "post_ffw_norm"), _GAIN)},
    wide=46,
)
_GEMMA3 = replace(
    _GEMMA2,
    model_type="gemma3_text",
    class_name="Gemma3ForCausalLM",
    layer={**_FOUR_NORMS, **_HEAD_NORMS},
    numbers={
        **_GEMMA.numbers,
        "attention.sliding_window": _WINDOW,
        "final_logit_softcapping": Number("final_logit_softcapping", float, lambda _: None),
    },
    neutral={"attention.sliding_window_pattern": (6,)},
    changes={**_GEMMA2.changes, **dict.fromkeys(_HEAD_NORMS, _GAIN)},
    rotation="local",
    wide=62,
)
_PHI3 = replace(
    _QWEN2,
    model_type="phi3",
    class_name="Phi3ForCausalLM",
    layer={
        **{stem: _ATTENTION[stem] for stem in ("attn_norm", "attn_output", "ffn_norm")},
        "attn_qkv": "self_attn.qkv_proj",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
    },
    numbers={**_QWEN2.numbers, "attention.sliding_window": Number("sliding_window", default=lambda _: None)},
    rotation="part",
)
_LAYER_NORM = "attention.layer_norm_epsilon"
_STARCODER2 = replace(
    _QWEN2,
    model_type="starcoder2",
    class_name="Starcoder2ForCausalLM",
    layer={**_ATTENTION, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    numbers={**_NUMBERS, _LAYER_NORM: Number("norm_epsilon", float)},
    fixed={"hidden_act": "gelu_pytorch_tanh", "use_bias": True},
)
_GPT_NEOX = Architecture(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    "gpt_neox.layers.",
    {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
    {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    {
        **_EVERY,
        _LAYER_NORM: Number("layer_norm_eps", float),
        "use_parallel_residual": Number("use_parallel_residual", bool, lambda _: True),
    },
    {"attention_bias": True},
    changes={"attn_qkv": _HEADS},
    rotation="part",
)
_GPT2 = Architecture(
    "gpt2",
    "GPT2LMHeadModel",
    "transformer.h.",
    {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    {
        "block_count": Number("n_layer"),
        "embedding_length": Number("n_embd"),
        "feed_forward_length": Number("n_inner"),
        "attention.head_count": Number("n_head"),
        "context_length": Number("n_positions"),
        _LAYER_NORM: Number("layer_norm_epsilon", float),
    },
    {"activation_function": "gelu_new"},
    changes=dict.fromkeys(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), _CONV1D),
    rotation="none",
)
ARCHITECTURES = {
    "llama": _LLAMA,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "qwen2moe": _QWEN2_MOE,
    "qwen3moe": _QWEN3_MOE,
    "gpt-oss": _GPT_OSS,
    "granitemoe": _GRANITE_MOE,
    "ernie4_5-moe": _ERNIE_MOE,
    "hunyuan-moe": _HUNYUAN_MOE,
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA3,
    "phi3": _PHI3,
    "olmo2": _OLMO2,
    "olmoe": _OLMOE,
    "smollm3": _SMOLLM3,
    "starcoder2": _STARCODER2,
    "gpt2": _GPT2,
    "gptneox": _GPT_NEOX,
}
"""By ``general.architecture``."""
MIXTRAL = _MIXTRAL
"""Of ``llama`` with experts."""
