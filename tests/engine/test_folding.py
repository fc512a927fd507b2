"""Engines whose steps have their norms folded into products: logits, sequences, refusals, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import qcut
from qcut import errors
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
    prompts = prompts_of(VOCABULARY, 3, 11)
    plain, folded, reference = (
        Engine(model, batch=2, stack=stack),
        Engine(model, batch=2, stack=stack, fold_norms=True),
        Engine(exact, batch=2),
    )
    found: dict[str, list[float]] = {"plain": [], "folded": []}
    for engine in (plain, folded, reference):
        engine.prefill(prompts)
    for token in range(5, 45, 4):
        tokens = [token, token + 1]
        want = reference.decode(tokens)
        for name, engine in (("plain", plain), ("folded", folded)):
            found[name].append(sqnr_db(want, engine.decode(tokens)))
    mean = {name: sum(values) / len(values) for name, values in found.items()}
    assert mean["folded"] > mean["plain"] - 1.0, mean
    assert mean["folded"] > 15.0


def test_a_step_is_folded_and_a_prompt_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized("gpt2")
    plain, folded = Engine(model), Engine(model, fold_norms=True)
    prompt = prompts_of(VOCABULARY, 9)
    assert torch.equal(plain.prefill(prompt), folded.prefill(prompt))
    assert not torch.equal(plain.decode([3]), folded.decode([3]))


def test_more_sequences_than_products_quantize_are_not_folded() -> None:
    """Nine rows are beyond the kernels' eight: the engine computes them as without."""
    model = quantized("llama")
    prompts = prompts_of(VOCABULARY, *range(2, 11))
    plain, folded = (Engine(model, batch=9, fold_norms=on) for on in (False, True))
    for engine in (plain, folded):
        engine.prefill(prompts)
    assert torch.equal(plain.decode(list(range(9))), folded.decode(list(range(9))))


def test_a_prompt_of_one_token_is_read() -> None:
    folded = Engine(quantized("gpt2"), batch=2, fold_norms=True)
    one, two = folded.generate([[5]], 4), folded.generate([[5], [7]], 4)
    assert one[0].tokens == two[0].tokens
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
