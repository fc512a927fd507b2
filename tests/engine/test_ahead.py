"""Which product asks for which weight: each for the next one's, the head for the first's of the next step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.engine.decoder import Decoder
from qcut.engine.engine import Engine
from qcut.layers.base import Linear
from tests.support.decoders import VOCABULARY, WIDE, prompts_of, small


def model_of(kind: str = "llama") -> Any:
    model = small(kind, **WIDE)
    qcut.quantize(model, "w8a8", embeddings="w8a16", allow_growth=True, progress=False)
    return model.eval()


def in_order(decoder: Decoder) -> list[nn.Module]:
    found: list[nn.Module] = []
    for block in decoder.blocks:
        found += [*block.attention.projections, block.attention.output, *block.mlp.projections, block.mlp.down]
    return [*found, decoder.head]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[int, Linear]:
    """Layers by the address of what they read first, of which they have views on the CPU too."""
    layers: dict[int, Linear] = {}

    def first_read(layer: Linear, rows: int, dtype: torch.dtype) -> Tensor:
        assert (rows, dtype) == (2, torch.float32)
        view = torch.zeros(1, 16, dtype=torch.uint8)
        layers[view.data_ptr()] = layer
        layer.__dict__["view"] = view  # alive as long as the layer
        return view

    monkeypatch.setattr(Linear, "first_read", first_read)
    return layers


@pytest.mark.parametrize("stack", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_each_product_asks_for_the_next_ones_weight(kind: str, stack: bool, asked: dict[int, Linear]) -> None:
    decoder = Engine(model_of(kind), batch=2, stack=stack).decoder
    products = in_order(decoder)
    aheads = decoder.aheads(2)
    assert len(products) == len(set(products)) == len(aheads)
    for module, following in zip(products, [*products[1:], products[0]], strict=True):
        assert asked[aheads[module].data_ptr()] is following


def test_steps_give_it_to_every_product(asked: dict[int, Linear], monkeypatch: pytest.MonkeyPatch) -> None:
    """In all forms of rows, and with the same tokens."""
    engine = Engine(model_of(), batch=2)
    prompts = prompts_of(VOCABULARY, 5, 12)
    want = [g.tokens for g in engine.generate(prompts, 6)]
    aheads, given = engine.decoder.aheads(2), []
    for name in ("forward", "forward_int8", "forward_with_absmax"):
        for cls in {type(module) for module in in_order(engine.decoder)}:
            if name not in vars(cls) and name != "forward":
                continue
            original = getattr(cls, name)

            def noting(layer: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
                views = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.dtype is torch.uint8]
                given.append((layer, views))
                return original(layer, *args, **kwargs)

            monkeypatch.setattr(cls, name, noting)
    step = engine._step
    monkeypatch.setattr(engine, "_step", partial(step, aheads=aheads))
    given.clear()
    assert [g.tokens for g in engine.generate(prompts, 6)] == want
    with_views = [(layer, views) for layer, views in given if views]
    products = in_order(engine.decoder)
    assert with_views
    assert [layer for layer, _ in with_views] == products * (len(with_views) // len(products))
    assert all(len(views) == 1 and views[0] is aheads[layer] for layer, views in with_views)


def test_other_modules_are_given_nothing(asked: dict[int, Linear]) -> None:
    model = small("llama", **WIDE)
    qcut.quantize(model, "w8a8", skip=["*o_proj*"], allow_growth=True, progress=False)
    engine = Engine(model.eval(), batch=2)
    products, aheads = in_order(engine.decoder), engine.decoder.aheads(2)
    for module, following in zip(products, [*products[1:], products[0]], strict=True):
        assert (module in aheads) == (isinstance(module, Linear) and isinstance(following, Linear))


def test_many_sequences_and_the_cpu_ask_for_nothing() -> None:
    engine = Engine(model_of(), batch=2)
    assert engine.decoder.aheads(2) == {}
    assert engine.decoder.aheads(9) == {}
