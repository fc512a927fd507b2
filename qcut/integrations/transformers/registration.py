"""Makes transformers know the quantization method ``qcut``; runs when transformers' registry has been imported."""

from __future__ import annotations

from typing import Any

from qcut.errors import UnsupportedError


def register(auto: Any) -> None:
    """Enter configuration and quantizer, in place of earlier ones if there are any.

    Args:
        auto: the module ``transformers.quantizers.auto``.
    """
    try:
        from qcut.common.hooks import when_quantized
        from qcut.integrations.transformers.config import QcutConfig
        from qcut.integrations.transformers.quantizer import QcutHfQuantizer, attach
    except (ImportError, UnsupportedError):
        return  # without torch, or of another version: `qcut.QcutConfig` raises the error
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING["qcut"] = QcutConfig
    auto.AUTO_QUANTIZER_MAPPING["qcut"] = QcutHfQuantizer
    when_quantized("transformers", attach)
