"""Checks of the engine's arguments: token ids in lists, arrays or tensors become tensors, and text is refused."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qcut.common.numbers import is_whole
from qcut.errors import ConfigError, DtypeError, ShapeError, shown
from qcut.numerics.sampling import Sampling
from qcut.text.constraint import Constraint

ReusePrefix = bool | int | Sequence[int]
"""How many tokens of each sequence stay in the cache."""

_TOKENS = "token ids, as tokenizer(text)['input_ids'] has them"
_TEXT = "; text needs Engine(model, tokenizer=…)"


class Options(NamedTuple):
    """Options of `qcut.Engine.generate`."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    sampling: Sampling | None = None
    stop: Iterable[int | str] = ()
    skip_special_tokens: bool = True
    constraint: Constraint | None = None
    keep_special_tokens: Collection[str] = ()

    def check(self, vocabulary: int, fewest: int = 1) -> None:
        """Check all but `stop`, which `stops_of` checks; ``fewest`` is the least ``max_new_tokens``.

        Raises:
            ConfigError: a value of another kind, or outside of its range.
        """
        most, least = self.max_new_tokens, self.min_new_tokens
        if most is not None and (not is_whole(most) or most < fewest):
            raise ConfigError(f"max_new_tokens is {shown(most)}; allowed: {fewest} and more, or None")
        if least is not None and (not is_whole(least) or least < 0 or (most is not None and least > most)):
            allowed = "0 and more" if most is None else f"0 to max_new_tokens, {most}"
            raise ConfigError(f"min_new_tokens is {shown(least)}; allowed: {allowed}, or None")
        if self.sampling is not None and not isinstance(self.sampling, Sampling):
            raise ConfigError(f"sampling is {shown(self.sampling)}; allowed: a qcut.Sampling, or None")
        if not isinstance(self.skip_special_tokens, bool):
            raise ConfigError(f"skip_special_tokens is {shown(self.skip_special_tokens)}; allowed: True or False")
        if self.constraint is not None and not isinstance(self.constraint, Constraint):
            raise ConfigError(f"constraint is {shown(self.constraint)}; allowed: a qcut.Constraint, or None")
        beyond = max(self.sampling.logit_bias, default=0) if self.sampling is not None else 0
        if beyond >= vocabulary:
            raise ConfigError(f"logit_bias of token {beyond}; allowed: tokens 0 to {vocabulary - 1}", "logit_bias")


def prompt_ids(prompts: Any) -> list[Tensor]:
    """Token ids ``[T]`` of each prompt, on the host, not checked yet.

    Raises:
        DtypeError: text, a mapping, or no list of lists of numbers.
        ShapeError: one list of token ids, or a tensor that is not ``[B, T]``.
    """
    if isinstance(prompts, Tensor):
        if prompts.dim() != 2:
            raise ShapeError(f"prompts have shape {list(prompts.shape)}; allowed: [B, T], or a list of lists")
        return list(_on_host(prompts))
    if isinstance(prompts, str | bytes):
        found = f"prompts are text, {prompts[:40]!r}"
        raise DtypeError(f"{found}; allowed: a list of prompts, each a list of {_TOKENS}{_TEXT}")
    try:
        lists = None if isinstance(prompts, Mapping) else list(prompts)
    except TypeError:
        lists = None
    if lists is None:
        raise DtypeError(f"prompts are a {type(prompts).__name__}; allowed: a list of lists of {_TOKENS}")
    if lists and all(map(is_whole, lists)):
        raise ShapeError("prompts are one list of token ids; allowed: a list of such lists, [ids] for one prompt")
    return [ids_of(tokens, i) for i, tokens in enumerate(lists)]


def ids_of(tokens: Any, index: int | None) -> Tensor:
    """Token ids ``[T]`` of one prompt, or of a decode step if ``index`` is None, on the host.

    Raises:
        DtypeError: text, or no list of numbers.
        ShapeError: lists in lists.
    """
    what = "tokens are" if index is None else f"prompt {index} is"
    if isinstance(tokens, str | bytes):
        raise DtypeError(f"{what} text, {tokens[:40]!r}; allowed: {_TOKENS}{'' if index is None else _TEXT}")
    if isinstance(tokens, list | tuple) and tokens and type(tokens[0]) is int:
        with suppress(TypeError, OverflowError):  # several times faster than torch, but torch's errors say more
            return torch.frombuffer(array("q", tokens), dtype=torch.int64)
    try:
        ids = torch.as_tensor(tokens if isinstance(tokens, Tensor) or hasattr(tokens, "__array__") else list(tokens))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DtypeError(f"{what} no list of integers ({error}); allowed: {_TOKENS}") from None
    if ids.dim() != 1:
        raise ShapeError(f"{what} of shape {list(ids.shape)}; allowed: [T]")
    return _on_host(ids) if ids.numel() else ids.long()


