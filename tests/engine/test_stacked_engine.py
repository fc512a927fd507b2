"""Engines with stacked projections: Hugging Face's tokens, the model next to them, and its checkpoints."""

from __future__ import annotations

import copy
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LlamaForCausalLM,
)

import qcut
from qcut.engine.engine import Engine
from qcut.engine.families import decoder_of
from qcut.layers import codebook, rotations
from qcut.layers.rotated import W8A8RotatedLinear
from tests.support.decoders import VOCABULARY, WIDE, last_logits, prompts_of, small, theirs

SCHEMES = (
    *(None, "w8a8", "w8a8_rotated", "w8a16", "fp8_dynamic", "int16x8"),
    *("codebook4_g32", "codebook4+4_g64_int8", "codebook3+2_g32_qr", "nvfp4"),
)
FAMILIES = ("qwen3", "olmo2", "phi3_partial", "smollm3", "starcoder2", "gpt_neox", "gemma", "gemma2", "gemma3")
WIDE_HEADS = {kind: {"head_dim": 32} for kind in ("qwen3", "gemma", "gemma2", "gemma3")}
EXACT = ("w8a8", "w8a8_rotated", "codebook4+4_g64_int8")


def model_of(scheme: str | None = None, **changes: Any) -> Any:
    """A small model with 64 rows in keys and values, so that codebooks too can be stacked."""
    return copy.deepcopy(quantized(scheme, **changes))


@cache
def quantized(scheme: str | None, *, kind: str = "llama", **changes: Any) -> Any:
    model = small(kind, **{**WIDE, **WIDE_HEADS.get(kind, {}), **changes})
    if scheme is not None:
        qcut.quantize(model, scheme, allow_growth=True, progress=False)
    return model.eval()


def products(engine: Engine) -> set[tuple[int, int]]:
    """Modules that a layer's first projections are, of its attention and of its MLP."""
    return {(len(block.attention.projections), len(block.mlp.projections)) for block in engine.decoder.blocks}


def steps(engine: Engine) -> list[Tensor]:
    return [engine.prefill(prompts_of(VOCABULARY, 9, 14)), engine.decode([3, 4]), engine.decode([5, 6])]


def storage_bytes(*tensors: Tensor) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def weights(model: Any, *engines: Engine) -> list[Tensor]:
    """The model's tensors, and those of the modules that engines call."""
    blocks = [block for engine in engines for block in engine.decoder.blocks]
    modules = [m for block in blocks for m in (*block.attention.projections, *block.mlp.projections)]
    return [t for m in (model, *modules) for t in (*m.parameters(), *m.buffers())]


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        *(("llama", scheme) for scheme in SCHEMES),
        *(("qwen2", scheme) for scheme in (None, "w8a8", "codebook4_g32")),
        *product(FAMILIES, ("w8a8", "int16x8", "w8a16", "codebook4_g32", "codebook4_g64_int8")),
        *(("gpt2", scheme) for scheme in ("w8a16", "codebook4+4_g64_int8", "codebook3+2_g32_qr", "nvfp4")),
    ],
)
def test_tokens_are_hugging_faces(kind: str, scheme: str | None) -> None:
    model = model_of(scheme, kind=kind)
    prompts = prompts_of(VOCABULARY, 5, 12)
    want = [theirs(model, prompt, 6) for prompt in prompts]
    engine = Engine(model, batch=2)
    assert products(engine) == {(1, 1)}
    assert [g.tokens for g in engine.generate(prompts, 6)] == want
    assert [theirs(model, prompt, 6) for prompt in prompts] == want


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_logits_are_those_of_separate_products(scheme: str | None, dtype: torch.dtype) -> None:
    """Sums of floats in two orders, of two layers: ``2**-5`` of the largest logit in float16, 1e-4 in float32."""
    model = model_of(scheme).to(dtype)
    separate = Engine(model, batch=2, stack=False)
    assert products(separate) == {(3, 2)}
    want = steps(separate)
    stacked = Engine(model, batch=2)
    for engine in (stacked, separate, Engine(model, batch=2)):
        for got, expected in zip(steps(engine), want, strict=True):
            if scheme in EXACT:
                assert torch.equal(got, expected)
            limit = 1e-4 if dtype is torch.float32 else 2.0**-5
            assert (got - expected).abs().max() <= limit * expected.abs().max()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_model_and_engines_have_each_weight_once(scheme: str | None) -> None:
    model = model_of(scheme)
    before = storage_bytes(*weights(model))
    first = Engine(model)
    assert storage_bytes(*weights(model, first)) == before
    places = [t.data_ptr() for t in weights(model)]
    second = Engine(model)
    assert storage_bytes(*weights(model, first, second)) == before
    assert [t.data_ptr() for t in weights(model)] == places
    for one, other in zip(weights(model, first), weights(model, second), strict=True):
        assert one.data_ptr() == other.data_ptr()


