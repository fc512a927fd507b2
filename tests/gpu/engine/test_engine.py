"""The engine on the GPU: the CPU's tokens, graphs against launches, ragged batches, int8 caches, odd sizes."""

from __future__ import annotations

import copy
import gc
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import qcut
from qcut.backends.cuda import gemm as gemm_cuda
from qcut.cli import main as cli
from qcut.engine import runner
from qcut.engine.engine import Engine
from qcut.numerics.int8 import sqnr_db
from qcut.numerics.sampling import Sampling
from tests.gpu.support.decoders import llama
from tests.gpu.support.oracles import DEVICE, assert_same
from tests.support import llama2c_oracle as llama2c
from tests.support.decoders import VOCABULARY, WIDE, prompts_of, small


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kv_cache", ["auto", "int8"])
def test_float32_tokens_are_the_cpus(graphs: bool, kv_cache: Any) -> None:
    cpu = llama(None, torch.float32, "cpu")
    prompts = prompts_of(VOCABULARY, 7, 100, 1)
    want = Engine(cpu, batch=3, kv_cache=kv_cache).generate(prompts, 40)
    engine = Engine(copy.deepcopy(cpu).to(DEVICE), batch=3, kv_cache=kv_cache, graphs=graphs)
    assert engine.generate(prompts, 40) == want
    assert engine.generate(prompts[:1], 40) == want[:1]


@pytest.mark.parametrize("scheme", [None, "w8a8", "w8a8_rotated", "w8a16", "int16x8", "codebook4", "codebook4_int8"])
def test_graphs_are_the_launches(scheme: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if scheme == "int16x8":  # no other test shares its kernels of nvcc's
        monkeypatch.setattr(gemm_cuda, "has_cutlass", lambda: False)
    model = llama(scheme)
    prompts = prompts_of(VOCABULARY, 20, 3)
    launched, captured = (Engine(model, batch=2, graphs=graphs) for graphs in (False, True))
    for engine in (launched, captured):
        engine.prefill(prompts)
    for token in (5, 7, 11):
        assert_same(captured.decode([token, token + 1]), launched.decode([token, token + 1]))
    hot = Sampling(temperature=1.0, seed=2)
    assert captured.generate(prompts, 30, sampling=hot) == launched.generate(prompts, 30, sampling=hot)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_codebook_tables_are_the_modules(kind: str) -> None:
    model = small(kind, **WIDE).to(DEVICE, torch.float16)
    qcut.quantize(model, "codebook4", embeddings="codebook4", prebuild=(), progress=False)
    decoder = Engine(model, batch=2).decoder
    ids = torch.arange(20, device=DEVICE) % VOCABULARY
    places = torch.arange(20, device=DEVICE, dtype=torch.int32)
    with torch.no_grad():
        want = model.get_input_embeddings()(ids)
        if decoder.positions is not None:
            want = want + decoder.positions(places.long())
        assert_same(decoder.embed(ids, places, 1), want)


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_int8_norms_are_the_norms_quantized(layer: bool, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 9, 200, device=DEVICE).to(dtype)
    weight, bias = torch.randn(2, 200, device=DEVICE).to(dtype)
    given = (x, residual, weight, bias if layer else None, layer, 1e-5)
    total, y = torch.ops.qcut.add_norm(*given)
    want = (total, *torch.ops.qcut.quantize_per_token(y, 208))
    for got, expected in zip(torch.ops.qcut.add_norm_int8(*given, 208), want, strict=True):
        assert_same(got, expected)


def test_half_precision_is_near_the_models_own() -> None:
    model = llama()
    prompt = prompts_of(VOCABULARY, 50)[0]
    engine = Engine(model)
    logits = engine.prefill([prompt])
    for token in (3, 4, 5):
        with torch.no_grad():
            want = model(torch.tensor([prompt], device=DEVICE)).logits[0, -1]
        assert sqnr_db(want[None], logits) > 45
        logits = engine.decode([token])
        prompt = [*prompt, token]


def test_a_step_that_fails_leaves_the_engine_usable() -> None:
    model = llama()
    engine, prompts = Engine(model, batch=2), prompts_of(VOCABULARY, 5, 9)
    engine.prefill(prompts)
    stream = torch.cuda.current_stream()
    with model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda *_: torch.cuda.synchronize()):
        with pytest.raises(RuntimeError):
            engine.decode([1, 2])
        assert engine.lengths == (5, 9)
        with pytest.raises(RuntimeError):
            engine.prefill([[1] * 40], reuse_prefix=[3])
        assert engine.lengths == (3,)
    assert torch.cuda.current_stream() == stream
    torch.cuda.synchronize()
    assert engine.generate(prompts, 10) == Engine(model, batch=2, graphs=False).generate(prompts, 10)


