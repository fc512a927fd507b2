"""Memory for keys and values: kept as they are, or near in int8, where they were put and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut.engine.kv_cache.cache import KVCache
from tests.support.decoders import kept


@pytest.mark.parametrize("kind", ["auto", "int8"])
def test_cache_returns_appended_keys_and_values(kind: Any) -> None:
    cache = KVCache(2, 3, 2, 10, 16, dtype=torch.float32, device=torch.device("cpu"), kv_dtype=kind)
    k, v = torch.randn(2, 2, 4, 16), torch.randn(2, 2, 4, 16)
    k[0, 1, 2] = 0
    first = torch.arange(4, dtype=torch.int32).repeat(2)
    rows = [t.transpose(1, 2).reshape(8, 2, 16) for t in (k, k, v)]
    torch.ops.qcut.append_kv(*rows, None, None, first, first, *cache.layer(1), 4)
    places = torch.tensor([7, 4], dtype=torch.int32)
    q, one, two = torch.randn(3, 2, 2, 16)
    torch.ops.qcut.append_kv(q, one, two, None, None, places, places, *cache.layer(1))
    for got, prompt, token in zip(kept(cache, 1), (k, v), (one, two), strict=True):
        assert not got[2].any()
        for row, place in enumerate(places):
            for stored, given in ((got[row, :, :4], prompt[row]), (got[row, :, place], token[row])):
                step = given.abs().amax(-1, keepdim=True) / 127
                assert ((stored - given).abs() <= (step * 0.5001 if kind == "int8" else 0 * step)).all()
    assert all(not t.any() for t in kept(cache, 0))