def _on_host(ids: Tensor) -> Tensor:
    if ids.is_meta or ids.layout is not torch.strided:
        raise DtypeError(f"token ids are a {ids.layout} tensor on {ids.device}; allowed: a dense one with values")
    return ids.cpu()


def check_ids(ids: Tensor, vocabulary: int) -> None:
    """Check token ids.

    Raises:
        DtypeError: no integers.
        ConfigError: an id outside of the vocabulary.
    """
    if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        raise DtypeError(f"token ids are {str(ids.dtype).removeprefix('torch.')}; allowed: integers")
    ids = ids.long()  # torch compares no other unsigned integers than bytes; those from 2**63 on become negative
    low, high = (int(v) for v in ids.aminmax()) if ids.numel() else (0, 0)
    if low < 0 or high >= vocabulary:
        raise ConfigError(f"token id {low if low < 0 else high}; allowed: 0 to {vocabulary - 1}")


def reused_tokens(reuse_prefix: Any, lengths: Sequence[int], prompts: int) -> list[int]:
    """The number of cached tokens before each prompt.

    Args:
        reuse_prefix: see `Engine.prefill`.
        lengths: tokens of each sequence in the cache.
        prompts: number of prompts.

    Raises:
        ConfigError: neither a truth value nor whole numbers, or more tokens than a sequence has.
        ShapeError: another number of prompts than of sequences in the cache, or than of numbers.
    """
    if reuse_prefix is False:
        return [0] * prompts
    if reuse_prefix is True:
        if prompts != len(lengths):
            raise ShapeError(f"{prompts} prompts, and all of {len(lengths)} sequences are kept; allowed: one for each")
        return list(lengths)
    counts = [reuse_prefix] * prompts if is_whole(reuse_prefix) else reuse_prefix
    if isinstance(counts, Tensor):
        counts = counts.tolist()
    is_list = isinstance(counts, Iterable) and not isinstance(counts, str | bytes)
    counts = list(counts) if is_list else [None]
    if not all(map(is_whole, counts)):
        raise ConfigError(f"reuse_prefix is {reuse_prefix!r}; allowed: True, False, or numbers of tokens")
    if len(counts) != prompts:
        raise ShapeError(f"reuse_prefix has {len(counts)} numbers; allowed: {prompts}, one for each prompt")
    for i, count in enumerate(counts):
        most = lengths[i] if i < len(lengths) else 0
        if not 0 <= count <= most:
            raise ConfigError(f"reuse_prefix is {count} for sequence {i}; allowed: 0 to {most}, its tokens")
    return [int(count) for count in counts]


def stops_of(stop: Any, *, text: bool) -> tuple[frozenset[int], frozenset[str]]:
    """Ids and strings that end a sequence, from any collection of whole numbers and strings.

    Args:
        stop: the collection.
        text: whether strings are allowed, which needs a tokenizer.

    Raises:
        ConfigError: anything else, or an empty string.
    """
    allowed = f"a list of {_TOKENS}" + (", and of strings" if text else "; strings need Engine(model, tokenizer=…)")
    if isinstance(stop, Tensor):
        stop = stop.flatten().tolist()
    try:
        found = list(stop)
    except TypeError:
        if is_whole(stop):
            raise ConfigError(f"stop is {stop!r}; allowed: a list of token ids, [{stop!r}] for one") from None
        raise ConfigError(f"stop is {stop!r}; allowed: {allowed}") from None
    if isinstance(stop, str) and text:
        raise ConfigError(f"stop is {stop!r}; allowed: {allowed}, [{stop!r}] for one")
    strings = [one for one in found if isinstance(one, str)]
    if isinstance(stop, str | bytes) or (strings and not text):
        raise ConfigError(f"stop is {stop!r}; allowed: {allowed}")
    if not all(isinstance(one, str) or is_whole(one) for one in found):
        raise ConfigError(f"stop is {stop!r}; allowed: {allowed}")
    if "" in strings:
        raise ConfigError("stop has an empty string; allowed: 1 character and more")
    return frozenset(int(one) for one in found if not isinstance(one, str)), frozenset(strings)


def end_tokens(model: Any, tokenizer: Any, vocabulary: int) -> tuple[int, ...]:
    """Ids that end texts, in order, by a model's generation_config, or else its config, and by its tokenizer."""
    ids: list[Any] = []
    for settings in (getattr(model, "generation_config", None), model.config):
        ends = getattr(settings, "eos_token_id", None)
        if ends is not None:
            ids += ends if isinstance(ends, list | tuple) else [ends]
            break
    ids.append(getattr(tokenizer, "eos_token_id", None))
    return tuple(sorted({int(token) for token in ids if is_whole(token) and 0 <= token < vocabulary}))
