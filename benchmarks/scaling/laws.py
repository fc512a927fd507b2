"""Times of the parts of a decode step, as formulas fitted to the rows in ``benchmarks/results``.

A product of ``M`` tokens takes ``launch + NK / rate + K / walk``: the weights stream at a rate of their own for each
scheme and M (bytes over bandwidth for few tokens, operations over a peak for many), and a longer K has a longer tail.
A mixture's experts have one law for all M, in the bytes of the experts that tokens reach and in each one's number of
tokens, its routes. Other times are read between measured ones on two logarithmic axes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.harness import CEILINGS, Ceiling
from benchmarks.layers.experts import MODELS, Mixture
from benchmarks.publish.rows import Row, Rows, shape_of
from qcut.errors import ConfigError
from qcut.schemes import parse_scheme

GPU = "NVIDIA H200"
FLOAT = "fp16"
SCHEMES = ("codebook4", "codebook4_int8", "w8a8", "w8a16", FLOAT)
CACHES = {"float": "qcut", "int8": "qcut int8"}
"""A cache's kind to the variant of `attention/decode.py` that reads it."""


def weight_bytes(scheme: str, n: int, k: int) -> float:
    """Bytes of a weight ``[N, K]`` that a product reads, under a scheme of qcut or in float16."""
    return 2.0 * n * k if scheme == FLOAT else parse_scheme(scheme).weight_bytes(n, k)


@dataclass(frozen=True)
class Measured:
    """The time of one product.

    Attributes:
        n, k: out_features and in_features.
        us: microseconds.
    """

    n: int
    k: int
    us: float


@dataclass(frozen=True)
class ProductLaw:
    """Microseconds of a product with a fixed number of tokens, by N and K.

    Attributes:
        launch_us: of a product without weights.
        us_per_weight: for each of the N · K weights.
        us_per_column: for each of the K columns.
        residuals: of the rows of the fit, predicted over measured less one.
    """

    launch_us: float
    us_per_weight: float
    us_per_column: float
    residuals: tuple[float, ...] = ()

    def us(self, n: int, k: int) -> float:
        """Microseconds of ``[M, K] x [N, K]^T``."""
        return self.launch_us + self.us_per_weight * n * k + self.us_per_column * k

    @classmethod
    def fit(cls, rows: Iterable[Measured], least_us_per_weight: float = 0.0) -> ProductLaw:
        """The law with the least squared relative residuals; no term is negative.

        Args:
            rows: at least three, of different shapes.
            least_us_per_weight: lower bound by bandwidth and peak.

        Raises:
            ConfigError: fewer than three rows.
        """
        rows = list(rows)
        if len(rows) < 3:
            raise ConfigError(f"a law of products needs rows of at least 3 shapes, got {len(rows)}")
        terms = torch.tensor([[1.0, row.n * row.k, row.k] for row in rows], dtype=torch.float64)
        measured = torch.tensor([row.us for row in rows], dtype=torch.float64)
        least = torch.tensor([0.0, least_us_per_weight, 0.0], dtype=torch.float64)
        launch, weight, column = fitted(terms, measured, least).tolist()
        law = cls(launch, weight, column)
        return replace(law, residuals=tuple(law.us(r.n, r.k) / r.us - 1 for r in rows))


def fitted(terms: Tensor, measured: Tensor, least: Tensor) -> Tensor:
    """The factors ``[T]`` of terms, none below its least, with the least squared relative residuals.

    A term that is 0 in all rows has its least factor.

    Args:
        terms: float64 ``[R, T]``, of each row.
        measured: float64 ``[R]``, positive: what the terms times their factors add up to.
        least: float64 ``[T]``, of each factor, 0 or more.
    """
    # Relative residuals, columns of one size, and what is above the least.
    scaled = terms / measured[:, None]
    sizes = scaled.norm(dim=0)
    goal = 1 - scaled @ least
    used = [index for index, size in enumerate(sizes.tolist()) if size > 0]
    best, least_error = torch.zeros_like(least), math.inf
    subsets = (itertools.combinations(used, count) for count in range(1, len(used) + 1))
    for chosen in itertools.chain.from_iterable(subsets):
        columns = list(chosen)
        part = torch.linalg.lstsq((scaled / sizes)[:, columns], goal[:, None]).solution[:, 0] / sizes[columns]
        found = torch.zeros_like(least).index_copy(0, torch.tensor(columns), part)
        error = (scaled @ found - goal).square().sum().item()
        if bool((part >= 0).all()) and error < least_error:
            best, least_error = found, error
    return best + least


