from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from qcut import load, save
from qcut.conversion.calibration.calibrate import calibrate
from qcut.conversion.quantize import quantize
from qcut.errors import CheckpointError, DeviceError, DtypeError
from qcut.layers.linear import Linear
from tests.conversion.test_quantize import Tied
from tests.support import files
from tests.support.zoo import TinyLM, tiny_hf, tiny_lm, token_batches

INTEGERS = ("w8a8", "w8a8_static", "w8a16", "int16x8", "int16x8_static")
FLOAT8 = ("fp8_dynamic", "fp8_static")
CODEBOOKS = ("codebook4_g16", "codebook3+2_qr_int8", "codebook4+4_g16_fp32norms_int8", "int4", "nvfp4")


def quantized(kind: str, scheme: str = "w8a8_static", dtype: torch.dtype = torch.float32) -> nn.Module:
    model = (tiny_lm() if kind == "plain" else tiny_hf(kind)).to(dtype)
    cal = calibrate(model, token_batches(), progress=False)
    quantize(
        model,
        scheme,
        calibration=cal,
        skip=("lm_head", "*.0.*.c_proj", "blocks.0.up"),
        allow_growth=True,
        progress=False,
    )
    return model


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        out = model(token_batches()[0])
    return out if isinstance(out, torch.Tensor) else out.logits


def embeddings(model: nn.Module) -> nn.Module:
    return model.embed if isinstance(model, TinyLM) else model.get_input_embeddings()


@pytest.mark.parametrize("scheme", [*INTEGERS, *FLOAT8, *CODEBOOKS])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "plain"])
def test_round_trip(tmp_path: Path, kind: str, scheme: str) -> None:
    model = quantized(kind, scheme)
    save(model, tmp_path / "a" / "b", max_shard_bytes=5000)
    got = load(tmp_path / "a" / "b", model=TinyLM if kind == "plain" else None, progress=False)
    assert not got.training
    assert torch.equal(logits(got), logits(model))
    assert got.lm_head.weight is embeddings(got).weight
    assert [n for n, _ in got.named_parameters()] == [n for n, _ in model.named_parameters()]
    for (name, a), (other, b) in zip(model.named_buffers(), got.named_buffers(), strict=True):
        assert name == other
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            assert got.get_submodule(name).scheme == module.scheme
            assert got.get_submodule(name).extra_repr() == module.extra_repr()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    model = quantized("llama", dtype=dtype)
    save(model, tmp_path)
    same = load(tmp_path, progress=False)
    assert {p.dtype for p in same.parameters()} == {dtype}
    assert torch.equal(logits(same), logits(model))
    wide = load(tmp_path, dtype=torch.float32, progress=False)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    layer = next(m for m in wide.modules() if isinstance(m, Linear))
    assert (layer.qweight.dtype, layer.weight_scale.dtype) == (torch.int8, torch.float32)


def test_a_loaded_hf_model_generates(tmp_path: Path) -> None:
    model = quantized("llama")
    model.generation_config.max_new_tokens = 5
    save(model, tmp_path)
    got = load(tmp_path, progress=False)
    ids = token_batches()[0][:1, :4]
    out = got.generate(ids, do_sample=False, pad_token_id=0)
    assert torch.equal(out, model.generate(ids, do_sample=False, pad_token_id=0))
    assert out.shape[1] <= 9


def test_shards_ties_and_shared_modules(tmp_path: Path) -> None:
    model = Tied()
    quantize(model, progress=False)
    save(model, tmp_path, max_shard_bytes=300)
    names = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert len(names) > 2
    stored = [name for file in names for name in load_file(tmp_path / file)]
    assert len(stored) == len(set(stored))
    assert "b.qweight" not in stored
    got = load(tmp_path, model=Tied(), progress=False)
    assert got.a.qweight is got.b.qweight
    assert got.again[0] is got.shared
    x = torch.randn(3, 16)
    assert torch.equal(got(x), model(x))


def test_loading_reads_once_and_makes_no_float_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory: apart from what the files hold, loading creates no tensor of a layer's size."""
    model = quantized("llama")
    save(model, tmp_path)
    sizes: list[int] = []
    real = torch.empty

    def empty(*args, **kwargs):
        out = real(*args, **kwargs)
        if not out.is_meta:
            sizes.append(out.nbytes)
        return out

    monkeypatch.setattr(torch, "empty", empty)
    load(tmp_path, progress=False)
    stored = [t.nbytes for file in tmp_path.glob("*.safetensors") for t in load_file(file).values()]
    assert sorted(size for size in sizes if size > 1024) == sorted(size for size in stored if size > 1024)


