"""Models for the commands: what stays as it was in the process around them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from qcut.checkpoints.pretrained import load_pretrained
from qcut.errors import CheckpointError
from tests.support import ROOT

hub = pytest.importorskip("huggingface_hub.utils")
logging = pytest.importorskip("transformers").logging

DEMO = ROOT / "models" / "gpt2-5m"


def bars() -> tuple[bool, bool]:
    return logging.is_progress_bar_enabled(), not hub.are_progress_bars_disabled()


def show(by_transformers: bool, by_hub: bool) -> None:
    (logging.enable_progress_bar if by_transformers else logging.disable_progress_bar)()
    (hub.enable_progress_bars if by_hub else hub.disable_progress_bars)()


@pytest.fixture(autouse=True)
def _bars() -> Iterator[None]:
    before = bars()
    yield
    show(*before)


@pytest.mark.parametrize("by_hub", [True, False])
@pytest.mark.parametrize("by_transformers", [True, False])
def test_progress_bars_are_off_and_then_as_before(
    by_transformers: bool, by_hub: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    show(by_transformers, by_hub)
    with pytest.raises(CheckpointError):
        load_pretrained(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    assert bars() == (by_transformers, by_hub)
    if by_transformers:
        load_pretrained(str(DEMO), dtype=torch.float32, device=torch.device("cpu"))
        assert bars() == (by_transformers, by_hub)
        assert capfd.readouterr().err == ""
