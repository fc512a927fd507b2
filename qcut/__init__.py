"""qcut: int8 and codebook inference for transformers.

Public names load on first use: ``import qcut`` imports neither torch nor a compiler and creates no
CUDA context. ``qcut.ops`` registers the operators of ``torch.ops.qcut``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qcut import errors, ops
    from qcut.calibration import Calibration, calibrate
    from qcut.checkpoint import load, save
    from qcut.codebook_fit import collect_second_moments
    from qcut.codebook_linear import execution_path
    from qcut.config import W8A8, W8A16, Codebook, Float, StaticRange
    from qcut.convert import quantize
    from qcut.embedding import Embedding
    from qcut.engine import Engine, Generated
    from qcut.explanation import explain
    from qcut.gemm import gemm_s8
    from qcut.linear import Linear
    from qcut.llama2c import load_llama2c, save_llama2c
    from qcut.planning import Plan, plan
    from qcut.sampling import Sampling
    from qcut.smoothing import smooth
    from qcut.turboquant_writer import save_turboquant

__version__ = "0.1.0"

__all__ = [
    "W8A8",
    "W8A16",
    "Calibration",
    "Codebook",
    "Embedding",
    "Engine",
    "Float",
    "Generated",
    "Linear",
    "Plan",
    "Sampling",
    "StaticRange",
    "calibrate",
    "collect_second_moments",
    "errors",
    "execution_path",
    "explain",
    "gemm_s8",
    "load",
    "load_llama2c",
    "ops",
    "plan",
    "quantize",
    "save",
    "save_llama2c",
    "save_turboquant",
    "smooth",
]

_HOME = {
    "W8A8": "config",
    "W8A16": "config",
    "Codebook": "config",
    "Float": "config",
    "StaticRange": "config",
    "Embedding": "embedding",
    "Engine": "engine",
    "Generated": "engine",
    "Sampling": "sampling",
    "load_llama2c": "llama2c",
    "save_llama2c": "llama2c",
    "Linear": "linear",
    "Calibration": "calibration",
    "calibrate": "calibration",
    "collect_second_moments": "codebook_fit",
    "execution_path": "codebook_linear",
    "smooth": "smoothing",
    "Plan": "planning",
    "plan": "planning",
    "quantize": "convert",
    "gemm_s8": "gemm",
    "explain": "explanation",
    "save": "checkpoint",
    "save_turboquant": "turboquant_writer",
    "load": "checkpoint",
}


def __getattr__(name: str) -> Any:
    if name in ("errors", "ops"):
        return import_module(f"qcut.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'qcut' has no attribute {name!r}")
    value = getattr(import_module(f"qcut.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