def test_int8_tokens_enter_stacked_projections() -> None:
    blocks = Engine(model_of("w8a8")).decoder.blocks
    assert all(norm.k_padded == 128 for block in blocks for norm in (block.attention_norm, block.mlp_norm))


def test_a_layer_of_two_schemes_is_stacked_in_part() -> None:
    model = model_of()
    qcut.quantize(model, "w8a8", skip=["*.0.self_attn.k_proj", "*.1.mlp.up_proj"], progress=False)
    engine = Engine(model)
    blocks = engine.decoder.blocks
    assert [(len(block.attention.projections), len(block.mlp.projections)) for block in blocks] == [(3, 1), (1, 2)]
    prompt = prompts_of(VOCABULARY, 8)[0]
    assert engine.generate([prompt], 6)[0].tokens == theirs(model, prompt, 6)


def test_layers_that_share_weights_keep_sharing_them() -> None:
    model = model_of()
    blocks = model.model.layers
    blocks[1].mlp.up_proj.weight = blocks[0].mlp.up_proj.weight
    blocks[1].self_attn.q_proj = blocks[0].self_attn.q_proj
    before = storage_bytes(*weights(model))
    engine = Engine(model)
    assert products(engine) == {(3, 2)}
    assert storage_bytes(*weights(model, engine)) == before
    assert blocks[1].mlp.up_proj.weight is blocks[0].mlp.up_proj.weight


def test_a_gated_mlp_with_another_activation() -> None:
    model = model_of(hidden_act="gelu_new")
    engine = Engine(model)
    assert products(engine) == {(1, 1)}
    prompt = prompts_of(VOCABULARY, 12)[0]
    want = last_logits(model, prompt)
    assert (engine.prefill([prompt])[0] - want).abs().max() <= 1e-4 * want.abs().max()


def test_gpt2_has_no_siblings() -> None:
    model = small("gpt2")
    places = [t.data_ptr() for t in weights(model)]
    engine = Engine(model)
    assert products(engine) == {(1, 1)}
    assert engine.decoder == decoder_of(model)
    assert [t.data_ptr() for t in weights(model)] == places


