"""The architecture: which folder may import which, read from the syntax trees, and what importing qcut must not do."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

import qcut
from tests.support import ROOT
from tests.support.processes import run, run_each

FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"errors"}),
    frozenset({"common"}),
    frozenset({"schemes", "text"}),
    frozenset({"models", "jit"}),
    frozenset({"numerics", "dispatch"}),
    frozenset({"ops"}),
    frozenset({"backends.cuda", "backends.triton"}),
    frozenset({"layers", "tuning"}),
    frozenset({"conversion", "checkpoints", "engine"}),
    frozenset({"integrations", "server"}),
    frozenset({"cli"}),
)
"""Folders of qcut, the ground floor first: a folder imports from the floors below its own, and from itself."""

KNOW_EMITTERS = {"jit", "dispatch", "backends.cuda", "tuning", "cli"}
KNOW_POINTERS = {"backends.cuda", "backends.triton", "tuning"}
WITHOUT_TORCH = {"errors", "schemes", "jit", "dispatch"}


@cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def files(folder: str = "") -> list[Path]:
    """Modules of qcut below a folder; those of emitters are found through their link."""
    found = sorted((ROOT / "qcut" / folder).rglob("*.py"))
    if not folder:
        found += sorted((ROOT / "qcut" / "emitters").rglob("*.py"))
    assert found, f"no modules in qcut/{folder}"
    return sorted(set(found))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def folder_of(module: str) -> str:
    """The folder of qcut that holds a module: ``qcut.jit.cache`` is in jit; "" for qcut itself.

    The two back ends count as a folder each.
    """
    parts = module.split(".")
    return ".".join(parts[1:3]) if parts[1:2] == ["backends"] else "".join(parts[1:2])


def imports(path: Path, *, at_import_time: bool = False, for_types: bool = False) -> set[str]:
    """Dotted names a file imports, in functions too; ``from a import b`` is a and a.b.

    With ``at_import_time``, only those that run when the module is imported; with ``for_types``, also those under
    ``TYPE_CHECKING``.
    """
    found: set[str] = set()
    todo: list[ast.AST] = [syntax(path)]
    while todo:
        node = todo.pop()
        if not for_types and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if at_import_time and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; name the package"
            assert node.module is not None
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        todo += ast.iter_child_nodes(node)
    return found


def floor(folder: str) -> int:
    for i, folders in enumerate(FLOORS):
        if folder in folders:
            return i
    raise AssertionError(f"qcut/{folder} has no floor; give it one in FLOORS")


def test_imports_point_down():
    upwards = set()
    for path in files():
        own = folder_of(module_name(path))
        if own in ("", "__main__", "emitters", "backends"):
            continue
        used = {folder_of(name) for name in imports(path) if name.startswith("qcut.")}
        folders = {
            name
            for name in used
            if (ROOT / "qcut" / name.replace(".", "/")).is_dir() or (ROOT / "qcut" / f"{name}.py").is_file()
        }
        for other in folders - {own, "emitters", ""}:
            if floor(other) >= floor(own):
                upwards.add(f"{module_name(path)} imports qcut.{other}")
    assert not upwards


def test_at_most_five_modules_lie_outside_a_folder():
    assert len(list((ROOT / "qcut").glob("*.py"))) <= 5


def test_emitters_import_the_standard_library_and_cutlass_alone():
    for path in files("emitters"):
        used = imports(path)
        allowed = {"qcut"} | set(sys.stdlib_module_names)
        if "cutlass" in path.parts:
            allowed |= {"cutlass_library", "cutlass_cppgen", "cuda"}  # cutlass_cppgen needs a stand-in for cuda
        assert {name.partition(".")[0] for name in used} <= allowed, path
        assert all(name.startswith("qcut.emitters") for name in used if name.startswith("qcut")), path


def test_only_the_kernel_side_knows_emitters():
    for path in files():
        own = folder_of(module_name(path))
        used = {name for name in imports(path) if name.startswith("qcut.emitters.")}
        assert not used or own in KNOW_EMITTERS | {"emitters"}, f"{module_name(path)} imports {used}"
        if own == "jit":
            assert all(name.startswith("qcut.emitters.core") for name in used)


def test_the_kernel_side_never_sees_torch():
    for path in files():
        if folder_of(module_name(path)) in WITHOUT_TORCH | {"", "emitters"}:
            assert "torch" not in {name.partition(".")[0] for name in imports(path)}, path


def test_no_import_circles():
    """Imports in functions and for type checkers count. A package's ``__init__`` is no arrow: it is imported first."""
    paths = {module_name(path): path for path in files()}
    graph = {}
    for name, path in paths.items():
        packages = {name.rsplit(".", i)[0] for i in range(name.count(".") + 1)}
        graph[name] = (imports(path, for_types=True) & paths.keys()) - packages
    del graph["qcut"]  # loads everything lazily, by name
    while leaves := {name for name, used in graph.items() if not used & graph.keys()}:
        graph = {name: used for name, used in graph.items() if name not in leaves}
    assert not graph, f"import circle among {sorted(graph)}"


def fenced_names(path: Path) -> set[str]:
    """Uses of data pointers and streams. A storage's pointer is its identity, and no operand."""
    found = set()
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            pointer = node.attr == "data_ptr" and not owner.endswith("untyped_storage()")
            if pointer or node.attr in ("current_stream", "_cuda_getCurrentRawStream"):
                found.add(f"{owner}.{node.attr}")
    return found


def test_pointers_and_streams_stay_on_the_kernel_side():
    outside = {
        module_name(path): used
        for path in files()
        if (used := fenced_names(path)) and folder_of(module_name(path)) not in KNOW_POINTERS
    }
    assert not outside
    assert any(fenced_names(path) for path in files("backends/cuda"))


