"""Products of mixtures' experts, all routes of a batch: up, down, and the whole mixture behind its router.

``up`` and ``down`` rows time only the product, on tokens as kernels take them, ``down`` with the sum of a token's
routes where its kernel adds them; ``mixture`` rows time `qcut.layers.experts.experts.Experts`, its sort, rotations,
activation and sum included. With vLLM installed, rows of ``marlin_int4`` are its kernels on the same routes. Experts
are chosen uniformly, others in each call; bytes are the weights of the experts that a batch reaches, each read once.
``dense`` rows of prompts time one layer of the same size and scheme on as many tokens as there are routes. ``--sizes``
adds rows of the mixture in tiles of so many routes, in place of the number that `qcut.dispatch.experts` chooses.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

import qcut
from benchmarks import harness
from benchmarks.harness import CheckError, Variant
from benchmarks.layers import marlin_experts
from qcut.backends.cuda.experts import tile_size
from qcut.layers.experts.experts import Experts, summed
from qcut.layers.experts.linear_stack import LinearStack
from qcut.numerics.gating import Gating
from qcut.numerics.routing import RouteTiles


class Mixture(NamedTuple):
    """Sizes of a model's experts: columns, width, number, and routes of a token."""

    hidden: int
    width: int
    experts: int
    top_k: int


MODELS = {
    "qwen3-30b-a3b": Mixture(2048, 768, 128, 8),
    "mixtral-8x7b": Mixture(4096, 14336, 8, 2),
    "gpt-oss-20b": Mixture(2880, 2880, 32, 4),
    "olmoe-1b-7b": Mixture(2048, 1024, 64, 8),
}
SCHEMES = ("codebook4", "codebook4_int8", "w8a8", "w8a16")
TOKENS = (1, 4, 8, 16, 64, 4096)
PROMPT = 256
"""Tokens from which a dense layer is timed too."""
ROUTINGS = 16
"""Choices of experts that calls take turns with."""
KEY = ("model", "scheme", "m", "part")


def stack(scheme: str, experts: int, n: int, k: int) -> LinearStack:
    """Experts of equal weights, each in memory of its own."""
    linear = nn.Linear(k, n, bias=False, dtype=torch.float16, device="cuda")
    nn.init.normal_(linear.weight, std=k**-0.5)
    return LinearStack.of([qcut.Linear.from_float(linear, scheme)] * experts)


