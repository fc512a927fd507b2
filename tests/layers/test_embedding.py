"""`qcut.Embedding`: rows of quantized tables, tied to a classifier or not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.conversion.quantize import model_bytes, quantize
from qcut.errors import CheckpointError, ConfigError, DtypeError, QuantizationError, RangeError, UnsupportedError
from qcut.layers.embedding import Embedding
from qcut.layers.linear import Linear
from qcut.numerics import int8 as numerics
from qcut.numerics.codebook import layout as codebook_layout
from tests.support.zoo import tiny_hf, tiny_lm, token_batches

SCHEMES = (
    *("w8a16", "w8a8", "codebook4", "codebook3_g64", "codebook2", "codebook4+4", "codebook4+2", "codebook3+2_g32"),
    *("codebook4_int8", "codebook4_rows", "codebook4_g32_none", "int4", "int3_g64", "codebook4_pairs", "nvfp4"),
)


def table(n: int = 70, k: int = 160, dtype: torch.dtype = torch.float32) -> nn.Embedding:
    module = nn.Embedding(n, k)
    with torch.no_grad():
        module.weight.copy_(torch.randn(n, k, generator=torch.Generator().manual_seed(n)))
    return module.to(dtype)


def ids(n: int = 70) -> Tensor:
    return torch.cat((torch.arange(n), torch.tensor([0, n - 1, 0]))).view(1, -1)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        out = model(token_batches()[0])
    return out if isinstance(out, Tensor) else out.logits


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_are_the_dequantized_ones_bit_by_bit(scheme: str):
    module = table(k=256 if "rows" in scheme else 160)
    layer = Embedding.from_float(module, scheme)
    weight = layer.dequantized_weight()
    found = layer(ids())
    assert found.dtype is torch.float32
    assert torch.equal(found, weight[ids()])
    assert float((weight - module.weight.detach()).norm() / module.weight.detach().norm()) < 0.4
    assert torch.equal(layer(ids()[:, :0]), weight[ids()[:, :0]])


@pytest.mark.parametrize("scheme", ["codebook4_qr", "codebook4+4_rows_qr", "codebook3_g48_qr"])
def test_rows_rotated_by_matrices(scheme: str):
    layer = Embedding.from_float(table(k=200), scheme)
    torch.testing.assert_close(layer(ids()), layer.dequantized_weight()[ids()], rtol=0, atol=5e-6)


@pytest.mark.parametrize("scheme", ["w8a16", "codebook4"])
def test_dtypes(scheme: str):
    for dtype in [torch.float16, torch.bfloat16, torch.float64]:
        layer = Embedding.from_float(table(dtype=dtype), scheme)
        assert torch.equal(layer(ids()), layer.dequantized_weight()[ids()].to(dtype))
        assert layer(ids().int()).dtype is dtype
        before = {name: b.dtype for name, b in layer.named_buffers()}
        layer.bfloat16()
        assert layer(ids()).dtype is layer.dtype is torch.bfloat16
        assert {name: b.dtype for name, b in layer.named_buffers()} == before
        with pytest.raises(DtypeError, match="ids are float32; allowed: int32, int64"):
            layer(ids().float())


def test_int8_rows_are_quantize_weights():
    module = table()
    q, scale = numerics.quantize_weight(module.weight.detach())
    assert torch.equal(Embedding.from_float(module)(ids()), numerics.dequantize_ref(q, scale)[ids()])


@pytest.mark.parametrize("scheme", ["w8a16", "codebook4"])
def test_ids_out_of_range(scheme: str):
    for bad in [-1, 70, 79, 1 << 40]:
        # Packed weights have rows up to 128: the 70th to 127th are padding.
        layer = Embedding.from_float(table(), scheme)
        with pytest.raises(RangeError, match=r"ids holds .*; allowed: 0 to"):
            layer(torch.tensor([0, bad]))


def test_no_more_is_unpacked_than_asked_for(monkeypatch: pytest.MonkeyPatch):
    layer = Embedding.from_float(table(n=640), "codebook4")

    def refuse(*_: Any) -> None:
        raise AssertionError("a whole weight was unpacked")

    monkeypatch.setattr(codebook_layout, "unpack_units", refuse)
    assert layer(torch.tensor([5, 639])).shape == (2, 160)


@pytest.mark.parametrize("scheme", ["w8a16", "codebook4", "codebook4+2", "codebook4_qr"])
def test_compiles_to_one_graph(scheme: str):
    torch._dynamo.reset()
    layer = Embedding.from_float(table(), scheme)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(ids()), layer(ids()))


def test_tables_that_are_refused():
    class Scaled(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * 3

    with pytest.raises(UnsupportedError, match=r"layer 'wte': cannot quantize a Scaled"):
        Embedding.from_float(Scaled(4, 8), name="wte")
    with pytest.raises(UnsupportedError, match=r"cannot quantize a Linear; allowed: nn\.Embedding"):
        Embedding.from_float(nn.Linear(4, 8))
    for option in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}):
        with pytest.raises(UnsupportedError, match=f"{next(iter(option))} is"):
            Embedding.from_float(nn.Embedding(4, 8, **option))
    with pytest.raises(UnsupportedError, match="meta"):
        Embedding.from_float(nn.Embedding(4, 8, device="meta"))
    for scheme in ("w8a8_static", "fp16", "w9"):
        with pytest.raises(ConfigError):
            Embedding.from_float(table(), scheme)
    with pytest.raises(QuantizationError, match=r"layer 'wte': .*NaN"):
        Embedding.from_float(nn.Embedding(4, 8, _weight=torch.full((4, 8), torch.nan)), name="wte")
    with pytest.raises(DtypeError, match="embedding of int8; allowed: float16"):
        Embedding(Linear(8, 4), torch.int8)


def test_sizes_and_repr():
    for scheme in ("w8a16", "codebook4+4"):
        other = Embedding.empty(70, 160, scheme)
        assert (other.num_embeddings, other.embedding_dim) == (70, 160)
        assert f"scheme={scheme}, dtype=float32" in repr(other)


# ── ties ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("scheme", ["w8a8", "w8a16", "codebook4", "codebook4_int8", "codebook4+2"])
def test_a_tied_table_is_the_classifiers(scheme: str):
    head = Linear.from_float(nn.Linear(160, 70), scheme)
    layer = Embedding.tied_to(head, torch.float16)
    assert not list(layer.parameters()) + list(layer.buffers())
    assert layer.linear is head
    assert layer.weight.device == head.weight.device
    assert torch.equal(layer(ids()), head.dequantized_weight()[ids()].half())
    assert "tied" in repr(layer)


def test_ties_last():
    model = nn.ModuleDict({"head": Linear.from_float(nn.Linear(160, 70, bias=False), "codebook4")})
    model["embed"] = Embedding.tied_to(model["head"])
    expected = model["embed"](ids())
    model = copy.deepcopy(model.to(torch.bfloat16))
    assert model["embed"].linear is model["head"]
    assert set(model.state_dict()) == {"head.indices", "head.norms", "head.codebook"}
    assert torch.equal(model["embed"](ids()), expected.bfloat16())
    model["head"].units.zero_()
    assert not torch.equal(model["embed"](ids()), expected.bfloat16())


# ── whole models ─────────────────────────────────────────────────────────────────────────────────


def names(model: nn.Module) -> tuple[str, str]:
    """The table of tokens and the classifier of a model of the zoo."""
    tables = {"TinyLM": "embed", "GPT2LMHeadModel": "transformer.wte", "LlamaForCausalLM": "model.embed_tokens"}
    return tables[type(model).__name__], "lm_head"


def small(kind: str) -> Any:
    return tiny_lm() if kind == "plain" else tiny_hf(kind)


@pytest.mark.parametrize("scheme", ["w8a16", "w8a8", "codebook4_g32", "codebook4+4_g32"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "plain"])
def test_tied_models(tmp_path: Path, kind: str, scheme: str):
    model = small(kind)
    before = logits(model)
    embed, head = names(model)
    weight = model.get_submodule(head).weight.detach()
    report = quantize(model, "w8a16", embeddings=scheme, progress=False)
    found, layer = model.get_submodule(embed), model.get_submodule(head)
    assert isinstance(found, Embedding)
    assert isinstance(layer, Linear)
    assert found.linear is layer
    assert report.schemes[head] == report.schemes[embed] == scheme
    assert next(r for r in report.layers if r.name == embed).tied_to == head
    assert head not in report.skipped
    assert report.bytes_after == model_bytes(model) < report.bytes_before
    assert torch.equal(layer.dequantized_weight(), Linear.from_float(_linear(weight), scheme).dequantized_weight())
    after = logits(model)
    assert 0 < float((after - before).norm() / before.norm()) < 0.3
    assert all(isinstance(m, Embedding) or name != embed for name, m in model.named_modules())

    qcut.save(model, tmp_path)
    got = qcut.load(tmp_path, model=type(model) if kind == "plain" else None, progress=False)
    assert got.get_submodule(embed).linear is got.get_submodule(head)
    assert torch.equal(logits(got), after)
    half = qcut.load(tmp_path, model=type(model) if kind == "plain" else None, dtype=torch.float16, progress=False)
    assert half.get_submodule(embed).dtype is torch.float16


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight)
    return layer


@pytest.mark.parametrize("scheme", ["w8a16", "codebook3_g32"])
def test_untied_models(tmp_path: Path, scheme: str):
    model = tiny_hf("llama")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 0.01)
    model.config.tie_word_embeddings = False
    report = quantize(model, "w8a16", embeddings=scheme, progress=False)
    embed = model.model.embed_tokens
    assert isinstance(embed, Embedding)
    assert not embed.tied
    assert report.schemes["lm_head"] == report.schemes["model.embed_tokens"] == scheme
    qcut.save(model, tmp_path)
    got = qcut.load(tmp_path, progress=False)
    assert torch.equal(logits(got), logits(model))
    assert torch.equal(got.model.embed_tokens.dequantized_weight(), embed.dequantized_weight())


def test_positions_stay_and_generation_works():
    model = tiny_hf("gpt2")
    quantize(model, "w8a8", embeddings="w8a16", progress=False)
    assert type(model.transformer.wpe) is nn.Embedding
    assert model.get_input_embeddings().tied
    out = model.generate(token_batches()[0][:1, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert out.shape == (1, 8)


def test_models_without_embeddings_to_quantize():
    model = nn.Sequential(nn.Linear(16, 16))
    with pytest.raises(QuantizationError, match="none of its embeddings"):
        quantize(model, "w8a8", embeddings="w8a16", progress=False)
    assert type(model[0]) is nn.Linear
    for scheme in ("fp16", "w8a8_static"):
        with pytest.raises(ConfigError, match="embeddings"):
            quantize(tiny_hf("gpt2"), "w8a8", embeddings=scheme, progress=False)


@pytest.mark.parametrize("tied", ["no", "table", "classifier", "both"])
def test_tables_that_compute_stay_in_float(tied: str) -> None:
    class Scaled(nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 8.0

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scaled, self.plain, self.proj = Scaled(64, 64), nn.Embedding(64, 64), nn.Linear(64, 64)
            self.lm_head = nn.Linear(64, 64, bias=False)
            if tied in ("table", "both"):
                self.plain.weight = self.scaled.weight
            if tied in ("classifier", "both"):
                self.lm_head.weight = self.scaled.weight

        def get_input_embeddings(self) -> nn.Module:
            return self.scaled

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.lm_head(self.proj(self.scaled(ids) + self.plain(ids)))

    torch.manual_seed(0)
    model, ids = Model().eval(), torch.arange(64)
    rows = model.scaled(ids)
    report = quantize(model, "w8a16", embeddings="w8a16", progress=False)
    assert torch.equal(model.scaled(ids), rows)
    assert "own forward" in report.skipped["scaled"]
    assert ("plain" in report.skipped) == (tied in ("table", "both"))
    assert ("lm_head" in report.skipped) == (tied in ("classifier", "both"))
    assert ("lm_head" in report.schemes) == (tied in ("no", "table"))
    assert "left in float: scaled" in str(report)


def test_scaled_tables_of_transformers_stay() -> None:
    model = tiny_hf("gemma")
    report = quantize(model, "w8a8", embeddings="w8a16", progress=False)
    assert "own forward" in report.skipped["model.embed_tokens"]
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_saved_embeddings_are_checked(tmp_path: Path):
    import json

    model = tiny_hf("gpt2")
    quantize(model, "w8a8", embeddings="codebook4_g32", progress=False)
    for change, message in (
        ({"transformer.wte": {"table": "nope", "dtype": "float32"}}, "'transformer.wte'.*nope"),
        ({"transformer.ln_f": {"table": "lm_head", "dtype": "float32"}}, "LayerNorm"),
        ({"transformer.wpe": {"table": "lm_head", "dtype": "float32"}}, r"'transformer\.wpe'.*64"),
        ({"transformer.wte": {"table": "lm_head", "dtype": "int8"}}, "int8"),
        ({"transformer.wte": "lm_head"}, r"transformer\.wte"),
        ({"transformer.nope": {"table": "lm_head", "dtype": "float32"}}, r"transformer\.nope"),
    ):
        qcut.save(model, tmp_path)
        path = tmp_path / "qcut_config.json"
        data = json.loads(path.read_text())
        data["embeddings"] = change
        path.write_text(json.dumps(data))
        with pytest.raises(CheckpointError, match=message):
            qcut.load(tmp_path, progress=False, verify=False)


class Reader(nn.Module):
    """A table of tokens, its classifier, and code that does something with the table."""

    def __init__(self, use: Callable[[Any], Any] = lambda model: 1.0) -> None:
        super().__init__()
        self.words, self.middle, self.use = nn.Embedding(96, 64), nn.Linear(64, 64), use
        self.lm_head = nn.Linear(64, 96, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def forward(self, input_ids: Tensor) -> Tensor:
        y: Tensor = self.lm_head(self.middle(self.words(input_ids))) * self.use(self)
        return y


def given(change: Callable[[Any], object]) -> Reader:
    model = Reader()
    change(model)
    return model


def norms(model: Any) -> Any:
    return sum(p.norm() for p in model.words.parameters())


USED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "weight": (lambda: Reader(lambda m: m.words.weight.norm()), "reads its weight itself"),
    "parameters": (lambda: Reader(norms), "reads its weight itself"),
    "class": (lambda: Reader(lambda m: 2 if isinstance(m.words, nn.Embedding) else 1), "checks its class"),
    "method": (lambda: Reader(lambda m: callable(m.words.from_pretrained)), "uses what a quantized embedding has not"),
    "held": (lambda: given(lambda m: m.__dict__.update(again=[m.words])), "Reader.again"),
    "dtype": (lambda: given(lambda m: setattr(m.words, "dtype", 16)), "has an attribute 'dtype' of its own"),
    "forward": (lambda: given(lambda m: setattr(m.words, "forward", m.words.forward)), "called otherwise than by"),
}


@pytest.mark.parametrize("what", USED)
def test_tables_used_otherwise_are_refused(what: str) -> None:
    make, words = USED[what]
    model = make()
    with pytest.raises(UnsupportedError, match=words):
        quantize(model, "w8a8", include=["middle"], embeddings="w8a16", progress=False)
    assert type(model.middle) is nn.Linear


def test_hooks_and_attributes_of_tables_stay() -> None:
    model, ids = Reader(lambda m: getattr(m.words, "gain", 1.0)), torch.arange(8)[None]
    model.words.gain = 3.0  # type: ignore[assignment]
    model.words.register_forward_hook(lambda module, args, y: 2 * y)
    want = model(ids)
    quantize(model, "int16x8", embeddings="w8a16", progress=False)
    assert isinstance(model.words, Embedding)
    torch.testing.assert_close(model(ids), want, rtol=0.05, atol=0.02 * float(want.detach().abs().max()))


def test_parametrized_tables_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="its weight is computed from other parameters"):
        Embedding.from_float(nn.utils.parametrizations.orthogonal(nn.Embedding(96, 64)), "w8a16")


def test_replaced_function_of_torch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.functional, "embedding", lambda *a, **b: None)
    with pytest.raises(UnsupportedError, match="called otherwise than by"):
        Embedding.from_float(nn.Embedding(8, 64), "w8a16")
