"""llama2.c's checkpoints: read, written, refused; its program's arithmetic and its text."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from zoo import tiny_hf

from qcut.config import Codebook
from qcut.convert import quantize
from qcut.errors import CheckpointError, DtypeError, UnsupportedError
from qcut.linear import Linear
from qcut.llama2c import load_llama2c, save_llama2c
from qcut.llama2c_tokenizer import Llama2cTokenizer

transformers = pytest.importorskip("transformers")

DATA = Path(__file__).parents[2] / "shared" / "data"
SAMPLE, SAMPLE_TOKENS, SAMPLE_TEXT = (
    DATA / name for name in ("stories260K.bin", "tok512.bin", "stories260K.greedy200.txt")
)
needs_sample = pytest.mark.skipif(not SAMPLE.is_file(), reason=f"no sample beside the project ({SAMPLE.name})")


class Sizes(NamedTuple):
    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    seq_len: int


CASES = {
    "the sample's sizes": Sizes(64, 172, 2, 8, 4, 512, 24),
    "untied": Sizes(64, 172, 1, 8, 4, -512, 9),
    "odd": Sizes(30, 17, 3, 3, 1, 37, 11),
    "odd, untied": Sizes(42, 5, 2, 3, 3, -41, 13),
    "heads of two": Sizes(6, 1, 1, 3, 3, 5, 4),
}


def in_file(sizes: Sizes) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes as `checkpoint_init_weights` of run.c steps over them."""
    dim, hidden, layers, heads, kv_heads, vocabulary, length = sizes
    kv, half = dim // heads * kv_heads, dim // heads // 2
    shapes = [("token_embedding", (abs(vocabulary), dim)), ("rms_att", (layers, dim)), ("wq", (layers, dim, dim))]
    shapes += [("wk", (layers, kv, dim)), ("wv", (layers, kv, dim)), ("wo", (layers, dim, dim))]
    shapes += [("rms_ffn", (layers, dim)), ("w1", (layers, hidden, dim)), ("w2", (layers, dim, hidden))]
    shapes += [("w3", (layers, hidden, dim)), ("rms_final", (dim,))]
    shapes += [("freq_cis_real", (length, half)), ("freq_cis_imag", (length, half))]
    return shapes + ([("wcls", (abs(vocabulary), dim))] if vocabulary < 0 else [])


def make(path: Path, sizes: Sizes, *, seed: int = 0) -> dict[str, np.ndarray]:
    """A checkpoint with random weights, written field by field."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in in_file(sizes):
        # The tables are noise: whoever reads them is found out.
        spread, middle = (0.4, 1.0) if name.startswith("rms") else (0.7 if "emb" in name else 0.3, 0.0)
        tensors[name] = (middle + spread * rng.standard_normal(shape)).astype("<f4")
    path.write_bytes(struct.pack("<7i", *sizes) + b"".join(t.tobytes() for t in tensors.values()))
    return tensors


def forward(sizes: Sizes, tensors: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """run.c's `forward` in float64, token after token, head after head."""
    w = {name: t.astype(np.float64) for name, t in tensors.items()}
    dim, heads = sizes.dim, sizes.n_heads
    size, shared = dim // heads, heads // sizes.n_kv_heads

    def norm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return gain * x / np.sqrt((x * x).mean() + 1e-5)

    def rope(x: np.ndarray, position: int) -> np.ndarray:
        y = x.copy()
        for i in range(0, len(x), 2):
            angle = position / 10000.0 ** (i % size / size)
            y[i] = x[i] * np.cos(angle) - x[i + 1] * np.sin(angle)
            y[i + 1] = x[i] * np.sin(angle) + x[i + 1] * np.cos(angle)
        return y

    keys: list[list[np.ndarray]] = [[] for _ in range(sizes.n_layers)]
    values: list[list[np.ndarray]] = [[] for _ in range(sizes.n_layers)]
    logits = []
    for position, token in enumerate(ids):
        x = w["token_embedding"][token]
        for layer in range(sizes.n_layers):
            h = norm(x, w["rms_att"][layer])
            q = rope(w["wq"][layer] @ h, position)
            keys[layer].append(rope(w["wk"][layer] @ h, position))
            values[layer].append(w["wv"][layer] @ h)
            mixed = np.zeros(dim)
            for head in range(heads):
                own, kv = slice(head * size, (head + 1) * size), head // shared * size
                scores = np.array([q[own] @ k[kv : kv + size] for k in keys[layer]]) / np.sqrt(size)
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                mixed[own] = sum(a * v[kv : kv + size] for a, v in zip(weights, values[layer], strict=True))
            x = x + w["wo"][layer] @ mixed
            h = norm(x, w["rms_ffn"][layer])
            gate = w["w1"][layer] @ h
            x = x + w["w2"][layer] @ (gate / (1 + np.exp(-gate)) * (w["w3"][layer] @ h))
        logits.append(w.get("wcls", w["token_embedding"]) @ norm(x, w["rms_final"]))
    return np.stack(logits)


