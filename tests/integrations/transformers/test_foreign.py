"""``from_pretrained(config=qcut.foreign_config(…))``: other libraries' checkpoints become the layers of `qcut.load`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, LlamaForCausalLM

import qcut
from qcut.errors import CheckpointError, ConfigError, QcutError, UnsupportedError
from qcut.layers.linear import Linear
from tests.checkpoints.formats import samples
from tests.integrations.transformers.support import hub_of, opened, same

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
EIGHT = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 0.0}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {"a": {"targets": ["Linear"], "weights": INT8, "input_activations": TOKENS}},
    "ignore": ["lm_head"],
}
E4M3 = {**INT8, "type": "float"}
FP8_STATIC = {
    **W8A8,
    "format": "float-quantized",
    "config_groups": {
        "a": {"targets": ["Linear"], "weights": E4M3, "input_activations": {**E4M3, "strategy": "tensor"}}
    },
}
FIRST = "model.layers.0.self_attn.q_proj"


def sorted_columns(name: str, weight: Tensor) -> samples.Packed:
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(len(name)))
    return samples.gptq(weight, size=32, order=order)


def rows_of_int8(key: str, rest: dict[str, Tensor]) -> Callable[[str, Tensor], samples.Packed]:
    def pack(_: str, weight: Tensor) -> samples.Packed:
        scale = weight.abs().amax(1, keepdim=True) / 127
        q = (weight / scale).round().to(torch.int8)
        stored = (scale[:, 0] * 127).float() if key == "SCB" else scale.half()
        return {"weight": q, key: stored, **{name: t.clone() for name, t in rest.items()}}, (q * scale).double()

    return pack


def static_tokens(name: str, weight: Tensor) -> samples.Packed:
    tensors, exact = samples.float8(weight, rows=True)
    scales = {"weight_scale": tensors["weight_scale"][:, None], "input_scale": samples.input_scale(name)[None]}
    return tensors | scales, exact


KINDS: dict[str, tuple[dict[str, Any], Callable[[str, Tensor], samples.Packed]]] = {
    "gptq": (GPTQ, sorted_columns),
    "awq": (AWQ, lambda _, w: samples.awq(w, 32)),
    "bitsandbytes": (EIGHT, rows_of_int8("SCB", {"weight_format": torch.tensor(0, dtype=torch.uint8)})),
    "compressed-tensors": (W8A8, rows_of_int8("weight_scale", {})),
    "compressed-tensors, fp8_static": (FP8_STATIC, static_tokens),
}


def write(folder: Path, kind: str = "gptq", **sizes: Any) -> Path:
    config, pack = KINDS[kind]
    samples.write(folder, config, pack, **sizes)
    return folder


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tensors_as_load(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    write(tmp_path / "theirs", kind, attention_bias=False)
    model, expected = samples.served(tmp_path / "theirs", dtype=dtype), qcut.load(tmp_path / "theirs", dtype=dtype)
    assert same(model, expected)
    assert sum(isinstance(module, Linear) for module in model.modules()) == 14
    if kind.endswith("fp8_static"):
        assert {m.scheme.name for m in model.modules() if isinstance(m, Linear)} == {"fp8_static"}
    assert all(not module.training for module in model.modules())
    for door in (model, expected):
        assert {m.weight_dtype for m in door.modules() if isinstance(m, Linear)} == {dtype}


@pytest.mark.parametrize("kind", KINDS)
def test_save_pretrained_writes_qcuts_own_folder(kind: str, tmp_path: Path) -> None:
    model = samples.served(write(tmp_path / "theirs", kind))
    assert set(model.config.quantization_config.to_dict()["layers"]) == set(samples.linears(samples.llama()))
    model.save_pretrained(tmp_path / "ours")
    stored = json.loads((tmp_path / "ours" / "config.json").read_text())["quantization_config"]
    assert stored["quant_method"] == "qcut"
    assert "foreign" not in stored
    assert same(opened(tmp_path / "ours"), model)
    assert same(qcut.load(tmp_path / "ours"), model)
    qcut.save(model, tmp_path / "saved")
    assert same(qcut.load(tmp_path / "saved"), model)


def test_nothing_is_said_to_be_missing_or_superfluous(tmp_path: Path) -> None:
    write(tmp_path)
    model, info = samples.served(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    assert model._keys_to_ignore_on_load_unexpected == samples.llama()._keys_to_ignore_on_load_unexpected


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}, "auto"])
def test_device_maps_of_one_device(device_map: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    write(tmp_path)
    assert same(samples.served(tmp_path, device_map=device_map), samples.served(tmp_path))


def test_several_devices_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    write(tmp_path)
    with pytest.raises(UnsupportedError, match=r"device_map requests .*allowed: one device"):
        samples.served(tmp_path, device_map={"model": "cpu", "lm_head": "disk"}, offload_folder=tmp_path / "off")


@pytest.mark.parametrize("stored", [True, False])
def test_a_tied_classifier_stays_float(stored: bool, tmp_path: Path) -> None:
    write(tmp_path, tie_word_embeddings=True)
    if not stored:
        samples.change(tmp_path, lambda t: t.pop("lm_head.weight", None))
    model = samples.served(tmp_path, dtype=torch.float16)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert same(model, qcut.load(tmp_path, dtype=torch.float16))
    model.save_pretrained(tmp_path / "ours")
    assert same(opened(tmp_path / "ours"), model)


def test_the_base_of_what_was_saved(tmp_path: Path) -> None:
    write(tmp_path)
    base = AutoModel.from_pretrained(tmp_path, config=qcut.foreign_config(tmp_path))
    whole = samples.served(tmp_path)
    with torch.no_grad():
        found, wanted = base(samples.IDS).last_hidden_state, whole.model(samples.IDS).last_hidden_state
    assert torch.equal(found, wanted)


def test_base_has_the_groups_of_the_whole(tmp_path: Path) -> None:
    model = samples.llama()
    qcut.quantize(model, "w8a8", progress=False)
    qcut.save_compressed_tensors(model, tmp_path)

    def add_group(config: dict[str, Any]) -> None:
        groups = config["config_groups"]
        targets = [r"re:model\.layers\.\d\.mlp"]
        groups["group_1"] = {**groups["group_0"], "targets": targets, "input_activations": None}

    samples.change_config(tmp_path, add_group)
    base = AutoModel.from_pretrained(tmp_path, config=qcut.foreign_config(tmp_path))
    schemes = [base.layers[1].self_attn.q_proj.scheme.name, base.layers[1].mlp.up_proj.scheme.name]
    assert schemes == ["w8a8", "w8a16"]


def test_names_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = write(hub_of(tmp_path, monkeypatch))
    options: dict[str, Any] = {"cache_dir": tmp_path / "hub", "local_files_only": True}
    config = qcut.foreign_config("someone/small", **options)
    model = LlamaForCausalLM.from_pretrained("someone/small", config=config, **options)
    assert same(model, samples.served(snapshot))
    with pytest.raises(CheckpointError, match="someone/other"):
        qcut.foreign_config("someone/other", **options)


def test_folders_that_are_not_another_librarys(tmp_path: Path) -> None:
    samples.llama().save_pretrained(tmp_path / "float")
    for folder, text in (("float", "names no quantization of another library"), ("nothing", "not a directory")):
        with pytest.raises(CheckpointError, match=text):
            qcut.foreign_config(tmp_path / folder)
    samples.served(write(tmp_path / "theirs")).save_pretrained(tmp_path / "ours")
    with pytest.raises(CheckpointError, match="models of qcut's need no configuration"):
        qcut.foreign_config(tmp_path / "ours")


def test_gguf_files_are_left_to_load(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(20))
    for name in (tmp_path, tmp_path / "x.gguf"):
        with pytest.raises(UnsupportedError, match=r"x\.gguf: transformers leaves .*qcut\.load\("):
            qcut.foreign_config(name)


def test_requests_that_are_no_configuration_of_a_folder(tmp_path: Path) -> None:
    samples.llama().save_pretrained(tmp_path / "float")
    write(tmp_path / "theirs")
    request = qcut.foreign_config(tmp_path / "theirs").quantization_config
    with pytest.raises(ConfigError, match=r"allowed: config=qcut\.foreign_config\(name\)"):
        opened(tmp_path / "float", quantization_config=request)
    config = AutoConfig.from_pretrained(tmp_path / "float")
    config.quantization_config = request
    with pytest.raises(CheckpointError, match="no layer has quantized tensors"):
        opened(tmp_path / "float", config=config)
    for damaged, text in (({"format_version": 2}, "version 1 is needed"), ({"more": 1}, "more"), ({"foreign": 3}, "3")):
        config.quantization_config = {**request, **damaged}
        with pytest.raises(CheckpointError, match=text):
            opened(tmp_path / "theirs", config=config)


def test_files_that_change_after_the_configuration_was_made(tmp_path: Path) -> None:
    write(tmp_path)
    config = qcut.foreign_config(tmp_path)
    samples.change(tmp_path, lambda t: t.pop(f"{FIRST}.scales"))
    with pytest.raises(CheckpointError, match=r"q_proj\.scales': is missing"):
        opened(tmp_path, config=config)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="pickles are not read"):
        opened(tmp_path, config=config)


def test_headers_are_refused_before_any_tensor_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qcut.common.safetensors import TensorFile

    def read(*_: object, **__: object) -> Tensor:
        raise AssertionError("a tensor was read")

    write(tmp_path)
    config = qcut.foreign_config(tmp_path)
    samples.change(tmp_path, lambda t: t.update({"model.layers.1.mlp.up_proj.scales": torch.ones(3, 128).half()}))
    monkeypatch.setattr(TensorFile, "read", read)
    monkeypatch.setattr("transformers.core_model_loading._materialize_copy", read)
    for door in (qcut.foreign_config, lambda folder: opened(folder, config=config)):
        with pytest.raises(CheckpointError, match=r"up_proj\.scales': found F16"):
            door(tmp_path)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight", f"{FIRST}.scales"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_cannot_be(name: str, value: float, tmp_path: Path) -> None:
    write(tmp_path)
    samples.change(tmp_path, lambda t: t[name].view(-1)[3:4].fill_(value))
    samples.refused(tmp_path, CheckpointError, rf"tensor '{name}': found {value} at .*; finite values are needed")


def test_classes_and_code_from_elsewhere_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for change, text in (
        ({"architectures": ["Nothing"]}, "found model class 'Nothing'"),
        ({"architectures": None, "model_type": "nothing"}, "model_type is 'nothing'"),
        ({"num_hidden_layers": 1 << 30}, "num_hidden_layers is"),
        ({"num_hidden_layers": 1 << 12}, "many more than the checkpoint has"),
        ({"hidden_size": "x"}, "cannot be built from the saved configuration"),
        ({"vocab_size": 41}, r"embed_tokens\.weight': found F16 \[40, 64\]"),
        ({"attn_implementation": "someone/kernels"}, "attn_implementation is"),
    ):
        path.write_text(json.dumps({**config, **change}))
        samples.refused(tmp_path, CheckpointError, text)
    for dtype in (3, "int8", "nothing", ["float16"]):
        path.write_text(json.dumps({**config, "dtype": dtype}))
        with pytest.raises(CheckpointError, match=r"dtype is|cannot be built"):
            qcut.foreign_config(tmp_path)
    path.write_text(json.dumps(config)[:-5])
    samples.refused(tmp_path, CheckpointError, "not readable as JSON")


def test_subfolders(tmp_path: Path) -> None:
    write(tmp_path / "part")
    config = qcut.foreign_config(tmp_path, subfolder="part")
    assert same(opened(tmp_path, config=config, subfolder="part"), samples.served(tmp_path / "part"))


def test_a_saved_request_is_one(tmp_path: Path) -> None:
    expected = samples.served(write(tmp_path))
    qcut.foreign_config(tmp_path).save_pretrained(tmp_path)
    assert same(opened(tmp_path), expected)
    assert same(qcut.load(tmp_path), expected)
    samples.change(tmp_path, lambda t: t.pop(f"{FIRST}.scales"))
    for door in (opened, qcut.load):
        with pytest.raises(CheckpointError, match=r"q_proj\.scales': is missing"):
            door(tmp_path)


def test_generating_and_dequantizing(tmp_path: Path) -> None:
    model = samples.served(write(tmp_path), dtype=torch.float32)
    ids = model.generate(samples.IDS, max_new_tokens=4, do_sample=False)
    weight = model.get_submodule(FIRST).dequantized_weight()
    plain = model.dequantize()
    assert torch.equal(plain.get_submodule(FIRST).weight, weight)
    assert torch.equal(plain.generate(samples.IDS, max_new_tokens=4, do_sample=False), ids)


def outcome(door: Callable[[], Any]) -> tuple[str, str]:
    try:
        door()
    except QcutError as error:  # any other is a failure of the test
        return type(error).__name__, str(error)
    return "read", ""


@pytest.mark.parametrize("kind", KINDS)
def test_both_doors_say_the_same_of_changed_bytes(kind: str, tmp_path: Path) -> None:
    write(tmp_path, kind, num_hidden_layers=1)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    draws = torch.Generator().manual_seed(1)
    seen = set()
    for i in range(15):
        changed = bytearray(data)
        first, last = ((0, header), (header, len(data)), (0, 8))[i % 3]
        at = int(torch.randint(first, last, (), generator=draws))
        changed[at] = int(torch.randint(0, 256, (), generator=draws))
        path.write_bytes(changed if i % 5 else changed[:at])
        one = outcome(lambda: qcut.load(tmp_path, progress=False))
        assert one == outcome(lambda: samples.served(tmp_path))
        seen.add(one[0])
    assert "CheckpointError" in seen
