"""Directories of the turboquant-model package: read, written, refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import qcut
from qcut import load
from qcut.checkpoints.formats.turboquant import format as turboquant
from qcut.checkpoints.formats.turboquant.format import Config
from qcut.checkpoints.formats.turboquant.writer import quantize_model
from qcut.checkpoints.formats.turboquant.writer import save_turboquant as save
from qcut.conversion.quantize import quantize
from qcut.errors import CheckpointError, ConfigError, QuantizationError, UnsupportedError
from qcut.layers.codebook import CodebookLinear
from qcut.numerics.codebook import lloyd_max, rotation
from qcut.numerics.codebook.quantizer import dequantize
from qcut.schemes import Codebook
from tests.support import turboquant_oracle
from tests.support.files import rewrite
from tests.support.oracles import normal
from tests.support.zoo import tiny_hf, token_batches


def logits(model: Any, ids: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        out = model(token_batches()[0] if ids is None else ids)
    return out if isinstance(out, Tensor) else out.logits


def llama(config: Config | None = None) -> Any:
    model = tiny_hf("llama")
    quantize_model(model, config or Config(group_size=16), progress=False)
    return model


def contents(path: Path) -> dict[str, tuple[str, list[int], Tensor]]:
    with safe_open(path, "pt") as file:
        views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        return {n: (v.get_dtype(), v.get_shape(), file.get_tensor(n)) for n, v in views.items()}


def same_files(a: Path, b: Path) -> None:
    for name in ("model.safetensors", "non_quantized.safetensors"):
        a_tensors, b_tensors = contents(a / name), contents(b / name)
        assert a_tensors.keys() == b_tensors.keys()
        for key, (dtype, shape, tensor) in a_tensors.items():
            assert (dtype, shape) == b_tensors[key][:2], key
            assert torch.equal(tensor, b_tensors[key][2]), key


# ── directories as the package writes them ───────────────────────────────────────────────────────


@pytest.fixture(scope="module", params=turboquant_oracle.SAMPLES)
def sample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return turboquant_oracle.sample(request.param, tmp_path_factory.mktemp("turboquant"))


def test_a_sample_gives_its_logits(sample: Path):
    model = qcut.load(sample, progress=False)
    layers = [m for m in model.modules() if isinstance(m, CodebookLinear)]
    assert len(layers) == 15
    assert not any(isinstance(m, nn.Linear) or m.training for m in model.modules())
    assert layers[0].scheme == Codebook(rotation="qr", norm_dtype="fp32")
    expected = load_file(sample / "expected.safetensors")
    out = logits(model, expected["input_ids"])
    assert out.dtype is torch.float32
    assert float((out - expected["logits"]).norm() / expected["logits"].norm()) < 1e-4


def test_a_sample_is_written_as_it_was(sample: Path, tmp_path: Path):
    save(load(sample, progress=False), tmp_path)
    same_files(tmp_path, sample)
    assert (tmp_path / "turboquant_config.json").read_bytes() == (sample / "turboquant_config.json").read_bytes()
    written, given = (json.loads((d / "config.json").read_text()) for d in (tmp_path, sample))
    for config in (written, given):
        config.pop("transformers_version")
    assert written == given
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in sample.iterdir()} - {"expected.safetensors"}


def test_the_codebook_is_the_packages(sample: Path):
    assert torch.equal(turboquant.codebook(4), load_file(sample / "model.safetensors")["codebook"])


def test_codebooks_that_have_converged_are_lloyd_maxs():
    for bits in (2, 3):
        torch.testing.assert_close(turboquant.codebook(bits), lloyd_max.codebook(bits), rtol=0, atol=1e-6)
    assert 1e-4 < float((turboquant.codebook(4) - lloyd_max.codebook(4)).abs().max()) < 1e-2
    with pytest.raises(ConfigError, match="codebook of 1 bits; allowed: 2, 3, 4"):
        turboquant.codebook(1)


def test_indices_of_a_samples_rotated_values_come_back(sample: Path):
    """The float weights are not there, but what the indices stand for rounds to the same indices."""
    model = load(sample, progress=False)
    for name in ("model.layers.0.mlp.down_proj", "lm_head"):
        (q,) = model.get_submodule(name).passes
        weight = dequantize(q)
        # A group of codebook values is not a point on the sphere: give each the length that it has.
        scale = q.values[q.indices.int()].view(len(q.indices), -1, 128).square().mean(-1).sqrt()
        (again,) = turboquant.quantize(weight, Config())
        torch.testing.assert_close(again.norms, q.norms * scale, rtol=1e-5, atol=0)
        ratio = scale.repeat_interleave(128, 1)
        nearest = (q.values[q.indices.int()] / ratio)[..., None].sub(q.values).abs().argmin(-1)
        assert (again.indices.long() == nearest).float().mean() > 0.9999


# ── the quantizer ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("kind", rotation.KINDS)
def test_quantizer_is_the_formula(kind: str, bits: int):
    weight = normal(24, 160)
    weight[3] = 0
    config = Config(bit_width=bits, group_size=128, rotation=kind, seed=7)
    (q,) = turboquant.quantize(weight, config)
    values, edges = turboquant.codebook(bits).double(), None
    for g, (first, d) in enumerate(((0, 128), (128, 32))):
        w = weight[:, first : first + d]
        norm = w.norm(dim=1).clamp(min=1e-8)
        torch.testing.assert_close(q.norms[:, g], norm, rtol=1e-6, atol=0)
        rotated = rotation.rotate((w / norm[:, None]).double(), kind, 7 + first) * d**0.5
        edges = (values[1:] + values[:-1]) / 2
        clear = (rotated[..., None] - edges).abs().amin(-1) > 1e-5
        clear[3] = False
        assert clear.float().mean() > 0.9
        found = q.indices[:, first : first + d].long()
        assert torch.equal(found[clear], torch.searchsorted(edges, rotated)[clear])
    assert not dequantize(q)[3].abs().max() > 1e-7


def test_residual_passes_are_of_what_bfloat16_leaves():
    weight = normal(16, 128)
    config = Config(group_size=64, residual_bit_width=3, rotation="hadamard", rotation_strategy="per_layer")
    first, second = turboquant.quantize(weight, config, layer_index=2)
    assert (first.seed, second.seed) == (42 + 20014, 1042 + 20014)
    left = weight - dequantize(first).bfloat16().float()
    alone = Config(bit_width=3, group_size=64, rotation="hadamard", seed=second.seed)
    (again,) = turboquant.quantize(left, alone)
    assert torch.equal(second.indices, again.indices)
    assert torch.equal(second.norms, again.norms)
    error = dequantize((first, second)) - weight
    assert float(error.norm() / weight.norm()) < 0.03


def test_the_seeds_of_passes():
    assert turboquant.pass_seeds(42) == (42, 1042)
    assert turboquant.pass_seeds(1, 2, "different", 5) == turboquant.pass_seeds(1, 2, "alternating", 5) == (1, 2)
    assert turboquant.pass_seeds(1, 2, "shared", 5) == (1, 1)
    assert turboquant.pass_seeds(1, 2, "per_layer", 0) == (1, 2)
    assert turboquant.pass_seeds(1, 2, "per_layer", 5) == (50_036, 50_037)
    with pytest.raises(ConfigError, match="strategy 'random'; allowed: different, shared"):
        turboquant.pass_seeds(1, 2, "random")  # type: ignore[arg-type]


def test_weights_that_are_refused():
    with pytest.raises(QuantizationError, match=r"layer 'h\.0': .*NaN or Inf"):
        turboquant.quantize(torch.full((2, 8), torch.inf), Config(), layer="h.0")
    with pytest.raises(ConfigError, match=r"'h\.1'.*Hadamard rotation of 96 columns"):
        turboquant.quantize(torch.ones(2, 96), Config(rotation="hadamard"), layer="h.1")
    with pytest.raises(QuantizationError, match="norm"):
        turboquant.quantize(torch.full((2, 8), 1e5), Config(norm_codec="fp16"))


# ── round trips ──────────────────────────────────────────────────────────────────────────────────

CONFIGS = {
    "qr": Config(group_size=16),
    "hadamard": Config(group_size=8, rotation="hadamard", norm_codec="fp16"),
    "three bits, whole rows": Config(bit_width=3, group_size=None),
    "residual": Config(group_size=16, residual_bit_width=4),
    "narrow residual": Config(group_size=16, residual_bit_width=2, rotation="hadamard", norm_codec="fp16"),
    "shared": Config(group_size=16, residual_bit_width=4, rotation_strategy="shared"),
    "per layer": Config(group_size=16, residual_bit_width=4, rotation_strategy="per_layer", seed=3),
    "no head": Config(bit_width=2, group_size=16, skip_lm_head=True),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_round_trip(tmp_path: Path, case: str):
    config = CONFIGS[case]
    model = llama(config)
    save(model, tmp_path / "a")
    found = json.loads((tmp_path / "a" / "turboquant_config.json").read_text())
    expected = config.to_json()
    if case == "shared":
        # The seeds are equal, which is all that there is to it.
        expected |= {"rotation_strategy": "different", "residual_seed": config.seed}
    assert found == expected
    assert list(found) == list(expected)
    again = load(tmp_path / "a", progress=False)
    assert torch.equal(logits(again), logits(model))
    for name, layer in model.named_modules():
        if isinstance(layer, CodebookLinear):
            for a, b in zip(layer.passes, again.get_submodule(name).passes, strict=True):
                assert torch.equal(a.indices, b.indices)
                assert torch.equal(a.norms.float(), b.norms.float())
                assert torch.equal(a.values, b.values)
                assert (a.seed, a.rotation) == (b.seed, b.rotation)
    save(again, tmp_path / "b")
    same_files(tmp_path / "a", tmp_path / "b")


def test_layout(tmp_path: Path):
    model = llama(CONFIGS["narrow residual"])
    save(model, tmp_path)
    tensors = contents(tmp_path / "model.safetensors")
    stem = "model_layers_1_mlp_down_proj"
    shapes = {name.partition(".")[2]: value[:2] for name, value in tensors.items() if name.startswith(stem)}
    assert shapes == {
        "indices": ("U8", [32, 24]),
        "norms": ("F16", [32, 3]),
        "pass2_indices": ("U8", [32, 24]),
        "pass2_norms": ("F32", [32, 3]),
        "pass2_codebook": ("F32", [4]),
    }
    first, _ = model.get_submodule("model.layers.1.mlp.down_proj").passes
    stored = tensors[f"{stem}.indices"][2]
    assert torch.equal(stored, first.indices[:, 0::2] | first.indices[:, 1::2] << 4)
    rest = contents(tmp_path / "non_quantized.safetensors")
    assert {"model.embed_tokens.weight", "model.rotary_emb.inv_freq", "model.norm.weight"} < rest.keys()
    assert "lm_head.weight" not in rest


def test_codebooks_of_qcut_layers_are_written(tmp_path: Path):
    model = tiny_hf("llama")
    quantize(model, Codebook(group_size=16), skip=(), include=("*_proj",), allow_growth=True, progress=False)
    save(model, tmp_path)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["codebook"], lloyd_max.codebook(4))
    assert torch.equal(logits(load(tmp_path, progress=False)), logits(model))
    assert json.loads((tmp_path / "turboquant_config.json").read_text())["skip_lm_head"] is True


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 7)
        self.rest = nn.ModuleList([nn.Linear(7, 5, bias=False)])
        self.shared = self.first
        self.tied = nn.Linear(7, 5, bias=False)
        self.tied.weight = self.rest[0].weight
        self.register_buffer("steps", torch.arange(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.rest[0](h) + self.tied(h) + self.steps.sum()


def test_models_of_ones_own(tmp_path: Path):
    """Biases, odd widths, modules under two names, buffers of integers."""
    model = Plain()
    quantize_model(model, Config(group_size=8), progress=False)
    save(model, tmp_path)
    assert not (tmp_path / "config.json").exists()
    assert load_file(tmp_path / "model.safetensors")["rest_0.indices"].shape == (5, 4)
    got = qcut.load(tmp_path, model=Plain, progress=False)
    assert got.shared is got.first
    x = normal(4, 20)
    assert torch.equal(got(x), model(x))
    with pytest.raises(CheckpointError, match=r"config\.json: there is no such file"):
        load(tmp_path, progress=False)


def test_tied_weights_are_read_once(tmp_path: Path):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(12, 8)
            self.proj = nn.Linear(8, 8)
            self.lm_head = nn.Linear(8, 12, bias=False)
            self.lm_head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.lm_head(self.proj(self.embed(ids)))

    model = Two()
    quantize_model(model, Config(group_size=8, skip_lm_head=True), progress=False)
    save(model, tmp_path)
    got = load(tmp_path, model=Two(), progress=False)
    assert got.lm_head.weight is got.embed.weight
    assert torch.equal(got(torch.arange(12)), model(torch.arange(12)))


def test_dtypes(tmp_path: Path):
    save(llama(), tmp_path)
    model = load(tmp_path, dtype=torch.bfloat16, progress=False)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert logits(model).dtype is torch.bfloat16
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    assert layer.norms.dtype is torch.float32


# ── what is refused ──────────────────────────────────────────────────────────────────────────────


MODEL, REST, CONFIG = "model.safetensors", "non_quantized.safetensors", "turboquant_config.json"
UP = "model_layers_0_mlp_up_proj"
DAMAGE: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "missing": (MODEL, lambda t: t.pop(f"{UP}.norms"), rf"{UP}\.norms': is missing"),
    "wrong shape": (
        MODEL,
        lambda t: t.update({f"{UP}.indices": torch.zeros(48, 15).byte()}),
        r"\[48, 15\].*\[48, 16\]",
    ),
    "wrong dtype": (MODEL, lambda t: t.update({f"{UP}.indices": torch.zeros(48, 16)}), rf"{UP}\.indices.*F32.*U8"),
    "norms of doubles": (MODEL, lambda t: t.update({f"{UP}.norms": torch.ones(48, 2).double()}), r"norms.*F64.*F32"),
    "one group's norms": (MODEL, lambda t: t.update({f"{UP}.norms": torch.ones(48)}), r"\[48\].*\[48, 2\]"),
    "codebook": (MODEL, lambda t: t.update(codebook=torch.zeros(8)), r"codebook.*\[8\].*\[16\]"),
    "codebook lost": (MODEL, lambda t: t.pop("codebook"), "codebook': is missing"),
    "codebook not ascending": (MODEL, lambda t: t.update(codebook=torch.zeros(16)), "ascend"),
    "bias of a layer without": (MODEL, lambda t: t.update({f"{UP}.bias": torch.ones(48)}), r"up_proj\.bias.*no bias"),
    "foreign layer": (MODEL, lambda t: t.update({"nope.indices": torch.zeros(1).byte()}), "'nope'"),
    "foreign part": (MODEL, lambda t: t.update({f"{UP}.zeros": torch.zeros(1)}), r"up_proj\.zeros"),
    "residual unannounced": (MODEL, lambda t: t.update({f"{UP}.pass2_norms": torch.ones(48, 2)}), "residual_bit_width"),
    "residual missing": (CONFIG, lambda c: c.update(residual_bit_width=4), r"pass2_indices': is missing"),
    "other group size": (CONFIG, lambda c: c.update(group_size=32), r"norms.*\[.*2\]; needed: .*\[\d+\]"),
    "bits": (CONFIG, lambda c: c.update(bit_width=5), "bit_width is 5; allowed: 2, 3, 4"),
    "bits of a float": (CONFIG, lambda c: c.update(bit_width=4.0), r"bit_width is 4\.0"),
    "fewer bits": (CONFIG, lambda c: c.update(bit_width=3), r"codebook.*\[16\].*\[8\]"),
    "rotation": (CONFIG, lambda c: c.update(rotation="givens"), "rotation is 'givens'; allowed: 'hadamard', 'qr'"),
    "strategy": (CONFIG, lambda c: c.update(rotation_strategy="random"), "rotation_strategy is 'random'"),
    "seed": (CONFIG, lambda c: c.update(seed="42"), "seed is '42'"),
    "group size of a string": (
        CONFIG,
        lambda c: c.update(group_size="128"),
        "group_size is '128'; allowed: null, whole",
    ),
    "flag": (CONFIG, lambda c: c.update(skip_lm_head=0), "skip_lm_head is 0; allowed: true, false"),
    "model type": ("config.json", lambda c: c.update(model_type="nope"), "model_type is 'nope'"),
    "no language model": ("config.json", lambda c: c.update(model_type="clip"), "no causal language model"),
    "parameter missing": (REST, lambda t: t.pop("model.norm.weight"), r"1 tensors .* missing.*model\.norm\.weight"),
    "buffer missing": (REST, lambda t: t.pop("model.rotary_emb.inv_freq"), r"inv_freq"),
    "parameter's shape": (
        REST,
        lambda t: t.update({"model.norm.weight": torch.ones(31)}),
        r"norm\.weight.*\[31\].*\[32\]",
    ),
    "parameter's dtype": (REST, lambda t: t.update({"model.norm.weight": torch.ones(32).int()}), r"norm\.weight.*I32"),
    "superfluous": (REST, lambda t: t.update({"model.more": torch.ones(1)}), r"1 do not belong.*model\.more"),
}
UNSUPPORTED: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "entropy coding": (CONFIG, lambda c: c.update(entropy_coding=True), "entropy_coding is True"),
    "factored norms": (CONFIG, lambda c: c.update(norm_codec="factored_int8"), "norm_codec is 'factored_int8'"),
    "embeddings": (CONFIG, lambda c: c.update(embedding_quant="int8"), "embedding_quant is 'int8'"),
    "unknown key": (CONFIG, lambda c: c.update(per_layer_group_size={"0": 32}), "per_layer_group_size is"),
    "entropy-coded tensor": (MODEL, lambda t: t.update({f"{UP}.indices_ec": torch.ones(3).byte()}), r"indices_ec"),
    "factored tensor": (MODEL, lambda t: t.update({f"{UP}.norms.row_scale": torch.ones(48)}), r"norms\.row_scale"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    save(llama(), folder)
    load(folder, progress=False)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A sound directory for one test to damage."""
    return shutil.copytree(written, tmp_path, dirs_exist_ok=True)


