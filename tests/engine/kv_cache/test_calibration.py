"""Guides of 4-bit keys: those of the queries and keys that a model has, wherever in the context they stand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qcut.engine.engine import Engine
from qcut.engine.kv_cache import calibration
from qcut.errors import ConfigError, ContextError
from qcut.numerics import int4
from tests.engine.test_int4_cache import model_of
from tests.support.decoders import VOCABULARY, prompts_of, small


def projected(model: Any, kind: str, prompts: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
    """Queries ``[T, heads, 32]`` and keys ``[T, kv_heads, 32]`` of each layer, before positions, by transformers."""
    found: list[list[Tensor]] = []
    hooks = []
    layers = model.model.layers if kind == "llama" else model.transformer.h
    for layer in layers:
        mine: list[Tensor] = []
        attention = layer.self_attn if kind == "llama" else layer.attn
        modules = (attention.q_proj, attention.k_proj) if kind == "llama" else (attention.c_attn,)
        for module in modules:
            hooks.append(module.register_forward_hook(lambda _, __, out, mine=mine: mine.append(out[0].detach())))
        found.append(mine)
    rows = [[torch.empty(0)] * 2 for _ in found]
    with torch.no_grad():
        for prompt in prompts:
            model(torch.tensor([prompt]))
            for mine, kept in zip(found, rows, strict=True):
                q, k = mine if kind == "llama" else mine[0].split(64, 1)[:2]
                kept[:] = [torch.cat((a, b)) for a, b in zip(kept, (q, k), strict=True)]
                mine.clear()
    for hook in hooks:
        hook.remove()
    return [(q.unflatten(1, (-1, 32)), k.unflatten(1, (-1, 32))) for q, k in rows]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_calibration_follows_the_models_queries_and_keys(kind: str) -> None:
    model, prompts = model_of(kind), prompts_of(VOCABULARY, 33, 7, 21, 40, 12)
    want = projected(model, kind, prompts)
    engine = Engine(model, kv_cache="int4", context=48, calibration_prompts=prompts)
    for layer, (q, k) in enumerate(want):
        heads = k.shape[1]
        rows = q.double().unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 2)
        moments, mean = rows.transpose(1, 2) @ rows, k.double().mean(0)
        if kind == "llama":  # each of the places, one after the other
            cos, sin = (t[0] for t in model.model.rotary_emb(q, torch.arange(48)[None]))
            places = [int(i * (5**0.5 - 1) / 2 % 1 * 48) for i in range(calibration.POSITIONS)]
            assert len(set(places)) == 48
            turns = []
            for place in places:
                half = torch.zeros(32, 32)
                half[:16, 16:], half[16:, :16] = -torch.eye(16), torch.eye(16)
                turns.append((torch.diag(cos[place]) + torch.diag(sin[place]) @ half).double())
            moments = torch.stack([t @ moments @ t.t() for t in turns]).mean(0)
            mean = torch.stack([mean @ t.t() for t in turns]).mean(0)
        assert_calibrated(engine, layer, moments, mean)


def assert_calibrated(engine: Engine, layer: int, moments: Tensor, mean: Tensor) -> None:
    guide = engine.cache.calibration(layer)
    assert guide is not None
    got, exact = int4._fields(guide), int4._fields(int4.guide_of(*turned(moments, mean)))
    torch.testing.assert_close(got.mean, exact.mean, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(got.costs.double(), exact.costs.double(), rtol=0.02, atol=0)
    torch.testing.assert_close(got.strengths, exact.strengths, rtol=0.02, atol=0)


def test_norms_after_positions_are_calibrated_as_they_are() -> None:
    model = small("hunyuan_v1_moe", num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    (prompt,) = prompts_of(VOCABULARY, 40)
    engine = Engine(model, kv_cache="int4", context=48, calibration_prompts=[prompt])
    found: list[Tensor] = []
    for layer in model.model.layers:
        for norm in (layer.self_attn.query_layernorm, layer.self_attn.key_layernorm):
            norm.register_forward_hook(lambda _, __, out: found.append(out[0].double()))
    with torch.no_grad():
        model(torch.tensor([prompt]))
    for layer, (q, k) in enumerate(zip(found[::2], found[1::2], strict=True)):
        rows = q.unflatten(0, (2, -1)).flatten(1, 2)  # of the two queries of each key
        assert_calibrated(engine, layer, rows.transpose(1, 2) @ rows, k.mean(1))


def turned(moments: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    return int4.rotate(int4.rotate(moments).transpose(1, 2)), int4.rotate(mean)


def test_an_engine_draws_text_of_its_own_and_always_the_same() -> None:
    model = model_of("llama")
    one, other = (Engine(model, kv_cache="int4", context=n) for n in (40, 40))
    reader = Engine(model, batch=calibration.PROMPTS, context=40)
    drawn = calibration.drawn(reader, VOCABULARY)
    assert [len(row) for row in drawn] == [40] * calibration.PROMPTS
    assert len({tuple(row.tolist()) for row in drawn}) == calibration.PROMPTS
    given = Engine(model, kv_cache="int4", context=40, calibration_prompts=[row.tolist() for row in drawn])
    for layer in range(2):
        first = one.cache.calibration(layer)
        assert first is not None
        for engine in (other, given):
            again = engine.cache.calibration(layer)
            assert again is not None
            assert torch.equal(first, again)


def test_other_caches_and_no_prompts_have_no_calibration() -> None:
    model, (prompt,) = model_of("gpt2"), prompts_of(VOCABULARY, 20)
    engines = [Engine(model, kv_cache=kind) for kind in ("auto", "int8", "int8/int4")]  # type: ignore[arg-type]
    nearest = Engine(model, kv_cache="int4", calibration_prompts=[])
    for engine in (*engines, nearest):
        assert engine.cache.calibration(0) is None
    guided = Engine(model, kv_cache="int4", calibration_prompts=[prompt])
    assert not torch.equal(guided.prefill([prompt]), nearest.prefill([prompt]))


def test_one_token_of_context_is_enough() -> None:
    engine = Engine(model_of("llama"), kv_cache="int4", context=1)
    assert engine.cache.calibration(1) is not None
    assert engine.prefill([[3]]).isfinite().all()


def test_prompts_that_no_engine_reads_are_refused() -> None:
    model = model_of("gpt2")
    with pytest.raises(ContextError, match="prompt 0 has 30 tokens; this engine's context is 20"):
        Engine(model, kv_cache="int4", context=20, calibration_prompts=prompts_of(VOCABULARY, 30))
    with pytest.raises(ConfigError, match=f"{VOCABULARY}"):
        Engine(model, kv_cache="int4", calibration_prompts=[[1, VOCABULARY]])
