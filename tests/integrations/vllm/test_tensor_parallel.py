"""Two GPUs' worth of processes: what is split by columns is bitwise whole, and what is split by rows adds up."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import qcut
from qcut.errors import UnsupportedError
from qcut.layers.experts.experts import Experts
from qcut.layers.parallel import part_scheme
from qcut.numerics.gating import Gating
from tests.integrations.vllm import parallel, test_experts
from tests.integrations.vllm.test_layers import KINDS, described, expected, linears

WORLD = 2
SCHEMES = ("w8a8", "w8a16", "codebook4", "codebook4_int8", "codebook4+4", "codebook3", "codebook4_pairs", "int4")
MIXTURE_SCHEMES = ("w8a8", "codebook4", "codebook4_int8")
STATIC = {"static_range": qcut.StaticRange(-4.0, 3.5)}
pytestmark = pytest.mark.usefixtures("alone")

Results = dict[tuple[str, str, str], list[dict[str, Tensor]]]


def _rank(rank: int, folder: str) -> None:
    """One process: every case's output and buffers, or what refused it."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    from qcut.integrations.vllm.config import ServingConfig

    found: dict[tuple[str, str, str], Any] = {}
    with parallel.processes(rank, WORLD, Path(folder) / "store"), torch.inference_mode():
        for kind in KINDS:
            floats = [{"weight": weight, "bias": bias} for weight, bias in parallel.weights(kind)]
            for scheme in (*SCHEMES, "w8a8_static"):
                options = STATIC if scheme == "w8a8_static" else {}
                layers = [qcut.Linear.from_float(module, scheme, **options) for module in linears(kind)]
                stored = ServingConfig(described(kind, layers))
                cases = {"stored": (stored, [layer.state_dict() for layer in layers])}
                if scheme != "w8a8_static":
                    cases["online"] = ServingConfig({"quant_method": "qcut", "scheme": scheme}), floats
                for source, (config, tensors) in cases.items():
                    made = parallel.layer(kind, config, tensors)
                    x = parallel.tokens()
                    k = made.qcut.in_features
                    y = made(x[:, rank * k : (rank + 1) * k] if kind == "row" else x)[0]
                    found[kind, scheme, source] = {"y": y, **dict(made.qcut.named_buffers())}
        for scheme in ("codebook4_g256", "codebook4_rows"):
            with pytest.raises(UnsupportedError, match=r"'h.down'.*parts of 128 input channels"):
                parallel.layer("row", ServingConfig({"quant_method": "qcut", "scheme": scheme}), floats)
        found |= _mixtures()
    torch.save(found, f"{folder}/{rank}.pt")


def _mixtures() -> dict[tuple[str, str, str], dict[str, Tensor]]:
    """Experts on two processes: a part of each, or half of them."""
    from vllm.config import get_current_vllm_config

    from qcut.integrations.vllm.config import ServingConfig

    found = {}
    options = get_current_vllm_config().parallel_config
    x, weights, ids = parallel.routes()
    ids[0, 0] = -1  # vLLM's routers give it to padding
    for kind, options.enable_expert_parallel in (("half of the experts", True), ("part of each", False)):
        for scheme in MIXTURE_SCHEMES:
            stacks = test_experts.stacks(scheme)
            cases = {"online": (test_experts.asking(scheme), parallel.expert_weights())}
            cases["stored"] = ServingConfig(test_experts.described(stacks)), test_experts.stored(stacks)
            for source, (config, tensors) in cases.items():
                routed = parallel.mixture(config, tensors)
                given = (x, weights, ids) if options.enable_expert_parallel else _without_first_route()
                made = {part: getattr(routed.qcut, part).dequantized_weight() for part in ("up", "down")}
                found[kind, scheme, source] = {"y": routed.quant_method.apply(routed, *given), **made}
    with pytest.raises(UnsupportedError, match=r"'.*mlp.experts.down'.*parts of 128 input channels"):
        parallel.mixture(test_experts.asking("codebook4_g256"), parallel.expert_weights())
    return found


def _without_first_route() -> tuple[Tensor, Tensor, Tensor]:
    x, weights, ids = parallel.routes()
    weights[0, 0], ids[0, 0] = 0, parallel.EXPERTS
    return x, weights, ids


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("ranks")
    spawn(_rank, (str(folder),), nprocs=WORLD)
    ranks = [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]
    return {case: [rank[case] for rank in ranks] for case in ranks[0]}


def _cut(kind: str, whole: Tensor, rank: int) -> Tensor:
    """The rank's columns of the result of a whole layer."""
    sizes = parallel.SHAPES[kind]
    return torch.cat([part.chunk(WORLD, 1)[rank] for part in whole.split(sizes, 1)], 1)