def reached(experts: int, top_k: int, tokens: int) -> float:
    """Experts that have a route, on average: each token chooses ``top_k`` different ones, all equally often."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


@functools.lru_cache(maxsize=4096)
def fullest(experts: int, chosen: int, gpus: int) -> float:
    """Chosen experts of the GPU that has most of them, on average, if every choice of so many is equally likely.

    Args:
        experts: an equal number on each GPU.
        chosen: at most all.
        gpus: how many.
    """
    each = experts // gpus
    found = 0.0
    for most in range(each):
        # Choices with at most so many on each GPU: a coefficient of the product of the GPUs' polynomials.
        choices = [1]
        for _ in range(gpus):
            product = [0] * min(chosen + 1, len(choices) + most)
            for (i, ways), j in itertools.product(enumerate(choices), range(most + 1)):
                if i + j < len(product):
                    product[i + j] += ways * math.comb(each, j)
            choices = product
        within = choices[chosen] if chosen < len(choices) else 0
        found += 1 - within / math.comb(experts, chosen)
    return found


class Routed(NamedTuple):
    """What the experts of one GPU do for a batch.

    Attributes:
        tokens: of the batch.
        experts: those that have routes.
        routes: of each of these.
        expert_bytes: of an expert's weights.
        expert_weights: their number.
    """

    tokens: int
    experts: float
    routes: float
    expert_bytes: float
    expert_weights: int

    @classmethod
    def of(cls, mixture: Mixture, scheme: str, tokens: int, gpus: int = 1) -> Routed:
        """Of the GPU with most experts that have routes, on average; each GPU has an equal part of the experts."""
        projections = (2 * mixture.width, mixture.hidden), (mixture.hidden, mixture.width)
        chosen = here = reached(mixture.experts, mixture.top_k, tokens)
        if gpus > 1:
            low, high = (fullest(mixture.experts, count, gpus) for count in (math.floor(chosen), math.ceil(chosen)))
            here = low + (high - low) * (chosen - math.floor(chosen))
        return cls(
            tokens,
            here,
            tokens * mixture.top_k / chosen,
            sum(weight_bytes(scheme, n, k) for n, k in projections),
            sum(n * k for n, k in projections),
        )

    def terms(self) -> list[float]:
        """What the factors of `MixtureLaw` multiply, in their order."""
        steps = zip(ROUTE_STEPS, (*ROUTE_STEPS[1:], math.inf), strict=True)
        beyond = (self.experts * self.expert_weights * max(0.0, min(self.routes, end) - start) for start, end in steps)
        return [1.0, float(self.tokens > 1), self.experts * self.expert_bytes, *beyond]


ROUTE_STEPS = (4.0, 16.0, 256.0)
"""Routes of an expert from which on a further one takes another time; fewer take no time but the weights' reading."""


FEWEST_MIXTURES = 6
"""Rows that a law of mixtures is fitted to: as many as it has constants."""


@dataclass(frozen=True)
class MixtureLaw:
    """Microseconds of a mixture's experts behind their router, whatever the number of tokens.

    Attributes:
        launch_us: of a mixture without weights.
        sort_us: more for two tokens and more, for sorting routes and adding results.
        us_per_byte: for each byte of the experts that have routes.
        us_per_weight: for each weight and each of its expert's routes beyond one of `ROUTE_STEPS`, up to the next.
        residuals: of the rows of the fit, predicted over measured less one.
    """

    launch_us: float
    sort_us: float
    us_per_byte: float
    us_per_weight: tuple[float, ...]
    residuals: tuple[float, ...] = ()

    def us(self, routed: Routed) -> float:
        """Microseconds of both products, and of what is before, between and after them."""
        factors = (self.launch_us, self.sort_us, self.us_per_byte, *self.us_per_weight)
        return sum(factor * term for factor, term in zip(factors, routed.terms(), strict=True))

    @classmethod
    def fit(cls, rows: Iterable[tuple[Routed, float]], least_us: tuple[float, float] = (0.0, 0.0)) -> MixtureLaw:
        """The law with the least squared relative residuals; no term is negative.

        Args:
            rows: what was done, and its microseconds; at least `FEWEST_MIXTURES`.
            least_us: lower bounds by bandwidth and peak, of a byte and of a weight.

        Raises:
            ConfigError: fewer rows.
        """
        rows = list(rows)
        if len(rows) < FEWEST_MIXTURES:
            raise ConfigError(f"a law of mixtures needs at least {FEWEST_MIXTURES} rows, got {len(rows)}")
        terms = torch.tensor([one.terms() for one, _ in rows], dtype=torch.float64)
        measured = torch.tensor([us for _, us in rows], dtype=torch.float64)
        byte, weight = least_us
        # Products of few routes may hide behind the reading of the weights.
        least = torch.tensor([0.0, 0.0, byte, 0.0, weight, weight], dtype=torch.float64)
        launch, sort, per_byte, *per_weight = fitted(terms, measured, least).tolist()
        law = cls(launch, sort, per_byte, tuple(per_weight))
        return replace(law, residuals=tuple(law.us(one) / us - 1 for one, us in rows))