def test_short_memory_leaves_the_model_as_good_as_before() -> None:
    model = model_of("w8a16")
    before, size = {key: t.clone() for key, t in model.state_dict().items()}, storage_bytes(*weights(model))
    prompts, calls = prompts_of(VOCABULARY, 5, 12), iter(range(1000))
    want = Engine(model, batch=2, stack=False).generate(prompts, 5)

    class Short(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
            if function is torch.ops.aten.cat.default and next(calls) == 5:
                raise torch.OutOfMemoryError("no memory")
            return function(*args, **(options or {}))

    with Short(), pytest.raises(torch.OutOfMemoryError):
        Engine(model)
    assert all(torch.equal(t, before[key]) for key, t in model.state_dict().items())
    assert storage_bytes(*weights(model)) == size
    for stack in (False, True):
        assert Engine(model, batch=2, stack=stack).generate(prompts, 5) == want


def test_refused_options_leave_the_weights_where_they_are() -> None:
    model = model_of()
    places = [t.data_ptr() for t in weights(model)]
    for options in ({"batch": 0}, {"context": 1000}):
        with pytest.raises(qcut.errors.ConfigError):
            Engine(model, **options)  # type: ignore[arg-type]
    assert [t.data_ptr() for t in weights(model)] == places


# ── the model afterwards ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("scheme", "shard"), [*((scheme, 1 << 14) for scheme in SCHEMES), (None, 1 << 30)])
def test_checkpoints_are_those_of_the_model_before(tmp_path: Path, scheme: str | None, shard: int) -> None:
    model = model_of(scheme)
    ids = torch.tensor(prompts_of(VOCABULARY, 9))
    contents = []
    for name in ("before", "after"):
        qcut.save(model, tmp_path / name, max_shard_bytes=shard)
        files = sorted((tmp_path / name).glob("*.safetensors"))
        found = {key: t for file in files for key, t in load_file(file).items()}
        contents.append((found, len(files), sum(file.stat().st_size for file in files)))
        if name == "before":
            engine = Engine(model)
    (before, *counts), (after, *others) = contents
    assert counts == others
    assert before.keys() == after.keys()
    assert all(torch.equal(after[key], t) for key, t in before.items())
    got: Any = qcut.load(tmp_path / "after", progress=False)
    with torch.no_grad():
        assert torch.equal(got(ids).logits, model(ids).logits)
    assert torch.equal(Engine(got).prefill(ids), engine.prefill(ids))


def test_other_writers_take_a_stacked_model(tmp_path: Path) -> None:
    model = model_of()
    before = {key: t.clone() for key, t in model.state_dict().items()}
    Engine(model)
    model.save_pretrained(tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    for state in (LlamaForCausalLM.from_pretrained(tmp_path / "hf").state_dict(), torch.load(tmp_path / "state.pt")):
        assert all(torch.equal(state[key], t) for key, t in before.items())
    assert found.keys() <= before.keys()
    packed = model_of("codebook4_g32")
    Engine(packed)
    qcut.save_turboquant(packed, tmp_path / "turboquant")
    again: Any = qcut.load(tmp_path / "turboquant", model=lambda: LlamaForCausalLM(packed.config), progress=False)
    ids = torch.tensor(prompts_of(VOCABULARY, 9))
    with torch.no_grad():
        assert torch.equal(again(ids).logits, packed(ids).logits)


def test_a_model_is_quantized_moved_and_copied_after_an_engine() -> None:
    model = model_of()
    prompts = prompts_of(VOCABULARY, 5, 12)
    Engine(model)
    twin = copy.deepcopy(model)
    assert storage_bytes(*weights(twin, Engine(twin))) == storage_bytes(*weights(model))
    for other in (model.double().float(), twin):
        qcut.quantize(other, "w8a8", progress=False)
        engine = Engine(other, batch=2)
        assert products(engine) == {(1, 1)}
        assert [g.tokens for g in engine.generate(prompts, 6)] == [theirs(other, prompt, 6) for prompt in prompts]
        assert storage_bytes(*weights(other, engine)) == storage_bytes(*weights(model_of("w8a8")))


@pytest.mark.parametrize("scheme", ["codebook4_g32", "codebook4+4_g64_int8", "codebook4+2_g32"])
@pytest.mark.parametrize("stack", [False, True])
def test_kernels_that_make_tokens_rotate_them(scheme: str, stack: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of CUDA on the CPU: the operators' CPU implementations behind it."""
    monkeypatch.setattr(rotations, "has_kernels", lambda device: True)
    monkeypatch.setattr(rotations, "stream_state", lambda device: None)
    made: list[int] = []
    forward = codebook.CodebookLinear.forward_rotated

    def counted(layer: Any, blocks: Tensor, scale: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
        made.append(rows)
        return forward(layer, blocks, scale, rows, dtype)

    monkeypatch.setattr(codebook.CodebookLinear, "forward_rotated", counted)
    model = copy.deepcopy(quantized(scheme)).half()
    within = steps(Engine(model, batch=2, stack=stack))
    layers = len(decoder_of(model).blocks)
    of_attention = not scheme.endswith("_int8")  # its scale would be of all heads
    readers = (3 if stack else 6) + of_attention  # qkv, gate and up, down, and the output projection
    assert made.count(2) == 2 * layers * readers
    monkeypatch.setattr(codebook.CodebookLinear, "rotation_of", lambda layer, like, **_: None)
    assert all(torch.equal(a, b) for a, b in zip(within, steps(Engine(model, batch=2, stack=stack)), strict=True))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("batch", [1, 3])
def test_kernels_that_make_tokens_rotate_int8_rows(kind: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts too; attention makes plain ones, which the output projection rotates."""
    monkeypatch.setattr(rotations, "has_kernels", lambda device: True)
    monkeypatch.setattr(rotations, "stream_state", lambda device: None)
    made: list[int] = []
    forward = W8A8RotatedLinear.forward_int8

    def counted(layer: Any, q: Tensor, *rest: Any) -> Tensor:
        made.append(len(q))
        return forward(layer, q, *rest)

    monkeypatch.setattr(W8A8RotatedLinear, "forward_int8", counted)
    model = copy.deepcopy(quantized("w8a8_rotated_g32", kind=kind)).half()
    prompts = prompts_of(VOCABULARY, *(9, 14, 5)[:batch])

    def logits() -> list[Tensor]:
        engine = Engine(model, batch=batch)
        return [engine.prefill(prompts), engine.decode([3] * batch), engine.decode([5] * batch)]

    within = logits()
    readers = {"llama": 3, "gpt2": 2}[kind]  # qkv, up, and down unless GELU is in the epilogue of up
    assert made.count(batch) == 2 * readers * len(decoder_of(model).blocks)
    assert max(made) > batch
    monkeypatch.setattr(W8A8RotatedLinear, "rotation_of", lambda layer, like, **_: None)
    made.clear()
    assert all(map(torch.equal, within, logits()))
    assert not made
