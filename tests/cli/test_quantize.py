"""``qcut quantize`` and ``qcut info``: a folder that is whole or not there, and what it holds."""

from __future__ import annotations

import copy
import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import qcut
from qcut.checkpoints.contents import contents
from qcut.checkpoints.pretrained import load_pretrained
from qcut.cli import main as cli
from qcut.cli.quantize import new_folder
from qcut.errors import CheckpointError, ConfigError
from qcut.models.evaluation import windows_of
from tests.cli.commands import DEMO, answer
from tests.support import ROOT
from tests.support.decoders import small as decoder
from tests.support.zoo import small_demo, tiny_hf

TEXT = ROOT / "README.md"
SCHEME = "codebook4_g64"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is soon fitted and refined."""
    folder = tmp_path_factory.mktemp("small")
    small_demo(folder)
    return folder


@pytest.fixture(scope="module")
def saved(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It, quantized with all that the shell offers."""
    out = tmp_path_factory.mktemp("models") / "made" / "quantized"
    words = ["--scheme", SCHEME, "--calibrate", TEXT, "--fit", "--embeddings", "w8a16", "--skip", "h.1.mlp.*"]
    words += ["--refine", 2, "--window", 64, "--max-windows", 4, "--batch", 2, "--device", "cpu", "--out", out]
    assert cli.main(["quantize", str(small), *map(str, words)]) == 0
    return out


def test_bits_make_a_plan_of_the_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--include", "h.0.attn.*", "--window", 16, "--max-windows", 1, "--device", "cpu", "--dtype", "float32"]
    out = tmp_path / "mixed"
    data = answer(capfd, "quantize", DEMO, "--bits", 3.6, "--calibrate", TEXT, *words, "--out", out)
    assert len(data["schemes"]) > 1
    stored = [layer for layer in contents(out).layers if layer.name.startswith("transformer.h.0.")]
    assert len(stored) == sum(data["schemes"].values()) == 2
    bits = 8 * sum(layer.nbytes for layer in stored) / sum(layer.weights or 0 for layer in stored)
    assert bits < 3.6 + 0.15  # biases and codebooks, which the limit does not count
    for extra, message in (
        (["--bits", 3], "--bits needs --calibrate TEXT"),
        (["--bits", 3, "--calibrate", TEXT, "--smooth", 0.5], "--smooth: not allowed with --bits"),
    ):
        assert cli.main([*map(str, ["quantize", DEMO, *extra, "--out", tmp_path / "none"])]) != 0
        assert message in capfd.readouterr().err


@pytest.mark.parametrize("calibrated", [False, True])
def test_the_proof_is_on_unless_refused(calibrated: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["quantize", DEMO, "--scheme", "w8a8", "--include", "h.0.*", "--overwrite", "--out", tmp_path / "out"]
    words += ["--dtype", "float32"]
    if calibrated:
        words += ["--calibrate", TEXT, "--window", 64, "--max-windows", 1]
    counts = [answer(capfd, *words, *option)["report"]["verified"] for option in ((), ("--verify",), ("--no-verify",))]
    assert counts == [4, 4, 0]
    assert cli.main(["generate", str(DEMO), "--no-verify"]) == 1
    assert "--verify needs --scheme" in capfd.readouterr().err


def test_a_folder_is_what_python_makes(small: Path, saved: Path) -> None:
    model, tokenizer = load_pretrained(str(small), dtype=torch.float16, device=torch.device("cpu"))
    windows = windows_of(torch.tensor(tokenizer(TEXT.read_text(), verbose=False)["input_ids"]), 64)
    moments, reference = qcut.collect_curvature(model, windows[:4].split(2), progress=False), copy.deepcopy(model)
    qcut.quantize(model, SCHEME, second_moments=moments, embeddings="w8a16", skip=["h.1.mlp.*"], progress=False)
    qcut.refine(model, reference, windows.split(2), steps=2, progress=False)
    found = qcut.load(saved, progress=False)
    want, got = model.state_dict(), found.state_dict()
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)
    assert not list(saved.parent.glob(".*"))


