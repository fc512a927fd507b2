"""The architecture: who imports whom, read from the syntax trees, and what importing qcut must not do."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import qcut

ROOT = Path(__file__).parents[1]

LAYERS = (
    {"errors", "arguments"},
    {"config"},
    {"numerics", "jit", "files", "modules", "timing", "cublaslt", "codebook", "codebook_layout", "rotation"}
    | {"sampling"},
    {"rotated_codebook", "rotated_tokens"},
    {"codebook_fit", "codebook_numerics"},
    {"dispatch", "codebook_dispatch", "gemm_model", "tuned", "tuning_journal"},
    {
        "op_registry",
        "codebook_ops",
        "decoder_ops",
        "_decoder_cuda",
        "w8a8_ops",
        "_w8a8_cuda",
        "embed_ops",
        "_embed_cuda",
        "ops",
        "_ops_cuda",
        "_codebook_cuda",
        "_launch_plans",
        "_native",
    },
    {"codebook_passes", "shared_rotations"},
    {"linear", "codebook_buffers", "codebook_linear", "gemm", "explanation", "tuning", "_tuning_cuda"},
    {"embedding", "stacking"},
    {
        "calibration",
        "checkpoint",
        "checkpoint_skeleton",
        "convert",
        "conversion_report",
        "conversion_tasks",
        "embedding_conversion",
    }
    | {"prebuilding", "smoothing", "tracing", "turboquant", "turboquant_reader"}
    | {"turboquant_writer", "costs", "evaluation", "planning", "plans", "sensitivity", "model_shapes"},
    {"decoder", "kv_cache", "llama2c", "llama2c_tokenizer", "pretrained", "decoding"},
    {"engine"},
    {"cli", "doctor", "eval_command", "gemm_command", "gemm_report", "gemm_trial", "generate_command", "tune_command"},
)
"""Top-level modules of qcut, lowest first: a module imports from its own layer and those before it."""

ABOVE_THE_SEAM = {
    *("jit", "dispatch", "codebook_dispatch", "gemm_model", "tuned", "tuning", "_tuning_cuda", "_ops_cuda"),
    *("_codebook_cuda", "_decoder_cuda", "_launch_plans", "_w8a8_cuda", "_embed_cuda"),
    *("cli", "doctor", "gemm_command", "gemm_trial", "tune_command"),
}
"""The modules that may know emitters: the others know tensors and no CUDA."""

WITHOUT_TORCH = {
    *("jit", "dispatch", "codebook_dispatch", "gemm_model", "tuned", "errors", "config", "arguments"),
    "",
}
"""Sizes, types and text: what runs on a machine without torch's libraries. The last is qcut itself."""


