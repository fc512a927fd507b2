"""What attention of captured steps asks the L2 for: the weight of its own layer's output projection."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import qcut
from qcut.engine import attention
from qcut.engine.attention import asked_of
from qcut.engine.engine import Engine
from qcut.engine.graphs import Graphs
from qcut.layers.base import Linear
from tests.support.decoders import VOCABULARY, WIDE, prompts_of, small

CODES = {"w8a8": "qweight", "w8a16": "qweight", "codebook4_g32": "units"}


class Asked(TorchDispatchMode):
    """Notes what steps of attention are given as ``ahead``."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor | None] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.qcut.append_attention.default:
            names = [argument.name for argument in func._schema.arguments]
            self.found.append({**dict(zip(names, args, strict=False)), **(kwargs or {})}.get("ahead"))
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_PARTS", 8)


def engine_of(scheme: str, kind: str = "llama", stack: bool = True) -> Engine:
    model = small(kind, **WIDE)
    qcut.quantize(model, scheme, allow_growth=True, progress=False)
    return Engine(model.eval(), batch=2, stack=stack)


@pytest.mark.parametrize("scheme", CODES)
@pytest.mark.parametrize(("kind", "stack"), [("llama", True), ("llama", False), ("gpt2", True)])
def test_each_layer_asks_for_its_own_output_projection(
    scheme: str, kind: str, stack: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(scheme, kind, stack)
    prompts = prompts_of(VOCABULARY, 5, 12)
    want = engine.generate(prompts, 6)
    assert engine._asked(2) == [], "of eager steps"
    monkeypatch.setattr(engine, "_graphs", Graphs(torch.device("cpu")))
    asked = engine._asked(2)
    assert engine._asked(9) == []
    for block, parts in zip(engine.decoder.blocks, asked, strict=True):
        codes = block.attention.output._buffers[CODES[scheme]]
        assert isinstance(codes, Tensor)
        assert isinstance(parts, Tensor)
        assert parts.data_ptr() == codes.data_ptr()
        assert (parts.shape, parts.is_contiguous()) == ((8, codes.nbytes // 8), True)
        assert torch.equal(parts.flatten(), codes.view(torch.uint8).flatten())
    monkeypatch.setattr(engine, "_graphs", None)
    monkeypatch.setattr(engine, "_asked", lambda size: asked)
    with Asked() as steps:
        assert engine.generate(prompts, 6) == want
    assert len(steps.found) >= 5 * len(asked)
    assert len(steps.found) % len(asked) == 0
    for i, given in enumerate(steps.found):
        assert given is asked[i % len(asked)]


def test_what_is_asked_for_is_bounded_and_in_whole_units(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Linear.from_float(nn.Linear(100, 37), "w8a16")
    whole = asked_of(layer)
    assert whole is not None
    assert whole.shape == (8, 37 * 112 // 8 // 16 * 16)
    for most, size in ((1 << 10, 128), (200, 16), (127, None), (0, None)):
        monkeypatch.setattr(attention, "ASKED_BYTES", most)
        parts = asked_of(layer)
        assert (None if parts is None else parts.shape[1]) == size
    monkeypatch.undo()
    assert asked_of(nn.Linear(4096, 64)) is None
    assert asked_of(layer) is None, "smaller than the parts together"


def test_only_a_buffer_in_one_piece_is_streamed() -> None:
    layer = Linear.from_float(nn.Linear(64, 32), "w8a8")
    assert layer.streamed_bytes() is not None
    layer.qweight = layer.qweight.t().contiguous().t()
    assert layer.streamed_bytes() is None
