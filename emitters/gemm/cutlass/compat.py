"""Work-arounds for nvidia-cutlass 4.2.

qcut uses the package as a source of text only. The package is imported without a GPU, and its option registry and
its compile-and-run path are never reached. This module edits the emitted text in the few places that the package's
Python interface cannot reach.
"""

from __future__ import annotations

import importlib
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

from qcut.emitters.core.source import EmitError

SUPPORTED_VERSION = "4.2.0"
"""Release that the edits below were written for."""


class FunctorTag(str):
    """C++ name of a device functor that stands where the package expects one of its enumerations."""


@cache
def cppgen() -> ModuleType:
    """Import ``cutlass_cppgen`` only to emit text, on any machine.

    Raises:
        EmitError: the package is missing or of another version.
    """
    try:
        _alias_cuda_modules()
        with _no_cache_file():
            package = importlib.import_module("cutlass_cppgen")
    except ImportError as error:
        raise EmitError(f"nvidia-cutlass {SUPPORTED_VERSION} cannot be imported: {error}") from error
    if not package.__version__.startswith(SUPPORTED_VERSION):
        raise EmitError(f"nvidia-cutlass {package.__version__} found, {SUPPORTED_VERSION} required")
    # Both would otherwise be asked of nvcc and of device 0.
    vars(package).update(_nvcc_version="13.0", _NVCC_VERSION="13.0")
    _accept_functor_tags()
    _register_dequantize_node()
    return package


def _alias_cuda_modules() -> None:
    """cuda-python 13 dropped the module names and the version that the package looks up."""
    import cuda

    for old, new in (("cuda", "driver"), ("cudart", "runtime"), ("nvrtc", "nvrtc")):
        name = f"cuda.{old}"
        if name not in sys.modules:
            module = importlib.import_module(f"cuda.bindings.{new}")
            sys.modules[name] = module
            setattr(cuda, old, module)
    if not hasattr(cuda, "__version__"):
        cuda.__version__ = "13.0.0"  # type: ignore[attr-defined]


@contextmanager
def _no_cache_file() -> Iterator[None]:
    """Keep the import from creating a kernel database in the current directory."""
    connect = sqlite3.connect

    def redirect(database: Any, *args: Any, **kwargs: Any) -> sqlite3.Connection:
        return connect(":memory:" if database == "compiled_cache.db" else database, *args, **kwargs)

    sqlite3.connect = redirect  # type: ignore[assignment]
    try:
        yield
    finally:
        sqlite3.connect = connect


def _accept_functor_tags() -> None:
    """Let a compute node name any device functor, not only those of the package's enumerations."""
    library = importlib.import_module("cutlass_cppgen.backend.library")
    for nodes in ("sm80_nodes", "sm90_nodes"):
        module = importlib.import_module(f"cutlass_cppgen.backend.evt.backend.{nodes}")
        vars(module)["op_tag"] = lambda op: str(op) if isinstance(op, FunctorTag) else library.op_tag(op)


def _register_dequantize_node() -> None:
    """Add qcut's fused nodes to the SM90 visitor nodes, each as one compute node."""
    ir = importlib.import_module("cutlass_cppgen.backend.evt.ir.compute_nodes")
    sm90 = importlib.import_module("cutlass_cppgen.backend.evt.backend.sm90_nodes")
    data_type_tag = importlib.import_module("cutlass_library").DataTypeTag

    class DequantizeImpl(ir.ComputeImpl):  # type: ignore[name-defined, misc]
        @staticmethod
        def match(node: Any, problem_size: tuple[int, ...]) -> bool:
            return isinstance(node.fn, DequantizeTag)

    class Sm90DequantizeImpl(DequantizeImpl):
        @property
        def type_decl(self) -> str:
            flags = ", ".join("true" if flag else "false" for flag in self.fn.flags)
            types = ", ".join(filter(None, (data_type_tag[self.element_output], self.fn.accumulator)))
            return (
                f"\nusing {self.name_camel} = {self.fn}<\n"
                f"    typename EpilogueDescriptor::TileShape, {types}, {flags}\n>;\n"
            )

    vars(sm90)["Sm90DequantizeImpl"] = Sm90DequantizeImpl
    ir.ComputeNode.possible_impls.insert(0, DequantizeImpl)


class DequantizeTag(FunctorTag):
    """Names a fused node and carries its compile-time arguments."""

    flags: tuple[bool, ...]
    accumulator: str

    def __new__(cls, form: str, *flags: bool, accumulator: str = "") -> DequantizeTag:
        """A tag of ``qcut::Sm90Dequantize{form}``; ``accumulator`` is one more type, which some forms take."""
        tag = super().__new__(cls, f"qcut::Sm90Dequantize{form}")
        tag.flags = flags
        tag.accumulator = accumulator
        return tag


def edit_sm90_text(text: str, epilogue_tile: tuple[int, int]) -> str:
    """Give the collective epilogue an explicit tile, for which the Python interface has no argument."""
    auto = "cutlass::epilogue::collective::EpilogueTileAuto"
    if any(epilogue_tile):
        text = text.replace(auto, "cute::Shape<cute::_{}, cute::_{}>".format(*epilogue_tile))
    return text


def edit_halves_text(text: str, element: str) -> str:
    """Take D from CUTLASS, since the visitor node of halves stores it."""
    old = f"using ElementD = {element};"
    if text.count(old) != 1:
        raise EmitError(f"emitted text holds {text.count(old)} times {old!r}, once expected")
    return text.replace(old, "using ElementD = void;")


def edit_units_text(text: str) -> str:
    """Put weights in units and tokens in blocks where 4-bit rows stood, and the codebook before the parameters."""
    parameters = "(__grid_constant__ typename Operator::Params const params)"
    edits = (
        ("cutlass::uint4b_t, cutlass::layout::RowMajor,", "qcut::CodebookIndex, qcut::UnitsLayout,"),
        (
            "    CollectiveMainloop,\n    CollectiveEpilogue,",
            "    qcut::BlockTokens<CollectiveMainloop>,\n    CollectiveEpilogue,",
        ),
        (parameters, "(__grid_constant__ qcut::WithBook<typename Operator::Params> const argument)"),
        ("op(params, smem)", "op(argument.params, smem)"),
    )
    for old, new in edits:
        if text.count(old) != 1:
            raise EmitError(f"emitted text holds {text.count(old)} times {old!r}, once expected")
        text = text.replace(old, new)
    return text


def split_kernel(text: str, emitted_name: str, name: str) -> tuple[str, str]:
    """Separate the type declarations from the ``__global__`` function, renamed to `name`."""
    marker = 'extern "C"\n__global__'
    if text.count(marker) != 1:
        raise EmitError(f"{name}: emitted text holds {text.count(marker)} kernels, one expected")
    declarations, kernel = text.replace(emitted_name, name).split(marker)
    return declarations, marker + kernel
