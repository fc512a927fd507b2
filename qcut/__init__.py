"""qcut: int8 and codebook inference for transformers.

Public names load on first use, and so do the operators of ``torch.ops.qcut``: ``import qcut`` imports neither torch nor
a compiler and creates no CUDA context. Programs that find operators from C++, `torch.jit.load` for one, import
``qcut.ops``, which registers all of them.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcut.common.hooks import when_imported
from qcut.common.versions import refuse_other_distribution, require

if TYPE_CHECKING:
    from qcut import errors as errors
    from qcut import ops as ops
    from qcut.backends.cuda.explanation import explain as explain
    from qcut.backends.cuda.launch.waiting import wait_for_kernels as wait_for_kernels
    from qcut.checkpoints.detect import load as load
    from qcut.checkpoints.formats.compressed_tensors.writer import save_compressed_tensors as save_compressed_tensors
    from qcut.checkpoints.formats.llama2c.files import load_llama2c as load_llama2c
    from qcut.checkpoints.formats.llama2c.files import save_llama2c as save_llama2c
    from qcut.checkpoints.formats.qcut_writer import save as save
    from qcut.checkpoints.formats.turboquant.writer import save_turboquant as save_turboquant
    from qcut.conversion.calibration.calibrate import Calibration as Calibration
    from qcut.conversion.calibration.calibrate import calibrate as calibrate
    from qcut.conversion.calibration.curvature import collect_curvature as collect_curvature
    from qcut.conversion.calibration.second_moments import collect_second_moments as collect_second_moments
    from qcut.conversion.planning.planner import Plan as Plan
    from qcut.conversion.planning.planner import plan as plan
    from qcut.conversion.quantize import quantize as quantize
    from qcut.conversion.refine import Refinement as Refinement
    from qcut.conversion.refine import refine as refine
    from qcut.conversion.smooth import smooth as smooth
    from qcut.engine.drafters import DraftModel as DraftModel
    from qcut.engine.drafters import Lookup as Lookup
    from qcut.engine.engine import Engine as Engine
    from qcut.engine.request import Request as Request
    from qcut.engine.scheduler import Scheduler as Scheduler
    from qcut.engine.sequence import Generated as Generated
    from qcut.integrations.transformers.config import QcutConfig as QcutConfig
    from qcut.integrations.transformers.foreign_config import foreign_config as foreign_config
    from qcut.layers.embedding import Embedding as Embedding
    from qcut.layers.gradients import disable_input_gradients as disable_input_gradients
    from qcut.layers.gradients import enable_input_gradients as enable_input_gradients
    from qcut.layers.integer_chain import IntegerChain as IntegerChain
    from qcut.layers.integers import IntegerLinear as IntegerLinear
    from qcut.layers.linear import Linear as Linear
    from qcut.numerics.codebook.fitting.curvature import Curvature as Curvature
    from qcut.numerics.sampling import Sampling as Sampling
    from qcut.ops.gemm import gemm_s8 as gemm_s8
    from qcut.ops.paths import execution_path as execution_path
    from qcut.schemes import FP8 as FP8
    from qcut.schemes import W8A8 as W8A8
    from qcut.schemes import W8A16 as W8A16
    from qcut.schemes import Codebook as Codebook
    from qcut.schemes import Float as Float
    from qcut.schemes import Int16x8 as Int16x8
    from qcut.schemes import StaticRange as StaticRange
    from qcut.schemes import W8A8Rotated as W8A8Rotated
    from qcut.text.constraint import Constraint as Constraint

__version__ = "0.2.0"

refuse_other_distribution(Path(__file__).parent)

_HOME = {
    "W8A8": "schemes",
    "W8A8Rotated": "schemes",
    "FP8": "schemes",
    "W8A16": "schemes",
    "Codebook": "schemes",
    "Float": "schemes",
    "Int16x8": "schemes",
    "StaticRange": "schemes",
    "Embedding": "layers.embedding",
    "IntegerChain": "layers.integer_chain",
    "IntegerLinear": "layers.integers",
    "Engine": "engine.engine",
    "Generated": "engine.sequence",
    "Request": "engine.request",
    "Scheduler": "engine.scheduler",
    "Lookup": "engine.drafters",
    "DraftModel": "engine.drafters",
    "Sampling": "numerics.sampling",
    "Constraint": "text.constraint",
    "load_llama2c": "checkpoints.formats.llama2c.files",
    "save_llama2c": "checkpoints.formats.llama2c.files",
    "Linear": "layers.linear",
    "Calibration": "conversion.calibration.calibrate",
    "calibrate": "conversion.calibration.calibrate",
    "Curvature": "numerics.codebook.fitting.curvature",
    "collect_curvature": "conversion.calibration.curvature",
    "collect_second_moments": "conversion.calibration.second_moments",
    "Refinement": "conversion.refine",
    "refine": "conversion.refine",
    "enable_input_gradients": "layers.gradients",
    "disable_input_gradients": "layers.gradients",
    "execution_path": "ops.paths",
    "smooth": "conversion.smooth",
    "Plan": "conversion.planning.planner",
    "QcutConfig": "integrations.transformers.config",
    "foreign_config": "integrations.transformers.foreign_config",
    "plan": "conversion.planning.planner",
    "quantize": "conversion.quantize",
    "gemm_s8": "ops.gemm",
    "explain": "backends.cuda.explanation",
    "wait_for_kernels": "backends.cuda.launch.waiting",
    "save": "checkpoints.formats.qcut_writer",
    "save_compressed_tensors": "checkpoints.formats.compressed_tensors.writer",
    "save_turboquant": "checkpoints.formats.turboquant.writer",
    "load": "checkpoints.detect",
}
_PACKAGES = ("errors", "ops")

__all__ = sorted((*_HOME, *_PACKAGES))


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"qcut.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'qcut' has no attribute {name!r}")
    _require_torch()
    value = getattr(import_module(f"qcut.{_HOME[name]}"), name)
    globals()[name] = value
    return value


@cache
def _require_torch() -> None:
    require("torch")


def __dir__() -> list[str]:
    return sorted(__all__)


def _announce(torch: Any) -> None:
    """Let the first use of ``torch.ops.qcut`` register its operators."""
    namespace: type = type(torch.ops.aten)

    class Operators(namespace):
        __module__ = namespace.__module__  # part of the operators' names

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)  # type: ignore[misc]
            except AttributeError:
                if name.startswith("__") or import_module("qcut.ops.definition").is_defining(name):
                    raise
            import_module("qcut.ops.registry").import_modules("qcut.ops")
            return super().__getattr__(name)  # type: ignore[misc]

    torch.ops.qcut = Operators("qcut")


when_imported("torch", "qcut:_announce")
when_imported("transformers.quantizers.auto", "qcut.integrations.transformers.registration:register")
when_imported("peft.tuners.tuners_utils", "qcut.integrations.peft:register")
