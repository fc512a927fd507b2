"""``qcut info``: the contents of a model's folder."""

from __future__ import annotations

import argparse
import math
import re
from typing import TYPE_CHECKING, Any

from qcut.cli.command import Answer, Command

if TYPE_CHECKING:
    from qcut.checkpoints.contents import Contents, StoredLayer, StoredTensor

_DESCRIPTION = """\
Shows the contents of a model's folder: quantized layers with sizes, schemes, bytes and bits per weight, and the tensors
in floating point. Reads only the files' headers and checks them against the files' sizes; no model is built, and no
package except qcut is needed. Layers with names that differ only by a number are one line: h.* stands for h.0, h.1, …
"""

FIELDS = {
    "directory": "DIR as given",
    "format": "format: qcut, turboquant-model, transformers, or the name of another library's method",
    "model": "class of the model, or its type; empty if unknown",
    "layers": "quantized layers: list of {name, scheme, out_features, in_features, bytes, bits_per_weight, tied_to}; "
    "null if the format does not define it; tied_to is the layer that stores the tensors, or null",
    "tensors": "tensors outside of quantized layers: list of {name, dtype, shape, bytes}",
    "schemes": "by scheme, {layers, bytes}",
    "parameters": "number of weights and other floating-point values, shared ones once; null if unknown",
    "percent_float": "percentage of the parameters in floating point; null if unknown",
    "percent_experts": "percentage of the parameters that are quantized weights of experts; null if unknown",
    "bytes": "bytes of the files with the model's tensors",
    "files": "bytes by file",
}


COMMAND = Command(
    "info",
    """\
DIR: Path
    a folder with safetensors files
--layers
    one line per layer and tensor, without grouping
""",
    help="show the contents of a model's folder: layers, schemes, bytes",
    description=_DESCRIPTION,
    example="qcut info models/gpt2-5m\nqcut info gpt2-4bit --layers",
    fields=FIELDS,
)


def run(arguments: argparse.Namespace) -> Answer:
    """Run the command."""
    from qcut.checkpoints.contents import contents

    found = contents(arguments.dir)
    schemes: dict[str, dict[str, int]] = {}
    for layer in found.layers:
        each = schemes.setdefault(layer.scheme, {"layers": 0, "bytes": 0})
        each["layers"] += 1
        each["bytes"] += layer.nbytes
    data = {
        "directory": str(arguments.dir),
        "format": found.format,
        "model": found.model,
        "layers": [_layer(layer) for layer in found.layers],
        "tensors": [_tensor(tensor) for tensor in found.tensors],
        "schemes": schemes,
        "parameters": found.parameters,
        "percent_float": found.percent_float,
        "percent_experts": found.percent_experts,
        "bytes": sum(found.files.values()),
        "files": found.files,
    }
    return Answer(data, _text(found, arguments.layers))


def _layer(layer: StoredLayer) -> dict[str, Any]:
    sizes = {"out_features": layer.out_features, "in_features": layer.in_features, "bytes": layer.nbytes}
    rest = {"bits_per_weight": layer.bits_per_weight, "tied_to": layer.tied_to}
    return {"name": layer.name, "scheme": layer.scheme, **sizes, **rest}


def _tensor(tensor: StoredTensor) -> dict[str, Any]:
    return {"name": tensor.name, "dtype": tensor.code, "shape": list(tensor.shape), "bytes": tensor.nbytes}


def _text(found: Contents, each: bool) -> str:
    rows: dict[tuple[str, ...], list[int]] = {}
    for layer in found.layers:
        size = "?" if layer.weights is None else f"{layer.out_features} x {layer.in_features}"
        bits = layer.bits_per_weight
        last = f"tied to {layer.tied_to}" if layer.tied_to else "" if bits is None else f"{bits:.2f}"
        rows.setdefault((_name(layer.name, each), layer.scheme, size, last), []).append(layer.nbytes)
    for tensor in found.tensors:
        bits = 8 * tensor.nbytes / max(1, math.prod(tensor.shape))
        size = " x ".join(map(str, tensor.shape)) or "1"
        rows.setdefault((_name(tensor.name, each), tensor.code, size, f"{bits:.2f}"), []).append(tensor.nbytes)
    table = [("layer or tensor", "scheme", "N x K", "how many", "KB", "bits/weight")]
    table += [
        (name, scheme, size, str(len(sizes)), f"{sum(sizes) / 1e3:,.1f}", last)
        for (name, scheme, size, last), sizes in rows.items()
    ]
    widths = [max(len(row[i]) for row in table) for i in range(6)]
    lines = [f"{found.directory}: {found.model or 'a model'}, format of {found.format}"]
    for row in table:
        left = (f"{row[i]:<{widths[i]}}" for i in (0, 1))
        lines.append("  ".join((*left, *(f"{row[i]:>{widths[i]}}" for i in (2, 3, 4, 5)))).rstrip())
    stored, files = sum(found.files.values()), len(found.files)
    lines.append(f"{len(found.layers)} quantized layers; {stored / 1e6:,.2f} MB in {files} file{'s' * (files != 1)}")
    if found.parameters is not None and found.percent_float is not None:
        experts = f", {found.percent_experts:.1f} % quantized experts" if found.percent_experts else ""
        share = f"{found.percent_float:.1f} % of them in floating point{experts}"
        lines.append(f"{found.parameters:,} parameters, {share}")
    return "\n".join(lines)


def _name(name: str, each: bool) -> str:
    return name if each else re.sub(r"(?<![^.])\d+(?=\.)|(?<=_)\d+(?=_)", "*", name)
