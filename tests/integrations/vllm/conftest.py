"""Tests that need vLLM: see `tests.serving`, which installs one."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
os.environ |= {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One process: parallel layers hold whole weights."""
    from tests.integrations.vllm.parallel import processes

    with processes(0, 1, tmp_path_factory.mktemp("store") / "store"):
        yield
