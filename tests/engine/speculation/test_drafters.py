"""Drafters of speculative decoding: a smaller model, and heads that read hidden states."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from torch import Tensor

import qcut
from qcut.engine.drafters import DraftState
from qcut.engine.engine import Engine
from qcut.engine.runner import ModelRunner
from qcut.engine.scheduler import Scheduler
from qcut.engine.speculation import DraftedLoop
from qcut.errors import ConfigError
from qcut.numerics.sampling import Sampling
from tests.support.decoders import VOCABULARY, prompts_of, small

NEW = 24
PROMPTS = prompts_of(VOCABULARY, 9, 1, 30)


@pytest.fixture(autouse=True)
def _widest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftedLoop, "cost", lambda loop, width, choose=None: 1.0)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Widths of the steps."""
    widths: list[int] = []
    step = DraftedLoop.step

    def noted(loop: DraftedLoop, width: int, choose: Any) -> Any:
        widths.append(width)
        return step(loop, width, choose)

    monkeypatch.setattr(DraftedLoop, "step", noted)
    return widths


def model_of(kind: str = "llama") -> Any:
    return small(kind)


def tokens(engine: Engine, **options: Any) -> list[list[int]]:
    return [found.tokens for found in engine.generate(PROMPTS, NEW, **options)]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mixtral"])
def test_a_models_own_drafts_are_always_right(kind: str, steps: list[int]) -> None:
    model = model_of(kind)
    draft = Engine(copy.deepcopy(model), context=64)
    engine = Engine(model, batch=3, context=64, speculate=qcut.DraftModel(draft, 3))
    assert tokens(engine) == tokens(Engine(model, batch=3, context=64))
    assert steps == [1, *[4] * ((NEW - 2) // 4 + 1)]  # the first token is prefill's, the second a plain step's


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=0.9, seed=7)], ids=["greedy", "sampled"])
def test_another_draft_changes_no_token(sampling: Sampling | None) -> None:
    model, other = model_of(), small("llama", num_hidden_layers=1)
    engine = Engine(model, batch=3, speculate=qcut.DraftModel(Engine(other), 2))
    want = tokens(Engine(model, batch=3), sampling=sampling)
    assert tokens(engine, sampling=sampling) == want
    reused = engine.generate([[1]] * 3, 5, reuse_prefix=4)
    assert [one.tokens for one in reused] == [one.tokens for one in _reused(model, sampling)]


def _reused(model: Any, sampling: Sampling | None) -> list[Any]:
    engine = Engine(model, batch=3)
    engine.generate(PROMPTS, NEW, sampling=sampling)
    return engine.generate([[1]] * 3, 5, reuse_prefix=4)


def test_a_scheduler_copies_the_draft_models_sequences() -> None:
    model = model_of()
    draft = Engine(copy.deepcopy(model), context=64)
    want = tokens(Engine(model, batch=3, context=64))
    engine = Engine(model, batch=2, context=64, speculate=qcut.DraftModel(draft, 3))
    with Scheduler(engine, chunk=8) as scheduler:
        requests = [scheduler.submit(prompt, NEW) for prompt in PROMPTS * 2]
        assert [request.result().tokens for request in requests] == want * 2
        load = scheduler.load
    # Sequences that come and go move to other slots, with the keys and values of the draft model. What is right beyond
    # a sequence's end does not count.
    assert load.accepted_tokens > NEW * len(requests) // 2
    assert load.accepted_tokens >= load.drafted_tokens - 3 * len(requests)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"vocab_size": VOCABULARY + 8}, rf"a vocabulary of {VOCABULARY + 8}; allowed: {VOCABULARY}, as of the model"),
        ({"context": 32}, "a context of 32; allowed: 64, as of the model"),
    ],
)
def test_draft_models_of_other_sizes_are_refused(changes: dict[str, Any], text: str) -> None:
    context = changes.pop("context", 64)
    draft = Engine(small("llama", **changes), context=context)
    with pytest.raises(ConfigError, match=text):
        Engine(model_of(), context=64, speculate=qcut.DraftModel(draft))


class Words:
    """A tokenizer of so many words; one of them is another tokenizer's."""

    eos_token_id = None

    def __init__(self, first: str) -> None:
        self._vocabulary = {first: 0} | {f"word{i}": i for i in range(1, VOCABULARY)}

    def get_vocab(self) -> dict[str, int]:
        return self._vocabulary


def test_draft_models_of_other_words_are_refused() -> None:
    model = model_of()
    draft = Engine(model)
    draft.tokenizer = Words("a")
    runner = Engine(model).runner
    qcut.DraftModel(draft).companion(runner, Words("a"))
    qcut.DraftModel(draft).companion(runner, None)
    with pytest.raises(ConfigError, match="the tokenizer has 'a' as token 0; allowed: None, as the model's tokenizer"):
        qcut.DraftModel(draft).companion(runner, Words("b"))


def test_what_is_no_drafter_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine is 'gpt2'; allowed: a qcut.Engine"):
        qcut.DraftModel("gpt2")  # type: ignore[arg-type]
    for drafts in (0, 16, True, 2.0):
        with pytest.raises(ConfigError, match=f"drafts is {drafts!r}; allowed: 1 to 15"):
            qcut.DraftModel(Engine(model_of()), drafts)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"speculate is 4; allowed: a qcut.Lookup, a qcut.DraftModel, or None"):
        Engine(model_of(), speculate=4)  # type: ignore[arg-type]


class Head:
    """A trained head in small: it sees the state after which the next token was chosen, and drafts that token again."""

    drafts: ClassVar[int] = 1
    shortest: ClassVar[int] = 1
    longest: ClassVar[int] = 0
    reads_hidden: ClassVar[bool] = True

    def __init__(self) -> None:
        self.agreed: list[bool] = []

    def companion(self, runner: ModelRunner, tokenizer: Any) -> None:
        self.decoder = runner.decoder

    def propose(self, companion: ModelRunner | None, state: DraftState, drafts: int, hidden: Tensor | None) -> None:
        assert hidden is not None
        found = self.decoder.logits(hidden, None).argmax(1)
        active = state.slots < 64
        self.agreed.append(bool((found == state.tokens[0])[active].all()))
        state.tokens[1].copy_(found)
        state.counts.fill_(2)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_heads_read_the_state_before_a_token(kind: str) -> None:
    model, head = model_of(kind), Head()
    engine = Engine(model, batch=3, context=64, speculate=head)
    assert tokens(engine) == tokens(Engine(model, batch=3, context=64))
    assert len(head.agreed) > NEW // 2
    assert all(head.agreed)