@pytest.mark.parametrize("case", [*DAMAGE, *UNSUPPORTED])
def test_damaged_and_unsupported_directories_are_refused(folder: Path, case: str):
    name, change, message = (DAMAGE | UNSUPPORTED)[case]
    rewrite(folder / name, change)
    skeleton = tiny_hf("llama")
    before = [(n, id(m)) for n, m in skeleton.named_modules()]
    with pytest.raises(UnsupportedError if case in UNSUPPORTED else CheckpointError, match=message) as caught:
        load(folder, model=None if name == "config.json" else skeleton, progress=False, verify=False)
    assert str(caught.value).startswith(f"{folder}{os.sep}")
    assert [(n, id(m)) for n, m in skeleton.named_modules()] == before


def test_indices_beyond_the_codebook_are_refused(tmp_path: Path):
    save(llama(Config(bit_width=3, group_size=16)), tmp_path)
    rewrite(tmp_path / MODEL, lambda t: t[f"{UP}.indices"].view(-1)[5].fill_(0x80))
    with pytest.raises(CheckpointError, match=rf"{UP}\.indices.*index 8; 3 bits hold less"):
        load(tmp_path, progress=False, verify=False)


def test_empty_unknown_keys_and_missing_keys_are_accepted(tmp_path: Path):
    assert Config.from_json({"per_layer_group_size": {}, "target_snr": None, "seed": 7}) == Config(seed=7)


