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
from qcut.layers.parallel import part_scheme
from tests.integrations.vllm import parallel
from tests.integrations.vllm.test_layers import KINDS, described, expected, linears

WORLD = 2
SCHEMES = ("w8a8", "w8a16", "codebook4", "codebook4_int8", "codebook4+4", "codebook3", "codebook4_pairs", "int4")
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
    torch.save(found, f"{folder}/{rank}.pt")


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
    assert len(results) == len(KINDS) * (2 * len(SCHEMES) + 1)


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
            # The rotation qr turns back in float32 products, whose order depends on their size.
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
