"""``QCUT_DEBUG`` on a GPU: a layer's first call tells its choice and its launch, later ones their launches."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support import ROOT

CODE = """
import sys, torch, qcut
layer = qcut.Linear.from_float(torch.nn.Linear(256, 512).half().cuda(), "w8a8")
x = torch.randn(300, 256, dtype=torch.float16, device="cuda")
layer(x)
print("again", file=sys.stderr, flush=True)
layer(x)
torch.cuda.synchronize()
"""


def test_choices_and_launches_are_logged() -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"QCUT_DEBUG": "choice,launch", "QCUT_BUILD": "wait", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, _, second = done.stderr.partition("again\n")
    assert "qcut: choice: select_gemm(" in first
    assert "reason=" in first
    for lines in (first, second):
        assert "qcut: launch: qcut_" in lines
        assert "m=300" in lines or "rows=300" in lines
    assert "qcut: choice" not in second