def logits_of(model: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def llama(**changes: Any) -> Any:
    """A random Llama that the format can hold, but for the changes."""
    torch.manual_seed(5)
    settings = {
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 16,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings | changes)).eval()


IDS = [1, 5, 63, 0, 17, 17, 40, 2, 9, 33, 21, 8]

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


def test_the_model_is_whole_and_as_the_header_says(tmp_path: Path):
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
    for missing in (path, tmp_path):
        with pytest.raises(CheckpointError, match=f"{missing}: there is no such file"):
            load_llama2c(missing)
    for size in (0, 27):
        path.write_bytes(bytes(size))
        with pytest.raises(CheckpointError, match=rf"m\.bin: found {size} bytes; a llama2\.c header is 28"):
            load_llama2c(path)


@pytest.mark.parametrize("change", [-4, -1, 1, 4])
def test_files_of_another_size(change: int, tmp_path: Path):
    path = tmp_path / "m.bin"
    make(path, CASES["odd"])
    size = path.stat().st_size
    path.write_bytes((path.read_bytes() + bytes(4))[: size + change])
    with pytest.raises(CheckpointError, match=rf"found {size + change} bytes; .*n_kv_heads=1.* asks for {size}"):
        load_llama2c(path)


@pytest.mark.parametrize("field", Sizes._fields)
@pytest.mark.parametrize("value", [0, -3, -(2**31)])
def test_headers_with_a_value_that_cannot_be(field: str, value: int, tmp_path: Path):
    path = tmp_path / "m.bin"
    make(path, CASES["odd"])
    path.write_bytes(struct.pack("<7i", *CASES["odd"]._replace(**{field: value})) + path.read_bytes()[28:])
    message = "found .* bytes; .* asks for" if field == "vocab_size" and value else f"{field} is {value} in the header"
    with pytest.raises(CheckpointError, match=message):
        load_llama2c(path)


@pytest.mark.parametrize(
    "changes", [{"n_heads": 4}, {"n_heads": 31}, {"n_kv_heads": 2}, {"n_kv_heads": 4}, {"n_heads": 6}]
)
def test_headers_whose_heads_do_not_fit(changes: dict[str, int], tmp_path: Path):
    path = tmp_path / "m.bin"
    path.write_bytes(struct.pack("<7i", *CASES["odd"]._replace(**changes)))
    with pytest.raises(CheckpointError, match=r"dim 30, n_heads \d+, n_kv_heads \d+ in the header; n_kv_heads divides"):
        load_llama2c(path)


def test_headers_that_ask_for_more_than_there_is_cost_nothing(tmp_path: Path):
    path = tmp_path / "m.bin"
    most = 2**31 - 1
    path.write_bytes(struct.pack("<7i", most - 1, most, most, 1, 1, -most, most) + bytes(100))
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match="found 128 bytes"):
        load_llama2c(path)
    assert time.perf_counter() - start < 5


def test_later_versions_are_refused_by_name(tmp_path: Path):
    path = tmp_path / "m.bin"
    path.write_bytes(struct.pack("<Ii", 0x616B3432, 1) + bytes(248))
    with pytest.raises(CheckpointError, match="version 1 or later; the legacy version 0 is read"):
        load_llama2c(path)


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


# ── the sample ───────────────────────────────────────────────────────────────────────────────────


@needs_sample
def test_the_sample_goes_on_as_run_c_does():
    model = load_llama2c(SAMPLE)
    tokenizer = Llama2cTokenizer.from_file(SAMPLE_TOKENS, model.config.vocab_size)
    past, token, printed = None, 1, b""
    with torch.no_grad():
        for _ in range(200):
            out = model(torch.tensor([[token]]), past_key_values=past, use_cache=True)
            past, previous, token = out.past_key_values, token, int(out.logits[0, -1].argmax())
            if token == 1:
                break
            printed += tokenizer.printed_piece(previous, token)
    assert printed + b"\n" == SAMPLE_TEXT.read_bytes()


