"""llama2.c checkpoints, read and written: the legacy format, version 0 of its export, which run.c reads.

- 7 int32: dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len. A negative vocab_size means that the
  classifier is not tied to the token embedding.
- float32 tensors without gaps: token_embedding; rms_att of all layers, then wq of all layers, and so on wk, wv, wo,
  rms_ffn, w1 (``gate_proj``), w2 (``down_proj``), w3 (``up_proj``); rms_final; freq_cis_real and freq_cis_imag
  ``[seq_len, head_size / 2]``, which nothing reads any more; wcls if it is not tied.

All little-endian. llama2.c rotates columns 2i and 2i + 1 of a head together, Hugging Face i and i + head_size / 2: rows
of wq and wk are reordered on the way. What the header lacks is built into run.c, see `save_llama2c`.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from qcut.common.files import write_bytes
from qcut.common.schema import file_size, read_into, read_up_to, reading
from qcut.common.versions import install, require
from qcut.errors import CheckpointError, DtypeError, UnsupportedError
from qcut.layers.embedding import Embedding, is_table
from qcut.layers.linear import Linear
from qcut.models.classes import activation_of, library_class
from qcut.models.modules import WEIGHT_DTYPES, is_linear, tensor_key, weight_nk
from qcut.numerics.checks import out_of_range
from qcut.numerics.plain_state import in_plain_state

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

_HEADER = struct.Struct("<7i")
_MAGIC = 0x616B3432
"""First int32 in files of later versions of the format; version 0 begins with dim instead."""
_MOST_LAYERS = 256
"""Twice what the deepest models have; a small file could state thousands, which take long to build."""
_THETA, _EPS = 10000.0, 1e-5


class _Entry(NamedTuple):
    """A tensor of the file: llama2.c's name for it, the module that has it as weight, and the heads to reorder."""

    label: str
    module: str
    shape: tuple[int, ...]
    heads: int = 0


