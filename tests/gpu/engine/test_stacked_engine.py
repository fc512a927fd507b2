"""Engines with stacked projections on the GPU, against engines without."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from qcut.engine.engine import Engine
from qcut.numerics.int8 import sqnr_db
from tests.gpu.support.decoders import llama
from tests.gpu.support.oracles import DEVICE, assert_same
from tests.support.decoders import VOCABULARY, prompts_of

EXACT = ("w8a8", "codebook4_int8")
"""Schemes with products of integers, which do not depend on the order of sums."""


def steps(engine: Engine) -> list[Tensor]:
    return [engine.prefill(prompts_of(VOCABULARY, 20, 3)), engine.decode([5, 6]), engine.decode([7, 8])]


def stacked_layers(engine: Engine) -> bool:
    return all(len(part.projections) == 1 for block in engine.decoder.blocks for part in (block.attention, block.mlp))


@pytest.mark.parametrize("scheme", [None, "w8a8", "w8a16", "codebook4", "codebook4_int8"])
def test_engines_give_the_logits_of_separate_products(scheme: str | None) -> None:
    """Those captured before the weights were stacked too: they keep what their graphs read."""
    model = llama(scheme)
    separate = Engine(model, batch=2, stack=False)
    want = steps(separate)
    stacked = Engine(model, batch=2)
    assert stacked_layers(stacked)
    assert not stacked_layers(separate)
    torch.cuda.empty_cache()
    trash = torch.full((1 << 26,), 77, dtype=torch.uint8, device=DEVICE)  # where freed weights would have been
    for got, expected in zip(steps(separate), want, strict=True):
        assert_same(got, expected)
    for engine in (stacked, Engine(model, batch=2), Engine(model, batch=2, graphs=False)):
        for got, expected in zip(steps(engine), want, strict=True):
            if scheme in EXACT:
                assert_same(got, expected)
            assert sqnr_db(expected, got) > 40
    del trash


def test_float32_tokens_are_those_of_separate_products() -> None:
    model, prompts = llama(None, torch.float32), prompts_of(VOCABULARY, 7, 100)
    want = Engine(copy.deepcopy(model), batch=2, stack=False).generate(prompts, 40)
    assert Engine(model, batch=2).generate(prompts, 40) == want