@pytest.mark.parametrize("kv_cache", ["auto", "int8", "int4"])
def test_a_long_context_is_a_short_one_while_sequences_are_short(
    kv_cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bitwise, in graphs and without; sequences then go on to further graphs, and back."""
    monkeypatch.setattr(runner, "FIRST_BUCKET", 64)
    model = llama("w8a8")
    guide: Any = [] if kv_cache == "int4" else None  # guides are made for the places of the whole context
    short, launched, captured = (
        Engine(model, batch=2, context=context, kv_cache=kv_cache, graphs=graphs, calibration_prompts=guide)
        for context, graphs in ((64, True), (290, False), (290, True))
    )
    for engine in (short, launched, captured):
        engine.prefill([[3], [4]])
    for step in range(250):
        tokens = [(7 * step + i) % VOCABULARY for i in range(2)]
        got = captured.decode(tokens)
        assert_same(launched.decode(tokens), got)
        if step < 63:
            assert_same(short.decode(tokens), got)
    prompts = prompts_of(VOCABULARY, 50, 3)
    want = launched.generate(prompts)
    assert captured.generate(prompts) == want
    assert captured.generate(prompts) == want


def test_ten_thousand_tokens_take_no_more_memory() -> None:
    model = llama()
    engine, prompts = Engine(model, batch=8), prompts_of(VOCABULARY, *(5,) * 8)

    def allocated() -> int:
        gc.collect()  # of earlier tests in this process
        return torch.cuda.memory_allocated()

    engine.generate(prompts, 100)
    before = allocated()
    for _ in range(5):
        assert sum(len(g.tokens) for g in engine.generate(prompts, 250)) == 2000
    assert allocated() == before


def test_llama2c_files_generate_the_cpus_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def text(checkpoint: Path, tokenizer: Path, device: str) -> str:
        files = ("--llama2c", str(checkpoint), "--tokenizer", str(tokenizer))
        assert cli.main(["generate", *files, "--steps", "200", "--device", device]) == 0
        return capfd.readouterr().out

    sizes = llama2c.Sizes(dim=64, hidden_dim=172, n_layers=2, n_heads=8, n_kv_heads=4, vocab_size=300, seq_len=250)
    files = tmp_path / "model.bin", tmp_path / "tokenizer.bin"
    llama2c.make(files[0], sizes)
    pieces = [b" %d" % i for i in range(sizes.vocab_size)]
    packed = [struct.pack("<fi", 0.0, len(piece)) + piece for piece in pieces]
    files[1].write_bytes(struct.pack("<i", 4) + b"".join(packed))
    want = text(*files, "cpu")
    assert len(set(want.split())) > 5
    assert text(*files, "cuda") == want
    for name in llama2c.SAMPLES[1:]:  # if llama2.c's own file lies next to the project
        sample = llama2c.sample(name, tmp_path)
        assert text(sample.model, sample.tokens, "cuda") == sample.text.read_text()


def test_host_copies_survive_later_steps() -> None:
    engine = Engine(llama(), batch=2)
    engine.prefill(prompts_of(VOCABULARY, 9, 5))
    loop = engine.runner.decode_loop(engine.runner.likeliest[:2], engine.lengths)
    arriving: list[Any] = []
    want: list[list[int]] = []
    for _ in range(11):
        engine.runner.decode_step(loop)
        arriving.append(loop.host_copy())
        want.append(loop.tokens.tolist())
    assert [tokens.wait() for tokens in arriving] == want
    loop.set_tokens(torch.tensor([3, 4], device=DEVICE))
    assert loop.host_copy().wait() == [3, 4]


def test_engines_that_are_garbage_disturb_no_capture() -> None:
    """The collector would finalize their events and graphs in the middle of a capture, which CUDA refuses."""
    model, prompts = llama(), prompts_of(VOCABULARY, 5, 9)
    want = Engine(model, batch=2).generate(prompts, 10)
    garbage: list[Any] = [Engine(model, batch=2)]
    garbage[0].generate(prompts, 10)
    garbage.append(garbage)
    captures = []

    def collect(*_: object) -> None:  # as an allocation may anywhere
        if torch.cuda.is_current_stream_capturing():
            captures.append(gc.isenabled())
            if gc.isenabled():
                gc.collect()

    engine = Engine(model, batch=2)
    del garbage
    with model.model.layers[1].mlp.down_proj.register_forward_pre_hook(collect):
        assert engine.generate(prompts, 10) == want
    assert captures
    assert gc.isenabled()
