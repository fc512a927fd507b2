"""A decoder's step, its prompt and its memory on some GPUs, predicted from `Primitives`.

Tensor parallelism splits every layer over GPUs of one host: heads and the MLP's intermediate columns, with an
all-reduce after the attention's projection and one after the MLP's. A mixture's experts are not split: each GPU has an
equal number of whole ones, every GPU computes the router, and the all-reduce adds what the GPUs' experts make of all
tokens. Pipelines split the layers over hosts. Replicas share nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.engine.steps import Case
from benchmarks.layers.experts import Mixture
from benchmarks.scaling.laws import ASSUMED_ACROSS_HOSTS, FLOAT, Primitives, cache_row_bytes, prompt_ops
from qcut import Linear
from qcut.errors import ConfigError

HOST_GPUS = 8
MEMORY_BYTES = 141e9
"""Of one H200."""
RESERVED_BYTES = 5e9
"""Of these, left for the CUDA context, graphs, workspaces and activations. Assumed."""
GROUP = 128
"""Columns of a codebook's group, which no GPU boundary may cut."""
CHUNK_TOKENS = 512
"""A pipeline's prompt is cut into chunks no smaller."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder.

    Attributes:
        name: label in tables.
        layers, hidden, heads, kv_heads, intermediate, vocabulary: sizes; ``intermediate`` of one expert in a mixture.
        gated: whether the MLP has a gate projection, as Llama's.
        experts: of a mixture: their number, and those of a token; queries and keys have norms then, as in Qwen3.
        head_size: columns of a head, if they are not the hidden ones over the heads.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    gated: bool = True
    experts: tuple[int, int] | None = None
    head_size: int | None = None

    @classmethod
    def of(cls, name: str, case: Case) -> Shape:
        """The shape of a model of `engine/steps.py`."""
        sizes = (case.layers, case.width, case.heads, case.kv_heads)
        if case.experts is None:
            return cls(name, *sizes, case.hidden, case.vocabulary, gated=not case.gpt2)
        number, top_k, width = case.experts
        return cls(name, *sizes, width, case.vocabulary, experts=(number, top_k), head_size=case.head)

    @property
    def head(self) -> int:
        """Columns of one head."""
        return self.hidden // self.heads if self.head_size is None else self.head_size

    @property
    def mixture(self) -> Mixture | None:
        """Sizes of a layer's experts; None of a dense model."""
        return None if self.experts is None else Mixture(self.hidden, self.intermediate, *self.experts)

    def shard_kv_heads(self, tp: int) -> int:
        """Heads of keys on each GPU; of fewer heads than GPUs, one each."""
        return max(1, self.kv_heads // tp)

    def products(self, tp: int = 1) -> tuple[tuple[int, int], ...]:
        """(N, K) of one GPU's part of a layer: queries, keys and values; back; of a dense model, gate and up; down."""
        inner = self.intermediate // tp
        attention = (
            ((self.heads // tp + 2 * self.shard_kv_heads(tp)) * self.head, self.hidden),
            (self.hidden, self.heads * self.head // tp),
        )
        if self.experts is not None:
            return attention
        return (*attention, ((2 if self.gated else 1) * inner, self.hidden), (self.hidden, inner))

    def shares_heads(self, tp: int) -> bool:
        """Whether GPUs have equally many heads, each with its head of keys."""
        return self.heads % tp == 0 and (self.kv_heads % tp == 0 or tp % self.kv_heads == 0)

    def moved_bytes(self, rows: int, tp: int = 1) -> float:
        """Bytes that one GPU's norms and activation of a layer read and write, in float16.

        A mixture's law includes its activation; norms of heads are part of the kernel that writes the cache.
        """
        norms = 2 * 4 * self.hidden
        activation = 3 * self.intermediate // tp if self.gated and self.experts is None else 0
        return 2.0 * rows * (norms + activation)


LLAMAS = (
    Shape("8B", 32, 4096, 32, 8, 14336, 128256),
    Shape("70B", 80, 8192, 64, 8, 28672, 128256),
    Shape("405B", 126, 16384, 128, 8, 53248, 128256),
)
"""Llama 3's."""
MIXTURES = (
    Shape("30B-A3B", 48, 2048, 32, 4, 768, 151936, experts=(128, 8), head_size=128),
    Shape("235B-A22B", 94, 4096, 64, 4, 1536, 151936, experts=(128, 8), head_size=128),
)
"""Qwen3's."""


@dataclass(frozen=True)
class Layout:
    """The parallel layout of a model.

    Attributes:
        tp: GPUs that split each layer, of one host.
        pp: pipeline stages; each is a host if there are several.
        replicas: of all that.
    """

    tp: int = 1
    pp: int = 1
    replicas: int = 1

    @property
    def gpus(self) -> int:
        """How many GPUs there are."""
        return self.tp * self.pp * self.replicas

    @property
    def name(self) -> str:
        """``replicas × tensor-parallel GPUs``, and ``× stages`` if there are several."""
        return f"{self.replicas} × {self.tp}" + (f" × {self.pp}" if self.pp > 1 else "")


@dataclass(frozen=True)
class Time:
    """Microseconds of a step or of a prompt, by part; each is summed over the stages that a token passes.

    Attributes:
        products_us: linear layers.
        attention_us: attention and the cache's reading.
        rest_us: norms and activations, less the time that kernels overlap.
        head_us: classifier.
        all_reduce_us: exchanges within a host.
        send_us: between stages.
        bubble_us: a stage waits for others, or the pipeline fills and drains.
        host_us: a prompt's way to the GPU and the token's way back.
    """

    products_us: float
    attention_us: float
    rest_us: float
    head_us: float
    all_reduce_us: float
    send_us: float = 0.0
    bubble_us: float = 0.0
    host_us: float = 0.0

    @property
    def us(self) -> float:
        """The sum."""
        parts = (self.products_us, self.attention_us, self.rest_us, self.head_us)
        return sum(parts) + self.all_reduce_us + self.send_us + self.bubble_us + self.host_us


def check_layout(shape: Shape, scheme: str, layout: Layout) -> None:
    """Raise `ConfigError` unless the layout splits the shape into equal parts."""
    if layout.tp > HOST_GPUS:
        raise ConfigError(f"{layout.tp} GPUs for each layer of {shape.name}: a host has {HOST_GPUS}")
    if layout.pp > shape.layers:
        raise ConfigError(f"{layout.pp} stages for the {shape.layers} layers of {shape.name}")
    if not shape.shares_heads(layout.tp):
        heads = f"{shape.heads} heads" if shape.heads % layout.tp else f"{shape.kv_heads} heads of keys"
        raise ConfigError(f"{shape.name} has {heads}, which {layout.tp} GPUs cannot share equally")
    if shape.experts is not None and shape.experts[0] % layout.tp:
        raise ConfigError(f"{shape.name} has {shape.experts[0]} experts, which {layout.tp} GPUs cannot share equally")
    if scheme.startswith("codebook"):
        for _, k in shape.products(layout.tp):
            if k % GROUP:
                raise ConfigError(f"{scheme}: {layout.tp} GPUs cut {shape.name}'s groups of {GROUP} columns (K = {k})")


def head_scheme(scheme: str) -> str:
    """The scheme of embeddings and classifier for a scheme of the layers."""
    return FLOAT if scheme == FLOAT else "w8a16"


def predicted(primitives: Primitives, shape: Shape, scheme: str) -> bool:
    """Whether there are rows of what a layer consists of."""
    return shape.experts is None or scheme in primitives.mixtures


def _layer(
    primitives: Primitives, shape: Shape, scheme: str, rows: int, tp: int, fixed_us: float
) -> tuple[float, float, float]:
    """Microseconds of a layer's products, of its norms and the rest, and of its all-reduces."""
    products = sum(primitives.product_us(scheme, rows, n, k) for n, k in shape.products(tp))
    if (mixture := shape.mixture) is not None:
        # The router is a float16 product of all experts' logits on every GPU.
        products += primitives.product_us(FLOAT, rows, mixture.experts, mixture.hidden)
        products += primitives.mixture_us(scheme, mixture, rows, tp)
    rest = fixed_us + shape.moved_bytes(rows, tp) / primitives.ceiling.read_bytes * 1e6
    return products, rest, 2 * primitives.all_reduce_us(tp, 2.0 * rows * shape.hidden)


def step(
    primitives: Primitives,
    shape: Shape,
    scheme: str,
    batch: int,
    context: int,
    layout: Layout | None = None,
    cache: str = "float",
) -> Time:
    """Predict one token for each sequence of one replica.

    A pipeline's sequences are cut into as many parts as there are stages, so that all stages work; with fewer sequences
    than stages, some wait.

    Args:
        primitives: of the GPU.
        shape: of the model.
        scheme: of the linear layers.
        batch: sequences of the replica.
        context: tokens of each in the cache.
        layout: one GPU unless given.
        cache: ``float`` (float16) or ``int8``.

    Raises:
        ConfigError: the layout does not divide the shape, or there is no sequence.
    """
    layout = layout or Layout()
    check_layout(shape, scheme, layout)
    if batch < 1:
        raise ConfigError(f"a step of {batch} sequences does not exist; at least 1")
    tp, pp = layout.tp, layout.pp
    parts = min(batch, pp)
    rows = math.ceil(batch / parts)
    products, rest, exchanged = _layer(primitives, shape, scheme, rows, tp, primitives.layer_us)
    read = rows * context * shape.shard_kv_heads(tp) * cache_row_bytes(cache, shape.head)
    attention = primitives.attention_us(rows, read, cache)
    head = primitives.product_us(head_scheme(scheme), rows, math.ceil(shape.vocabulary / tp), shape.hidden)
    # Each GPU has the best of its part of the vocabulary: a value and an index for each sequence.
    choice = primitives.all_reduce_us(tp, 8.0 * rows * tp)
    send = ASSUMED_ACROSS_HOSTS.send_us(2.0 * rows * shape.hidden / tp) if pp > 1 else 0.0
    passed = Time(
        products * shape.layers,
        attention * shape.layers,
        rest * shape.layers,
        head,
        exchanged * shape.layers + choice,
        send * pp,
    )
    if pp == 1:
        return passed
    slowest = math.ceil(shape.layers / pp) * (products + attention + rest + exchanged) + head + choice + send
    return replace(passed, bubble_us=max(0.0, parts * slowest - passed.us))


def prompt(
    primitives: Primitives, shape: Shape, scheme: str, batch: int, tokens: int, layout: Layout | None = None
) -> Time:
    """Predict the time from prompts of equal length to their first new tokens, on one replica.

    A pipeline's prompts are cut into chunks, which follow each other through the stages.

    Args:
        primitives: of the GPU.
        shape: of the model.
        scheme: of the linear layers.
        batch: sequences.
        tokens: of each prompt.
        layout: one GPU unless given.

    Raises:
        ConfigError: the layout does not divide the shape, or there is no token.
    """
    layout = layout or Layout()
    check_layout(shape, scheme, layout)
    if batch < 1 or tokens < 1:
        raise ConfigError(f"{batch} prompts of {tokens} tokens do not exist; at least 1 of 1")
    tp, pp = layout.tp, layout.pp
    chunks = max(1, min(pp, batch * tokens // CHUNK_TOKENS))
    rows = math.ceil(batch * tokens / chunks)
    products, rest, exchanged = _layer(primitives, shape, scheme, rows, tp, primitives.first_us)
    attention = primitives.prompt_attention.at(prompt_ops(batch, tokens, shape.heads, shape.head) / tp) / chunks
    head = primitives.product_us(head_scheme(scheme), batch, math.ceil(shape.vocabulary / tp), shape.hidden)
    send = ASSUMED_ACROSS_HOSTS.send_us(2.0 * rows * shape.hidden / tp) if pp > 1 else 0.0
    layers = math.ceil(shape.layers / pp) * pp
    times = (products * layers, attention * layers, rest * layers, head, exchanged * layers, send * pp)
    stage = math.ceil(shape.layers / pp) * (products + attention + rest + exchanged) + send
    return Time(*times, bubble_us=(chunks - 1) * stage if pp > 1 else 0.0, host_us=primitives.prompt_us)


@functools.lru_cache(maxsize=1024)
def kept_bytes(scheme: str, n: int, k: int) -> float:
    """Bytes of a layer ``[N, K]`` in memory: of all buffers of qcut's layer, or of a float16 weight."""
    return 2.0 * n * k if scheme == FLOAT else float(Linear(k, n, False, scheme, device="meta").weight_bytes)


def weights_bytes(shape: Shape, scheme: str, layout: Layout | None = None) -> float:
    """Bytes of weights on the fullest GPU: its layers, its parts of classifier and table, and the norms."""
    layout = layout or Layout()
    tp, pp = layout.tp, layout.pp
    layer = sum(kept_bytes(scheme, n, k) for n, k in shape.products(tp)) + 2 * 2 * shape.hidden
    if (mixture := shape.mixture) is not None:
        up, down = (2 * mixture.width, mixture.hidden), (mixture.hidden, mixture.width)
        expert = sum(kept_bytes(scheme, n, k) for n, k in (up, down))
        router, norms = 2 * mixture.experts * mixture.hidden, 2 * 2 * shape.head
        layer += mixture.experts // tp * expert + router + norms
    table = kept_bytes(head_scheme(scheme), shape.vocabulary, shape.hidden) / tp
    return math.ceil(shape.layers / pp) * layer + table * (2 if pp == 1 else 1) + 2 * shape.hidden


def token_bytes(shape: Shape, cache: str = "float", layout: Layout | None = None) -> float:
    """Bytes of keys and values of one token on the fullest GPU."""
    layout = layout or Layout()
    return math.ceil(shape.layers / layout.pp) * shape.shard_kv_heads(layout.tp) * cache_row_bytes(cache, shape.head)


def room(shape: Shape, scheme: str, context: int, layout: Layout, cache: str = "float") -> int:
    """The number of sequences of a context that fit one replica; 0 if the weights do not fit."""
    left = MEMORY_BYTES - RESERVED_BYTES - weights_bytes(shape, scheme, layout)
    return max(0, int(left / (context * token_bytes(shape, cache, layout))))


def layouts(gpus: int) -> Iterator[Layout]:
    """All layouts of so many GPUs: layers split over 1, 2, 4 or 8 of a host; stages only of whole hosts."""
    for tp in (1, 2, 4, HOST_GPUS):
        if gpus % tp:
            continue
        rest = gpus // tp
        for pp in range(1, rest + 1) if tp == HOST_GPUS else (1,):
            if rest % pp == 0:
                yield Layout(tp, pp, rest // pp)


@dataclass(frozen=True)
class Served:
    """Sequences that GPUs generate together.

    Attributes:
        layout: of the GPUs.
        time: of a step of one replica.
        tokens_s_gpu: tokens a second of all sequences, for each GPU.
    """

    layout: Layout
    time: Time
    tokens_s_gpu: float


def served(
    primitives: Primitives, shape: Shape, scheme: str, sequences: int, context: int, gpus: int, cache: str = "float"
) -> Iterator[Served]:
    """Predict a number of sequences on GPUs, in every layout that divides the shape and has the memory."""
    for layout in layouts(gpus):
        batch = math.ceil(sequences / layout.replicas)
        if (
            not shape.shares_heads(layout.tp)
            or layout.pp > shape.layers
            or room(shape, scheme, context, layout, cache) < batch
        ):
            continue
        time = step(primitives, shape, scheme, batch, context, layout, cache)
        yield Served(layout, time, sequences / time.us * 1e6 / gpus)