def routings(tokens: int, mixture: Mixture) -> list[Tensor]:
    """Experts of tokens, int32 ``[M, k]``."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    found = []
    for _ in range(ROUTINGS):
        scores = torch.rand(tokens, mixture.experts, generator=generator, device="cuda")
        found.append(scores.topk(mixture.top_k, 1).indices.int())
    return found


def tiles_of(index: Tensor, layers: Experts) -> RouteTiles:
    """The tiles in which `Experts` computes these routes."""
    up, down = cast(LinearStack, layers.up), cast(LinearStack, layers.down)
    tokens, top_k = index.shape
    size = tile_size(tokens, top_k, layers.num_experts, min(up.form.largest_tile, down.form.largest_tile), 0)
    if size is None or size == 1:
        return RouteTiles(index.flatten(), None, index.numel())
    tile_experts, tile_routes = torch.ops.qcut.sort_routes(index, layers.num_experts, size)
    return RouteTiles(tile_experts, tile_routes, index.numel())


class Product:
    """The product of one projection, without what prepares its tokens."""

    def __init__(
        self, layers: LinearStack, x: Tensor, tiles: list[RouteTiles], per_row: int, weights: Tensor | None = None
    ) -> None:
        self.layers, self.x, self.tiles, self.per_row = layers, x, tiles, per_row
        self.prepared: list[tuple[str, tuple[Any, ...]]] = []
        with _Recorded(self.prepared):
            for one in tiles:
                layers.routed(x, one, per_row, weights=weights)

    def __call__(self, i: int) -> Tensor:
        """The product with the routing i."""
        name, args = self.prepared[i]
        result: Tensor = getattr(torch.ops.qcut, name)(*args)
        return result


class _Recorded(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the arguments of products of experts."""

    def __init__(self, calls: list[tuple[str, tuple[Any, ...]]]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.endswith("_experts"):
            self.calls.append((name, args))
        return func(*args, **(kwargs or {}))


def checked(layers: LinearStack, x: Tensor, tiles: RouteTiles, index: Tensor, per_row: int) -> Callable[[], None]:
    """A check that some routes are what their experts' layers make of them."""

    def check() -> None:
        got = layers.routed(x, tiles, per_row)
        assert got is not None
        of_routes = index.flatten()
        for route in range(0, len(of_routes), max(1, len(of_routes) // 16)):
            want = layers.expert(int(of_routes[route]))(x[route // per_row][None])[0].float()
            error = ((got[route].float() - want).abs().max() / want.abs().max()).item()
            if not error < 2.0**-8:
                raise CheckError(f"route {route}: error {error:.2g}")

    return check


class Batch(NamedTuple):
    """What is given to a mixture: tokens, tokens of routes, weights of routes, and experts for each call in turn."""

    x: Tensor
    hidden: Tensor
    weights: Tensor
    every: list[Tensor]

    @classmethod
    def of(cls, mixture: Mixture, m: int) -> Batch:
        """Of m tokens."""
        x = torch.randn(m, mixture.hidden, dtype=torch.float16, device="cuda")
        hidden = torch.randn(m * mixture.top_k, mixture.width, dtype=torch.float16, device="cuda")
        return cls(x, hidden, torch.rand(m, mixture.top_k, device="cuda"), routings(m, mixture))

    @property
    def reached(self) -> float:
        """Experts that have routes, on average."""
        return sum(len(index.unique()) for index in self.every) / ROUTINGS


def in_tiles_of(layers: Experts, batch: Batch, size: int) -> Callable[[int], object]:
    """The mixture with the routing i, in tiles of so many routes."""
    stacks = layers.stacks
    assert stacks is not None

    def call(i: int) -> Tensor:
        found = layers._in_tiles(stacks, batch.x, None, batch.every[i], batch.weights, size)
        assert found is not None
        return summed(found)

    return call


def variants(layers: Experts, mixture: Mixture, batch: Batch, sizes: Sequence[int] = ()) -> dict[str, Variant]:
    """What is timed, by part."""
    up, down = layers.up, layers.down
    assert isinstance(up, LinearStack)
    assert isinstance(down, LinearStack)
    every, m = batch.every, len(batch.x)
    tiles = [tiles_of(index, layers) for index in every]
    given = {"up": (up, batch.x, mixture.top_k), "down": (down, batch.hidden, 1)}
    found = {}
    for part, (projection, tokens, per_row) in given.items():
        check = checked(projection, tokens, tiles[0], every[0], per_row)
        sums = batch.weights if part == "down" and tiles[0].size == 1 else None
        found[part] = Variant(part, Product(projection, tokens, tiles, per_row, sums), ROUTINGS, check)
        if m >= PROMPT:
            one = projection.expert(0)
            many = tokens.repeat_interleave(per_row, 0)
            found[f"{part}:dense"] = Variant(f"{part}:dense", lambda i, one=one, many=many: one(many))  # type: ignore
    found["mixture"] = Variant("mixture", lambda i: layers(batch.x, every[i], batch.weights), ROUTINGS)
    for size in sizes:
        found[f"mixture:{size}"] = Variant(f"mixture:{size}", in_tiles_of(layers, batch, size), ROUTINGS)
    return found


class Measurement(NamedTuple):
    """Times parts, and adds their rows."""

    results: harness.Results
    clock: harness.CudaClock
    rounds: int

    def add(
        self, model: str, scheme: str, batch: Batch, found: dict[str, Variant], weight_bytes: dict[str, float]
    ) -> None:
        """Rows of a batch; ``weight_bytes`` are those of one expert, by part."""
        kept, problems = harness.checked(found.values(), print)
        if problems:
            raise CheckError(f"{model} {scheme} m={len(batch.x)}: {'; '.join(problems)}")
        ceiling, reached = harness.CEILINGS.get(self.results.env.gpu), batch.reached
        for part, timing in harness.measure(kept, self.clock, rounds=self.rounds).items():
            moved = reached * weight_bytes.get(part, math.nan)
            share = moved / ceiling.read_bytes * 1e6 / timing.median_us if ceiling else math.nan
            row = self.results.add(
                timing,
                model=model,
                scheme=scheme,
                m=len(batch.x),
                part=part,
                experts=round(reached, 1),
                gb_s=round(moved / timing.median_us / 1e3, 1),
                memory_pct=round(100 * share, 1),
            )
            print(*(row[key] for key in (*KEY, "median_us", "gb_s", "memory_pct")), flush=True)


def add_peer(measurement: Measurement, model: str, batches: list[Batch]) -> None:
    """Rows of vLLM's kernels; none of sizes that they do not take."""
    mixture = MODELS[model]
    peer = marlin_experts.MarlinExperts(mixture.experts, mixture.hidden, mixture.width)
    for batch in batches:
        calls = peer.calls(batch.every, batch.x, batch.hidden, batch.weights)
        try:
            for call in calls.values():
                call(0)
        except RuntimeError as error:
            print(f"{model} {marlin_experts.SCHEME} m={len(batch.x)}: {str(error).splitlines()[0]}")
            continue
        found = {part: Variant(part, call, ROUTINGS) for part, call in calls.items()}
        measurement.add(model, marlin_experts.SCHEME, batch, found, peer.weight_bytes)
    del peer
    torch.cuda.empty_cache()


@torch.no_grad()
def measured(options: argparse.Namespace, results: harness.Results) -> None:
    """Time everything, a model and scheme after the other."""
    measurement = Measurement(results, harness.CudaClock(), options.rounds)
    for model in options.models:
        mixture = MODELS[model]
        batches = [Batch.of(mixture, m) for m in options.tokens]
        for scheme in options.schemes:
            torch.manual_seed(0)
            layers = Experts(
                stack(scheme, mixture.experts, 2 * mixture.width, mixture.hidden),
                stack(scheme, mixture.experts, mixture.hidden, mixture.width),
                Gating("silu"),
            )
            stacks = {"up": cast(LinearStack, layers.up), "down": cast(LinearStack, layers.down)}
            weight_bytes: dict[str, float] = {part: one.weight_bytes / one.experts for part, one in stacks.items()}
            weight_bytes["mixture"] = sum(weight_bytes.values())
            for batch in batches:
                measurement.add(model, scheme, batch, variants(layers, mixture, batch, options.sizes), weight_bytes)
            del layers
            torch.cuda.empty_cache()
        if marlin_experts.is_there():
            add_peer(measurement, model, batches)
        results.write_csv(options.out, KEY)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--schemes", nargs="+", default=[*SCHEMES])
    parser.add_argument("--tokens", nargs="+", type=int, default=[*TOKENS])
    parser.add_argument("--sizes", nargs="+", type=int, default=[], help="routes of a tile, of further rows [none]")
    parser.add_argument("--rounds", type=int, default=15)


@harness.script(harness.timing_options, add_options, gpu=True)
def main(options: argparse.Namespace) -> int:
    """Run the benchmark; 2 without a GPU."""
    results = harness.Results("bench_experts", harness.environment())
    measured(options, results)
    print(f"rows in {results.write_csv(options.out, KEY)}")
    return 0