@dataclass(frozen=True)
class Curve:
    """Positive values between measured points: straight lines on two logarithmic axes.

    Below the first point the value is the first one's; above the last, it grows as between the last two points, and no
    more slowly than not at all.

    Attributes:
        points: (x, y), by increasing x; at least two.
    """

    points: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, points: Iterable[tuple[float, float]]) -> Curve:
        """The curve through points in any order; of points with one x, the mean.

        Raises:
            ConfigError: points of fewer than two x.
        """
        by_x: dict[float, list[float]] = {}
        for x, y in points:
            by_x.setdefault(x, []).append(y)
        if len(by_x) < 2:
            raise ConfigError(f"a curve needs 2 or more different x, got {len(by_x)}")
        return cls(tuple((x, sum(by_x[x]) / len(by_x[x])) for x in sorted(by_x)))

    def at(self, x: float) -> float:
        """The value at x."""
        points = self.points
        if x <= points[0][0]:
            return points[0][1]
        (x0, y0), (x1, y1) = points[-2:]
        if x >= x1:
            return y1 + max(0.0, (y1 - y0) / (x1 - x0)) * (x - x1)
        above = next(index for index, (place, _) in enumerate(points) if place >= x)
        return between(x, *points[above - 1], *points[above])


def between(x: float, x0: float, y0: float, x1: float, y1: float) -> float:
    """The value at x of the straight line through two points on two logarithmic axes."""
    return math.exp(math.log(y0) + (math.log(y1) - math.log(y0)) * math.log(x / x0) / math.log(x1 / x0))


@dataclass(frozen=True)
class Link:
    """An exchange that was not measured: a latency, more of it for each further GPU, and a bandwidth.

    Attributes:
        latency_us: between two GPUs.
        hop_us: more for each GPU beyond two.
        bytes_s: bytes a second out of each GPU.
    """

    latency_us: float
    hop_us: float
    bytes_s: float

    def all_reduce_us(self, gpus: int, size: float) -> float:
        """Microseconds of the sum of ``size`` bytes over GPUs: each sends 2 (n - 1) / n of them."""
        sent = 2 * (gpus - 1) / gpus * size
        return self.latency_us + self.hop_us * (gpus - 2) + sent / self.bytes_s * 1e6

    def send_us(self, size: float) -> float:
        """Microseconds of ``size`` bytes from one GPU to another."""
        return self.latency_us + size / self.bytes_s * 1e6


ASSUMED_IN_HOST = Link(latency_us=6.6, hop_us=1.1, bytes_s=200e9)
"""All-reduce inside a CUDA graph over NVLink, if `engine/allreduce.py` has no rows. Assumed."""
ASSUMED_ACROSS_HOSTS = Link(latency_us=15.0, hop_us=0.0, bytes_s=45e9)
"""One message between hosts, over a network card of 400 Gbit/s for each GPU. Assumed."""