def _options(scheme: str) -> dict[str, Any]:
    return STATIC if scheme == "w8a8_static" else {}


def test_every_case_ran(results: Results) -> None:
    assert len(results) == len(KINDS) * (2 * len(SCHEMES) + 1) + 4 * len(MIXTURE_SCHEMES)


@pytest.mark.parametrize("kind", ["column", "merged", "qkv"])
def test_columns_are_bitwise_those_of_one_gpu(results: Results, kind: str) -> None:
    for (of, scheme, source), ranks in results.items():
        if of != kind:
            continue
        whole = expected(kind, scheme, **_options(scheme))
        for rank, found in enumerate(ranks):
            assert torch.equal(found["y"], _cut(kind, whole, rank)), (scheme, source, rank)


def test_row_parallel_shards_sum_to_the_layer(results: Results) -> None:
    x, (module,) = parallel.tokens(), linears("row")
    k = parallel.K // WORLD
    absmax = module.weight.detach().abs().amax(1)
    for (kind, scheme, source), ranks in results.items():
        if kind != "row":
            continue
        whole = qcut.Linear.from_float(module, scheme, **_options(scheme))
        total = torch.zeros(len(x), parallel.N)
        for rank, found in enumerate(ranks):
            columns = slice(rank * k, (rank + 1) * k)
            part = nn.Linear(k, parallel.N)
            part.weight, part.bias = nn.Parameter(module.weight[:, columns]), module.bias
            own = part_scheme(whole.scheme, columns.start, k)
            made = qcut.Linear.from_float(part, own, row_absmax=absmax, **_options(scheme))
            made.bias = None if rank else made.bias
            # The rotation qr turns back in float32 products; their order depends on their size.
            torch.testing.assert_close(
                made.dequantized_weight(), whole.dequantized_weight()[:, columns], rtol=0, atol=1e-5
            )
            for name, buffer in made.named_buffers():
                assert torch.equal(found[name], buffer), (scheme, source, rank, name)
            total += made(x[:, columns])
        for found in ranks:
            assert torch.equal(found["y"], total), (scheme, source)


def test_row_parallel_result_is_near_the_layer(results: Results) -> None:
    x, (module,) = parallel.tokens(), linears("row")
    for scheme in SCHEMES:
        whole = qcut.Linear.from_float(module, scheme)
        y, weight = whole(x), whole.dequantized_weight()
        error = (results["row", scheme, "online"][0]["y"] - y).abs()
        # Tokens of int8 are rounded by half a step of their scale at most, in the whole layer and in a part.
        step = x.abs().amax(1, keepdim=True) / 127 * weight.abs().sum(1) if whole.scheme.int8_products else 0.0
        assert bool((error <= step + 1e-3).all()), scheme


def _whole_mixture(scheme: str) -> tuple[dict[str, Tensor], Tensor]:
    """The weights of both projections, and the result, where all experts are on one GPU."""
    made = test_experts.stacks(scheme)
    x, weights, ids = _without_first_route()
    y = Experts(made["up"], made["down"], Gating("silu"))(x, ids, weights)
    return {part: stack.dequantized_weight() for part, stack in made.items()}, y


@pytest.mark.parametrize("scheme", MIXTURE_SCHEMES)
@pytest.mark.parametrize("source", ["online", "stored"])
def test_halves_of_the_experts_sum_to_the_mixture(results: Results, scheme: str, source: str) -> None:
    whole, y = _whole_mixture(scheme)
    ranks = results["half of the experts", scheme, source]
    for part, weight in whole.items():
        assert torch.equal(torch.cat([found[part] for found in ranks]), weight)
    assert torch.equal(ranks[0]["y"] + ranks[1]["y"], y)  # two routes of a token, in any order


@pytest.mark.parametrize("scheme", MIXTURE_SCHEMES)
@pytest.mark.parametrize("source", ["online", "stored"])
def test_parts_of_all_experts_sum_to_the_mixture(results: Results, scheme: str, source: str) -> None:
    whole, y = _whole_mixture(scheme)
    ranks = results["part of each", scheme, source]
    for rank, found in enumerate(ranks):
        gate_up = [half.chunk(WORLD, 1)[rank] for half in whole["up"].chunk(2, 1)]
        assert torch.equal(found["up"], torch.cat(gate_up, 1))
        assert torch.equal(found["down"], whole["down"].chunk(WORLD, 2)[rank])
    # Tokens of int8 are rounded by half a step of their scale at most, in the whole and in a part.
    near = 1e-5 if scheme == "codebook4" else 0.02
    assert float((ranks[0]["y"] + ranks[1]["y"] - y).norm() / y.norm()) <= near
