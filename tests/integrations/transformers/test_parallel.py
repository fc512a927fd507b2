"""``from_pretrained(tp_plan="auto")``: two processes, gloo; what each holds, and what they compute together."""

from __future__ import annotations

import fcntl
import os
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

import qcut
from qcut.errors import UnsupportedError
from qcut.integrations.transformers.parallel import TensorParallel, Whole
from qcut.layers.codebook import CodebookLinear
from qcut.layers.linear import Linear
from qcut.numerics.codebook import rotation
from qcut.schemes import Codebook
from tests.integrations.transformers.support import opened, small
from tests.support.parallel import PROCESSES, Job, answers, config_of, is_rowwise, read, rows_for, run, slices

HAS_HOOKS = find_spec("transformers.distributed.tensor_parallel") is not None
cuts = pytest.mark.skipif(not HAS_HOOKS, reason="this transformers cuts models in another way, and is refused")
SCHEMES = (
    *("w8a8", "w8a16", "int16x8", "w8a8_static", "int16x8_static", "codebook4_g16", "codebook4_g16_int8"),
    *("codebook2+3_g16", "codebook4_pairs_g16", "int4_g16"),
)
ROUND_TOKENS = ("w8a8", "codebook4_g16_int8")
"""Schemes with tokens that become int8, with a scale each: parts round otherwise than the whole."""
FITTED = "codebook3_g32_qr"
STORED = ("w8a8_static", "codebook2+3_g16")
HOOKED = ("up_proj", "down_proj")
Results = dict[str, list[dict[str, Any]]]


def _llama(**options: Any) -> Any:
    """A random Llama with biases, so that one added twice shows."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    common = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "num_key_value_heads": 2}
    config = LlamaConfig(**(sizes | common | {"attention_bias": True, "mlp_bias": True} | options))
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return model


def _phi() -> Any:
    torch.manual_seed(3)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    common = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "num_key_value_heads": 2}
    return Phi3ForCausalLM(Phi3Config(**(sizes | common)))


def _config(scheme: str) -> dict[str, Any]:
    if scheme == FITTED:
        return {"scheme": scheme, "fitted": True}
    return {"scheme": scheme, "calibrated": True} if scheme.endswith("static") else {"scheme": scheme}


def _jobs(folder: Path) -> list[Job]:
    """Models in folders, and what is to be loaded."""
    models = {
        "llama": _llama(),
        "two": _llama(num_hidden_layers=2),
        "tied": _llama(tie_word_embeddings=True),
        "narrow": _llama(intermediate_size=100),
        "odd": _llama(intermediate_size=99),
        "gpt2": small("gpt2"),
        "phi3": _phi(),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
    llama, tied = str(folder / "llama"), str(folder / "tied")
    tables = {"scheme": "w8a8", "embeddings": "w8a16"}
    made = [Job(scheme, llama, _config(scheme)) for scheme in (*SCHEMES, FITTED)]
    made[0] = replace(made[0], refused=True)
    made += [
        Job("bfloat16", llama, {"scheme": "w8a8"}, dtype="bfloat16"),
        Job("narrow", str(folder / "narrow"), _config("w8a8_static")),
        Job("some layers", str(folder / "two"), {"scheme": "w8a16", "include": ["layers.0.*"]}),
        Job("tied", tied, {"scheme": "w8a16"}),
        Job("tables", llama, tables),
        Job("tied tables", tied, tables),
        Job("phi3", str(folder / "phi3"), {"scheme": "w8a16"}, probed=False),
        Job("groups", llama, {"scheme": "codebook4"}),
        Job("odd", str(folder / "odd"), {"scheme": "w8a8"}),
        Job("gpt2", str(folder / "gpt2"), {"scheme": "w8a8"}),
        Job("report", llama, {"scheme": "w8a8", "report": True}),
        Job("verify", llama, {"scheme": "w8a8", "verify": True}),
        Job("fsdp", llama, {"scheme": "w8a8"}, distributed={"fsdp_size": 2}),
        Job("style", llama, {"scheme": "w8a8"}, distributed={"tp_plan": {"model.layers.*.mlp.up_proj": "all_reduce"}}),
        Job(
            "weight",
            llama,
            {"scheme": "w8a8"},
            distributed={"tp_plan": {"model.layers.*.mlp.up_proj.weight": "rowwise"}},
        ),
    ]
    for name in (*STORED, "some layers", "tied", "tables", "tied tables", "groups"):
        job = next(job for job in made if job.name == name)
        path = folder / "saved" / name
        opened(Path(job.folder), **config_of(job)).save_pretrained(path)
        made.append(replace(job, name=f"stored {name}", folder=str(path), config=None, refused=False))
    for job in [one for one in made if one.name.endswith("tied tables")]:
        made.append(replace(job, name=f"{job.name}, hooked", hooked="lm_head"))
        made += [replace(job, name=f"{job.name}, {key}", hooked=f"model.layers.0.mlp.{key}") for key in HOOKED]
    foreign = opened(folder / "llama")
    qcut.quantize(foreign, "w8a8", progress=False)
    qcut.save_compressed_tensors(foreign, folder / "foreign")
    made.append(Job("foreign", str(folder / "foreign"), foreign=True))
    return made


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Job], Results]:
    """Jobs and results, by name. All workers of one run of the tests share them: the first makes them."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "parallel"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            run(_jobs(folder), folder, cpu=True)
            (folder / "done").touch()
    jobs, both = read(folder)
    return jobs, {name: [one[name] for one in both] for name in jobs}