def test_one_module_knows_torch_library():
    knowing = {
        module_name(path)
        for path in files()
        for node in ast.walk(syntax(path))
        if isinstance(node, ast.Attribute) and node.attr == "library" and ast.unparse(node) == "torch.library"
    }
    assert knowing == {"qcut.ops.definition", "qcut.ops.gradients", "qcut.ops.registry"}


def test_importing_qcut_imports_no_torch():
    assert run("import qcut, sys; print('torch' in sys.modules, 'qcut.ops' in sys.modules)") == "False False"


def test_operators_are_there_when_they_are_used():
    use = "torch.ops.qcut.colsum(torch.ones(2, 3).char()).tolist()"
    first_use = f"import qcut, sys, torch; before = 'qcut.ops' in sys.modules; print(before, {use})"
    after_torch = (
        first_use,
        "import torch; torch.ops.qcut; import qcut; print('colsum' in str(torch.ops.qcut.colsum))",
        f"import qcut.ops, torch; print({use})",
    )
    assert run_each("import torch", after_torch) == ["False [3, 3]", "True", "[3, 3]"]
    after_qcut = (first_use, "import qcut, torch; print(hasattr(torch.ops.qcut, 'nothing'))")
    assert run_each("import qcut, torch", after_qcut) == ["False [3, 3]", "False"]


def test_an_exported_program_loads_after_importing_qcut(tmp_path):
    path, x = tmp_path / "layer.pt2", torch.arange(10.0).view(2, 5)
    layer = qcut.Linear.from_float(torch.nn.Linear(5, 3))
    with torch.no_grad():
        torch.export.save(torch.export.export(layer, (x,)), path)
        expected = str(layer(x).tolist())
    load = f"torch.export.load({str(path)!r}).module()(torch.arange(10.0).view(2, 5)).tolist()"
    assert run(f"import torch, qcut\nwith torch.no_grad():\n    print({load})") == expected


def test_scripts_may_have_a_folder_named_emitters(tmp_path):
    (tmp_path / "emitters").mkdir()
    (tmp_path / "emitters" / "__init__.py").write_text("raise RuntimeError('not qcut')\n")
    code = f"""
import sys
sys.path.insert(1, {str(ROOT)!r})
import qcut, torch
qcut.Linear.from_float(torch.nn.Linear(5, 3))(torch.randn(2, 5))
import qcut.dispatch.gemm
print("emitters" in sys.modules)
"""
    assert run(code, tmp_path) == "False"


_MODEL = """
x = torch.randn(4, 64)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 32, bias=False)).eval()
copy = lambda: __import__("copy").deepcopy(model)
"""


USES = (
    "qcut.Linear",
    # Classes for transformers import transformers, which imports torch's compiler.
    "for name in set(qcut.__all__) - {'QcutConfig', 'foreign_config'}: getattr(qcut, name)",
    f"""{_MODEL}
for scheme in ("w8a8", "w8a16", "int16x8", "codebook4", "codebook3_qr", "codebook4_int8"):
    quantized = copy()
    qcut.quantize(quantized, scheme, progress=False)
    quantized(x)
""",
    f"""{_MODEL}
qcut.quantize(model, qcut.plan(copy(), [x], budget=0.1, objective="memory"), calibration=qcut.calibrate(copy(), [x]))
model(x)
import tempfile
folder = tempfile.mkdtemp() + "/saved"
qcut.save(model, folder)
qcut.load(folder, model=copy)
""",
)
LEFT_OUT = """
new = set(sys.modules) - before
print(torch.cuda.is_initialized())
others = ("cuda", "nvidia", "cutlass_library", "cutlass_cppgen", "triton", "sympy", "transformers", "scipy", "numba")
print(sorted(m for m in new if m.partition(".")[0] in others or m.startswith(("torch._dynamo", "torch._inductor"))))
modules = ("", ".cuda", ".cuda.explanation", ".cuda.launch", ".cuda.launch.waiting")  # they import the rest when called
public = {f"qcut.backends{module}" for module in modules}
sides = tuple(f"qcut.{side}" for side in ("backends", "emitters", "jit", "dispatch"))
print(sorted(m for m in new - public if m.startswith(sides)))
"""


def test_cpu_use_imports_no_compiler() -> None:
    """The compiler of torch takes longer to import than torch itself."""
    codes = [f"import sys, torch\nbefore = set(sys.modules)\nimport qcut\n{use}\n{LEFT_OUT}" for use in USES]
    for use, printed in zip(USES, run_each("import torch", codes), strict=True):
        assert printed.splitlines() == ["False", "[]", "[]"], use


def test_importing_the_kernel_side_imports_no_compiler():
    code = """
import sys
import qcut.dispatch.gemm, qcut.jit
print([m for m in sys.modules if m.partition(".")[0] in ("torch", "cuda", "cutlass_library", "cutlass_cppgen")])
"""
    assert run(code) == "[]"


def test_help_imports_no_torch():
    code = """
import sys
from qcut.cli.main import main
try:
    main(["--help"])
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr.strip()) == (0, "False")


def test_info_reads_headers_without_torch():
    code = """
import sys
from qcut.cli.main import main
assert main(["info", "models/gpt2-5m"]) == 0
print("torch" in sys.modules, "numpy" in sys.modules)
"""
    assert run(code).splitlines()[-1] == "False False"


def test_public_names():
    assert dir(qcut) == qcut.__all__
    for name in qcut.__all__:
        assert getattr(qcut, name) is getattr(qcut, name)
    with pytest.raises(AttributeError, match="module 'qcut' has no attribute 'Lineer'"):
        qcut.Lineer  # noqa: B018
