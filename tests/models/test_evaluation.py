"""Divergence of predictions from a reference's, against sums in Python's floats; `qcut.Engine.logits`."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import qcut
from qcut.errors import ShapeError
from qcut.models.evaluation import compare, compare_logits, logits_of, perplexity, token_divergence
from tests.support.zoo import tiny_hf


def exact(reference: Tensor, logits: Tensor) -> float:
    """The divergence of one position, ``math.fsum`` of Python's floats."""
    p, q = reference.double().tolist(), logits.double().tolist()
    total, others = (math.fsum(math.exp(v) for v in each) for each in (p, q))
    logs = [(a - math.log(total), b - math.log(others)) for a, b in zip(p, q, strict=True)]
    return math.fsum(math.exp(a) * (a - b) for a, b in logs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("step", [1e-4, 1.0, 30.0])
def test_divergence_is_that_of_exact_sums(dtype: torch.dtype, step: float) -> None:
    torch.manual_seed(0)
    reference = (5 * torch.randn(3, 47, 91)).to(dtype)  # 141 positions: more than are in memory at once
    logits = (reference.double() + step * torch.randn(3, 47, 91)).to(dtype)
    found = token_divergence(reference, logits)
    assert (found.dtype, found.shape) == (torch.float64, (3, 47))
    for at in ((0, 0), (1, 46), (2, 46)):
        assert found[at].item() == pytest.approx(exact(reference[at], logits[at]), rel=1e-9, abs=1e-13)
    assert torch.equal(token_divergence(logits, logits), torch.zeros(3, 47, dtype=torch.float64))


def test_divergence_of_excluded_tokens() -> None:
    inf, nan = math.inf, math.nan
    reference = torch.tensor([[0.0, 0.0, -inf], [0.0, 0.0, -inf], [0.0, 0.0, 0.0], [0.0, nan, 0.0]])
    logits = torch.tensor([[0.0, 0.0, -inf], [0.0, 0.0, 0.0], [0.0, 0.0, -inf], [0.0, 0.0, 0.0]])
    found = token_divergence(reference, logits).tolist()
    assert found[0] == 0
    assert found[1] == pytest.approx(math.log(1.5))
    assert found[2] == inf
    assert math.isnan(found[3])


def test_vocabularies_of_two_sizes_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"found shape \[1, 4, 8\]; allowed: \[1, 4, 9\].*one vocabulary"):
        token_divergence(torch.zeros(1, 4, 9), torch.zeros(1, 4, 8))
    for windows in ([], [(torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3, 1, 9), torch.zeros(3, 1, 9))]):
        with pytest.raises(ShapeError, match="windows: found no token to predict"):
            compare_logits(windows)


def one_hot(tokens: list[int], height: float) -> Tensor:
    return height * torch.nn.functional.one_hot(torch.tensor([tokens]), 4).float()


def test_quantile_and_top_of_known_positions() -> None:
    # 2,000 positions: 998 of each 1,000 agree, one has the same top token at another height, one another token.
    same, far, other = one_hot([1], 2.0), one_hot([1], 4.0), one_hot([3], 2.0)
    reference = same.repeat(1, 1000, 1)
    logits = torch.cat((same.repeat(1, 998, 1), far, other), 1)
    ids = torch.zeros(1, 1000, dtype=torch.int64)
    found = compare_logits((ids, reference, logits) for _ in range(2))
    near, most = exact(same[0, 0], far[0, 0]), exact(same[0, 0], other[0, 0])
    assert near < most
    assert found.positions == 2000
    assert found.divergence == pytest.approx((near + most) / 1000, rel=1e-12)
    assert found.divergence_999 == pytest.approx(near, rel=1e-12)  # 1,998 of 2,000 are not above it
    assert found.same_top == 0.999
    assert found.reference_perplexity == pytest.approx(math.exp(2) + 3, rel=1e-6)
    nan = compare_logits([(ids, reference, torch.full_like(logits, math.nan))])
    assert math.isnan(nan.divergence)
    assert (nan.same_top, math.isnan(nan.perplexity)) == (0, True)


def test_only_one_window_of_logits_is_kept() -> None:
    made: list[weakref.ref[Tensor]] = []

    def window() -> tuple[Tensor, Tensor, Tensor]:
        reference, logits = torch.zeros(1, 3, 5), torch.zeros(1, 3, 5)
        made.extend(map(weakref.ref, (reference, logits)))
        return torch.zeros(1, 3, dtype=torch.int64), reference, logits

    def windows() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for _ in range(4):
            assert [each() for each in made] == [None] * len(made)
            yield window()

    assert compare_logits(windows()).positions == 12


@pytest.mark.parametrize("batch", [1, 3])
def test_models_are_compared_window_by_window(batch: int) -> None:
    reference, model = tiny_hf("llama"), tiny_hf("llama")
    ids = torch.randint(0, model.config.vocab_size, (70,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model.lm_head.weight.mul_(1.1)
    found = compare(model.train(), reference, ids, window=16, batch_size=batch, progress=False)
    assert model.training
    sizes: dict[str, Any] = {"window": 16, "progress": False}
    assert found.perplexity == pytest.approx(perplexity(model, ids, **sizes), rel=1e-6)
    assert found.reference_perplexity == pytest.approx(perplexity(reference, ids, **sizes), rel=1e-6)
    pairs = [[logits_of(each, ids[None, i : i + 16]) for each in (reference, model)] for i in (0, 16, 32, 48)]
    wanted = [token_divergence(*pair) for pair in pairs]
    assert found.positions == 64
    assert found.divergence == pytest.approx(torch.cat(wanted).mean().item(), rel=1e-4)
    assert found.divergence > 1e-6


def test_engines_return_logits_of_every_token() -> None:
    model = tiny_hf("llama").eval()
    engine = qcut.Engine(model, batch=2, context=32)
    engine.runner.max_prefill_tokens = 16  # several chunks
    prompts = [[1, 2, 3] * 9, [4, 5]]
    for prompt, logits in zip(prompts, engine.logits(prompts), strict=True):
        torch.testing.assert_close(logits, logits_of(model, torch.tensor([prompt]))[0], rtol=1e-4, atol=1e-4)
    assert engine.lengths == (27, 2)