@pytest.fixture
def jobs(ran: tuple[dict[str, Job], Results]) -> dict[str, Job]:
    return ran[0]


@pytest.fixture
def results(ran: tuple[dict[str, Job], Results]) -> Results:
    return ran[1]


def _whole(job: Job) -> Any:
    return opened(Path(job.folder), **config_of(job))


@cache
def _plain_logits(folder: str) -> Tensor:
    return answers(opened(Path(folder)))[0]


def _part(layer: Linear, name: str, rank: int, state: dict[str, Tensor]) -> Linear:
    """The layer of a process, made of its state: a layer of fewer channels, with rotations of its own columns."""
    n, k, scheme = layer.out_features, layer.in_features, layer.scheme
    if is_rowwise(name):
        k //= PROCESSES
        if isinstance(scheme, Codebook):
            scheme = replace(scheme, seed=scheme.seed + rank * k, residual_seed=scheme.residual_seed + rank * k)
    else:
        n //= PROCESSES
    part = Linear(k, n, "bias" in state, scheme)
    part.load_state_dict(state)
    return part.eval()


class _Sum(nn.Module):
    """Both parts of a layer that is cut along its input channels, in one process."""

    def __init__(self, parts: list[Linear]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (part(half) for part, half in zip(self.parts, x.chunk(PROCESSES, -1), strict=True))
        return first + second


def _rotated(t: Tensor, layer: CodebookLinear) -> Tensor:
    if layer.kind == rotation.NO_ROTATION:
        return t
    return rotation.rotate_groups(t, layer.kind, layer.group_size, layer.scheme.seed)


def _bound(layer: Linear, x: Tensor, parts: Tensor) -> Tensor:
    """How far the sum of parts may be from the result of the whole layer, float64 ``[M, N]``.

    Sums of K float32 products differ by less than ``2 (K + 32) 2**-24`` of the sum of magnitudes, where 32 is for the
    steps of a rotation, scales and the bias. Int8 tokens are off by half a step: by largest magnitude / 254, in the
    whole layer and in parts, whose steps are smaller. Int8 weights of codebooks are, too, by their row's.
    """
    k = layer.in_features
    w, x = layer.dequantized_weight().double(), x.double()
    if isinstance(layer, CodebookLinear):
        w, x = (_rotated(t, layer) for t in (w, x))
    magnitudes = x.abs() @ w.abs().t()
    bias = 0.0 if layer.bias is None else layer.bias.abs().double()
    bound: Tensor = 2 * (k + 32) * 2**-24 * (magnitudes + bias + parts.double())
    if layer.scheme.int8_products and not layer.scheme.needs_range:
        steps = {"int16x8": 2 * 32767}.get(layer.scheme.name, 2 * 127)
        of_tokens = x.abs().amax(1, keepdim=True) / steps
        bound = bound + 2 * of_tokens * w.abs().sum(1)
        if isinstance(layer, CodebookLinear):
            of_weights = w.abs().amax(1) / steps
            bound = bound + 2 * of_weights * (x.abs().sum(1, keepdim=True) + k * of_tokens)
    return bound


@pytest.mark.parametrize("scheme", [*SCHEMES, FITTED, "narrow"])
@cuts
def test_parts_are_slices_and_add_up(scheme: str, jobs: dict[str, Job], results: Results) -> None:
    job, ranks = jobs[scheme], results[scheme]
    model = _whole(job)
    logits, tokens = answers(model)
    wholes = {name: m for name, m in model.named_modules() if isinstance(m, Linear)}
    assert all(one["layers"].keys() == wholes.keys() for one in ranks)
    for name, layer in wholes.items():
        of_ranks, rowwise = [one["layers"][name] for one in ranks], is_rowwise(name)
        for rank, one in enumerate(of_ranks):
            expected = slices(layer, rowwise, rank)
            assert one["state"].keys() == expected.keys()
            assert all(torch.equal(one["state"][key], expected[key]) for key in expected), (name, rank)
        parts = [_part(layer, name, rank, one["state"]) for rank, one in enumerate(of_ranks)]
        x = rows_for(name, layer.in_features)
        with torch.no_grad():
            y = layer(x)
        if not rowwise:
            together = torch.cat([one["hooked"] for one in of_ranks], -1)
            if layer.scheme.int8_products:
                assert torch.equal(together, y)
            assert bool(((together - y).abs() <= _bound(layer, x, y.abs())).all()), name
            continue
        own = [one["own"] for one in of_ranks]
        for one, part, half in zip(own, parts, x.chunk(PROCESSES, -1), strict=True):
            assert torch.equal(one, part(half))
        assert all(torch.equal(one["hooked"], own[0] + own[1]) for one in of_ranks)
        assert bool(((own[0] + own[1] - y).abs() <= _bound(layer, x, own[0].abs() + own[1].abs())).all()), name
        parent, _, key = name.rpartition(".")
        setattr(model.get_submodule(parent), key, _Sum(parts))
    summed, summed_tokens = answers(model)
    for one in ranks:
        torch.testing.assert_close(one["logits"], summed, rtol=1e-5, atol=1e-5)
        assert one["tokens"] == summed_tokens
        assert one["whole"] == []
    assert torch.equal(ranks[0]["logits"], ranks[1]["logits"])
    if scheme not in ROUND_TOKENS:
        assert summed_tokens == tokens
    # What parallelism changes is less than what quantizing does.
    assert (ranks[0]["logits"] - logits).abs().max() < (logits - _plain_logits(job.folder)).abs().max()


@pytest.mark.parametrize("name", [*STORED, "some layers", "tied", "tables", "tied tables"])
@cuts
def test_checkpoints_give_the_parts_that_quantizing_gives(name: str, results: Results) -> None:
    for online, stored in zip(results[name], results[f"stored {name}"], strict=True):
        assert online["layers"].keys() == stored["layers"].keys()
        for one, other in zip(online["layers"].values(), stored["layers"].values(), strict=True):
            assert one["state"].keys() == other["state"].keys()
            assert all(torch.equal(one["state"][key], other["state"][key]) for key in one["state"])
        assert torch.equal(online["logits"], stored["logits"])
        assert online["tokens"] == stored["tokens"]
        assert online["whole"] == stored["whole"]


@pytest.mark.parametrize("name", ["tied tables", "stored tied tables"])
@cuts
def test_hooks_of_a_constructor_stay(name: str, results: Results) -> None:
    for plain, hooked in zip(results[name], results[f"{name}, hooked"], strict=True):
        assert hooked["whole"] == ["lm_head"]
        assert torch.equal(hooked["logits"], 2 * plain["logits"])


@pytest.mark.parametrize("scheme", ["codebook4_g16", "codebook2+3_g16", "int4_g16"])
@cuts
def test_shard_of_columns_has_its_own_seed(scheme: str, jobs: dict[str, Job], results: Results) -> None:
    """Groups do not know each other: quantizing only a process's columns gives the process's part."""
    plain = opened(Path(jobs[scheme].folder))
    for rank, one in enumerate(results[scheme]):
        for name in filter(is_rowwise, one["layers"]):
            module = plain.get_submodule(name)
            half = nn.Linear(module.in_features // 2, module.out_features, bias=False)
            half.weight = nn.Parameter(module.weight.detach().chunk(PROCESSES, 1)[rank].clone())
            first = rank * half.in_features
            base = qcut.Codebook.from_name(scheme)
            assert base is not None
            moved = replace(base, seed=base.seed + first, residual_seed=base.residual_seed + first)
            expected = Linear.from_float(half, moved).state_dict()
            assert all(torch.equal(one["layers"][name]["state"][key], t) for key, t in expected.items())


@cuts
def test_sums_are_in_the_dtype_of_the_model(results: Results, jobs: dict[str, Job]) -> None:
    model, ranks = _whole(jobs["bfloat16"]), results["bfloat16"]
    for name, first in ranks[0]["layers"].items():
        second = ranks[1]["layers"][name]
        assert first["hooked"].dtype is torch.bfloat16
        if is_rowwise(name):
            assert torch.equal(first["hooked"], first["own"] + second["own"])
            assert torch.equal(first["hooked"], second["hooked"])
        else:
            layer = model.get_submodule(name)
            y = layer(rows_for(name, layer.in_features, torch.bfloat16))
            assert torch.equal(torch.cat([first["hooked"], second["hooked"]], -1), y)


@pytest.mark.parametrize("name", ["some layers", "tied", "tables", "tied tables", "phi3"])
@cuts
def test_other_models(name: str, jobs: dict[str, Job], results: Results) -> None:
    """Float layers next to quantized ones, tables and classifiers, results that are gathered."""
    model = _whole(jobs[name])
    logits, tokens = answers(model)
    error = (logits - _plain_logits(jobs[name].folder)).abs().max()
    layers = {name for name, m in model.named_modules() if isinstance(m, Linear)}
    for one in results[name]:
        assert {*one["layers"], *one["whole"]} == layers
        assert one["tokens"] == results[name][0]["tokens"]
        if name == "phi3":
            assert one["tokens"] == tokens
        assert (one["logits"] - logits).abs().max() < error
    expected = {"tables": ["model.embed_tokens.table"], "tied tables": ["lm_head"]}
    assert results[name][0]["whole"] == expected.get(name, [])
    assert ("lm_head" in results[name][0]["layers"]) == (name == "tables")
    if name == "some layers":
        assert layers == {layer for layer in layers if layer.startswith("model.layers.0.")} != set()


@cuts
def test_process_holds_one_whole_layer_at_most(jobs: dict[str, Job], results: Results) -> None:
    """Whole layers that are cut, and whole tensors of files: when the next one comes, those before it are gone."""
    for name in ("w8a8", "codebook2+3_g16", "stored w8a8_static", "stored codebook2+3_g16"):
        assert all(one["alive"] == 0 for one in results[name])
    wholes = {name: m for name, m in _whole(jobs["w8a8"]).named_modules() if isinstance(m, Linear)}
    for name, layer in wholes.items():
        for one in results["w8a8"]:
            assert one["layers"][name]["state"]["qweight"].nbytes == layer.qweight.nbytes // PROCESSES
            assert one["layers"][name]["bytes"] < 0.6 * layer.weight_bytes


REFUSED = {
    "groups": r"tp_size=2 for 64 input channels.*'model\.layers\.0\.self_attn\.o_proj'.*codebook4.*32.*groups of 128",
    "odd": r"'model\.layers\.0\.mlp\.gate_proj': 99 output channels over tp_size=2",
    "report": r"report=True with tp_size=2",
    "verify": r"verify with tp_size=2: .*; allowed: verify=False",
    "fsdp": r"\{'fsdp_size': 2\}; allowed: only tp_size",
    "style": r"'model\.layers\.0\.mlp\.up_proj'.*style 'all_reduce'",
    "weight": r"'model\.layers\.0\.mlp\.up_proj'.*'rowwise' for its weight and 'colwise'",
    "foreign": r"tp_size=2 for a checkpoint of another library",
    "stored groups": r"tp_size=2 for .* input channels.*_proj",
    **{
        f"{stored}tied tables, {key}": rf"layer 'model\.layers\.0\.mlp\.{key}': tp_size=2, and .*, a hook on its"
        for stored in ("", "stored ")
        for key in HOOKED
    },
}


@cuts
def test_what_cannot_be_cut_is_refused(results: Results) -> None:
    for name, message in REFUSED.items():
        for one in results[name]:
            with pytest.raises(UnsupportedError, match=message):
                _again(one["error"])
    for one in results["gpt2"]:
        if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):  # whole in every process
            assert one["whole"]
            assert not one["layers"]
            continue
        assert one["error"].startswith("ValueError: `tp_size=2` was requested, but `GPT2LMHeadModel` has no `tp_plan`")


def _again(error: str) -> None:
    kind, _, text = error.partition(": ")
    assert kind == "UnsupportedError", error
    raise UnsupportedError(text)


@cuts
def test_parts_are_no_checkpoint(results: Results) -> None:
    for one in results["w8a8"]:
        refused = one["refused"]
        assert refused.keys() == {"save_pretrained", "qcut.save", "dequantize", "decode"}
        for door, message in refused.items():
            assert message.startswith("UnsupportedError: layer 'model.layers.0.self_attn.q_proj': "), (door, message)
            assert "one of 2 parts" in message


@cuts
def test_an_activation_between_layer_and_sum_is_refused() -> None:
    config = SimpleNamespace(distributed_config=SimpleNamespace(tp_plan=None))
    model = SimpleNamespace(config=config, tp_plan={"net.*": "rowwise"}, get_submodule=lambda name: nn.Linear(64, 8))
    parallel = TensorParallel(model, 2)
    scheme = qcut.Codebook(group_size=16)
    parallel.check({"net.0": Whole(scheme, 8, 64, "none"), "other": Whole(scheme, 7, 63, "relu")})
    with pytest.raises(UnsupportedError, match=r"'net\.0': its activation \(relu\).*fuse=False"):
        parallel.check({"net.0": Whole(scheme, 8, 64, "relu")})


@pytest.mark.skipif(HAS_HOOKS, reason="this transformers is served")
def test_older_versions_are_refused(tmp_path: Path) -> None:
    _llama().save_pretrained(tmp_path / "llama")
    for one in run([Job("w8a8", str(tmp_path / "llama"), {"scheme": "w8a8"})], tmp_path, cpu=True):
        with pytest.raises(UnsupportedError, match=r"tensor parallel of 2 .*; allowed: transformers>=5\.16"):
            _again(one["w8a8"]["error"])
