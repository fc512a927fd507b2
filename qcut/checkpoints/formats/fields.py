"""Fields of a ``quantization_config``: each is read, says how the checkpoint came about, or is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from qcut.errors import UnsupportedError

GPTQ_HISTORY = frozenset(
    {
        *("act_group_aware", "autoround_version", "awq_version", "backend", "batch_size", "block_name_to_quantize"),
        *("cache_block_outputs", "calib_data", "calibration", "damp_auto_increment", "damp_percent", "data_type"),
        *("dataset", "device", "disable_exllama", "do_fuse", "enable_quanted_input", "exllama_config", "failsafe"),
        *("fail_safe", "fuse_max_seq_len", "hyb_act", "iters", "lm_head", "low_gpu_mem_usage", "lr"),
        *("max_input_length", "meta", "minmax_lr", "model_file_base_name", "model_name_or_path", "model_seqlen"),
        *("module_name_preceding_first_block", "modules_in_block_to_quantize", "modules_to_fuse"),
        *("modules_to_not_convert", "mse", "nsamples", "offload_to_disk", "offload_to_disk_path", "pad_token_id"),
        *("process", "quant_method", "quantizer", "seqlen", "static_groups", "tokenizer", "true_sequential"),
        *("use_cuda_fp16", "use_exllama", "uri", "version", "version_of_quantizer", "zero_point"),
    }
)
"""Of GPTQ and AWQ: how weights were found, which layers were left out (the tensors tell), and which kernels to run."""


def refuse_others(data: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Refuse fields that nobody knows and that hold something: they may change what is computed.

    Args:
        data: the configuration.
        known: fields that are read, or that say how the checkpoint came about.
        where: for messages.

    Raises:
        UnsupportedError: there is such a field; named, with its value.
    """
    for key, value in data.items():
        if key not in known and value not in (None, False, "", [], {}):
            raise UnsupportedError(
                f"{where}: found the field {key[:80]!r} with {str(value)[:80]!r}, which qcut does not know and which "
                f"may change the weights; allowed: {', '.join(sorted(known))}"
            )
