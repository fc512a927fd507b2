"""Compares a quantized model with the float one on a batch: what each layer computes, and how layers are connected.

Two checks, each with a bound far above any scheme's own error:

1. **Each layer.** The float layer's result on tokens of the batch is ``x @ W.T + b``, to rounding; the quantized
   layer's is that of the weight and the tokens that its scheme stands for; and that weight is as near to the float one
   as its bits allow. See `check_layer`.
2. **The model.** The float model runs once, and the result of every layer that will be quantized is kept. In the
   quantized model each layer then returns the result that it had in the float model. That removes the scheme's error:
   the calls, their order, their inputs and the model's output must be those of the float model, to rounding. A lost
   activation, a norm rescaled for only one reader or a branch that another class takes fails under 2 bits as under 16.
   See `Recording`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from qcut.errors import DtypeError, QcutError, QuantizationError
from qcut.layers.embedding import Embedding
from qcut.layers.linear import Linear
from qcut.layers.quantized import QuantizedLayer
from qcut.models.modules import (
    as_given,
    eagerly,
    evaluating,
    first_input,
    float_linear,
    forward,
    input_ids_of,
    is_conv1d,
    looks_linear,
    model_device,
    state_kept,
    tensor_bytes,
    to_device,
    weight_nk,
)
from qcut.numerics.int8 import apply_activation
from qcut.schemes import FP8, Codebook, W8A8Rotated

SAMPLE_ROWS = 16
"""Tokens of each layer's input that the layer is checked on; and tokens of a batch that qcut makes up."""
MOST_TOKENS = 64
"""Tokens of a sequence that `excerpt` keeps."""
MOST_BYTES = 1 << 30
"""Bytes of layers' results that a verification by default may take."""
_INPUT_VALUES = 256
_ROTATED_INT8 = 0.15
"""What int8 tokens that are quantized after a rotation may add, of a result of that size; 0.8 % is usual."""


def excerpt(batch: Any) -> Any:
    """A part of a batch that the model takes too: of token ids one short sequence, of others all."""
    ids = input_ids_of(batch)
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    if ids is None or any(t.shape != ids.shape for t in tensors):
        return pytree.tree_map_only(Tensor, lambda t: t.clone(), batch)
    return pytree.tree_map_only(Tensor, lambda t: t[:1, :MOST_TOKENS].clone(), batch)