def files(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"no modules in {ROOT / package}"
    return found


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports(path: Path, *, at_import_time: bool = False) -> set[str]:
    """Dotted names a file imports, except for type checkers; ``from a import b`` counts as a and a.b.

    With ``at_import_time``, only those that run when the module is imported.
    """
    found: set[str] = set()
    todo: list[ast.AST] = [ast.parse(path.read_text(), str(path))]
    while todo:
        node = todo.pop()
        if is_type_checking(node) or (at_import_time and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; name the package"
            assert node.module is not None
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        todo += ast.iter_child_nodes(node)
    return found


def roots(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def top(name: str) -> str:
    """The module of qcut a dotted name belongs to: ``qcut.jit.cache`` is jit."""
    return name.split(".")[1] if "." in name else ""


def level(module: str) -> int:
    for i, layer in enumerate(LAYERS):
        if module in layer:
            return i
    raise AssertionError(f"qcut.{module} has no place in the architecture; add it to LAYERS")


@pytest.mark.parametrize("path", files("emitters"), ids=module_name)
def test_emitters_import_the_standard_library_and_cutlass_alone(path):
    allowed = {"emitters"} | set(sys.stdlib_module_names)
    if path.name.startswith("cutlass_"):
        allowed |= {"cutlass_library", "cutlass_cppgen", "cuda"}  # cutlass_cppgen needs a stand-in for cuda
    assert roots(imports(path)) <= allowed


@pytest.mark.parametrize("path", files("qcut"), ids=module_name)
def test_imports_point_one_way(path):
    own = top(module_name(path))
    used = {top(name) for name in imports(path) if name.startswith("qcut.")} & {
        top(module_name(p)) for p in files("qcut")
    }
    if own == "":  # qcut/__init__.py loads everything lazily, by name
        assert not used
        return
    too_high = {module for module in used if level(module) > level(own)}
    assert not too_high, f"qcut.{own} imports {too_high} from a layer above its own"


@pytest.mark.parametrize("path", files("qcut"), ids=module_name)
def test_only_the_kernel_side_knows_emitters(path):
    own = top(module_name(path))
    used = {name for name in imports(path) if name.startswith("emitters")}
    assert not used or own in ABOVE_THE_SEAM
    if own == "jit":
        assert {".".join(name.split(".")[:2]) for name in used} <= {"emitters.source"}


@pytest.mark.parametrize("path", files("qcut"), ids=module_name)
def test_the_kernel_side_never_sees_torch(path):
    if top(module_name(path)) in WITHOUT_TORCH:
        assert "torch" not in roots(imports(path))


def test_numerics_imports_torch_and_config_alone():
    used = imports(ROOT / "qcut" / "numerics.py")
    assert roots(used) <= {"torch", "qcut", *sys.stdlib_module_names}
    assert {top(name) for name in used if name.startswith("qcut.")} <= {"config", "errors"}


def test_no_import_cycles():
    paths = {module_name(path): path for package in ("qcut", "emitters") for path in files(package)}
    graph = {}
    for name, path in paths.items():
        packages = {name.rsplit(".", i)[0] for i in range(name.count(".") + 1)}  # a module may name its siblings
        graph[name] = (imports(path, at_import_time=True) & paths.keys()) - packages
    while leaves := {name for name, used in graph.items() if not used & graph.keys()}:
        graph = {name: used for name, used in graph.items() if name not in leaves}
    assert not graph, f"import cycle among {sorted(graph)}"


def fenced_names(path: Path) -> set[str]:
    """Uses of torch.library, data pointers and streams. A storage's pointer is its identity, and no operand."""
    found = {name for name in imports(path) if name.startswith("torch.library")}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            pointer = node.attr == "data_ptr" and not owner.endswith("untyped_storage()")
            if pointer or node.attr in ("current_stream", "_cuda_getCurrentRawStream"):
                found.add(f"{owner}.{node.attr}")
            elif (owner, node.attr) == ("torch", "library"):
                found.add("torch.library")
    return found


KNOW_POINTERS = {
    *("qcut.op_registry", "qcut.codebook_ops", "qcut._ops_cuda", "qcut._codebook_cuda"),
    *("qcut.decoder_ops", "qcut._decoder_cuda", "qcut._w8a8_cuda", "qcut._embed_cuda", "qcut.decoding"),
    "qcut._tuning_cuda",
    "qcut.cublaslt",
}
"""The operators, what times candidates for them, and the calls of a library that takes pointers itself."""


@pytest.mark.parametrize("package", ["qcut", "emitters"])
def test_operators_pointers_and_streams_stay_in_few_files(package):
    outside = {
        module_name(p): used
        for p in files(package)
        if (used := fenced_names(p)) and module_name(p) not in KNOW_POINTERS
    }
    assert not outside, f"torch.library, data_ptr() and streams belong in {sorted(KNOW_POINTERS)}"
    if package == "qcut":
        assert "torch.library" in fenced_names(ROOT / "qcut" / "op_registry.py")
        assert "x.data_ptr" in fenced_names(ROOT / "qcut" / "_ops_cuda.py")


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_importing_qcut_imports_no_torch():
    assert run("import qcut, sys; print('torch' in sys.modules, 'qcut.ops' in sys.modules)") == "False False"


def test_using_the_cpu_creates_no_cuda_context_and_imports_no_compiler():
    code = """
import sys, torch
before = set(sys.modules)
import qcut
for name in qcut.__all__:
    getattr(qcut, name)
layer = qcut.Linear.from_float(torch.nn.Linear(5, 3))
layer(torch.randn(2, 5))
new = set(sys.modules) - before
print(torch.cuda.is_initialized())
print([m for m in new if m.partition(".")[0] in ("cuda", "nvidia", "cutlass_library", "cutlass_cppgen", "triton")])
print([m for m in new if m.startswith(("qcut.jit", "qcut._ops_cuda", "emitters"))])
"""
    assert run(code).splitlines() == ["False", "[]", "[]"]


def test_importing_the_kernel_side_imports_no_compiler():
    code = """
import sys
import qcut.dispatch, qcut.jit
print([m for m in sys.modules if m.partition(".")[0] in ("torch", "cuda", "cutlass_library", "cutlass_cppgen")])
"""
    assert run(code) == "[]"


def test_the_command_line_imports_no_torch_before_a_command_runs():
    code = """
import sys
from qcut import cli
try:
    cli.main(["--help"])
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr.strip()) == (0, "False")


def test_public_names():
    assert set(dir(qcut)) == set(qcut.__all__)
    assert set(qcut._HOME) | {"errors", "ops"} == set(qcut.__all__)
    for name in qcut.__all__:
        assert getattr(qcut, name) is getattr(qcut, name)
    with pytest.raises(AttributeError, match="module 'qcut' has no attribute 'Lineer'"):
        qcut.Lineer  # noqa: B018
