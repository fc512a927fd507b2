"""GPT-OSS in the engine: sinks, windows in every second layer, YaRN, biased routers, clamped gates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer

import qcut
from qcut.engine.engine import Engine
from qcut.engine.families import decoder_of
from qcut.engine.kv_cache.cache import KVDtype
from qcut.engine.mixture import Mixture
from qcut.errors import UnsupportedError
from qcut.numerics.int8 import sqnr_db
from tests.support import ROOT
from tests.support.decoders import VOCABULARY, last_logits, prompts_of, small, theirs

HARMONY = """\
{%- macro said(role, text) -%}<|start|>{{ role }}<|message|>{{ text }}<|end|>{%- endmacro -%}
{{- said("system", "Knowledge cutoff: 2024-06\\n\\nReasoning: " ~ (reasoning_effort or "medium")) -}}
{%- for message in messages -%}
{%- if message.role == "assistant" -%}
{{- said("assistant<|channel|>final", message.content) -}}
{%- else -%}
{{- said("developer" if message.role == "system" else message.role, message.content) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""


def deep(**changes: Any) -> Any:
    """A model of two layers of each kind, with heads that 4-bit caches take."""
    return small("gpt_oss", **{"num_hidden_layers": 4, "head_dim": 32, "hidden_size": 64, **changes})


def test_parts_are_the_models() -> None:
    model = deep()
    decoder = decoder_of(model)
    assert [block.attention.window for block in decoder.blocks] == [9, 0, 9, 0]
    for block, layer in zip(decoder.blocks, model.model.layers, strict=True):
        assert block.attention.sinks is not None
        assert torch.equal(block.attention.sinks, layer.self_attn.sinks)
        assert isinstance(block.mlp, Mixture)
        assert block.mlp.router.logits_bias is layer.mlp.router.bias
        gate = block.mlp.experts.gating.gated_silu
        assert gate is not None
        assert tuple(gate) == (1.702, 7.0, True)
    (cos, sin), *others = decoder.rotary_tables(16)
    assert cos is not None
    assert sin is not None
    assert cos.shape == (16, 32)
    assert float(cos[0, 0]) == pytest.approx(model.model.rotary_emb.attention_scaling)
    assert model.model.rotary_emb.attention_scaling > 1.1
    assert all(other[0] is cos for other in others)


@pytest.mark.parametrize("chunk", [5, 16, 512])
def test_logits_of_chunks_and_steps_are_transformers(chunk: int) -> None:
    """Float32 sums of the same products in some order, of 4 layers: 1e-4 of the largest logit is ample."""
    model, prompts = deep(), prompts_of(VOCABULARY, 40, 3, 17)
    engine = Engine(model, batch=3)
    engine.runner.max_prefill_tokens = 3 * chunk
    logits = engine.prefill(prompts)
    for step in range(8):
        for row, prompt in zip(logits, prompts, strict=True):
            want = last_logits(model, prompt)
            assert (row - want).abs().max() <= 1e-4 * want.abs().max()
        chosen = [(7 * step + i) % VOCABULARY for i in range(3)]
        logits = engine.decode(chosen)
        prompts = [[*prompt, token] for prompt, token in zip(prompts, chosen, strict=True)]


@pytest.mark.parametrize("sink", [-20.0, 6.0])
def test_sinks_are_read_from_the_model(sink: float) -> None:
    model, (prompt,) = deep(), prompts_of(VOCABULARY, 21)
    before = last_logits(model, prompt)
    for layer in model.model.layers:
        nn.init.constant_(layer.self_attn.sinks, sink)
    want = last_logits(model, prompt)
    assert not torch.allclose(want, before, rtol=1e-2)
    assert (Engine(model).prefill([prompt])[0] - want).abs().max() <= 1e-4 * want.abs().max()


def test_other_sinks_and_positions_are_refused() -> None:
    model = deep()
    model.model.layers[1].self_attn.sinks = nn.Parameter(torch.zeros(1))
    with pytest.raises(UnsupportedError, match=r"layer 1 has sinks \[1\]; allowed: \[6\], one of each head"):
        Engine(model)
    model = deep()
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq[:4]
    with pytest.raises(UnsupportedError, match="rotary positions of 8 of a head's 32 columns; allowed: of all"):
        Engine(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_may_stay_in_float32(dtype: torch.dtype) -> None:
    """As transformers loads float16 models; bounds as of other 16-bit models."""
    model, (prompt,) = deep(intermediate_size=64).to(dtype), prompts_of(VOCABULARY, 12)
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.float()
    assert model.model.norm.weight.dtype is torch.float32
    logits = Engine(model).prefill([prompt])
    assert logits.dtype is dtype
    want = last_logits(model, prompt)
    assert (logits[0] - want).abs().max() <= 2.0**-4 * want.abs().max()


@pytest.mark.parametrize(("kv_cache", "db"), [("auto", 200), ("int8", 25), ("int4", 8), ("int8/int4", 8)])
def test_prefill_and_decode_fill_the_same_cache(kv_cache: KVDtype, db: float) -> None:
    """Which is near that of floats, as far as routes do not change."""
    model, (prompt,) = deep(), prompts_of(VOCABULARY, 20)
    exact, whole, steps = Engine(model), Engine(model, kv_cache=kv_cache), Engine(model, kv_cache=kv_cache)
    want = whole.prefill([prompt])
    assert sqnr_db(exact.prefill([prompt]), want) > db
    steps.prefill([prompt[:-1]])
    got = steps.decode(prompt[-1:])
    assert (got - want).abs().max() <= 1e-3 * want.abs().max()
    assert whole.generate([prompt], 9) == steps.generate([prompt], 9)


@pytest.mark.parametrize("scheme", ["w8a8", "w8a16", "codebook4_g32", "codebook4_g64_int8", "mxfp4"])
def test_greedy_tokens_are_transformers(scheme: str) -> None:
    model = deep(hidden_size=192, intermediate_size=192)
    qcut.quantize(model, scheme, allow_growth=True, progress=False)
    prompts = prompts_of(VOCABULARY, 5, 33)
    got = Engine(model, batch=2).generate(prompts, 12)
    assert [g.tokens for g in got] == [theirs(model, prompt, 12) for prompt in prompts]


def test_a_chat_goes_through_a_harmony_template() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(ROOT / "models" / "gpt2-5m", local_files_only=True)
    marks = ["<|start|>", "<|message|>", "<|end|>", "<|channel|>", "<|return|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.chat_template = HARMONY
    model = small("gpt_oss", vocab_size=len(tokenizer), max_position_embeddings=128)
    engine = Engine(model, tokenizer=tokenizer, context=128)
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is a list?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert tokenizer.convert_tokens_to_ids(marks[0]) == ids[0]
    (made,) = engine.generate(chat, 6)
    assert made.tokens == engine.generate([ids], 6)[0].tokens == theirs(model, ids, 6)