@pytest.mark.parametrize("name", [MODEL, REST])
@pytest.mark.parametrize("keep", [0, 4, 300, -1])
def test_truncated_files_are_refused(folder: Path, name: str, keep: int):
    file = folder / name
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=rf"{name}: truncated"):
        load(folder, progress=False)


def test_pickles_are_never_read(folder: Path):
    loaded = []

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return loaded.append, (1,)

    torch.save(Trap(), folder / "codebook.pt")
    torch.save(Trap(), folder / "non_quantized.pt")
    load(folder, progress=False)
    (folder / MODEL).unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*codebook\.pt holds pickles, which are not read"):
        load(folder, progress=False)
    shutil.copy(folder / "codebook.pt", folder / MODEL)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        load(folder, progress=False)
    assert not loaded


def test_names_that_may_be_two_layers(tmp_path: Path):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.ModuleDict({"b": nn.Linear(8, 8)})
            self.a_b = nn.Linear(8, 8)

    model = Twice()
    quantize_model(model, Config(group_size=8), progress=False)
    with pytest.raises(CheckpointError, match=r"layers 'a\.b' and 'a_b' would have the same name"):
        save(model, tmp_path)
    single = Twice()
    del single.a_b
    quantize_model(single, Config(group_size=8), progress=False)
    save(single, tmp_path)
    with pytest.raises(CheckpointError, match=r"'a_b' may be 'a\.b' or 'a_b'"):
        load(tmp_path, model=Twice, progress=False)


