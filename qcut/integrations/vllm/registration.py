"""Makes vLLM know the quantization methods ``qcut`` and ``qcut-<scheme>``; vLLM calls it in each of its processes."""

from __future__ import annotations

from typing import Any, NoReturn

from qcut.errors import UnsupportedError

RELEASES = ("0.26", "0.27", "0.28", "0.29", "0.30", "0.31", "0.32")
"""Minor releases of vLLM that are served."""
SHORTHANDS = (
    *("w8a8", "w8a8_rotated", "w8a16", "fp8", "int16x8"),
    *("codebook4", "codebook4_int8", "codebook4+4", "codebook3", "int4"),
)
"""Schemes that ``--quantization qcut-<scheme>`` names; every other one goes into a ``quantization_config``."""


def register() -> None:
    """Enter the methods, in place of earlier ones if there are any: calling it twice does no harm.

    vLLM finds this function as the entry point ``qcut`` of the group ``vllm.general_plugins``. Releases other than
    `RELEASES` start as they do without qcut; there, a model with one of the methods raises `UnsupportedError`.
    """
    import vllm
    from vllm.model_executor.layers.quantization import register_quantization_config

    if ".".join(vllm.__version__.split(".")[:2]) in RELEASES:
        from qcut.integrations.vllm.config import ServingConfig

        config: Any = ServingConfig
    else:
        config = _refusing(vllm.__version__)
    register_quantization_config("qcut")(config)
    for scheme in SHORTHANDS:
        name = f"qcut-{scheme}"
        register_quantization_config(name)(type(config.__name__, (config,), {"method": name, "scheme": scheme}))


def _refusing(found: str) -> type:
    """A configuration that cannot be made. Other releases may lack all of vLLM that `config` imports."""
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(f"found vLLM {found}; allowed: {', '.join(RELEASES)}")

    made_by = {"__new__": refuse, "from_config": refuse, "get_config_filenames": staticmethod(list)}
    return type("Refused", (QuantizationConfig,), made_by)
