"""A model with parameters of several float dtypes is served, or refused by the name of a module."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch

import qcut
from qcut.engine.engine import Engine
from qcut.errors import DtypeError, UnsupportedError
from tests.support.decoders import KINDS, small


def engine_of(model: Any) -> Engine | str:
    """The engine, or why there is none."""
    try:
        return Engine(model, batch=2, context=16)
    except (DtypeError, UnsupportedError) as error:  # the second where experts are of several dtypes
        return str(error)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "_" not in kind or kind.endswith("moe")])
@pytest.mark.parametrize(("given", "odd"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)])
def test_odd_dtypes_are_served_or_refused(kind: str, given: torch.dtype, odd: torch.dtype) -> None:
    model, refused = small(kind).to(given), 0
    for name in [name for name, _ in model.named_parameters() if ".1." not in name]:
        changed = copy.deepcopy(model)
        parameter = changed.get_parameter(name)
        parameter.data = parameter.data.to(odd)
        engine = engine_of(changed)
        if isinstance(engine, Engine):
            engine.generate([[1, 2, 3], [4]], 2)
        else:
            refused += 1
            assert re.search(r"(module '|experts of layer \d: ).*; allowed: ", engine), engine
    assert refused > 5


def test_layers_of_another_dtype_are_named() -> None:
    for name in ("lm_head", "model.layers.1.mlp.up_proj", "model.layers.0.input_layernorm", "model.embed_tokens"):
        model = small("llama").to(torch.bfloat16)
        model.get_submodule(name).float()
        with pytest.raises(DtypeError, match=f"module '{name}': its weight is float32.*; allowed: bfloat16, as model"):
            Engine(model)
    with pytest.raises(DtypeError, match=r"module 'model\.norm': its weight is float64; allowed: float16, bfloat16, "):
        Engine(small("llama").double())


def test_quantized_layers_take_what_a_model_computes_in() -> None:
    model = small("llama")
    qcut.quantize(model, "w8a8", progress=False)
    model.model.norm.to(torch.bfloat16)
    with pytest.raises(DtypeError, match=r"module 'model\.embed_tokens': its weight is float32, and the last norm's"):
        Engine(model)
    assert Engine(model.to(torch.bfloat16), context=16).generate([[1, 2]], 2)
