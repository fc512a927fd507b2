"""What GPTQ and AWQ share: ``qweight`` and ``qzeros`` packed in int32, and ``scales`` of groups."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor

from qcut.checkpoints.formats.build import column_order, packed_layer
from qcut.checkpoints.formats.grid import Grid
from qcut.checkpoints.formats.parts import FLOATS, Format, Parts, Stored
from qcut.errors import CheckpointError, UnsupportedError
from qcut.layers.linear import Linear

HISTORY = frozenset(
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
"""Fields of GPTQ and AWQ that change no weight: the search for weights, layers left in float, kernels to run."""


class PackedInt32(Format):
    """Layers of ``w[k, n] = scales[g, n] * (q[k, n] - z[g, n])``, except how integers are packed in int32.

    Args:
        bits: of an integer.
        served: the bits that the format is served with.
        group_size: rows of K that share a scale; -1: all.
        along_k: whether qweight is packed along K, and may be sorted: ``g_idx`` is the group of each row.
        where: the configuration, for messages.

    Raises:
        CheckpointError: groups of no columns.
        UnsupportedError: other bits.
    """

    def __init__(self, bits: int, served: tuple[int, ...], group_size: int, along_k: bool, where: str) -> None:
        if bits not in served:
            raise UnsupportedError(f"{where}: bits is {bits}; {' and '.join(map(str, served))} are served")
        if group_size == 0:
            raise CheckpointError(f"{where}: group_size is 0; allowed: -1, or 1 and more")
        self._bits, self._along_k = bits, along_k
        self._group_size = None if group_size == -1 else group_size

    @abstractmethod
    def _integers(self, qweight: Tensor) -> Tensor:
        """uint8 ``[K, N]``."""

    @abstractmethod
    def _zero_points(self, qzeros: Tensor) -> Tensor:
        """Integers ``[G, N]``."""

    def quantized(self, tensors: Mapping[str, Stored]) -> bool:
        """See `Format.quantized`."""
        return "qweight" in tensors

    def check(self, parts: Parts) -> None:
        """See `Format.check`."""
        n, k, per_int32 = parts.n, parts.k, 32 // self._bits
        parts.only(("qweight", "qzeros", "scales", *["g_idx"] * self._along_k, "bias"))
        parts.require_bias()
        if n % per_int32 or (self._along_k and k % per_int32):
            packed = "N and K are" if self._along_k else "N is"
            raise parts.error("qweight", f"the layer is [N={n}, K={k}]; {packed} packed in multiples of {per_int32}")
        groups = -(-k // (self._group_size or k))
        parts.require("qweight", ("I32",), [k // per_int32, n] if self._along_k else [k, n // per_int32])
        parts.require("qzeros", ("I32",), [groups, n // per_int32])
        parts.require("scales", FLOATS, [groups, n])
        if "g_idx" in parts.tensors:
            parts.require("g_idx", ("I32", "I64"), [k])

    def layer(self, parts: Parts) -> Linear:
        """See `Format.layer`."""
        return packed_layer(parts, self.codes(parts), self.grid(parts))

    def codes(self, parts: Parts) -> Tensor:
        """See `IntegerFormat.codes`."""
        return self._integers(parts.read("qweight")).t().contiguous()

    def grid(self, parts: Parts) -> Grid:
        """See `IntegerFormat.grid`."""
        return Grid(
            self._bits,
            parts.read_scales("scales").t().contiguous(),
            self._zero_points(parts.read("qzeros")).t().contiguous(),
            self._group_size,
            column_order(parts, "g_idx", self._group_size),
        )