@needs_sample
def test_the_sample_is_written_as_it_was(tmp_path: Path):
    """The tables of the rotation too: they are computed in llama2.c's steps, with torch as there."""
    save_llama2c(load_llama2c(SAMPLE), tmp_path / "m.bin")
    assert (tmp_path / "m.bin").read_bytes() == SAMPLE.read_bytes()


# ── writing ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("case", CASES)
def test_round_trips_are_bitwise(case: str, tmp_path: Path):
    sizes = CASES[case]
    tensors = make(tmp_path / "a.bin", sizes)
    size = sizes.dim // sizes.n_heads
    angles = np.arange(sizes.seq_len)[:, None] * 10000.0 ** -(np.arange(0, size, 2) / size)
    save_llama2c(load_llama2c(tmp_path / "a.bin"), tmp_path / "b.bin")
    data, offset = (tmp_path / "b.bin").read_bytes(), 28
    assert data[:28] == struct.pack("<7i", *sizes)
    for name, tensor in tensors.items():
        found = np.frombuffer(data, "<f4", tensor.size, offset).reshape(tensor.shape)
        offset += tensor.nbytes
        if name.startswith("freq_cis"):
            wanted = np.cos(angles) if name == "freq_cis_real" else np.sin(angles)
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)  # float32 angles of a few dozen radians
        else:
            assert found.tobytes() == tensor.tobytes(), name
    assert offset == len(data)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "b.bin"]


@pytest.mark.parametrize("tied", [True, False])
def test_models_of_transformers_come_back(tied: bool, tmp_path: Path):
    model = llama(tie_word_embeddings=tied)
    save_llama2c(model, tmp_path / "m.bin")
    again = load_llama2c(tmp_path / "m.bin")
    state = again.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(logits_of(again, IDS), logits_of(model, IDS))
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    save_llama2c(model.bfloat16(), tmp_path / "m.bin")
    halves = load_llama2c(tmp_path / "m.bin", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(tensor, halves[name]) for name, tensor in model.state_dict().items())


