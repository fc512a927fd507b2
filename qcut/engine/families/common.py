"""Parts that several families share: decoders of Llama's shape, windows of attention, and the check of dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import reduce
from typing import Any

import torch
from torch import nn

from qcut.engine.decoder import AddNorm, Block, Decoder, Heads, Rotary
from qcut.engine.families.rotary import context_of, rotary_of
from qcut.errors import DtypeError, UnsupportedError
from qcut.layers.experts.experts import Experts
from qcut.models.modules import SERVED_DTYPES, Quantized, dtype_name, is_linear, looks_linear, model_device

_BY_CONFIGURATION = ("mistral", "mixtral", "phi3", "starcoder2")
"""Models with windows only in their configurations; others ignore an entry there."""


def window_of(attention: Any) -> int:
    """Positions that a token of a layer attends to, its own the last; 0: all.

    Args:
        attention: transformers' module. Its own window counts, then that of its configuration.

    Raises:
        UnsupportedError: a window without positions.
    """
    window = getattr(attention, "sliding_window", None)
    if window is None and attention.config.model_type in _BY_CONFIGURATION:
        window = attention.config.sliding_window
    if window is not None and window < 1:
        raise UnsupportedError(f"sliding_window is {window!r}; allowed: None, or 1 and more")
    return 0 if window is None else int(window)


def heads_of(model: Any) -> Heads:
    """Heads of a model of Llama's shape."""
    config = model.config
    return Heads(config.num_attention_heads, config.num_key_value_heads, model.model.layers[0].self_attn.head_dim)


def decoder_from(
    model: Any,
    heads: Heads,
    blocks: Iterable[Block],
    norm: AddNorm,
    *,
    tokens: Any,
    head: Any,
    positions: Any = None,
    softcap: float | None = None,
) -> Decoder:
    """The decoder of a model from its parts."""
    return Decoder(
        architecture=type(model).__name__,
        tokens=tokens,
        positions=positions,
        blocks=tuple(blocks),
        norm=norm,
        head=head,
        heads=heads,
        vocabulary=model.config.vocab_size,
        context=context_of(model.config),
        dtype=norm.module.weight.dtype,  # type: ignore[arg-type]
        device=model_device(model),
        softcap=softcap,
    )


def llama_like(model: Any, block: Callable[[Any, Heads, Rotary], Block], norm: AddNorm) -> Decoder:
    """The decoder of a model of Llama's shape; all blocks have the same rotary positions.

    Raises:
        UnsupportedError: see `rotary_of`.
    """
    body, heads = model.model, heads_of(model)
    rotary, _ = rotary_of(model, body.rotary_emb, heads)
    blocks = (block(layer, heads, rotary) for layer in body.layers)
    return decoder_from(model, heads, blocks, norm, tokens=body.embed_tokens, head=model.lm_head)


def check_dtypes(model: nn.Module, decoder: Decoder) -> None:
    """Check that norms, embeddings and layers in float are of one dtype, which kernels and torch's products require.

    Quantized layers and adapters take tokens of each dtype, and routers may be of float32.

    Raises:
        DtypeError: a module of another dtype than the last norm's result, or a norm of float64 (named).
    """
    names, dtype = {id(module): name for name, module in model.named_modules()}, decoder.dtype

    def check(part: str, module: Any, key: str, found: torch.dtype, *allowed: torch.dtype) -> None:
        if found not in allowed:
            why = "" if dtype not in SERVED_DTYPES else f", and the last norm's result is {dtype_name(dtype)}"
            raise DtypeError(
                f"module {names.get(id(module), part)!r}: its {key} is {dtype_name(found)}{why}; allowed: "
                f"{', '.join(map(dtype_name, allowed))}, as model.to(torch.{dtype_name(allowed[0])}) makes it"
            )

    check("norm", decoder.norm.module, "weight", dtype, *SERVED_DTYPES)
    tables: dict[str, Any] = {"tokens": decoder.tokens, "positions": decoder.positions}
    dtypes = {part: getattr(t, "dtype", None) or t.weight.dtype for part, t in tables.items() if t is not None}
    if reduce(torch.promote_types, dtypes.values()) is not dtype:
        for part, found in dtypes.items():
            check(part, tables[part], "weight", found, dtype)
    for part, module in _modules(decoder):
        allowed = (dtype, torch.float32) if part.endswith("router.gate") else (dtype,)
        for key in ("weight", "bias"):
            if part not in tables and (tensor := module._parameters.get(key)) is not None:
                check(part, module, key, tensor.dtype, *allowed)


def _modules(held: Any, part: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Norms, routers, embeddings and float layers in a part of a decoder, with its name there."""
    if isinstance(held, Experts | nn.Sequential | nn.ModuleList):
        for name, one in held.named_children():
            yield from _modules(one, f"{part}.{name}")
    elif isinstance(held, nn.Module):
        if (inner := held._modules.get("base_layer")) is not None:
            yield from _modules(inner, part)
        elif not isinstance(held, Quantized) and (is_linear(held) or not looks_linear(held)):
            yield part, held
    elif isinstance(held, tuple):
        for i, one in enumerate(held):
            yield from _modules(one, f"{part}.{i}")
    elif is_dataclass(held):
        for field in fields(held):
            yield from _modules(getattr(held, field.name), f"{part}.{field.name}".lstrip("."))