def test_a_folder_for_other_readers(tmp_path: Path) -> None:
    out, model = tmp_path / "out", tmp_path / "model"
    decoder("llama", hidden_size=96, intermediate_size=128).half().save_pretrained(model)
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(model)
    words = ["quantize", model, "--scheme", "int4", "--format", "compressed-tensors", "--device", "cpu", "--out", out]
    assert cli.main([*map(str, words)]) == 0
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["format"] == "pack-quantized"
    assert (out / "tokenizer.json").exists()
    assert not (out / "qcut_config.json").exists()
    layers = [module for module in qcut.load(out, progress=False).modules() if isinstance(module, qcut.Linear)]
    assert layers
    assert {layer.scheme.name for layer in layers} == {"int4_rows"}  # of 96 and 128 columns


def test_info_tells_layers_bytes_and_what_is_float(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = answer(capfd, "info", saved)
    assert (found["format"], found["model"]) == ("qcut", "GPT2LMHeadModel")
    layers = {layer["name"]: layer for layer in found["layers"]}
    assert len(layers) == 6 + 2
    attention = layers["transformer.h.0.attn.c_attn"]
    assert (attention["scheme"], attention["out_features"], attention["in_features"]) == (SCHEME, 384, 128)
    # Half a byte an index, a float16 norm for each of two groups of a row, and a float32 bias.
    assert 384 * 128 // 2 + 384 * 2 * 2 + 384 * 4 <= attention["bytes"] < 1.1 * (384 * 128 // 2 + 384 * 8)
    assert attention["bits_per_weight"] == pytest.approx(8 * attention["bytes"] / (384 * 128))
    tied = {name: layer["tied_to"] for name, layer in layers.items() if layer["tied_to"]}
    assert list(tied.items()) in ([("transformer.wte", "lm_head")], [("lm_head", "transformer.wte.table")])
    float_values = sum(torch.Size(t["shape"]).numel() for t in found["tensors"])
    assert {t["dtype"] for t in found["tensors"]} == {"F16"}
    weights = 8192 * 128 + 2 * 128 * (384 + 128 + 2 * 512) - 2 * 128 * 512
    assert found["parameters"] == float_values + weights
    assert found["percent_float"] == pytest.approx(100 * float_values / found["parameters"])
    assert found["schemes"][SCHEME]["layers"] == 6
    files = set(json.loads((saved / "qcut_config.json").read_text())["weight_map"].values())
    assert found["files"] == {name: (saved / name).stat().st_size for name in files}
    assert found["bytes"] == sum(found["files"].values())
    assert cli.main(["info", str(saved)]) == 0
    lines = capfd.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.startswith("transformer.h.*.attn.c_attn "))
    assert line.split()[1:6] == [SCHEME, "384", "x", "128", "2"]
    assert "% of them in floating point" in lines[-1]
    assert cli.main(["info", str(saved), "--layers"]) == 0
    assert "transformer.h.1.attn.c_attn " in capfd.readouterr().out


def test_info_of_a_float_model_builds_none(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.Module, "__init__", None)  # no module can be made
    found = answer(capfd, "info", DEMO)
    assert (found["format"], found["layers"], found["percent_float"]) == ("transformers", [], 100.0)
    assert found["parameters"] == 5_387_776


def test_info_reads_the_index_in_a_configuration_too(tmp_path: Path) -> None:
    """A folder of transformers with qcut's index in ``config.json`` under ``quantization_config``."""
    model = tiny_hf("gpt2")
    qcut.quantize(model, "w8a8", progress=False)
    qcut.save(model, tmp_path / "a", progress=False)
    index = tmp_path / "a" / "qcut_config.json"
    data = json.loads(index.read_text())
    before = contents(tmp_path / "a")
    quantization = {"quant_method": "qcut", "layers": data["layers"], "tied": data["tied"]}
    (tmp_path / "a" / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    index.unlink()
    after = contents(tmp_path / "a")
    assert after.layers == before.layers
    assert set(after.tensors) == set(before.tensors)
    assert after.files == before.files


def test_info_checks_sizes(tmp_path: Path, saved: Path) -> None:
    shutil.copytree(saved, tmp_path / "a")
    path = tmp_path / "a" / "qcut_config.json"
    data = json.loads(path.read_text())
    (name,) = (name for name in data["layers"] if name.endswith("h.0.attn.c_attn"))
    data["layers"][name]["out_features"] = 1 << 30
    path.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=r"h\.0\.attn\.c_attn.*the data files have \d+ bytes"):
        contents(tmp_path / "a")
    weights = tmp_path / "a" / next(iter(data["weight_map"].values()))
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=weights.name):
        contents(tmp_path / "a")


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], int]]) -> None:
    """A file of zeros, by dtype, shape and bytes."""
    header, start = {}, 0
    for name, (code, shape, nbytes) in tensors.items():
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, start + nbytes]}
        start += nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(start))


