"""Tests with other people's clients: see `tests.clients`, which installs them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.serving import Served, engine, serving
from tests.server.tools.scripted import HERMES, scripted

KEY = "sk-test"
if importlib.util.find_spec("litellm") is None:
    collect_ignore_glob = ["test_*.py"]
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
}


@pytest.fixture(scope="session")
def keyed() -> Iterator[Served]:
    """A server that asks for a key, of a context in which clients' prompts have room."""
    with serving(engine(context=256), key=KEY) as found:
        yield found


@pytest.fixture(scope="session")
def caller() -> Iterator[Served]:
    """A server that asks for a key, of a chat template with tools and reasoning; tests write its answers."""
    with scripted(key=KEY) as found:
        yield found


@pytest.fixture(scope="session")
def forcer() -> Iterator[Served]:
    """A server that asks for a key, of a chat template with tools; its model calls functions if it must."""

    def wrap(tokenizer: Any) -> Any:
        tokenizer.chat_template = HERMES.replace("<think>", "").replace("</think>", "")
        return tokenizer

    with serving(engine(context=512, wrap=wrap), key=KEY) as found:
        yield found


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-evaluation-harness takes the key from the environment."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