def test_second_save_keeps_other_files_drops_old_ones(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "other.safetensors").write_bytes(b"someone else's")
    for scheme in ("w8a8", "w8a16"):
        save(quantized("gpt2", scheme), tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) == 2  # the tensors, and the marks
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "other.safetensors").exists()
    assert "w8a16" in str(load(tmp_path, progress=False))
    assert not [p for p in tmp_path.iterdir() if p.name.endswith(".tmp")]


@pytest.mark.parametrize("name", ["__metadata__", "\ud800", "x" * 4097])
def test_names_that_readers_refuse_are_not_saved(tmp_path: Path, name: str) -> None:
    model = TinyLM()
    save(model, tmp_path)
    model.register_buffer(name, torch.ones(3))
    with pytest.raises(CheckpointError, match=r"tensor '.*': found a name of \d+ characters; allowed: up to 4096"):
        save(model, tmp_path)
    load(tmp_path, model=TinyLM, progress=False)  # what was there is in force


def test_meta_tensors_cannot_be_saved(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = TinyLM()
    with pytest.raises(CheckpointError, match=r"embed\.weight.*meta"):
        save(model, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def rewrite(directory: Path, tensors=None, config=None) -> None:
    index = directory / "qcut_config.json"
    if tensors:
        files.rewrite(directory / next(iter(json.loads(index.read_text())["weight_map"].values())), tensors)
    if config:
        files.rewrite(index, config)


LAYER = "blocks.1.up"
DAMAGE = {
    "missing tensor": ({"tensors": lambda t: t.pop(f"{LAYER}.qweight")}, rf"{LAYER}\.qweight"),
    "wrong shape": ({"tensors": lambda t: t.update({"norm.weight": torch.ones(31)})}, r"norm\.weight.*\[31\].*\[32\]"),
    "wrong dtype": (
        {"tensors": lambda t: t.update({f"{LAYER}.weight_scale": torch.ones(64).half()})},
        "float16.*float32",
    ),
    "integer parameter": ({"tensors": lambda t: t.update({"norm.bias": torch.ones(32).int()})}, r"norm\.bias.*int32"),
    "wrong qweight": ({"tensors": lambda t: t.update({f"{LAYER}.qweight": torch.ones(64, 32)})}, "float32.*int8"),
    "foreign format": ({"config": lambda c: c.update(format="x")}, "format 'x'"),
    "newer version": ({"config": lambda c: c.update(version=99)}, "version 99"),
    "no layers": ({"config": lambda c: c.pop("layers")}, "'layers' is missing"),
    "unknown layer": ({"config": lambda c: c["layers"].update(nope=c["layers"][LAYER])}, "'nope'"),
    "unknown scheme": ({"config": lambda c: c["layers"][LAYER].update(scheme={"kind": "w1"})}, rf"{LAYER}.*kind"),
    "wrong size": ({"config": lambda c: c["layers"][LAYER].update(in_features=48)}, rf"{LAYER}.*48"),
    "not linear": ({"config": lambda c: c["layers"].update({"blocks.0.ln1": c["layers"][LAYER]})}, "LayerNorm"),
    "layer forgotten": ({"config": lambda c: c["layers"].pop(LAYER)}, rf"{LAYER}\.(weight|qweight)"),
    "escape": ({"config": lambda c: c["weight_map"].update({"norm.weight": "../../x.safetensors"})}, r"\.\./"),
    "other file type": ({"config": lambda c: c["weight_map"].update({"norm.weight": "x.pt"})}, "x.pt"),
    "no such file": ({"config": lambda c: c["weight_map"].update({"norm.weight": "x.safetensors"})}, "no such file"),
    "not names": ({"config": lambda c: c["tied"].update({"norm.weight": ["a"]})}, r"tied\.norm\.weight'.*text"),
    "tied to nothing": ({"config": lambda c: c["tied"].update({"norm.weight": "nope"})}, r"norm\.weight"),
    "superfluous": ({"config": lambda c: c["tied"].update({"more": "norm.weight"})}, "'more'"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    save(quantized("plain"), folder)
    return folder


@pytest.mark.parametrize("case", DAMAGE)
def test_what_does_not_fit_is_refused_before_use(written: Path, tmp_path: Path, case: str) -> None:
    change, message = DAMAGE[case]
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    rewrite(tmp_path, **change)
    skeleton = tiny_lm()
    before = [(n, id(m)) for n, m in skeleton.named_modules()]
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, model=skeleton, progress=False, verify=False)
    assert [(n, id(m)) for n, m in skeleton.named_modules()] == before


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_truncated_files_are_refused(tmp_path: Path, keep: int) -> None:
    save(quantized("gpt2"), tmp_path)
    file = max(tmp_path.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model-.*safetensors: truncated"):
        load(tmp_path, progress=False)


def test_missing_and_unreadable_configurations(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        load(tmp_path, progress=False)
    (tmp_path / "qcut_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="JSON"):
        load(tmp_path, progress=False)


def test_only_classes_of_transformers_are_built(tmp_path: Path) -> None:
    save(quantized("plain"), tmp_path)
    with pytest.raises(CheckpointError, match=r"'TinyLM', not a class of transformers; pass model="):
        load(tmp_path, progress=False)
    save(quantized("gpt2"), tmp_path)
    for name in ("pipeline", "AutoConfig", "os", "__loader__", 7):
        rewrite(tmp_path, config=lambda c, name=name: c["huggingface"].update({"class": name}))
        with pytest.raises(CheckpointError, match="a model class of transformers is needed"):
            load(tmp_path, progress=False, verify=False)
    rewrite(tmp_path, config=lambda c: c["huggingface"].update({"class": "LlamaForCausalLM"}))
    with pytest.raises(CheckpointError):
        load(tmp_path, progress=False, verify=False)


def test_plain_tensor_attributes_on_meta_are_refused(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)
            self.table = torch.arange(16.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x + self.table)

    model = Model()
    quantize(model, progress=False)
    save(model, tmp_path)
    with pytest.raises(CheckpointError, match=r"table.*no parameter or buffer"):
        load(tmp_path, model=Model, progress=False)
    x = torch.randn(2, 16)
    assert torch.equal(load(tmp_path, model=Model(), progress=False)(x), model(x))


# ── codebooks ────────────────────────────────────────────────────────────────────────────────────


def test_codebooks_are_in_plain_order_on_disk(tmp_path: Path) -> None:
    model = tiny_lm()
    quantize(model, "codebook4+4_g16", allow_growth=True, progress=False)
    save(model, tmp_path)
    (file,) = tmp_path.glob("model-*.safetensors")
    stored = load_file(file)
    expected = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"} | {"gain": model.gain}
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[key], expected[key]) for key in stored)
    up = model.blocks[0].up
    assert stored["blocks.0.up.indices"].shape == (64, 16)
    assert stored["blocks.0.up.norms"].shape == (64, 2)
    assert json.loads((tmp_path / "qcut_config.json").read_text())["layers"]["blocks.0.up"]["scheme"] == (
        up.scheme.to_json()
    )


def test_tied_codebooks_are_written_once_and_stay_tied(tmp_path: Path) -> None:
    model = Tied()
    quantize(model, "codebook4+4_g16", allow_growth=True, progress=False)
    save(model, tmp_path)
    (file,) = tmp_path.glob("model-*.safetensors")
    layers = [name for name, m in model.named_modules() if isinstance(m, Linear)]
    indices = [key for key in load_file(file) if key.endswith(".residual_indices")]
    assert len(indices) == len(layers) - 1
    got = load(tmp_path, model=Tied, progress=False)
    for key in ("units", "packed_norms", "norms", "codebook"):
        shared = [{getattr(m.get_submodule(name), key).data_ptr() for name in layers} for m in (model, got)]
        assert len(shared[0]) == len(shared[1]) == len(layers) - 1, key


class Hooked(nn.Module):
    """Hooks and attributes of its layers decide what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
        self.b.gain = 3.0
        self.a.register_forward_hook(lambda module, args, y: 2 * y)
        self.b.register_forward_pre_hook(lambda module, args: (args[0] + 1,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b(self.a(x)) * self.b.gain
        return y


def test_hooks_and_attributes_of_layers_load(tmp_path: Path) -> None:
    model, x = Hooked(), torch.randn(4, 64)
    quantize(model, "w8a8", progress=False)
    save(model, tmp_path)
    assert torch.equal(load(tmp_path, model=Hooked, progress=False)(x), model(x))


def test_arguments_of_other_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DtypeError, match="directory: found NoneType; a path is needed"):
        load(None)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="directory: found int"):
        save(tiny_lm(), 3)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="model: found a int"):
        save(3, tmp_path)  # type: ignore[arg-type]
    save(quantized("plain"), tmp_path)
    with pytest.raises(DtypeError, match="model: found int; a function that makes the model"):
        load(tmp_path, model=3)  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="device: found 'gpu'"):
        load(tmp_path, device="gpu")
