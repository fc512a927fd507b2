"""A commit makes all its changes or none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qcut.conversion.commit import changes_of, commit
from qcut.models.fusion import Change
from tests.support.zoo import same, snapshot, tiny_lm


def changes(model: nn.Module) -> list[Change]:
    """A new module, a fused activation, a new value, and every buffer and parameter on a device."""
    replacements = {id(model.blocks[0].up): nn.Linear(32, 64), id(model.blocks[1].q): nn.Identity()}
    updates = [(model.norm.weight, torch.full_like(model.norm.weight, 3.0))]
    return changes_of(model, replacements, {"blocks.1.up": "relu"}, updates, torch.device("cpu"))


def test_changes_are_made_in_place() -> None:
    model = tiny_lm()
    up, weight, embed = model.blocks[0].up, model.norm.weight, model.embed.weight
    before = snapshot(model)
    made = changes(model)
    assert same(before, snapshot(model))
    commit(made)
    assert model.blocks[0].up is not up
    assert type(model.blocks[1].q) is nn.Identity
    assert repr(model.blocks[1].up) == "FusedActivation(relu)"
    assert model.norm.weight is weight
    assert (weight == 3).all()
    assert model.embed.weight is embed is model.lm_head.weight


def test_an_interrupt_at_any_change_undoes_the_others() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    model = tiny_lm()
    before = snapshot(model)
    made = changes(model)
    for i in range(len(made) + 1):
        interrupted = [*made[:i], Change(interrupt, lambda: None), *made[i:]]
        with pytest.raises(KeyboardInterrupt):
            commit(interrupted)
        assert same(before, snapshot(model))
