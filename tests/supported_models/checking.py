"""What qcut does with a small random model of one architecture, from quantizing to serving."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import qcut
from qcut.conversion.inventory import QUANTIZED, count_parameters
from qcut.conversion.quantize import prepare
from qcut.conversion.tasks import stack_reasons
from qcut.errors import QcutError, UnsupportedError
from qcut.layers.experts.opening import opened
from qcut.models.modules import weight_nk, weight_of
from qcut.models.selection import linear_layers
from tests.support.architectures import inputs_of, run, tiny_model

SCHEMES = ("w8a8", "codebook4")
NEW_TOKENS = 8
_USUAL: dict[str, dict[str, int]] = {
    "bloom": {"hidden_size": 1024, "n_layer": 24, "n_head": 16},
    "nemotron": {"num_key_value_heads": 48},
}
"""By model type, what a configuration lacks that it starts from, to be that of a model that people have."""

YES, NO, NONE = "yes", "no", "–"
"""A claim that held, one that did not, and one that does not apply to the architecture."""


@dataclass
class Finding:
    """A row of the table.

    Attributes:
        kind: ``model_type`` of the architecture's configuration.
        model_class: of transformers.
        layers: number of layers that are quantized in a model of the sizes that the configuration starts from.
        percent_float: of that model's parameters, those left in float.
        largest: what most of those are.
        cosines: of the output with the float model's, by scheme.
        saved: whether what `qcut.load` reads computes the same, bit by bit.
        pretrained: the same of ``save_pretrained`` and ``from_pretrained``.
        loading: whether ``from_pretrained`` with a `qcut.QcutConfig` computes what `qcut.quantize` gives, bit by bit.
        generates: whether ``generate`` runs.
        engine: whether `qcut.Engine` serves it, with the tokens of greedy ``generate``.
        notes: why a claim did not hold, and why linear layers except a classifier stay in float.
    """

    kind: str
    model_class: str
    layers: int = 0
    percent_float: float = 100.0
    largest: str = ""
    cosines: dict[str, float] = field(default_factory=dict)
    saved: str = NONE
    pretrained: str = NONE
    loading: str = NONE
    generates: str = NONE
    engine: str = NONE
    notes: list[str] = field(default_factory=list)


def examine(model_class: str) -> Finding:
    """Quantize a small random model of a class of transformers under each scheme, and try what users do with it."""
    model: Any = tiny_model(model_class)
    _with_gain(model)
    found = Finding(model.config.model_type, model_class)
    batch = inputs_of(model)
    if batch is None:
        raise ValueError(f"{model_class}: no batch that is known here runs")
    _default_sizes(found, type(model))
    for scheme in SCHEMES:
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            _examine(found, model, batch, scheme, Path(folder))
    return found


def _with_gain(model: Any) -> None:
    """Draw weights as large as they get in training: with smaller ones, outputs come from what is not quantized."""
    layers, _ = linear_layers(model)
    for name, module in layers.items():
        if name.endswith(".q"):
            continue  # T5 scales its attention only by these weights
        weight = weight_of(module).detach()
        inputs = weight_nk(module).shape[1]
        weight.mul_(1 / (weight.std() * inputs**0.5).clamp_min(1e-3))


def _examine(found: Finding, model: Any, batch: dict[str, Any], scheme: str, folder: Path) -> None:
    changed: Any = copy.deepcopy(model)
    try:
        report = qcut.quantize(changed, scheme, progress=False)
    except QcutError as error:
        found.notes.append(f"{scheme}: {_line(error)}")
        return
    assert report.layers
    want, got = run(model, batch), run(changed, batch)
    found.cosines[scheme] = torch.nn.functional.cosine_similarity(
        want.double().flatten(), got.double().flatten(), dim=0
    ).item()

    def same(make: Callable[[], Any]) -> Callable[[], str | None]:
        return lambda: None if torch.equal(run(make().eval(), batch), got) else "the outputs differ"

    def saved() -> Any:
        qcut.save(changed, folder / "saved")
        return qcut.load(folder / "saved", progress=False)

    def pretrained() -> Any:
        changed.save_pretrained(folder / "pretrained")
        return type(model).from_pretrained(folder / "pretrained")

    def loading() -> Any:
        model.save_pretrained(folder / "float")
        return type(model).from_pretrained(folder / "float", quantization_config=qcut.QcutConfig(scheme))

    found.saved = _claim(found, found.saved, f"{scheme}, qcut.load", same(saved))
    found.pretrained = _claim(found, found.pretrained, f"{scheme}, from_pretrained", same(pretrained))
    found.loading = _claim(found, found.loading, f"{scheme}, QcutConfig", same(loading))
    if model.can_generate():
        found.generates = _claim(found, found.generates, f"{scheme}, generate", lambda: _generates(changed, batch))
    if not model.config.is_encoder_decoder and "input_ids" in batch and model.can_generate():
        try:
            engine = qcut.Engine(changed)
        except UnsupportedError:
            found.engine = NO
            return
        found.engine = _claim(found, found.engine, f"{scheme}, engine", lambda: _serves(engine, changed, batch))


def _generates(model: Any, batch: dict[str, Any]) -> str | None:
    made = _greedy(model, {name: value for name, value in batch.items() if isinstance(value, Tensor)})
    return None if made.shape[1] >= NEW_TOKENS and (made >= 0).all() else f"made {list(made.shape)}"


def _serves(engine: qcut.Engine, model: Any, batch: dict[str, Any]) -> str | None:
    for prompt in batch["input_ids"]:
        tokens = _greedy(model, {"input_ids": prompt[None]})[0, len(prompt) :].tolist()
        (served,) = engine.generate([prompt.tolist()], NEW_TOKENS)
        if served.tokens != tokens:
            return f"tokens {served.tokens}, generate's are {tokens}"
    return None


def _greedy(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    settings: Any = model.generation_config
    settings.eos_token_id, settings.pad_token_id = None, 1  # the engine has no end either
    if settings.decoder_start_token_id is None and model.config.is_encoder_decoder:
        settings.decoder_start_token_id = 1
    made: Tensor = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    return made


def _default_sizes(found: Finding, cls: Any) -> None:
    """Count what of a model of the usual size is quantized, and what stays in float, without its memory."""
    with torch.device("meta"):
        large: Any = cls(cls.config_class(**_USUAL.get(found.kind, {})))
    large.tie_weights()
    classifier = large.get_output_embeddings()
    with opened(large) as mixtures:
        work = [prepare(large, scheme, None, None, None, None, None, None, True, False, mixtures) for scheme in SCHEMES]
        kinds = count_parameters(large, {id(task.module) for task in work[0].tasks.values()})
    found.layers = len({mixtures.stack_of(name) or name for name in work[0].tasks})
    left = {
        name: reason
        for one in work
        for name, reason in stack_reasons(one.skipped, mixtures).items()
        if large.get_submodule(name) is not classifier and not name.endswith("lm_head")
    }
    found.notes += [f"left in float: {reason}" for reason in dict.fromkeys(left.values())]
    stays = {kind: count for kind, count in kinds.items() if kind != QUANTIZED}
    found.percent_float = 100 * sum(stays.values()) / sum(kinds.values())
    found.largest = max(stays, key=lambda kind: stays[kind])


def _claim(found: Finding, before: str, what: str, check: Callable[[], str | None]) -> str:
    """Whether a claim holds that held for the schemes before; a failure is noted."""
    try:
        problem = check()
    except Exception as error:  # of transformers too: a failure is a row of the table
        problem = _line(error)
    if problem is None:
        return YES if before == NONE else before
    found.notes.append(f"{what}: {problem}")
    return NO


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