@dataclass(frozen=True)
class Primitives:
    """What is known of one GPU and of its links.

    Attributes:
        products: scheme → tokens → law.
        attention: cache → sequences (1 and 8) → microseconds by bytes of keys and values.
        prompt_attention: microseconds by multiplications and additions that the causal mask leaves.
        all_reduce: GPUs → microseconds by bytes, in a CUDA graph; GPUs without rows are assumed.
        mixtures: scheme → law of a mixture's experts; none without rows.
        ceiling: bandwidth and peaks.
        layer_us: of one layer of a step, the rest: norms, activation, minus the overlap of kernels.
        first_us: of one layer of a prompt, the same.
        prompt_us: of one prompt: its ids go to the GPU, the first token comes back.
        all_reduce_factor: multiplies every all-reduce, for sensitivity checks.
    """

    products: Mapping[str, Mapping[int, ProductLaw]]
    attention: Mapping[str, Mapping[int, Curve]]
    prompt_attention: Curve
    all_reduce: Mapping[int, Curve] = field(default_factory=dict)
    mixtures: Mapping[str, MixtureLaw] = field(default_factory=dict)
    ceiling: Ceiling = CEILINGS[GPU]
    layer_us: float = 0.0
    first_us: float = 0.0
    prompt_us: float = 0.0
    all_reduce_factor: float = 1.0

    @classmethod
    def read(cls, rows: Rows) -> Primitives:
        """Fit and collect rows: of products, of attention, of prompts' attention; of all-reduces and mixtures if any.

        Raises:
            ConfigError: there are too few rows of one of the first three.
        """
        products = product_laws(rows, GPU)
        if missing := [scheme for scheme in SCHEMES if scheme not in products]:
            raise ConfigError(f"bench_crossover.csv has no rows of {', '.join(missing)} on an {GPU}")
        attention: dict[str, dict[int, Curve]] = {}
        for cache, variant in CACHES.items():
            found: dict[int, list[tuple[float, float]]] = {}
            for row in rows.of("bench_attention", gpu=GPU, variant=variant):
                batch, context, kv_heads, head = (int(row[c]) for c in ("batch", "context", "kv_heads", "head"))
                size = batch * context * kv_heads * cache_row_bytes(cache, head)
                found.setdefault(batch, []).append((size, float(row["median_us"])))
            attention[cache] = {batch: Curve.of(points) for batch, points in found.items()}
        prompts = (
            (prompt_ops(*(int(row[c]) for c in ("batch", "tokens", "heads", "head"))), float(row["median_us"]))
            for row in rows.of("bench_prompt_attention", gpu=GPU, variant="qcut", head="128")
        )
        return cls(products, attention, Curve.of(prompts), all_reduce_curves(rows), mixture_laws(rows, GPU))

    def product_us(self, scheme: str, m: int, n: int, k: int) -> float:
        """Microseconds of a layer ``[M, K] x [N, K]^T``, quantization of its input included; see `product_us`.

        Raises:
            ConfigError: a scheme without rows, or no token.
        """
        laws = self.products.get(scheme)
        if laws is None:
            raise ConfigError(f"scheme {scheme!r} has no measured products; there are {', '.join(self.products)}")
        if m < 1:
            raise ConfigError(f"a product of {m} tokens does not exist; at least 1")
        return product_us(laws, m, n, k)

    def mixture_us(self, scheme: str, mixture: Mixture, tokens: int, gpus: int = 1) -> float:
        """Microseconds of a mixture behind its router, on the GPU with most of the experts that tokens reach.

        Raises:
            ConfigError: a scheme without rows.
        """
        law = self.mixtures.get(scheme)
        if law is None:
            measured = ", ".join(self.mixtures) or "none"
            raise ConfigError(f"scheme {scheme!r} has no measured mixtures; measured: {measured}")
        return law.us(Routed.of(mixture, scheme, tokens, gpus))

    def attention_us(self, sequences: int, size: float, cache: str = "float") -> float:
        """Microseconds of attention of one token for each sequence, over ``size`` bytes of keys and values together."""
        curves = self.attention[cache]
        known = sorted(curves)
        low = max((one for one in known if one <= sequences), default=known[0])
        high = min((one for one in known if one >= sequences), default=known[-1])
        if low == high:
            return curves[low].at(size)
        return between(sequences, low, curves[low].at(size), high, curves[high].at(size))

    def all_reduce_us(self, gpus: int, size: float) -> float:
        """Microseconds of an all-reduce of ``size`` bytes over GPUs of one host; assumed if there are no rows."""
        if gpus == 1:
            return 0.0
        curve = self.all_reduce.get(gpus)
        us = ASSUMED_IN_HOST.all_reduce_us(gpus, size) if curve is None else curve.at(size)
        return us * self.all_reduce_factor

    def assumed(self, gpus: int) -> bool:
        """Whether all-reduces over so many GPUs are assumed."""
        return gpus > 1 and gpus not in self.all_reduce


def product_us(laws: Mapping[int, ProductLaw], m: int, n: int, k: int) -> float:
    """Microseconds of ``[M, K] x [N, K]^T`` by the laws of some M.

    Between two of them it is read on two logarithmic axes; beyond the largest, time grows with M.
    """
    known = sorted(laws)
    if m in laws or m < known[0]:
        return laws[max(m, known[0])].us(n, k)
    if m > known[-1]:
        return laws[known[-1]].us(n, k) * m / known[-1]
    above = next(index for index, one in enumerate(known) if one > m)
    m0, m1 = known[above - 1], known[above]
    return between(m, m0, laws[m0].us(n, k), m1, laws[m1].us(n, k))


