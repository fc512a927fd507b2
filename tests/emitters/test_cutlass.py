"""CUTLASS kernels as text and as binaries: golden text, constraints, instructions, no spills."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest

from qcut import jit
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType, EmitError
from qcut.emitters.families import INT8_CUTLASS
from qcut.emitters.gemm.cutlass.text import LAUNCH_PARAMS
from qcut.emitters.gemm.cutlass.tiles import tile as tile_of
from qcut.emitters.gemm.problem import GemmProblem, TileConfig
from tests.support import GOLDEN, ROOT
from tests.support.sass import instructions

FULL = Epilogue(DType.F16, "per_token", "per_channel", "per_token", bias=True)
SM80_TILE = TileConfig((128, 128, 64), (64, 64, 64), stages=4)
SM90_TILE = TileConfig((128, 128, 128), cluster_shape=(2, 1), schedule="pingpong")

KERNELS = {
    "sm80_s8_gelu": (replace(FULL, out=DType.S8, activation=Activation.GELU_TANH), SM80_TILE, "sm_80"),
    "sm90_f16": (FULL, SM90_TILE, "sm_90a"),
}


def emit(name: str):
    epilogue, tile, arch = KERNELS[name]
    return INT8_CUTLASS.emit(GemmProblem(epilogue=epilogue), tile, arch)


@pytest.mark.parametrize("name", KERNELS)
def test_text_is_the_golden_text(name):
    source = emit(name)
    path = GOLDEN / f"{name}.txt"
    text = f"// {source.name}\n{source.text}\n// ---- host ----\n{source.host_text}"
    assert path.read_text() == text, f"emitted text changed; if that is meant, rewrite {path.name}"


def test_text_does_not_depend_on_the_process():
    code = (
        "import hashlib, sys; sys.path.insert(0, sys.argv[1]); from tests.emitters.test_cutlass import emit;"
        "s = emit('sm90_f16'); print(hashlib.sha256((s.text + s.host_text).encode()).hexdigest())"
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


def test_every_epilogue_emits_on_both_architectures_under_its_own_name():
    names = set()
    count = 0
    for epilogue in every_epilogue():
        for tile, arch in ((SM80_TILE, "sm_80"), (SM90_TILE, "sm_90a")):
            source = INT8_CUTLASS.emit(GemmProblem(epilogue=epilogue), tile, arch)
            names.add(source.name)
            count += 1
            assert source.params == (*GemmProblem(epilogue=epilogue).params(), *LAUNCH_PARAMS)
            assert source.host_text is not None
            for param in epilogue.params():
                assert f"a.{param.name}" in source.host_text, f"{source.name} does not pass {param.name}"
    assert len(names) == count


@pytest.mark.parametrize(
    ("problem", "tile", "arch", "reason"),
    [
        ({"a": DType.F16}, {}, "sm_90a", "operands are s8"),
        ({"alignment_k": 8}, {}, "sm_90a", "multiples of 16 bytes"),
        ({"alignment_n": 4}, {}, "sm_90a", "rows of D"),
        ({"layout_a": "column"}, {}, "sm_90a", "D is row-major"),
        ({"layout_b": "row"}, {}, "sm_90a", "contiguous along K"),
        ({"layout_d": "column"}, {}, "sm_90a", "D is row-major"),
        ({"epilogue": Epilogue(DType.S32)}, {}, "sm_90a", "raw accumulators"),
        ({"epilogue": Epilogue(DType.S8, wrap=True)}, {}, "sm_90a", "raw accumulators"),
        ({}, {"splits": 2}, "sm_90a", "stream_k schedule"),
        ({}, {"threadblock_shape": (96, 128, 128)}, "sm_90a", "M is 64, 128 or 256"),
        ({}, {"threadblock_shape": (128, 120, 128)}, "sm_90a", "wgmma width"),
        ({}, {"threadblock_shape": (128, 256, 128)}, "sm_90a", "accumulators"),
        ({}, {"threadblock_shape": (64, 128, 128), "schedule": "cooperative"}, "sm_90a", "128 rows"),
        ({}, {"cluster_shape": (3, 1)}, "sm_90a", "cluster sides"),
        ({}, {"epilogue_tile": (32, 64)}, "sm_90a", "epilogue_tile"),
        ({}, {"epilogue_tile": (64, 48)}, "sm_90a", "epilogue_tile"),
        ({}, {"warp_shape": (64, 64, 64)}, "sm_90a", "fixes the warp shape"),
        ({}, {}, "sm_80", "exists on sm_90a alone"),
    ],
)
def test_illegal_sm90_kernels_are_refused_by_name(problem, tile, arch, reason):
    with pytest.raises(EmitError, match=reason):
        INT8_CUTLASS.validate(replace(GemmProblem(epilogue=FULL), **problem), replace(SM90_TILE, **tile), arch)


@pytest.mark.parametrize(
    ("tile", "arch", "reason"),
    [
        ({"stages": 2}, "sm_80", "at least 3 stages"),
        ({"warp_shape": (0, 0, 0)}, "sm_80", "warp_shape is given"),
        ({"warp_shape": (48, 64, 64)}, "sm_80", "divides"),
        ({"warp_shape": (64, 64, 32)}, "sm_80", "divides"),
        ({"warp_shape": (8, 64, 64)}, "sm_80", "16x8x32"),
        ({"warp_shape": (16, 16, 64)}, "sm_80", "1, 2, 4 or 8 warps"),
        ({"stages": 7}, "sm_86", "fit shared memory"),
        ({"cluster_shape": (2, 1)}, "sm_80", "clusters"),
        ({"splits": 2}, "sm_80", "stream_k schedule"),
    ],
)
def test_illegal_sm80_kernels_are_refused_by_name(tile, arch, reason):
    with pytest.raises(EmitError, match=reason):
        INT8_CUTLASS.validate(GemmProblem(epilogue=FULL), replace(SM80_TILE, **tile), arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"])
def test_menus_and_spaces_are_distinct_and_legal(arch):
    problem = GemmProblem(epilogue=FULL)
    space = list(INT8_CUTLASS.search_space(problem, arch))
    assert len(set(space)) == len(space) >= 20
    for tile in space:
        INT8_CUTLASS.validate(problem, tile, arch)
    assert set(INT8_CUTLASS.default_tiles(GemmProblem(), arch)) & set(space)
    assert list(INT8_CUTLASS.search_space(replace(problem, layout_d="column"), arch)) == []
    assert tile_of("pingpong", "128x256x64 c2x1 e64x32") == TileConfig(
        (128, 256, 64), cluster_shape=(2, 1), schedule="pingpong", epilogue_tile=(64, 32)
    )


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("sm80_s8_gelu", ("IMMA.16832.S8.S8", "LDGSTS")),
        ("sm90_f16", ("IGMMA.64x128x32.S8.S8", "UTMALDG", "UTMASTG", "SYNCS", "USETMAXREG")),
    ],
)
def test_binary_holds_the_instructions_it_was_written_for(name, wanted):
    source = emit(name)
    binary = jit.build(source)
    assert binary.host_so is not None
    assert binary.resources is not None
    assert binary.resources.spill_store_bytes == binary.resources.spill_load_bytes == binary.resources.stack_bytes == 0
    found = instructions(binary.cubin)
    for prefix in wanted:
        assert any(op.startswith(prefix) for op in found), f"{prefix} not among {sorted(found)}"
    assert not any(op.startswith(("LDL", "STL")) for op in found)
    # Contraction is off: a fused multiply-add would round once where the reference rounds twice.
    assert not any(op.startswith("FFMA") for op in found) or source.arch == "sm_80"
