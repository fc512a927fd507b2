"""CUTLASS's kernels: text that depends on nothing else, every epilogue, which of them wait."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest

from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType, EmitError
from qcut.emitters.families import INT8_CUTLASS
from qcut.emitters.gemm.cutlass import compat
from qcut.emitters.gemm.cutlass.text import LAUNCH_PARAMS
from qcut.emitters.gemm.cutlass.tiles import SM80_MENU, SM90_MENU, tile
from qcut.emitters.gemm.problem import GemmProblem, TileConfig
from tests.emitters.conformance.gemm import ARCH, BIASED, FULL, MULTISTAGE, PINGPONG
from tests.support import ROOT


def test_text_does_not_depend_on_the_process():
    code = (
        "import hashlib, sys; sys.path.insert(0, sys.argv[1]);"
        "from tests.emitters.conformance.gemm import cutlass_sources;"
        "[s] = cutlass_sources('sm_90a'); print(hashlib.sha256((s.text + s.host_text).encode()).hexdigest())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code, str(ROOT)],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
            cwd=cwd,
        ).stdout
        for cwd, seed in ((ROOT, "1"), ("/", "2"))
    }
    assert len(outputs) == 1


def test_importing_the_emitter_leaves_no_file_behind(tmp_path):
    code = "import sys; sys.path.insert(0, sys.argv[1]); from qcut.emitters.gemm.cutlass.compat import cppgen; cppgen()"
    subprocess.run([sys.executable, "-c", code, str(ROOT)], check=True, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


def every_epilogue():
    for out, row, col, zero_point, bias, activation, residual in product(
        (DType.F16, DType.BF16, DType.F32, DType.S8),
        ("none", "per_token"),
        ("none", "per_tensor", "per_channel"),
        ("none", "per_tensor", "per_token"),
        (False, True),
        (Activation.NONE, Activation.SILU),
        (False, True),
    ):
        if not (residual and out is DType.S8):
            yield Epilogue(out, row, col, zero_point, bias, activation, residual)


def test_every_epilogue_has_a_kernel_and_a_name():
    names = set()
    count = 0
    for epilogue in every_epilogue():
        for one, arch in ((MULTISTAGE, "sm_80"), (PINGPONG, "sm_90a")):
            source = INT8_CUTLASS.emit(GemmProblem(epilogue=epilogue), one, arch)
            names.add(source.name)
            count += 1
            assert source.params == (*GemmProblem(epilogue=epilogue).params(), *LAUNCH_PARAMS)
            assert source.host_text is not None
            for param in epilogue.params():
                assert f"a.{param.name}" in source.host_text, f"{source.name} does not pass {param.name}"
    assert len(names) == count


def test_kernels_wait_but_of_two_schedules() -> None:
    for choice in (*SM90_MENU, *SM80_MENU, tile("stream_k", "128x64x128")):
        source = INT8_CUTLASS.emit(BIASED, choice, ARCH)
        waits = choice.schedule not in ("multistage", "stream_k")
        assert source.waits == waits == ("CUTLASS_ENABLE_GDC_FOR_SM90" in source.defines), source.name


def test_tiles_are_read_from_their_text() -> None:
    assert tile("pingpong", "128x256x64 c2x1 e64x32") == TileConfig(
        (128, 256, 64), cluster_shape=(2, 1), schedule="pingpong", epilogue_tile=(64, 32)
    )
    assert not list(INT8_CUTLASS.search_space(replace(GemmProblem(epilogue=FULL), layout_d="column"), ARCH))


def test_text_that_is_not_as_expected_is_refused() -> None:
    with pytest.raises(EmitError, match="0 times"):
        compat.edit_units_text("")
