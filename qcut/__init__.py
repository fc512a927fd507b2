"""qcut: int8 and codebook inference for transformers.

Public names load on first use, and so do the operators of ``torch.ops.qcut``: ``import qcut`` imports neither torch nor
a compiler and creates no CUDA context. Programs that find operators from C++, `torch.jit.load` for one, import
``qcut.ops``, which registers all of them.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcut.process.imports import when_imported
from qcut.process.versions import refuse_other_distribution, require

if TYPE_CHECKING:
    from qcut import errors as errors
    from qcut import ops as ops
    from qcut.checkpoints.foreign.writer import save_compressed_tensors as save_compressed_tensors
    from qcut.checkpoints.llama2c.files import load_llama2c as load_llama2c
    from qcut.checkpoints.llama2c.files import save_llama2c as save_llama2c
    from qcut.checkpoints.qcut_format import load as load
    from qcut.checkpoints.qcut_format import save as save
    from qcut.checkpoints.turboquant.writer import save_turboquant as save_turboquant
    from qcut.codebooks.curvature import Curvature as Curvature
    from qcut.config import W8A8 as W8A8
    from qcut.config import W8A16 as W8A16
    from qcut.config import Codebook as Codebook
    from qcut.config import Float as Float
    from qcut.config import Int16x8 as Int16x8
    from qcut.config import StaticRange as StaticRange
    from qcut.conversion.calibration import Calibration as Calibration
    from qcut.conversion.calibration import calibrate as calibrate
    from qcut.conversion.convert import quantize as quantize
    from qcut.conversion.curvature import collect_curvature as collect_curvature
    from qcut.conversion.planning import Plan as Plan
    from qcut.conversion.planning import plan as plan
    from qcut.conversion.refinement import Refinement as Refinement
    from qcut.conversion.refinement import refine as refine
    from qcut.conversion.second_moments import collect_second_moments as collect_second_moments
    from qcut.conversion.smoothing import smooth as smooth
    from qcut.cuda.explanation import explain as explain
    from qcut.cuda.waiting import wait_for_kernels as wait_for_kernels
    from qcut.engine.engine import Engine as Engine
    from qcut.engine.generated import Generated as Generated
    from qcut.engine.request import Request as Request
    from qcut.engine.scheduler import Scheduler as Scheduler
    from qcut.integrations.transformers.config import QcutConfig as QcutConfig
    from qcut.integrations.transformers.foreign_config import foreign_config as foreign_config
    from qcut.layers.base import Linear as Linear
    from qcut.layers.embedding import Embedding as Embedding
    from qcut.layers.gradients import disable_input_gradients as disable_input_gradients
    from qcut.layers.gradients import enable_input_gradients as enable_input_gradients
    from qcut.layers.integers import IntegerChain as IntegerChain
    from qcut.layers.integers import IntegerLinear as IntegerLinear
    from qcut.numerics.sampling import Sampling as Sampling
    from qcut.ops.gemm import gemm_s8 as gemm_s8
    from qcut.ops.paths import execution_path as execution_path

__version__ = "0.1.0"

refuse_other_distribution(Path(__file__).parent)

_HOME = {
    "W8A8": "config",
    "W8A16": "config",
    "Codebook": "config",
    "Float": "config",
    "Int16x8": "config",
    "StaticRange": "config",
    "Embedding": "layers.embedding",
    "IntegerChain": "layers.integers",
    "IntegerLinear": "layers.integers",
    "Engine": "engine.engine",
    "Generated": "engine.generated",
    "Request": "engine.request",
    "Scheduler": "engine.scheduler",
    "Sampling": "numerics.sampling",
    "load_llama2c": "checkpoints.llama2c.files",
    "save_llama2c": "checkpoints.llama2c.files",
    "Linear": "layers.base",
    "Calibration": "conversion.calibration",
    "calibrate": "conversion.calibration",
    "Curvature": "codebooks.curvature",
    "collect_curvature": "conversion.curvature",
    "collect_second_moments": "conversion.second_moments",
    "Refinement": "conversion.refinement",
    "refine": "conversion.refinement",
    "enable_input_gradients": "layers.gradients",
    "disable_input_gradients": "layers.gradients",
    "execution_path": "ops.paths",
    "smooth": "conversion.smoothing",
    "Plan": "conversion.planning",
    "QcutConfig": "integrations.transformers.config",
    "foreign_config": "integrations.transformers.foreign_config",
    "plan": "conversion.planning",
    "quantize": "conversion.convert",
    "gemm_s8": "ops.gemm",
    "explain": "cuda.explanation",
    "wait_for_kernels": "cuda.waiting",
    "save": "checkpoints.qcut_format",
    "save_compressed_tensors": "checkpoints.foreign.writer",
    "save_turboquant": "checkpoints.turboquant.writer",
    "load": "checkpoints.qcut_format",
}
_PACKAGES = ("errors", "ops")

__all__ = sorted((*_HOME, *_PACKAGES))


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"qcut.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'qcut' has no attribute {name!r}")
    require("torch")
    value = getattr(import_module(f"qcut.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _announce(torch: Any) -> None:
    """Let the first use of ``torch.ops.qcut`` register its operators."""
    namespace: type = type(torch.ops.aten)

    class Operators(namespace):
        __module__ = namespace.__module__  # part of the operators' names

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("__"):
                import_module("qcut.ops")
            return super().__getattr__(name)  # type: ignore[misc]

    torch.ops.qcut = Operators("qcut")


when_imported("torch", "qcut:_announce")
when_imported("transformers.quantizers.auto", "qcut.integrations.transformers.registration:register")
