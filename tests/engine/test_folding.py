"""Engines whose steps have their norms folded into products: logits, sequences, refusals, on the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

import qcut
from qcut import errors
from qcut.cuda import folded_norms
from qcut.dispatch.gpus import target_named
from qcut.engine.engine import Engine
from qcut.numerics.int8 import sqnr_db
from tests.support.decoders import VOCABULARY, prompts_of, small


def quantized(kind: str, scheme: str = "w8a8", **changes: Any) -> Any:
    model = small(kind, **changes)
    qcut.quantize(model, scheme, allow_growth=True, prebuild=(), progress=False)
    return model


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3", "mistral_window", "starcoder2", "phi3"])
@pytest.mark.parametrize("stack", [True, False])
def test_steps_differ_by_roundings(kind: str, stack: bool) -> None:
    """As far from the float model as steps without folding, or nearer."""
    exact, model = small(kind), quantized(kind)
    prompts = prompts_of(VOCABULARY, 11)
    plain, folded, reference = (
        Engine(model, stack=stack),
        Engine(model, stack=stack, fold_norms=True),
        Engine(exact),
    )
    found: dict[str, list[float]] = {"plain": [], "folded": []}
    for engine in (plain, folded, reference):
        engine.prefill(prompts)
    for token in range(5, 45, 4):
        want = reference.decode([token])
        for name, engine in (("plain", plain), ("folded", folded)):
            found[name].append(sqnr_db(want, engine.decode([token])))
    mean = {name: sum(values) / len(values) for name, values in found.items()}
    assert mean["folded"] > mean["plain"] - 1.0, mean
    assert mean["folded"] > 15.0


def test_a_step_is_folded_and_a_prompt_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized("gpt2")
    plain, folded = Engine(model), Engine(model, fold_norms=True)
    prompt = prompts_of(VOCABULARY, 9)
    assert torch.equal(plain.prefill(prompt), folded.prefill(prompt))
    assert not torch.equal(plain.decode([3]), folded.decode([3]))


def test_steps_of_several_sequences_are_not_folded() -> None:
    model = quantized("llama")
    prompts = prompts_of(VOCABULARY, 2, 5)
    plain, folded = (Engine(model, batch=2, fold_norms=on) for on in (False, True))
    for engine in (plain, folded):
        engine.prefill(prompts)
    assert torch.equal(plain.decode([3, 4]), folded.decode([3, 4]))


def test_a_prompt_of_one_token_is_read() -> None:
    folded = Engine(quantized("gpt2"), batch=2, fold_norms=True)
    assert [len(one.tokens) for one in folded.generate([[5], [7]], 4)] == [4, 4]
    (one,) = folded.generate([[5]], 4)
    folded.prefill([[5]])
    assert [one.tokens[0], *(int(folded.decode([token]).argmax()) for token in one.tokens[:-1])] == one.tokens
    assert [len(scores) for scores in folded.score([[5]])] == [0]


@pytest.mark.parametrize(
    ("kind", "scheme", "match"),
    [
        ("gpt2", None, r"block 0: a projection to queries, keys and values is a \w+; allowed: layers of w8a8"),
        ("llama", "w8a16", r"is of w8a16; allowed: layers of w8a8"),
        ("gemma2", "w8a8", "block 0 has norms behind attention or MLP"),
        ("gpt_neox", "w8a8", "block 0 reads the same rows in attention and MLP"),
        ("gpt_neox_serial", "w8a8", "block 0 has the activation GELUActivation; allowed: those with a kernel"),
        ("olmo2", "w8a8", "block 0 has norms behind attention or MLP"),
    ],
)
def test_what_cannot_be_folded_is_refused(kind: str, scheme: str | None, match: str) -> None:
    model = small(kind) if scheme is None else quantized(kind, scheme)
    with pytest.raises(errors.ConfigError, match=f"fold_norms: .*{match}"):
        Engine(model, fold_norms=True)


def test_long_rows_are_refused() -> None:
    model = quantized("llama", intermediate_size=16400)
    with pytest.raises(errors.ConfigError, match="projection down reads 16400 columns; allowed: up to 16384"):
        Engine(model, fold_norms=True)


def test_a_pack_of_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = target_named("sm_90a")
    for closed in (False, True):
        monkeypatch.setattr(folded_norms, "target", lambda _, closed=closed: replace(gpu, closed=closed))
        with pytest.raises(errors.ConfigError, match="sm_90a come from a pack") if closed else nullcontext():
            folded_norms.check_kernels(0)
