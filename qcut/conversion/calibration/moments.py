"""What is collected for fitting codebooks: a matrix or two of each layer, all at once or in turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from qcut.common.numbers import is_number
from qcut.errors import CalibrationError, ConfigError

M = TypeVar("M")

PRIOR = 4.0
"""What is known of all experts of a projection counts as so many tokens of one, for each column, by default."""


class Moments(Mapping[str, M], Generic[M]):
    """What was collected, by layer name.

    In turns, only what was collected in the last turn is held: asking for a layer of another turn runs the model again.
    `qcut.quantize` and `qcut.plan` ask in the order of the turns.

    Args:
        turns: names of the layers that are collected together.
        collect: what layers get, and how many tokens each of them saw.

    Attributes:
        tokens: how many tokens each layer saw, of the turns that were; 0 of an expert that no token came to.
    """

    def __init__(
        self, turns: Sequence[Sequence[str]], collect: Callable[[Sequence[str]], tuple[dict[str, M], dict[str, int]]]
    ) -> None:
        self._turns = turns
        self._collect: Callable[[Sequence[str]], tuple[dict[str, M], dict[str, int]]] | None = collect
        self._turn_of = {name: i for i, names in enumerate(turns) for name in names}
        self._now, self._held = -1, dict[str, M]()
        self.tokens: dict[str, int] = {}
        if len(turns) == 1:
            self._take(0)
            self._collect = None  # and with it the model and the batches

    @property
    def in_turns(self) -> bool:
        """Whether asking for a layer may run the model."""
        return self._collect is not None

    def __getitem__(self, name: str) -> M:
        if self._turn_of[name] != self._now:
            self._take(self._turn_of[name])
        return self._held[name]

    def _take(self, turn: int) -> None:
        self._held = {}  # before the next ones are made
        self._now = -1
        assert self._collect is not None
        self._held, tokens = self._collect(self._turns[turn])
        self._now = turn
        self.tokens |= tokens

    def __contains__(self, name: object) -> bool:
        return name in self._turn_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._turn_of)

    def __len__(self) -> int:
        return len(self._turn_of)


def checked_prior(prior: float) -> float:
    """A prior of `shrunk`.

    Raises:
        ConfigError: it is negative, or no finite number.
    """
    if not is_number(prior) or not 0 <= prior < math.inf:
        raise ConfigError(f"prior: found {prior!r}; allowed: 0 and more, such as {PRIOR}")
    return prior


def turns_of(
    sizes: Mapping[str, int], stacks: Mapping[str, Sequence[str]], most_bytes: float | None
) -> list[list[str]]:
    """Layers that are collected together: those next to each other, as far as the bytes go.

    Args:
        sizes: bytes that are collected of each layer.
        stacks: layers that are in one turn: all experts of a projection.
        most_bytes: of a turn; one layer, or one projection of experts, may take more. None: one turn for all.

    Raises:
        ConfigError: the bytes are not positive.
    """
    if most_bytes is None:
        return [list(sizes)]
    if not is_number(most_bytes) or not most_bytes > 0:
        raise ConfigError(f"most_bytes: found {most_bytes!r}; a positive number is allowed, such as 8e9")
    stack_of = {name: stack for stack, names in stacks.items() for name in names}
    units: dict[str, list[str]] = {}
    for name in sizes:
        units.setdefault(stack_of.get(name, name), []).append(name)
    turns: list[list[str]] = []
    left = 0.0
    for names in units.values():
        size = sum(sizes[name] for name in names)
        if not turns or size > left:
            turns.append([])
            left = most_bytes
        turns[-1] += names
        left -= size
    return turns


def check_seen(
    tokens: Mapping[str, int],
    stacks: Mapping[str, Sequence[str]],
    modules: Mapping[str, tuple[Sequence[str], bool]],
    batches: int,
    what: str,
) -> list[str]:
    """Check that something was seen by each layer, and by one expert at least of each projection.

    Args:
        tokens: that each layer saw.
        stacks: names of the layers of a projection.
        modules: of experts that are modules, names of a layer of each, and whether those are all experts.
        batches: their number, for the message.
        what: was to be seen.

    Returns:
        The layers of experts that are modules, and saw nothing.

    Raises:
        CalibrationError: nothing was (the layer or projection is named).
    """
    unseen = [name for names, _ in modules.values() for name in names if not tokens[name]]
    members = {name for names in stacks.values() for name in names}.union(unseen)
    counts = {name: count for name, count in tokens.items() if name not in members}
    counts |= {stack: sum(tokens[name] for name in names) for stack, names in stacks.items()}
    counts |= {names[0]: sum(tokens[name] for name in names) for names, whole in modules.values() if whole}
    for name, count in counts.items():
        if not count:
            raise CalibrationError(
                f"layer {name!r} saw no {what} in {batches} batches; pass data that reaches it, or leave it out with "
                f"skip=[{name!r}]"
            )
    return unseen


def identities(weights: Mapping[str, Tensor], side: int) -> dict[str, Tensor]:
    """Moments of layers that nothing is known of, the same object for those of one size.

    Args:
        weights: ``[N, K]`` of each layer.
        side: 1 for moments of inputs, ``[K, K]``; 0 for those of outputs, ``[N, N]``.
    """
    made: dict[tuple[int, torch.device], Tensor] = {}
    for weight in weights.values():
        key = weight.shape[side], weight.device
        if key not in made:
            made[key] = torch.eye(key[0], dtype=torch.float32, device=weight.device)
    return {name: made[weight.shape[side], weight.device] for name, weight in weights.items()}


def shrunk(sums: Sequence[Tensor | None], tokens: Sequence[int], common: bool, prior: float = PRIOR) -> list[Tensor]:
    """Moments of experts, drawn to what is known of all: ``(sum_e + n0 * P) / (tokens_e + n0)``, ``n0 = prior * K``.

    With few tokens, a matrix of an expert's own says more about these tokens than about the expert. Where channels mean
    the same to all experts, as those of tokens do, P is the mean of all; inside an expert they do not, and P is a
    multiple of the identity, of the mean's trace.

    Args:
        sums: float32 ``[K, K]`` of each expert, overwritten; None of one without tokens.
        tokens: of each expert; of one at least.
        common: whether channels mean the same to all experts.
        prior: tokens for each column that P counts for.

    Returns:
        The moments; experts without tokens share P.
    """
    known = torch.zeros_like(next(one for one in sums if one is not None))
    for one in sums:
        if one is not None:
            known += one
    known /= sum(tokens)
    if not common:
        known = torch.diag(known.diagonal().mean().expand(len(known)))
    n0 = prior * len(known)
    return [
        known if one is None else one.add_(known, alpha=n0).div_(count + n0)
        for one, count in zip(sums, tokens, strict=True)
    ]
