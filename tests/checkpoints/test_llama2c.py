"""llama2.c's checkpoints: read and refused; its program's arithmetic and its text."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from qcut.checkpoints.formats.llama2c.files import load_llama2c, save_llama2c
from qcut.checkpoints.formats.llama2c.tokenizer import Llama2cTokenizer
from qcut.errors import CheckpointError, DtypeError
from tests.support.llama2c_oracle import CASES, Sample, Sizes, forward, logits_of, make, relative

transformers = pytest.importorskip("transformers")

# ── reading ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("case", CASES)
def test_logits_are_llama2cs(case: str, tmp_path: Path):
    sizes = CASES[case]
    tensors = make(tmp_path / "m.bin", sizes)
    model = load_llama2c(tmp_path / "m.bin")
    ids = np.random.default_rng(1).integers(0, abs(sizes.vocab_size), sizes.seq_len).tolist()
    wanted = forward(sizes, tensors, ids)
    found = logits_of(model, ids)
    assert found.dtype is torch.float32
    assert relative(found, torch.from_numpy(wanted)) < 1e-4
    # Pairs of a head and halves of it are not the same thing: the permutation is what made them so.
    if sizes.dim // sizes.n_heads > 2:
        raw = tensors["wq"][0]
        model.model.layers[0].self_attn.q_proj.weight = nn.Parameter(torch.from_numpy(raw))
        assert relative(logits_of(model, ids), torch.from_numpy(wanted)) > 1e-3


def test_loaded_model_has_the_sizes_of_the_header(tmp_path: Path):
    make(tmp_path / "m.bin", CASES["odd"])
    model = load_llama2c(tmp_path / "m.bin")
    assert type(model) is transformers.LlamaForCausalLM
    config = model.config
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (30, 17, 3)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (3, 1, 10)
    assert (config.vocab_size, config.max_position_embeddings, config.rms_norm_eps) == (37, 11, 1e-5)
    assert (config.bos_token_id, config.eos_token_id, config.tie_word_embeddings) == (1, 2, True)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert not any(m.training for m in model.modules())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    fresh = transformers.LlamaForCausalLM(config).model.rotary_emb
    for name, buffer in fresh.named_buffers():
        assert torch.equal(getattr(model.model.rotary_emb, name), buffer), name


def test_an_untied_classifier_is_its_own(tmp_path: Path):
    tensors = make(tmp_path / "m.bin", CASES["untied"])
    model = load_llama2c(tmp_path / "m.bin")
    assert not model.config.tie_word_embeddings
    assert np.array_equal(model.lm_head.weight.detach().numpy(), tensors["wcls"])
    assert np.array_equal(model.model.embed_tokens.weight.detach().numpy(), tensors["token_embedding"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype, tmp_path: Path):
    tensors = make(tmp_path / "m.bin", CASES["odd"])
    model = load_llama2c(tmp_path / "m.bin", dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model.model.rotary_emb.inv_freq.dtype is torch.float32
    wanted = torch.from_numpy(tensors["w2"][1]).to(dtype)
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight, wanted)
    assert logits_of(model, [1, 2, 3]).isfinite().all()


def test_dtypes_that_are_none():
    with pytest.raises(DtypeError, match="dtype is int8; allowed: float16, bfloat16, float32, float64"):
        load_llama2c("nowhere.bin", dtype=torch.int8)


# ── files that are refused ───────────────────────────────────────────────────────────────────────


def test_files_that_are_missing_or_short(tmp_path: Path):
    path = tmp_path / "m.bin"
    for missing, message in ((path, "there is no such file"), (tmp_path, "not a regular file")):
        with pytest.raises(CheckpointError, match=f"{missing}: {message}"):
            load_llama2c(missing)
    for size in (0, 27):
        path.write_bytes(bytes(size))
        with pytest.raises(CheckpointError, match=rf"m\.bin: found {size} bytes; a llama2\.c header is 28"):
            load_llama2c(path)


def test_files_of_another_size(tmp_path: Path):
    path = tmp_path / "m.bin"
    make(path, CASES["odd"])
    data = path.read_bytes()
    for change in (-4, -1, 1, 4):
        size = len(data) + change
        path.write_bytes((data + bytes(4))[:size])
        with pytest.raises(CheckpointError, match=rf"found {size} bytes; .*n_kv_heads=1.* needs {len(data)}"):
            load_llama2c(path)


@pytest.mark.parametrize("field", Sizes._fields)
def test_headers_with_a_value_that_cannot_be(field: str, tmp_path: Path):
    path = tmp_path / "m.bin"
    make(path, CASES["odd"])
    rest = path.read_bytes()[28:]
    for value in (0, -3, -(2**31)):
        path.write_bytes(struct.pack("<7i", *CASES["odd"]._replace(**{field: value})) + rest)
        untied = field == "vocab_size" and value
        message = "found .* bytes; .* needs" if untied else f"{field} is {value} in the header"
        with pytest.raises(CheckpointError, match=message):
            load_llama2c(path)


def test_headers_whose_heads_do_not_fit(tmp_path: Path):
    path = tmp_path / "m.bin"
    for changes in ({"n_heads": 4}, {"n_heads": 31}, {"n_kv_heads": 2}, {"n_kv_heads": 4}, {"n_heads": 6}):
        path.write_bytes(struct.pack("<7i", *CASES["odd"]._replace(**changes)))
        with pytest.raises(CheckpointError, match=r"dim 30, n_heads \d+, n_kv_heads \d+ in the header; n_kv_heads div"):
            load_llama2c(path)


MOST = 2**31 - 1
DEEP = Sizes(dim=2, hidden_dim=1, n_layers=2000, n_heads=1, n_kv_heads=1, vocab_size=1, seq_len=1)
FLOATS = 2 + 2000 * (2 + 4 * 4 + 2 + 3 * 2) + 2 + 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (struct.pack("<7i", MOST - 1, MOST, MOST, 1, 1, -MOST, MOST) + bytes(100), "found 128 bytes"),
        (struct.pack("<7i", *DEEP) + bytes(4 * FLOATS), r"n_layers is 2000 in the header; allowed: 1 to 256"),
        (struct.pack("<Ii", 0x616B3432, 1) + bytes(248), "version 1 or later; the legacy version 0 is read"),
    ],
    ids=["oversized", "many layers", "later version"],
)
def test_headers_are_refused_without_allocating(data: bytes, message: str, tmp_path: Path):
    (tmp_path / "m.bin").write_bytes(data)
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match=message):
        load_llama2c(tmp_path / "m.bin")
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize(
    ("name", "value", "label"),
    [
        ("token_embedding", np.nan, "token_embedding"),
        ("wk", np.inf, "wk of layer 2"),
        ("rms_ffn", -np.inf, "rms_ffn of layer 2"),
        ("rms_final", np.nan, "rms_final"),
        ("w3", 7e4, None),
    ],
)
def test_values_that_are_not_finite(name: str, value: float, label: str | None, tmp_path: Path):
    path = tmp_path / "m.bin"
    tensors = make(path, CASES["odd"])
    tensors[name].reshape(-1)[-1] = value
    path.write_bytes(path.read_bytes()[:28] + b"".join(t.tobytes() for t in tensors.values()))
    if label is None:
        load_llama2c(path)
        with pytest.raises(CheckpointError, match="w3 of layer 2 holds NaN or Inf, or values beyond float16"):
            load_llama2c(path, dtype=torch.float16)
    else:
        with pytest.raises(CheckpointError, match=rf"m\.bin: tensor {label} holds NaN or Inf"):
            load_llama2c(path)


# ── files of llama2.c, and files like them ───────────────────────────────────────────────────────


def test_a_model_goes_on_as_run_c_does(llama2c_sample: Sample):
    model = load_llama2c(llama2c_sample.model)
    assert model.config.vocab_size == llama2c_sample.vocab_size
    tokenizer = Llama2cTokenizer.from_file(llama2c_sample.tokens, model.config.vocab_size)
    past, token, printed = None, 1, b""
    with torch.no_grad():
        for _ in range(llama2c_sample.steps):
            out = model(torch.tensor([[token]]), past_key_values=past, use_cache=True)
            past, previous, token = out.past_key_values, token, int(out.logits[0, -1].argmax())
            if token == 1:
                break
            printed += tokenizer.printed_piece(previous, token)
    assert printed + b"\n" == llama2c_sample.text.read_bytes()


def test_a_file_is_written_as_it_was(llama2c_sample: Sample, tmp_path: Path):
    """The tables of the rotation too: they are computed in llama2.c's steps, with torch as there."""
    save_llama2c(load_llama2c(llama2c_sample.model), tmp_path / "m.bin")
    assert (tmp_path / "m.bin").read_bytes() == llama2c_sample.model.read_bytes()