def vocabulary_tokens(model: nn.Module) -> Any:
    """A batch for a model of transformers that reads text: one token of each sixteenth of its vocabulary.

    Returns:
        What the model is called on, its decoder included; or None if it reads anything else than token ids.
    """
    config, table = getattr(model, "config", None), None
    if getattr(model, "main_input_name", None) == "input_ids":
        with suppress(NotImplementedError):  # models that read token ids and something else
            table = model.get_input_embeddings()  # type: ignore[operator]
    if not isinstance(table, (nn.Embedding, Embedding)):
        return None
    context = getattr(config, "max_position_embeddings", None)
    count = min(SAMPLE_ROWS, max(1, context // 2)) if isinstance(context, int) else SAMPLE_ROWS
    ids = (2 * torch.arange(count, dtype=torch.int64, device="cpu") + 1) * table.num_embeddings // (2 * count)
    names = ("input_ids", "decoder_input_ids") if getattr(config, "is_encoder_decoder", False) else ("input_ids",)
    return dict.fromkeys(names, ids[None])


class Proof:
    """The verification of one quantization, as far as there is a batch for it.

    Args:
        verify: a batch; None takes the calibration's, if there is one; True takes that, or else tokens of the
            vocabulary (`vocabulary_tokens`); False leaves verification out.
        calibrated: the calibration's small batch, or None.

    Attributes:
        batch: what models are called on, or None.
        active: whether anything is to be verified.
        held: how many layers were compared with their float weights.
        unseen: why the whole model was not verified; empty if that was not requested.
    """

    def __init__(self, verify: Any, calibrated: Any) -> None:
        default = verify is None or verify is True or verify is False
        self.batch = calibrated if default else verify
        self._most: float = MOST_BYTES if default else math.inf
        self._made_up = verify is True and calibrated is None
        self.active = verify is not False and (self._made_up or self.batch is not None)
        self._recording: Recording | None = None
        self.held, self.unseen = 0, ""

    @property
    def calls(self) -> int:
        """Calls of layers that were recorded; 0 without a recording."""
        return 0 if self._recording is None else len(self._recording)

    def record(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        """Run the float model; arguments and errors are those of `Recording`, except for made-up tokens."""
        if not self.active:
            return
        batch = vocabulary_tokens(model) if self._made_up else self.batch
        if batch is None:
            reads = getattr(model, "main_input_name", "")
            self.unseen = f"it reads {reads}" if reads not in ("", "input_ids") else "qcut knows no input for it"
            return
        try:
            recording = Recording(model, batch, layers, self._most)
        except (QcutError, AssertionError) as error:
            if not self._made_up:
                raise
            self.unseen = " ".join(str(error).split())[:200]
            return
        if recording.complete:
            self._recording = recording
        else:
            self.unseen = f"the results of its layers on a batch have more than {MOST_BYTES} bytes"

    def layer(
        self, name: str, source: nn.Module, layer: Linear, error: float, fitted: bool, sample: Tensor | None = None
    ) -> None:
        """Compare a layer with its float weight, see `check_layer`, on ``sample`` or on normal random tokens."""
        if not self.active:
            return
        if sample is None:
            generator = torch.Generator().manual_seed(0)
            sample = torch.randn(SAMPLE_ROWS, layer.in_features, generator=generator, dtype=torch.float32, device="cpu")
        check_layer(name, source, layer, sample, error, fitted)
        self.held += 1

    def sample(self, name: str) -> Tensor | None:
        """Some tokens of a layer's first recorded input."""
        return None if self._recording is None else self._recording.samples.get(name)

    def check(self, model: nn.Module, layers: Mapping[str, nn.Module], scales: Mapping[str, Tensor]) -> None:
        """Compare the quantized model with the recorded one; see `Recording.check`."""
        if self._recording is None:
            return
        try:
            self._recording.check(model, layers, scales)
        except DtypeError as error:  # kernels on a GPU that take no float32, of a model that is only to be written
            if not self._made_up:
                raise
            self._recording, self.unseen = None, str(error)


@contextmanager
def lent_weights(modules: Mapping[nn.Module, Linear | Embedding]) -> Iterator[None]:
    """Let float modules without weights compute with those of their quantized layers, one module at a time.

    For a verification after the float weights are gone: how layers are connected does not depend on the weights.

    Args:
        modules: linear layers and embeddings, with what replaces each; their weights are on the meta device before and
            after.
    """
    before: dict[nn.Module, Any] = {module: module._parameters["weight"] for module in modules}
    handles = []

    def put(module: nn.Module, weight: Tensor) -> None:
        old = before[module]
        module._parameters["weight"] = nn.Parameter(weight.to(old.dtype), old.requires_grad)

    def fill(module: nn.Module, _: Any) -> None:
        weight = modules[module].dequantized_weight()
        put(module, weight.t() if is_conv1d(module) else weight)

    def empty(module: nn.Module) -> None:
        """A weight of one element of memory that has the shape and the layer's device."""
        layer = modules[module]
        device = next((layer.linear if isinstance(layer, Embedding) else layer).buffers()).device
        put(module, torch.zeros((), dtype=before[module].dtype, device=device).expand(before[module].shape))

    try:
        for module in modules:
            empty(module)
            handles.append(module.register_forward_pre_hook(fill))
            handles.append(module.register_forward_hook(lambda module, _, __: empty(module)))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, weight in before.items():
            module._parameters["weight"] = weight


def check_layer(name: str, source: nn.Module, layer: Linear, x: Tensor, error: float, fitted: bool = False) -> None:
    """Compare a quantized layer with its own weight, and that weight with the float one.

    With W the float weight, Ŵ the dequantized one and x̂ the tokens as the scheme rounds them, the layer's result must
    be ``act(x̂ @ Ŵ.T + b)`` to 0.1 % of ``max(‖x̂ @ Ŵ.T‖, ‖x̂‖ ‖Ŵ‖ / sqrt(K))``, 3 % where tokens or results have 16
    bits, and ``‖W - Ŵ‖ / ‖W‖`` at most eight times what the scheme's bits cost.

    Args:
        name: of the layer, for messages.
        source: the float layer.
        layer: the quantized layer.
        x: ``[M, K]`` tokens.
        error: ``‖W - Ŵ‖ / ‖W‖``.
        fitted: whether the weight was fitted to second moments, for which it may go farther from the float one.

    Raises:
        QuantizationError: the layer is beyond a bound (named, with what was found).
    """
    allowed = _weight_bound(source, layer, fitted)
    if error > allowed:
        raise QuantizationError(
            f"verify: the {layer.scheme.name} weight is {error:.1%} off the float one; allowed: {allowed:.1%}", name
        )
    given = as_given(x, source)
    if given.is_cuda and given.dtype is torch.float32 and not layer.scheme.int8_products:
        given = given.half()  # such kernels take no others
    tokens = layer.quantized_tokens(given)
    exact = tokens is not None
    tokens = given.float() if tokens is None else tokens
    weight = layer.dequantized_weight()
    product = nn.functional.linear(tokens, weight)
    bias, activation = layer.bias, "none" if layer.apart else layer.activation
    expected = apply_activation(product if bias is None else product + bias, activation)
    scale = max(product.norm().item(), tokens.norm().item() * weight.norm().item() / math.sqrt(weight.shape[1]))
    least = 1e-3 if given.dtype is torch.float32 and not weight.is_cuda else 0.03
    allowed = max(least, 0 if exact else _ROTATED_INT8) * scale + least * expected.norm().item()
    found = (layer(given).float() - expected).norm().item()
    if not found <= allowed and math.isfinite(allowed):
        raise QuantizationError(
            f"verify: its result is {found / max(scale, 1e-30):.1%} off that of its own weight; allowed: "
            f"{allowed / max(scale, 1e-30):.1%}",
            name,
        )


def _check_float(name: str, module: nn.Module, x: Tensor, output: Any) -> None:
    """Compare a float layer's result with ``x @ W.T + b``."""
    weight, expected = weight_nk(module).float(), float_linear(module, x)
    rows = isinstance(output, Tensor) and output.shape[-1:] == expected.shape[-1:]
    found = output.reshape(-1, len(weight))[: len(x)].float() if rows else torch.full_like(expected, math.nan)
    allowed = 0.03 if weight.is_cuda or weight_nk(module).dtype.itemsize < 4 else 1e-3
    size = max(expected.norm().item(), x.norm().item() * weight.norm().item() / math.sqrt(weight.shape[1]), 1e-30)
    if not (off := (found - expected).norm().item() / size) <= allowed and math.isfinite(size):
        raise QuantizationError(
            f"verify: the float layer's result is {off:.1%} off x @ W.T + b; allowed: {allowed:.1%}. Leave it in float "
            "with skip=[...]",
            name,
        )


def _weight_bound(source: nn.Module, layer: Linear, fitted: bool) -> float:
    """Largest relative error allowed of a weight."""
    if isinstance(layer.scheme, Codebook):
        bits = layer.scheme.bits + (layer.scheme.residual_bits or 0)
        return min(1.2, (24 if fitted else 8) * 2.0**-bits + 0.01)
    # Half a step at most: int8's, or e4m3's, which is a sixteenth of a value, and 2**-10 of the scale for the least.
    is_fp8, weight = isinstance(layer.scheme, FP8), weight_nk(source).float()
    if isinstance(layer.scheme, W8A8Rotated):
        from qcut.numerics.codebook.rotation import rotate_groups

        weight = rotate_groups(weight, "hadamard", layer.scheme.group_columns(weight.shape[1]), layer.scheme.seed)
    steps = weight.abs().amax(1) / (448 * 1024 if is_fp8 else 254)
    share = math.sqrt(weight.shape[1]) * steps.norm().item() / max(weight.norm().item(), 1e-30)
    return 1.05 * (share + is_fp8 / 16) + 1e-6


class _Call(NamedTuple):
    """One call of a layer in the float model: some values of its input, and its result."""

    name: str
    values: Tensor
    result: Any


class Recording:
    """What the layers of a float model computed on a batch.

    Args:
        model: the float model; run once, in evaluation mode. Buffers and plain attributes are afterwards as before.
        batch: what it is called on.
        layers: those with results to keep, by name.
        most_bytes: of results to keep.

    Attributes:
        samples: some tokens of each layer's first input, float32 ``[M, K]``.
        complete: whether all results fit; else no model can be compared.

    Raises:
        ConfigError: the model fails on the batch.
        QuantizationError: a linear layer's result is not ``x @ W.T + b`` (layer named).
    """

    def __init__(self, model: nn.Module, batch: Any, layers: Mapping[str, nn.Module], most_bytes: float) -> None:
        self.batch = batch
        self.samples: dict[str, Tensor] = {}
        self.complete = True
        self._calls: list[_Call] = []
        self._bytes, self._most = 0, most_bytes
        self._output = _run(model, batch, {name: (layer, self._note(name)) for name, layer in layers.items()})

    def __len__(self) -> int:
        return len(self._calls)

    def _note(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            x = first_input(args, kwargs)
            if isinstance(x, Tensor) and x.is_floating_point() and name not in self.samples and x.numel():
                self.samples[name] = x.detach().reshape(-1, x.shape[-1])[:SAMPLE_ROWS].float().clone()
                if len(module._forward_hooks) == 1 and looks_linear(module):  # no other hook has changed the result
                    _check_float(name, module, self.samples[name], output)
            self._bytes += sum(tensor_bytes(t) for t in pytree.tree_leaves(output) if isinstance(t, Tensor))
            if self._bytes > self._most:
                self.complete = False
                self._calls.clear()
            if self.complete:
                result = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), output)
                self._calls.append(_Call(name, _values(x, None), result))

        return hook

    def check(self, model: nn.Module, layers: Mapping[str, nn.Module], scales: Mapping[str, Tensor]) -> None:
        """Run the quantized model while its layers return the float model's results.

        Args:
            model: the quantized model, run once in evaluation mode; state as above.
            layers: the quantized layers, by the names under which the float ones were recorded.
            scales: per layer, what smoothing divided its input's channels by.

        Raises:
            QuantizationError: layers are connected in another way than in the float model (layer named).
        """
        done = [0]
        moved = model_device(model)

        def substitute(name: str) -> Callable[..., Any]:
            def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
                at = done[0]
                done[0] += 1
                if at >= len(self._calls) or self._calls[at].name != name:
                    other = self._calls[at].name if at < len(self._calls) else "no layer"
                    raise QuantizationError(
                        f"verify: the quantized model calls it where the float model calls {other}; code checks "
                        "what layers are, or calls them by another way. Leave such layers in float with skip=[...]",
                        name,
                    )
                call = self._calls[at]
                found, expected = _values(first_input(args, kwargs), scales.get(name)), call.values
                if _distance(found, expected) > self._tolerance(found, moved):
                    raise QuantizationError(
                        f"verify: its input in call {at} is {_distance(found, expected):.1%} off the float model's, "
                        "though all layers before it answer as in float; something between them reads or computes "
                        "something else. Leave the layers before it in float with skip=[...]",
                        name,
                    )
                result = pytree.tree_map_only(Tensor, lambda t: t.to(_device_of(output, t.device)), call.result)
                if not isinstance(module, QuantizedLayer) or module.apart or not isinstance(result, Tensor):
                    return result
                if module.activation == "none":
                    return result
                return apply_activation(result.float(), module.activation).to(result.dtype)

            return hook

        output = _run(model, self.batch, {name: (layer, substitute(name)) for name, layer in layers.items()})
        if done[0] < len(self._calls):
            raise QuantizationError(
                "verify: the quantized model does not call it where the float model does; leave such layers in float "
                "with skip=[...]",
                self._calls[done[0]].name,
            )
        for found, expected in zip(output, self._output, strict=False):
            if found.shape != expected.shape or _distance(found, expected) > self._tolerance(found, moved):
                off = f"{_distance(found, expected):.1%}" if found.shape == expected.shape else "of another shape"
                last = self._calls[-1].name if self._calls else None
                raise QuantizationError(
                    f"verify: the model's output is off the float model's by {off} though all layers answer as in "
                    "float; something behind this layer, the last that is called, reads or computes something else",
                    last,
                )

    def _tolerance(self, found: Tensor, device: torch.device) -> float:
        """What rounding may do: results of fused activations are rounded once instead of twice."""
        eps = max([torch.finfo(t.dtype).eps for t in self._output if t.is_floating_point()], default=0.0)
        eps = max(eps, torch.finfo(found.dtype).eps if found.is_floating_point() else 0.0)
        return max(0.01 if device.type != "cpu" else 1e-3, 4 * eps)


def _run(model: nn.Module, batch: Any, hooks: Mapping[str, tuple[nn.Module, Callable[..., Any]]]) -> list[Tensor]:
    """The tensors of a model's output, with hooks on its layers meanwhile, and its state as before."""
    handles = []
    try:
        with evaluating(model), eagerly(), state_kept(model), torch.no_grad():
            for layer, hook in hooks.values():
                handles.append(layer.register_forward_hook(hook, with_kwargs=True))
            output = forward(model, to_device(batch, model_device(model)))
    finally:
        for handle in handles:
            handle.remove()
    leaves = [*pytree.tree_leaves(output), *pytree.tree_leaves(getattr(output, "__dict__", None))]
    unique = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    return [leaf.detach().clone() for leaf in unique.values()]


def _values(x: Any, scale: Tensor | None) -> Tensor:
    """Some values of a layer's input, on the CPU, as they were before smoothing divided them."""
    if not isinstance(x, Tensor) or x.numel() == 0:
        return torch.zeros(0, dtype=torch.float32, device="cpu")
    rows = x.detach().reshape(-1, x.shape[-1]) if x.dim() else x.detach().reshape(1, 1)
    step = max(1, rows.shape[0] // max(1, _INPUT_VALUES // rows.shape[1]))
    rows = rows[::step][: max(1, -(-_INPUT_VALUES // rows.shape[1]))].cpu()
    if scale is None:
        return rows.reshape(-1).clone()
    return (rows.float() * scale.cpu()).to(rows.dtype).reshape(-1)


def _distance(found: Tensor, expected: Tensor) -> float:
    """``‖found - expected‖ / ‖expected‖``; values that are not finite in both count as equal."""
    if found.shape != expected.shape:
        return math.inf
    a, b = found.double().cpu(), expected.double().cpu()
    both = a.isfinite() & b.isfinite()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return math.inf
    a, b = a[both], b[both]
    return (a - b).norm().item() / max(b.norm().item(), 1e-30) if not torch.equal(a, b) else 0.0


def _device_of(output: Any, default: torch.device) -> torch.device:
    return next((t.device for t in pytree.tree_leaves(output) if isinstance(t, Tensor)), default)
