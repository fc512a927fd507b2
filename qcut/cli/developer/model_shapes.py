"""Sizes (N, K) of a model's linear layers, from a preset's name or a checkpoint directory. No weights are read."""

from __future__ import annotations

from pathlib import Path

from qcut.errors import CheckpointError, ConfigError
from qcut.models.modules import is_linear, weight_nk
from qcut.schemes import padded_k

PRESETS: dict[str, tuple[tuple[int, int], ...]] = {
    "gpt2": ((2304, 768), (768, 768), (3072, 768), (768, 3072)),
    "gpt2-large": ((3840, 1280), (1280, 1280), (5120, 1280), (1280, 5120)),
    "gpt2-xl": ((4800, 1600), (1600, 1600), (6400, 1600), (1600, 6400)),
    "llama-3.2-1b": ((2048, 2048), (512, 2048), (8192, 2048), (2048, 8192)),
    "llama-3-8b": ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)),
    "mistral-7b": ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)),
}
"""(out_features, in_features) of the layers in one block; the head, which qcut leaves in float, is left out."""


def layer_shapes(model: str, skip: tuple[str, ...] = ("lm_head",)) -> list[tuple[int, int]]:
    """The distinct sizes (N, padded K) of a model's linear layers.

    Args:
        model: a name of `PRESETS`, or a directory with a Hugging Face ``config.json``.
        skip: names to leave out: a layer's whole dotted name, or the end of it.

    Raises:
        ConfigError: ``model`` is neither a preset nor a directory.
        CheckpointError: the directory's model cannot be made, or has no linear layer.
    """
    if model in PRESETS:
        return [(n, padded_k(k)) for n, k in PRESETS[model]]
    directory = Path(model)
    if not directory.is_dir():
        raise ConfigError(f"model {model!r} is neither a directory nor one of {', '.join(PRESETS)}")
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory}: there is no config.json")
    shapes = {
        (n, padded_k(k)): None
        for name, (n, k) in _meta_layers(directory).items()
        if not any(name == s or name.endswith("." + s) for s in skip)
    }
    if not shapes:
        raise CheckpointError(f"{directory}: the model has no linear layer")
    return list(shapes)


def _meta_layers(directory: Path) -> dict[str, tuple[int, int]]:
    from qcut.checkpoints.headers import read_config
    from qcut.checkpoints.huggingface import causal_model

    path = directory / "config.json"
    model = causal_model(read_config(path), str(path))
    shapes = {}
    for name, module in model.named_modules():
        if is_linear(module):
            n, k = weight_nk(module).shape
            shapes[name] = (int(n), int(k))
    return shapes
