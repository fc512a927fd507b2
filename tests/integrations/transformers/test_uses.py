"""What transformers' users do with a model once it is loaded, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast, pipeline

import qcut
from qcut.errors import UnsupportedError
from qcut.layers.linear import Linear
from tests.integrations.transformers.support import IDS, folder_of, logits, opened, same


@pytest.fixture(
    scope="module", params=[("gpt2", "w8a8", "w8a16"), ("llama", "codebook4_g16", None)], ids=lambda p: p[0]
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model that was quantized while loading, and the folder it was saved to."""
    kind, scheme, embeddings = request.param
    folder = tmp_path_factory.mktemp("models")
    config = qcut.QcutConfig(scheme, embeddings=embeddings)
    model = opened(folder_of(kind, folder), quantization_config=config)
    model.save_pretrained(folder / "quantized")
    return opened(folder / "quantized"), folder / "quantized"


def tokens(model: Any, ids: torch.Tensor = IDS, **options: Any) -> list[list[int]]:
    mask = options.pop("attention_mask", torch.ones_like(ids))
    with torch.no_grad():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False, **options)
    return out[:, ids.shape[1] :].tolist()


def test_generate_with_a_static_cache(made: tuple[Any, Path]) -> None:
    model, _ = made
    assert tokens(model, cache_implementation="static", disable_compile=True) == tokens(model)


def test_assisted_generation(made: tuple[Any, Path]) -> None:
    model, folder = made
    assert tokens(model, assistant_model=opened(folder)) == tokens(model)


def test_padding_on_the_left(made: tuple[Any, Path]) -> None:
    """A short row next to a long one; its padding must not be seen."""
    model, _ = made
    short = IDS[:, -5:]
    padded = torch.cat([torch.zeros(1, 7, dtype=torch.long), short], 1)
    both = torch.cat([IDS, padded])
    mask = torch.ones_like(both)
    mask[1, :7] = 0
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        found = model(both, attention_mask=mask, position_ids=positions).logits[1, -1]
        other = both.clone()
        other[1, :7] = 99
        same_again = model(other, attention_mask=mask, position_ids=positions).logits[1, -1]
    assert torch.equal(found, same_again)
    torch.testing.assert_close(found, logits(model, short)[0, -1], rtol=2e-2, atol=2e-2)
    assert tokens(model, both, attention_mask=mask)[0] == tokens(model)[0]


def test_pipelines(made: tuple[Any, Path]) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    model, folder = made
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(128)}, "w0"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2")
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    text = " ".join(f"w{i}" for i in IDS[0].tolist())
    made_text = generator(
        text,
        max_new_tokens=6,
        min_new_tokens=6,
        do_sample=False,
        return_full_text=False,
        clean_up_tokenization_spaces=False,
    )[0]["generated_text"]
    assert tokenizer(made_text)["input_ids"] == [i for i in tokens(model)[0] if i != 2]
    generator.save_pretrained(folder.parent / "pipeline")
    assert same(opened(folder.parent / "pipeline"), model)


def test_compiled_models_compute_the_same(made: tuple[Any, Path]) -> None:
    model, _ = made
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(IDS, use_cache=False).logits, model(IDS, use_cache=False).logits)


def test_exported_models_compute_the_same(made: tuple[Any, Path]) -> None:
    model, _ = made

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.inner(ids, use_cache=False).logits
            return found

    with torch.no_grad():
        program = torch.export.export(Logits().eval(), (IDS,))
        torch.testing.assert_close(program.module()(IDS), model(IDS, use_cache=False).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}, "auto"])
def test_device_maps_of_one_device(made: tuple[Any, Path], device_map: Any) -> None:
    pytest.importorskip("accelerate")
    model, folder = made
    assert same(opened(folder, device_map=device_map), model)


@pytest.mark.parametrize(
    "device_map",
    [
        {"": "disk"},
        {"transformer": "cpu", "model": "cpu", "lm_head": "disk"},
        {"": "meta"},
        {"a": "cuda:0", "b": "cpu"},
    ],
)
@pytest.mark.parametrize("stored", [True, False])
def test_offloading_and_splitting_are_refused(
    made: tuple[Any, Path], device_map: Any, stored: bool, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    folder = made[1] if stored else folder_of("llama", tmp_path)
    options = {} if stored else {"quantization_config": qcut.QcutConfig("w8a8")}
    with pytest.raises(UnsupportedError, match=r"device_map requests .*buffers.*allowed: one device"):
        opened(folder, device_map=device_map, **options)


def test_trainer_trains_adapters_over_frozen_weights(made: tuple[Any, Path]) -> None:
    model, _ = made
    assert model.hf_quantizer.is_trainable
    assert all(not b.requires_grad for m in model.modules() if isinstance(m, Linear) for b in m.buffers())
