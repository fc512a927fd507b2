"""Tests of the server with other people's clients: ``python -m tests.clients``, or ``make clients``.

LiteLLM, LangChain, lm-evaluation-harness and what they import lie in an environment over the one that runs this, in
``build/clients``.
"""

from __future__ import annotations

import sys

from tests.support import ROOT
from tests.support.environments import environment, run_tests

TESTS = ROOT / "tests" / "server" / "clients"


def main() -> int:
    """Install and test; returns pytest's exit status."""
    if sys.version_info < (3, 11):
        print("the clients' versions need Python 3.11")
        return 0
    lines = (TESTS / "requirements.txt").read_text().splitlines()
    wanted = [line for line in lines if not line.startswith("#")]
    python = environment(ROOT / "build" / "clients", wanted, "--no-deps")
    return run_tests(python, ["--dist", "loadfile", str(TESTS.relative_to(ROOT)), *sys.argv[1:]])


if __name__ == "__main__":
    raise SystemExit(main())