def product_laws(rows: Rows, gpu: str) -> dict[str, dict[int, ProductLaw]]:
    """Scheme → tokens → the law of the products that `layers/crossover.py` measured on a GPU.

    No time is below the GPU's `Ceiling`, if one is known.
    """
    ceiling = CEILINGS.get(gpu)
    times: dict[str, dict[int, dict[tuple[int, int], float]]] = {}
    for row in rows.of("bench_crossover", gpu=gpu):
        m, n, k = shape_of(row)
        times.setdefault(row["variant"], {}).setdefault(m, {})[n, k] = float(row["median_us"])
        times.setdefault(FLOAT, {}).setdefault(m, {})[n, k] = float(row["fp16_us"])

    def law(scheme: str, m: int, found: Mapping[tuple[int, int], float]) -> ProductLaw:
        measured = (Measured(n, k, us) for (n, k), us in found.items())
        return ProductLaw.fit(measured, least_us_per_weight(scheme, m, ceiling) if ceiling else 0.0)

    return {
        scheme: {m: law(scheme, m, found) for m, found in sorted(by_tokens.items())}
        for scheme, by_tokens in times.items()
        if scheme in SCHEMES
    }


def mixture_rows(rows: Rows, gpu: str) -> list[Row]:
    """Rows of `layers/experts.py` of whole mixtures in qcut's schemes on a GPU."""
    found = rows.of("bench_experts", gpu=gpu, part="mixture")
    return [row for row in found if row["scheme"] in SCHEMES and row["model"] in MODELS]


def mixture_laws(rows: Rows, gpu: str) -> dict[str, MixtureLaw]:
    """Scheme → the law of the mixtures that `layers/experts.py` measured on a GPU.

    A scheme without `FEWEST_MIXTURES` rows, or with those of one model, has none: one model's rows do not tell what an
    expert's routes cost from what its bytes do. No time is below the GPU's `Ceiling`, if one is known.
    """
    ceiling = CEILINGS.get(gpu)
    found: dict[str, list[tuple[Routed, float]]] = {}
    models: dict[str, set[str]] = {}
    for row in mixture_rows(rows, gpu):
        models.setdefault(row["scheme"], set()).add(row["model"])
        routed = Routed.of(MODELS[row["model"]], row["scheme"], int(row["m"]))
        found.setdefault(row["scheme"], []).append((routed, float(row["median_us"])))

    def least(scheme: str) -> tuple[float, float]:
        if ceiling is None:
            return 0.0, 0.0
        return ceiling.floor_us(0.0, 1.0), ceiling.floor_us(2.0, 0.0, _product_bits(scheme))

    return {
        scheme: MixtureLaw.fit(found[scheme], least(scheme))
        for scheme in SCHEMES
        if len(models.get(scheme, ())) > 1 and len(found[scheme]) >= FEWEST_MIXTURES
    }


def all_reduce_curves(rows: Rows) -> dict[int, Curve]:
    """GPUs → microseconds of an all-reduce in a CUDA graph by bytes, on whatever GPUs it was measured.

    An H100 and an H200 have the same links and multiprocessors; their memories differ.
    """
    found: dict[int, list[tuple[float, float]]] = {}
    for row in rows.of("bench_allreduce", variant="graph"):
        found.setdefault(int(row["gpus"]), []).append((float(row["bytes"]), float(row["median_us"])))
    return {gpus: Curve.of(points) for gpus, points in found.items()}


def cache_row_bytes(cache: str, head: int) -> int:
    """Bytes of one head's key and value of one token: float16, or int8 with a float32 scale for each."""
    return 2 * 2 * head if cache == "float" else 2 * (head + 4)


def prompt_ops(batch: int, tokens: int, heads: int, head: int) -> float:
    """Multiplications and additions of a prompt's attention that the causal mask leaves."""
    return 2.0 * batch * heads * tokens * (tokens + 1) * head


def least_us_per_weight(scheme: str, m: int, ceiling: Ceiling) -> float:
    """The least time for one weight: its bytes over the bandwidth, or its operations over the peak of its products."""
    size = 4096
    moved = weight_bytes(scheme, size, size) / size**2
    return ceiling.floor_us(2.0 * m, moved, _product_bits(scheme))


def _product_bits(scheme: str) -> int:
    return 8 if scheme != FLOAT and parse_scheme(scheme).int8_products else 16