SCHEMES = {
    "w8a16": ("w8a16", None),
    "w8a16 and tables": ("w8a16", "w8a16"),
    "codebook4": (Codebook(group_size=16), None),
    "codebook4 and tables": (Codebook(group_size=16), Codebook(group_size=16)),
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", SCHEMES)
def test_quantized_models_are_written_as_what_they_stand_for(kind: str, tied: bool, tmp_path: Path):
    scheme, tables = SCHEMES[kind]
    model = llama(tie_word_embeddings=tied, intermediate_size=48)
    before = logits_of(model, IDS)
    quantize(model, scheme, embeddings=tables, progress=False)
    assert isinstance(model.model.layers[0].self_attn.q_proj, Linear)
    save_llama2c(model, tmp_path / "m.bin")
    again = load_llama2c(tmp_path / "m.bin")
    wanted = logits_of(model, IDS)
    assert relative(before, wanted) > 1e-3
    assert relative(logits_of(again, IDS), wanted) < 1e-5
    assert again.config.tie_word_embeddings == tied
    weight = model.model.layers[1].mlp.down_proj.dequantized_weight()
    assert torch.equal(again.model.layers[1].mlp.down_proj.weight, weight)


def test_a_quantized_table_unties_a_float_classifier(tmp_path: Path):
    model = llama()
    source = model.lm_head
    quantize(model, "w8a16", embeddings="w8a16", progress=False)
    model.lm_head = source
    save_llama2c(model, tmp_path / "m.bin")
    again = load_llama2c(tmp_path / "m.bin")
    assert not again.config.tie_word_embeddings
    assert torch.equal(again.lm_head.weight, source.weight)
    assert torch.equal(again.model.embed_tokens.weight, model.model.embed_tokens.dequantized_weight())


class Adapted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


def changed(change: Callable[[Any], None], **settings: Any) -> Callable[[], Any]:
    def build() -> Any:
        model = llama(**settings)
        change(model)
        return model

    return build


def fuse(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.gate_proj = Linear.from_float(mlp.gate_proj, "w8a16", activation="silu")


def poison(model: Any) -> None:
    model.model.norm.weight.data[3] = torch.inf


def quantized(model: Any) -> Any:
    quantize(model, "w8a16", progress=False)
    return model


def odd_heads() -> Any:
    model = llama()
    model.config.hidden_size, model.config.head_dim = 28, 7  # transformers builds none
    return model


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "biases of attention": (
        lambda: llama(attention_bias=True),
        UnsupportedError,
        r"layers\.0\.self_attn\.q_proj'.*bias",
    ),
    "biases of the mlp": (lambda: llama(mlp_bias=True), UnsupportedError, r"layers\.0\.mlp\.gate_proj' has a bias"),
    "bias of a tied classifier": (
        changed(lambda m: setattr(m.lm_head, "bias", nn.Parameter(torch.zeros(64)))),
        UnsupportedError,
        "'lm_head' has a bias",
    ),
    "bias of a quantized layer": (
        lambda: quantized(llama(attention_bias=True)),
        UnsupportedError,
        r"self_attn\.q_proj' has a bias",
    ),
    "bias of a norm": (
        changed(lambda m: setattr(m.model.norm, "bias", nn.Parameter(torch.zeros(32)))),
        UnsupportedError,
        r"'model\.norm' has a bias",
    ),
    "another norm": (
        changed(lambda m: setattr(m.model, "norm", nn.LayerNorm(32, bias=False))),
        UnsupportedError,
        r"'model\.norm' is a LayerNorm; rms_final of llama2\.c is a LlamaRMSNorm",
    ),
    "wide heads": (lambda: llama(head_dim=16), UnsupportedError, "hidden_size 32, 4 heads of head_dim 16"),
    "odd heads": (odd_heads, UnsupportedError, "4 heads of head_dim 7"),
    "theta": (lambda: llama(rope_theta=5e5), UnsupportedError, "rope_theta is 500000.0 .* 10000.0 built in"),
    "scaled rope": (
        lambda: llama(rope_scaling={"rope_type": "linear", "factor": 2.0}),
        UnsupportedError,
        "rope_type is 'linear'",
    ),
    "partial rope": (lambda: llama(partial_rotary_factor=0.5), UnsupportedError, "partial_rotary_factor is 0.5"),
    "epsilon": (lambda: llama(rms_norm_eps=1e-6), UnsupportedError, "rms_norm_eps is 1e-06; llama2.c has 1e-05"),
    "activation": (lambda: llama(hidden_act="gelu"), UnsupportedError, "hidden_act is 'gelu'.* 'silu' built in"),
    "fused activation": (changed(fuse), UnsupportedError, r"mlp\.gate_proj' computes silu too; w1 of layer 0"),
    "GPT-2": (lambda: tiny_hf("gpt2"), UnsupportedError, "GPT2LMHeadModel: llama2.c holds"),
    "Gemma": (lambda: tiny_hf("gemma"), UnsupportedError, "GemmaForCausalLM: llama2.c holds"),
    "no transformers": (lambda: nn.Linear(4, 4), UnsupportedError, "Linear: llama2.c holds"),
    "adapter": (
        changed(lambda m: setattr(m.model.layers[1].self_attn, "o_proj", Adapted(32, 32, bias=False))),
        UnsupportedError,
        r"layers\.1\.self_attn\.o_proj' is a Adapted; wo of layer 1 of llama2\.c is a linear layer",
    ),
    "another mlp": (
        changed(lambda m: delattr(m.model.layers[0].mlp, "up_proj")),
        UnsupportedError,
        r"layers\.0\.mlp\.up_proj'.*llama2\.c has w3 of layer 0 there",
    ),
    "another table": (
        changed(lambda m: setattr(m.model, "embed_tokens", nn.Identity())),
        UnsupportedError,
        r"embed_tokens' is a Identity; token_embedding of llama2\.c is an embedding",
    ),
    "another size": (
        changed(lambda m: setattr(m, "lm_head", nn.Linear(32, 60, bias=False)), tie_word_embeddings=False),
        UnsupportedError,
        r"'lm_head' has a weight \[60, 32\]; the model's wcls is \[64, 32\]",
    ),
    "no memory": (changed(lambda m: m.to("meta")), CheckpointError, r"'model\.embed_tokens'.*meta device"),
    "Inf": (changed(poison), CheckpointError, r"'model\.norm': the weight holds NaN or Inf"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_models_that_are_refused_leave_the_old_file(what: str, tmp_path: Path):
    build, error, message = REFUSED[what]
    path = tmp_path / "m.bin"
    path.write_bytes(b"old")
    with pytest.raises(error, match=message):
        save_llama2c(build(), path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "m.bin"
    save_llama2c(llama(), path)
    old = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(CheckpointError, match=r"m\.bin: cannot be written: no space left"):
        save_llama2c(llama(intermediate_size=12), path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "m.bin"
    path.write_bytes(b"old")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_llama2c(llama(), path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_places_that_cannot_be_written(tmp_path: Path):
    for path in (tmp_path / "none" / "m.bin", tmp_path):
        with pytest.raises(CheckpointError, match=f"{path}: cannot be written"):
            save_llama2c(llama(), path)
    assert not list(tmp_path.iterdir())