def test_models_that_the_format_has_no_place_for(tmp_path: Path):
    def refused(scheme: Any, match: str, kind: str = "llama", **options: Any) -> None:
        model = tiny_hf(kind)
        for one, include in scheme:
            quantize(model, one, include=include, allow_growth=True, progress=False, **options)
        with pytest.raises(UnsupportedError, match=match):
            save(model, tmp_path)

    mlp, attention = ("*.mlp.*",), ("*.self_attn.*",)
    four = Codebook(group_size=16)
    refused([("w8a8", None)], r"q_proj' is w8a8")
    refused([(four, ("*.0.*",)), ("w8a16", ("*.1.*",))], r"layers\.1\..* is w8a16")
    refused([("int4", None)], r"is int4.*only rotated layers")
    refused(
        [(Codebook(group_size=16, pairs=True), None)], r"is codebook4_pairs_g16; the format has no codebook of pairs"
    )
    refused([(four, attention), (Codebook(bits=3, group_size=16), mlp)], r"mlp.* has bits 3,.* has 4")
    refused([(four, attention), (Codebook(group_size=16, seed=1), mlp)], r"mlp.* has the seeds \(1,\)")
    refused([(four, None)], r"c_attn' is a Conv1D", kind="gpt2")
    with pytest.raises(UnsupportedError, match="no layer of a codebook scheme"):
        save(tiny_hf("llama"), tmp_path)
    model = tiny_hf("llama")
    quantize(model, four, include=attention, allow_growth=True, progress=False)
    other = tiny_hf("llama")
    quantize_model(other, Config(group_size=16, rotation="hadamard"), progress=False)
    model.model.layers[0].mlp = other.model.layers[0].mlp
    with pytest.raises(UnsupportedError, match="codebook of its own"):
        save(model, tmp_path)
    assert not list(tmp_path.iterdir())