@dataclass(frozen=True)
class _Header:
    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    seq_len: int

    @property
    def tied(self) -> bool:
        return self.vocab_size > 0

    @property
    def head_size(self) -> int:
        return self.dim // self.n_heads

    @property
    def file_bytes(self) -> int:
        tables = abs(self.vocab_size) * self.dim * (1 if self.tied else 2)
        layers = self.n_layers * sum(math.prod(entry.shape) for entry in self.layer())
        return _HEADER.size + 4 * (tables + layers + self.dim + self.seq_len * self.head_size)

    def layer(self) -> list[_Entry]:
        dim, hidden, kv = self.dim, self.hidden_dim, self.n_kv_heads * self.head_size
        return [
            _Entry("rms_att", "input_layernorm", (dim,)),
            _Entry("wq", "self_attn.q_proj", (dim, dim), self.n_heads),
            _Entry("wk", "self_attn.k_proj", (kv, dim), self.n_kv_heads),
            _Entry("wv", "self_attn.v_proj", (kv, dim)),
            _Entry("wo", "self_attn.o_proj", (dim, dim)),
            _Entry("rms_ffn", "post_attention_layernorm", (dim,)),
            _Entry("w1", "mlp.gate_proj", (hidden, dim)),
            _Entry("w2", "mlp.down_proj", (dim, hidden)),
            _Entry("w3", "mlp.up_proj", (hidden, dim)),
        ]

    def entries(self) -> Iterator[_Entry]:
        """Every tensor in the file's order. Those of no module are the tables of the rotation."""
        table = (abs(self.vocab_size), self.dim)
        yield _Entry("token_embedding", "model.embed_tokens", table)
        for label, module, shape, heads in self.layer():
            for i in range(self.n_layers):
                yield _Entry(f"{label} of layer {i}", f"model.layers.{i}.{module}", shape, heads)
        yield _Entry("rms_final", "model.norm", (self.dim,))
        for label in ("freq_cis_real", "freq_cis_imag"):
            yield _Entry(label, "", (self.seq_len, self.head_size // 2))
        if not self.tied:
            yield _Entry("wcls", "lm_head", table)


@in_plain_state
def load_llama2c(
    path: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> LlamaForCausalLM:
    """Read a checkpoint as a Llama of transformers, in evaluation mode.

    The header is checked against the file's size before anything is built; tensors are read one at a time.

    Args:
        path: the file.
        dtype: dtype of the weights: float16, bfloat16, float32 or float64.
        device: device of the weights.

    Returns:
        A model of seq_len positions, its classifier tied to the embedding if the file's is. BOS is 1, EOS 2.

    Raises:
        DtypeError: another dtype.
        CheckpointError: the file is missing, truncated or foreign; a value of the header cannot be (named); a tensor
            holds NaN or Inf, or values beyond ``dtype`` (named); or transformers is not installed.

    Exactness: weights are the file's, bit by bit in float32, else rounded once.

    Source: docs/schemes.md, section 7; llama2.c, ``legacy_export`` of export.py.
    """
    path = Path(path)
    if dtype not in WEIGHT_DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in WEIGHT_DTYPES)
        raise DtypeError(f"dtype is {str(dtype).removeprefix('torch.')}; allowed: {allowed}")
    with reading(path, CheckpointError) as file:
        header = _read_header(file, path)
        model = _skeleton(header, path)
        for entry in header.entries():
            if not entry.module:
                file.seek(4 * math.prod(entry.shape), os.SEEK_CUR)
                continue
            model.get_submodule(entry.module).weight = nn.Parameter(_read(file, entry, dtype, device, path))
    if header.tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=model.config).to(device)  # no state dict has its buffers
    return model.eval()


def _read_header(file: BinaryIO, path: Path) -> _Header:
    size = file_size(file)
    head = read_up_to(file, _HEADER.size)
    if len(head) < _HEADER.size:
        raise CheckpointError(f"{path}: found {len(head)} bytes; a llama2.c header is {_HEADER.size}")
    header = _Header(*_HEADER.unpack(head))
    if header.dim == _MAGIC:
        raise CheckpointError(f"{path}: a llama2.c file of version 1 or later; the legacy version 0 is read")
    for field, value in zip(fields(header), astuple(header), strict=True):
        if value < 1 and not (field.name == "vocab_size" and value < 0):
            raise CheckpointError(f"{path}: {field.name} is {value} in the header; allowed: >= 1")
    if header.dim % header.n_heads or header.n_heads % header.n_kv_heads or header.head_size % 2:
        raise CheckpointError(
            f"{path}: dim {header.dim}, n_heads {header.n_heads}, n_kv_heads {header.n_kv_heads} in the header; "
            "n_kv_heads divides n_heads, n_heads divides dim, and dim / n_heads is even"
        )
    if size != header.file_bytes:
        raise CheckpointError(f"{path}: found {size} bytes; {header} needs {header.file_bytes}")
    if header.n_layers > _MOST_LAYERS:
        raise CheckpointError(f"{path}: n_layers is {header.n_layers} in the header; allowed: 1 to {_MOST_LAYERS}")
    return header


def _skeleton(header: _Header, path: Path) -> Any:
    require("transformers")
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise CheckpointError(f"{path}: the model is a Llama of transformers: {install('hf')}") from None
    config = LlamaConfig(
        hidden_size=header.dim,
        intermediate_size=header.hidden_dim,
        num_hidden_layers=header.n_layers,
        num_attention_heads=header.n_heads,
        num_key_value_heads=header.n_kv_heads,
        vocab_size=abs(header.vocab_size),
        max_position_embeddings=header.seq_len,
        rms_norm_eps=_EPS,
        rope_theta=_THETA,  # transformers 5 puts it in rope_parameters
        attention_bias=False,
        tie_word_embeddings=header.tied,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def _read(file: BinaryIO, entry: _Entry, dtype: torch.dtype, device: torch.device | str, path: Path) -> Tensor:
    values = np.empty(math.prod(entry.shape), "<f4")
    if read_into(file, values.data.cast("B")) < values.nbytes:
        raise CheckpointError(f"{path}: the file ends in tensor {entry.label}")
    tensor = torch.from_numpy(values.astype(np.float32, copy=False)).to(dtype).view(entry.shape)
    if found := out_of_range(tensor):
        kind = str(dtype).removeprefix("torch.")
        raise CheckpointError(f"{path}: tensor {entry.label} holds NaN or Inf, or values beyond {kind}: {found}")
    if entry.heads:
        tensor = tensor.view(entry.heads, -1, 2, entry.shape[1]).transpose(1, 2).reshape(entry.shape)
    return tensor.to(device)


def save_llama2c(model: nn.Module, path: str | Path) -> None:
    """Write a Llama of transformers as a checkpoint that run.c reads.

    Layers and embeddings that qcut has quantized are written as the float32 weights that they stand for; activations
    are not quantized there. The file is written under a temporary name and renamed.

    Args:
        model: a ``LlamaForCausalLM`` on any device, with what run.c has built in: no biases, head_dim = hidden_size /
            heads, rope of theta 10000 without scaling and over whole heads, RMSNorm of eps 1e-5, and silu.
        path: the file, which is replaced if it exists.

    Raises:
        UnsupportedError: another model, or one that run.c would compute otherwise (what and where is named).
        CheckpointError: a weight is on the meta device, or holds NaN, Inf or values beyond float32 (named); or the file
            cannot be written. What was at ``path`` is then as it was.

    Exactness: float32 weights bit by bit; a quantized layer's are its `dequantized_weight`. The tables of the rotation
        are computed as llama2.c's export does, in float32.

    Source: docs/schemes.md, section 7; llama2.c, ``legacy_export`` of export.py, ``precompute_freqs_cis`` of model.py.
    """
    path = Path(path)
    header = _describe(model)
    for entry in replace(header, vocab_size=-abs(header.vocab_size)).entries():  # the classifier too if it is tied
        if entry.module:
            _check_module(model, entry)
    _check_code(model)
    try:
        write_bytes(path, _pieces(model, header))
    except OSError as exc:
        raise CheckpointError(f"{path}: cannot be written: {exc}") from exc


def _describe(model: Any) -> _Header:
    """The header of a model; its configuration is checked."""
    config: Any = getattr(model, "config", None)
    if not _is_llamas(model, "LlamaForCausalLM") or getattr(config, "model_type", None) != "llama":
        raise UnsupportedError(f"{type(model).__name__}: llama2.c holds only transformers' LlamaForCausalLM")
    dim, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or dim // heads
    if head_dim * heads != dim or heads % kv_heads or head_dim % 2:
        raise UnsupportedError(
            f"hidden_size {dim}, {heads} heads of head_dim {head_dim} and {kv_heads} for keys; llama2.c takes an even "
            "head_dim of hidden_size / heads, and key heads that divide the heads"
        )
    # transformers 5 keeps rope_parameters, earlier ones the theta in the configuration and rope_scaling, often None.
    rope = getattr(config, "rope_parameters", None) or {**vars(config), **(getattr(config, "rope_scaling", None) or {})}
    built_in = {
        "hidden_act": (config.hidden_act, "silu"),
        "rope_theta": (rope.get("rope_theta", _THETA), _THETA),
        "rope_type": (rope.get("rope_type", rope.get("type", "default")), "default"),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", 1.0), 1.0),
    }
    for key, (value, allowed) in built_in.items():
        if value != allowed:
            raise UnsupportedError(f"{key} is {value!r} in the configuration; llama2.c has {allowed!r} built in")
    vocabulary = config.vocab_size if _is_tied(model) else -config.vocab_size
    layers = len(model.model.layers[: config.num_hidden_layers])
    seq_len = config.max_position_embeddings
    return _Header(dim, config.intermediate_size, layers, heads, kv_heads, vocabulary, seq_len)


def _check_code(model: nn.Module) -> None:
    """Whether what lies between the weights is transformers' own."""
    for name, module in model.named_modules():
        known = isinstance(module, (Linear, Embedding, nn.ModuleList)) or is_linear(module) or is_table(module)
        if not (known or _is_llamas(module, type(module).__name__) or activation_of(module) == "silu"):
            found = f"{type(module).__module__}.{type(module).__qualname__}"
            raise UnsupportedError(f"{name!r} is a {found}; llama2.c has what transformers' Llama has there")


def _is_llamas(module: nn.Module, name: str) -> bool:
    """Whether a module is of a class of transformers' Llama, and no forward was set on it."""
    of_llama = library_class("transformers.models.llama.modeling_llama", name)
    return type(module) is of_llama and "forward" not in vars(module)


def _is_tied(model: Any) -> bool:
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if isinstance(table, Embedding):
        return table.linear is head
    return is_table(table) and is_linear(head) and tensor_key(table.weight) == tensor_key(head.weight)


def _check_module(model: nn.Module, entry: _Entry) -> None:
    """Whether a module computes what llama2.c does with its weight, and has one to write."""
    where = repr(entry.module)
    try:
        module: Any = model.get_submodule(entry.module)
    except AttributeError as exc:
        raise UnsupportedError(f"{where}: {exc}; llama2.c has {entry.label} there") from None
    if getattr(module, "bias", None) is not None:
        raise UnsupportedError(f"{where} has a bias; {entry.label} of llama2.c has none")
    if entry.label == "token_embedding":
        wanted, ok = "an embedding", isinstance(module, Embedding) or is_table(module)
    elif len(entry.shape) == 1:
        wanted, ok = "a LlamaRMSNorm", _is_llamas(module, "LlamaRMSNorm")
    else:
        wanted, ok = "a linear layer", isinstance(module, Linear) or is_linear(module)
    if not ok:
        raise UnsupportedError(f"{where} is a {type(module).__name__}; {entry.label} of llama2.c is {wanted}")
    if getattr(module, "activation", "none") != "none":
        raise UnsupportedError(f"{where} computes {module.activation} too; {entry.label} of llama2.c does not")
    if getattr(module, "variance_epsilon", _EPS) != _EPS:
        raise UnsupportedError(f"{where}: rms_norm_eps is {module.variance_epsilon}; llama2.c has {_EPS} built in")
    if (shape := tuple(module.weight.shape)) != entry.shape:
        raise UnsupportedError(f"{where} has a weight {list(shape)}; the model's {entry.label} is {list(entry.shape)}")
    if module.weight.is_meta:
        raise CheckpointError(f"{where}: the weight is on the meta device and has no values to save")


def _pieces(model: nn.Module, header: _Header) -> Iterator[bytes]:
    yield _HEADER.pack(*astuple(header))
    for entry in header.entries():
        values = _values(model, entry) if entry.module else _rotation_table(header, entry.label)
        yield values.contiguous().numpy().astype("<f4", copy=False).tobytes()


def _values(model: nn.Module, entry: _Entry) -> Tensor:
    module: Any = model.get_submodule(entry.module)
    quantized = isinstance(module, (Linear, Embedding))
    weight = module.dequantized_weight() if quantized else weight_nk(module)
    weight = weight.to("cpu", torch.float32)
    if not weight.isfinite().all():
        raise CheckpointError(f"{entry.module!r}: the weight holds NaN or Inf; every value must be finite in float32")
    if entry.heads:
        weight = weight.reshape(entry.heads, 2, -1, entry.shape[1]).transpose(1, 2).reshape(entry.shape)
    return weight


def _rotation_table(header: _Header, label: str) -> Tensor:
    """``cos`` or ``sin`` of ``position * theta^(-2i / head_size)``, every step in float32 as llama2.c's export."""
    even = torch.arange(0, header.head_size, 2, dtype=torch.float32, device="cpu")
    positions = torch.arange(header.seq_len, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, 1.0 / _THETA ** (even / header.head_size))
    return angles.cos() if label == "freq_cis_real" else angles.sin()
