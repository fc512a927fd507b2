"""Tests on the oldest versions that pyproject.toml allows: ``python -m tests.floors``, or ``make floors``.

The oldest versions lie in a virtual environment over the one that runs this, in ``build/floors``, so that torch is not
installed twice. torch itself is left out: its oldest version is gigabytes, and `qcut.common.versions` refuses
older ones.
"""

from __future__ import annotations

import sys
from typing import Any

from packaging.requirements import Requirement

from tests.support import ROOT
from tests.support.environments import environment, run_tests

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TESTS = (
    "tests/checkpoints/formats",
    "tests/checkpoints/test_huggingface.py",
    "tests/checkpoints/test_pretrained.py",
    "tests/cli/test_models.py",
    "tests/engine/test_constraints.py",
    "tests/engine/test_engine.py",
    "tests/text",
    "tests/integrations/transformers/test_foreign.py",
    "tests/integrations/transformers/test_new_heads.py",
    "tests/integrations/transformers/test_parallel.py::test_older_versions_are_refused",
    "tests/integrations/transformers/test_registration.py",
    "tests/integrations/transformers/test_saving.py",
    "tests/integrations/transformers/test_uses.py",
    "tests/integrations/transformers/test_without_qcut.py",
    "tests/common/test_progress.py",
    "tests/server/test_openai.py",
    "tests/server/test_refusals.py",
    "tests/common/test_safetensors.py",
)


def oldest(project: dict[str, Any]) -> list[str]:
    """``name==version`` of each dependency with a lower bound, except torch and the CUDA packages."""
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["hf"], *extras["serve"]]
    found = []
    for requirement in map(Requirement, lines):
        bounds = [s.version for s in requirement.specifier if s.operator == ">="]
        if bounds and requirement.name != "torch" and not requirement.name.startswith("cuda-"):
            found.append(f"{requirement.name}=={bounds[0]}")
    return found


def main() -> int:
    """Install and test; returns pytest's exit status."""
    wanted = oldest(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])
    return run_tests(environment(ROOT / "build" / "floors", wanted), [*TESTS, *sys.argv[1:]])


if __name__ == "__main__":
    raise SystemExit(main())
