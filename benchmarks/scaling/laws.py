"""Times of the parts of a decode step, as formulas fitted to the rows in ``benchmarks/results``.

A product of ``M`` tokens takes ``launch + NK / rate + K / walk``: the weights stream at a rate of their own for each
scheme and M (bytes over bandwidth for few tokens, operations over a peak for many), and a longer K has a longer tail.
Other times are read between measured ones on two logarithmic axes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from benchmarks.harness import CEILINGS, Ceiling
from benchmarks.publish.rows import Rows, shape_of
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
        # Relative residuals, columns of one size, and the time above the floor.
        scaled = terms / measured[:, None]
        sizes = scaled.norm(dim=0)
        goal = 1 - scaled[:, 1] * least_us_per_weight
        best, least = torch.zeros(3, dtype=torch.float64), math.inf
        for chosen in itertools.chain.from_iterable(itertools.combinations(range(3), count) for count in (1, 2, 3)):
            columns = list(chosen)
            part = torch.linalg.lstsq((scaled / sizes)[:, columns], goal[:, None]).solution[:, 0] / sizes[columns]
            found = torch.zeros(3, dtype=torch.float64).index_copy(0, torch.tensor(columns), part)
            error = (scaled @ found - goal).square().sum().item()
            if bool((part >= 0).all()) and error < least:
                best, least = found, error
        launch, weight, column = best.tolist()
        law = cls(launch, weight + least_us_per_weight, column)
        return cls(
            *(law.launch_us, law.us_per_weight, law.us_per_column), tuple(law.us(r.n, r.k) / r.us - 1 for r in rows)
        )


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
    ceiling: Ceiling = CEILINGS[GPU]
    layer_us: float = 0.0
    first_us: float = 0.0
    prompt_us: float = 0.0
    all_reduce_factor: float = 1.0

    @classmethod
    def read(cls, rows: Rows) -> Primitives:
        """Fit and collect rows: of products, of attention, of prompts' attention, and of all-reduces if there are any.

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
        return cls(products, attention, Curve.of(prompts), all_reduce_curves(rows))

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
    bits = 8 if scheme != FLOAT and parse_scheme(scheme).int8_products else 16
    return ceiling.floor_us(2.0 * m, moved, bits)
