"""Makes vLLM know the quantization methods ``qcut`` and ``qcut-<scheme>``; vLLM calls it in each of its processes."""

from __future__ import annotations

SHORTHANDS = (
    *("w8a8", "w8a8_rotated", "w8a16", "fp8", "int16x8"),
    *("codebook4", "codebook4_int8", "codebook4+4", "codebook3", "int4"),
)
"""Schemes that ``--quantization qcut-<scheme>`` names; every other one goes into a ``quantization_config``."""


def register() -> None:
    """Enter the methods, in place of earlier ones where there are any: calling it twice does no harm.

    vLLM finds this function as the entry point ``qcut`` of the group ``vllm.general_plugins``.
    """
    from vllm.model_executor.layers.quantization import register_quantization_config

    from qcut.integrations.vllm.config import ServingConfig

    register_quantization_config("qcut")(ServingConfig)
    for scheme in SHORTHANDS:
        name = f"qcut-{scheme}"
        shorthand = type(ServingConfig.__name__, (ServingConfig,), {"method": name, "scheme": scheme})
        register_quantization_config(name)(shorthand)
