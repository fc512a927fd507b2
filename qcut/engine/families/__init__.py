"""Model families: each file turns one shape of Hugging Face models into a `qcut.engine.decoder.Decoder`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from qcut.engine.decoder import Decoder
from qcut.engine.families import (
    ernie4_5_moe,
    gemma,
    gpt2,
    gpt_neox,
    gpt_oss,
    granitemoe,
    hunyuan_v1_moe,
    llama,
    olmo2,
    olmoe,
    phi3,
    starcoder2,
)
from qcut.engine.families.common import check_dtypes
from qcut.engine.families.fidelity import check_model
from qcut.errors import UnsupportedError
from qcut.layers.parallel import refuse_parts

FAMILIES: dict[str, Callable[[Any], Decoder]] = {
    "gpt2": gpt2.decoder,
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3"), llama.decoder),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe"), llama.decoder),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), gemma.decoder),
    "ernie4_5_moe": ernie4_5_moe.decoder,
    "gpt_neox": gpt_neox.decoder,
    "gpt_oss": gpt_oss.decoder,
    "granitemoe": granitemoe.decoder,
    "hunyuan_v1_moe": hunyuan_v1_moe.decoder,
    "olmo2": olmo2.decoder,
    "olmoe": olmoe.decoder,
    "phi3": phi3.decoder,
    "starcoder2": starcoder2.decoder,
}
"""By ``model_type`` of a model's configuration, the function that makes its decoder."""


def decoder_of(model: nn.Module) -> Decoder:
    """Make the decoder of a Hugging Face causal language model.

    Args:
        model: of a type in `FAMILIES`; its linear layers and embeddings quantized or not.

    Raises:
        UnsupportedError: another architecture, or a part of one that is not built here, or that this version of
            transformers holds by another name; a model that is cut across processes; or one that computes otherwise
            than transformers' own (`check_model`). The message names it.
        DtypeError: see `check_dtypes`.
    """
    model_type, name = getattr(getattr(model, "config", None), "model_type", None), type(model).__name__
    if model_type not in FAMILIES:
        raise UnsupportedError(
            f"{name}: a model of type {model_type!r}; allowed: causal language models of type {', '.join(FAMILIES)}"
        )
    refuse_parts(model, "decoding by qcut")
    check_model(model)
    try:
        decoder = FAMILIES[model_type](model)
    except AttributeError as missing:
        import transformers  # loaded before: check_model has read its code

        raise UnsupportedError(
            f"{name} of transformers {transformers.__version__}: {missing}; allowed: a version of transformers in "
            f"which models of type {model_type!r} have that part; or model.generate"
        ) from missing
    check_dtypes(model, decoder)
    return decoder
