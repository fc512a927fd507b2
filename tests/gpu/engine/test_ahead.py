"""Steps whose products ask for one another's weights: the same tokens as without graphs, and as where none asks."""

from __future__ import annotations

import pytest

from qcut.cuda import ahead as ahead_cuda
from qcut.engine.engine import Engine
from tests.gpu.support.decoders import llama
from tests.support.decoders import VOCABULARY, prompts_of


@pytest.mark.parametrize("stack", [True, False])
@pytest.mark.parametrize("scheme", ["w8a8", "codebook4", "codebook4_int8", "w8a16"])
def test_tokens_are_those_without(scheme: str, stack: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = llama(scheme), prompts_of(VOCABULARY, 7, 20)
    asking = Engine(model, batch=2, stack=stack)
    tokens = [g.tokens for g in asking.generate(prompts, 24)]
    assert [g.tokens for g in Engine(model, batch=2, stack=stack, graphs=False).generate(prompts, 24)] == tokens
    monkeypatch.setattr(ahead_cuda, "BYTES", 0)
    assert [g.tokens for g in Engine(model, batch=2, stack=stack).generate(prompts, 24)] == tokens
