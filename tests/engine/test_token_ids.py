"""What callers pass for token ids: what is served, and what is refused with a message that says what is wanted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import qcut
from qcut import errors
from tests.support.zoo import tiny_hf


@pytest.fixture(scope="module")
def engine() -> qcut.Engine:
    return qcut.Engine(tiny_hf("llama"), batch=2, context=16)


@pytest.mark.parametrize(
    "prompts",
    [
        [[1, 2, 3]],
        ((1, 2, 3),),
        np.array([[1, 2, 3]]),
        [np.array([1, 2, 3], dtype=np.int32)],
        [torch.tensor([1, 2, 3], dtype=torch.uint8)],
        np.array([[1, 2, 3]], dtype=np.uint64),
        torch.tensor([[1, 2, 3]], dtype=torch.uint32),
        [np.array([1, 2, 3], dtype=np.uint16)],
        torch.tensor([[1, 2, 3]]),
        [[np.int64(1), np.int64(2), 3]],
        [range(1, 4)],
        (iter([1, 2, 3]) for _ in range(1)),
    ],
    ids=lambda prompts: type(prompts).__name__,
)
def test_any_rows_of_whole_numbers_are_prompts(engine: qcut.Engine, prompts: Any) -> None:
    want = engine.generate([[1, 2, 3]], 4)
    assert engine.generate(prompts, 4) == want


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ("The import", errors.DtypeError, "prompts are text, 'The import'; allowed: a list of prompts, each a list of"),
        (b"The", errors.DtypeError, "prompts are text"),
        (["The", "import"], errors.DtypeError, "prompt 0 is text, 'The'; allowed: token ids, as tokenizer"),
        ([["The", "import"]], errors.DtypeError, "prompt 0 is no list of integers"),
        ([[1, None]], errors.DtypeError, "prompt 0 is no list of integers"),
        ([[1], None], errors.DtypeError, "prompt 1 is no list of integers"),
        ([1, 2, 3], errors.ShapeError, "prompts are one list of token ids; allowed: a list of such lists"),
        (np.array([1, 2]), errors.ShapeError, "prompts are one list of token ids"),
        (torch.tensor([1, 2]), errors.ShapeError, r"prompts have shape \[2\]"),
        ([[[1, 2]]], errors.ShapeError, r"prompt 0 is of shape \[1, 2\]"),
        ({"input_ids": [[1, 2]]}, errors.DtypeError, "prompts are a dict"),
        (7, errors.DtypeError, "prompts are a int"),
        (None, errors.DtypeError, "prompts are a NoneType"),
        (torch.tensor([[1, 2]]).to_sparse(), errors.DtypeError, "token ids are a torch.sparse_coo tensor on cpu"),
        ([torch.tensor([1, 2]).to_sparse()], errors.DtypeError, "token ids are a torch.sparse_coo tensor on cpu"),
        (torch.ones(1, 2, dtype=torch.int64, device="meta"), errors.DtypeError, "tensor on meta; allowed: a dense one"),
        (np.array([[2**64 - 1]], dtype=np.uint64), errors.ConfigError, "token id -1; allowed: 0 to"),
        ([], errors.ShapeError, "no prompt"),
        ([[]], errors.ShapeError, "prompt 0 is empty"),
        ([[1], []], errors.ShapeError, "prompt 1 is empty"),
        (np.zeros((0, 3), dtype=np.int64), errors.ShapeError, "no prompt"),
        ([[1.0, 2.0]], errors.DtypeError, "token ids are float32"),
        (np.array([[1.0]]), errors.DtypeError, "token ids are float64"),
        ([[True]], errors.DtypeError, "token ids are bool"),
        ([[64]], errors.ConfigError, "token id 64; allowed: 0 to 63"),
        ([[-1]], errors.ConfigError, "token id -1"),
        ([[1, 2.5]], errors.DtypeError, "token ids are float32"),
        ([[1, 2**70]], errors.DtypeError, "prompt 0 is no list of integers"),
        ([[2**70]], errors.DtypeError, "prompt 0 is no list of integers"),
        ([[1] * 17], errors.ContextError, "prompt 0 has 17 tokens; this engine's context is 16"),
        ([[1]] * 3, errors.ContextError, "3 prompts; this engine's batch is 2"),
    ],
)
def test_other_prompts_are_refused(engine: qcut.Engine, prompts: Any, error: Any, message: str) -> None:
    for call in (engine.generate, engine.prefill, engine.score):
        with pytest.raises(error, match=message):
            call(prompts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": 2}, r"stop is 2; allowed: a list of token ids, \[2\] for one"),
        ({"stop": "end"}, "stop is 'end'; allowed: a list"),
        ({"stop": ["end"]}, "stop is .*; allowed: a list"),
        ({"stop": 1.5}, "stop is 1.5; allowed: a list"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5; allowed: 1 and more"),
        ({"max_new_tokens": "4"}, "max_new_tokens is '4'"),
        ({"sampling": {"temperature": 1}}, "sampling is .*; allowed: a qcut.Sampling"),
    ],
)
def test_other_options_are_refused(engine: qcut.Engine, options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        engine.generate([[1, 2]], **options)


@pytest.mark.parametrize("stop", [{3}, (3,), np.array([3]), torch.tensor([3]), [np.int64(3)], iter([3])])
def test_any_collection_of_ids_stops(engine: qcut.Engine, stop: Any) -> None:
    (want,) = engine.generate([[1, 2]], 6, stop=[3])
    assert engine.generate([[1, 2]], 6, stop=stop) == [want]


@pytest.mark.parametrize(("name", "value"), [("batch", 1.5), ("batch", "2"), ("batch", True), ("context", 8.0)])
def test_sizes_are_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(errors.ConfigError, match=f"{name} is {value!r}"):
        qcut.Engine(tiny_hf("llama"), **{name: value})


def test_steps_are_whole_numbers_too(engine: qcut.Engine) -> None:
    engine.prefill([[1, 2]])
    for tokens, error in ((["a"], errors.DtypeError), ("a", errors.DtypeError), ([1.5], errors.DtypeError)):
        with pytest.raises(error):
            engine.decode(tokens)  # type: ignore[arg-type]
    assert engine.decode(np.array([3])).shape == (1, 64)  # type: ignore[arg-type]


def test_an_old_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    model = tiny_hf("gpt2")
    monkeypatch.setattr(transformers, "__version__", "5.3.0")
    with pytest.raises(errors.UnsupportedError, match=r"transformers 5\.3\.0 is too old: .*>=5\.4"):
        qcut.Engine(model)