def test_info_names_the_methods_of_other_libraries(tmp_path: Path) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_safetensors(
        tmp_path / "model.safetensors",
        {
            "a.q.qweight": ("I32", [8, 64], 2048),
            "a.q.scales": ("F16", [1, 64], 128),
            "a.norm.weight": ("F16", [64], 128),
        },
    )
    found = contents(tmp_path)
    assert found.format == "gptq"
    assert [(layer.name, layer.scheme, layer.nbytes, layer.weights) for layer in found.layers] == [
        ("a.q", "gptq", 2176, None)
    ]
    assert (found.parameters, found.percent_float) == (None, None)


# ── nothing half written ────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("old")
    return out


@pytest.mark.parametrize("error", [ConfigError("full"), KeyboardInterrupt()])
def test_a_failure_leaves_what_was_there(model_folder: Path, error: BaseException) -> None:
    def fail() -> None:
        with new_folder(model_folder, True) as folder:
            (folder / "config.json").write_text("new")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert [path.name for path in model_folder.parent.iterdir()] == ["out"]
    assert (model_folder / "config.json").read_text() == "old"


def test_a_folder_is_replaced_when_it_is_complete(model_folder: Path) -> None:
    with new_folder(model_folder, True) as folder:
        (folder / "new.json").write_text("new")
        assert (model_folder / "config.json").read_text() == "old"
    assert [path.name for path in model_folder.iterdir()] == ["new.json"]
    assert [path.name for path in model_folder.parent.iterdir()] == ["out"]


def test_what_came_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def write() -> None:
        with new_folder(out, False):
            out.mkdir()
            (out / "config.json").write_text("another's")

    with pytest.raises(ConfigError, match="there is a model already"):
        write()
    assert (out / "config.json").read_text() == "another's"


def test_leftovers_of_dead_processes_are_removed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    dead = tmp_path / ".out.01234567.partial"
    dead.mkdir()
    (dead / ".writing").touch()
    with new_folder(out, True) as first, new_folder(out, False) as second:
        assert not dead.exists()
        assert first.is_dir()
        (second / "config.json").touch()
        (first / "first").touch()
    assert [path.name for path in out.iterdir()] == ["first"]


def test_failed_rename_restores_the_old_model(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.suffix == ".partial":
            raise PermissionError(13, "Permission denied")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(ConfigError, match="cannot be written: Permission denied"), new_folder(model_folder, True):
        pass
    assert (model_folder / "config.json").read_text() == "old"
    assert [path.name for path in model_folder.parent.iterdir()] == ["out"]


def test_overwriting_through_the_command(tmp_path: Path, saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also the scheme that needs a text, and an interrupt while the model is written."""
    out = tmp_path / "out"
    shutil.copytree(saved, out)
    words = ["quantize", DEMO, "--scheme", "w8a8_static", "--calibrate", TEXT, "--window", 32, "--max-windows", 2]
    found = answer(capfd, *words, "--out", out, "--overwrite", "--device", "cpu")
    assert found["schemes"] == {"w8a8_static": 16}
    assert found["file_bytes"] == sum(path.stat().st_size for path in out.iterdir())
    assert found["bytes_after"] < 0.75 * found["bytes_before"]
    assert len(list(out.glob("*.safetensors"))) == 2  # the tensors, and the marks
    assert {layer.scheme for layer in contents(out).layers} == {"w8a8_static"}
    # What remains in float keeps the type of the model's files.
    assert {tensor.code for tensor in contents(out).tensors} == {"F16"}


def test_an_interrupted_save_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(model: object, folder: Path, **_: object) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(qcut, "save", interrupted)
    status = cli.main(["quantize", str(DEMO), "--scheme", "w8a8", "--out", str(tmp_path / "out"), "--device", "cpu"])
    assert (status, capfd.readouterr().err) == (130, "qcut: interrupted\n")
    assert list(tmp_path.iterdir()) == []
