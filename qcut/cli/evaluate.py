"""``qcut eval``: perplexity of a model on a text, and the divergence of its predictions from a reference's."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from qcut.cli.command import Answer, Command
from qcut.cli.models import (
    KV_CACHE,
    MODEL,
    QUANTIZING,
    Quantizing,
    cut_text,
    device_options,
    open_another,
    open_model,
    read_text,
    shown,
    window_options,
)
from qcut.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from qcut.cli.runners import Runner

_DESCRIPTION = """\
Measures the perplexity of a model on a text: the lower, the better; at 20 the model is as uncertain about each token as
about a choice among 20. The text is cut into windows without overlap; each token is predicted from the preceding tokens
of its window.

--reference compares the model with another one, such as the float model that it was made of, at each position of the
windows: the Kullback-Leibler divergence of the model's prediction from the reference's, in nats, as its mean and its
99.9 % quantile, and the share of the positions with the same most probable token. They show the loss by quantization on
much less text than perplexity does. With --scheme and the like only MODEL is quantized: --reference MODEL compares it
with itself as it is. The reference has float keys and values. One window at a time runs through both models.

MODEL is any causal language model of transformers, quantized or not: a folder of Hugging Face, of qcut or of the
turboquant-model package, a GGUF file, or a name on the hub. The engine runs GPT-2, GPT-NeoX, Llama, Mistral, Qwen2,
Qwen3, Gemma, Gemma 2, Gemma 3, Phi-3, Phi-4, OLMo 2, SmolLM3, Starcoder2, and the mixtures of experts Mixtral,
Qwen2-MoE, Qwen3-MoE, OLMoE, Granite-MoE, Ernie 4.5, Hunyuan and GPT-OSS; others run on transformers, with a note on
standard error.
"""

_COMPARED = {
    "reference_perplexity": "perplexity of the reference",
    "divergence": "mean over positions of the Kullback-Leibler divergence from the reference, in nats",
    "divergence_999": "its 99.9 % quantile",
    "same_top": "share of the positions with the reference's most probable token, 0 to 1",
    "positions": "number of positions: windows times window",
}
FIELDS = {
    "model": "MODEL as given",
    "scheme": "--scheme as given, or null",
    "plan": "--plan as given, or null",
    "bits": "--bits as given, or null",
    "kv_cache": "--kv-cache as given",
    "text": "path of the text",
    "windows, window": "number of windows and tokens per window",
    "device": "cpu or cuda:N",
    "runs_on": "qcut, its engine, or transformers",
    "perplexity": "the perplexity; null if not finite",
    "reference": "--reference as given, or null; then the following are null, too",
    **_COMPARED,
}


_ARGUMENTS = f"""\
{MODEL}\
--text FILE, required: Path
    the UTF-8 text to predict
--reference MODEL
    a model of the same tokenizer, to compare MODEL's predictions with (default: none)
"""
COMMAND = Command(
    "eval",
    _ARGUMENTS + window_options(8) + QUANTIZING + device_options(KV_CACHE),
    help="measure how well a model predicts a text",
    description=_DESCRIPTION,
    example="qcut eval models/gpt2-5m --text book.txt\n"
    "qcut eval models/gpt2-5m --text book.txt --scheme codebook4 --reference models/gpt2-5m --json",
    fields=FIELDS,
)


def run(arguments: argparse.Namespace) -> Answer:
    """Run the command."""
    from qcut.cli.runners import runner_for

    text = read_text(arguments.text, "--text")
    quantizing = Quantizing.of(arguments)
    model, tokenizer = open_model(arguments)
    windows, window = cut_text(
        model, tokenizer, text, f"--text {arguments.text}", arguments.window, arguments.max_windows
    )
    reference = None if arguments.reference is None else _reference(arguments, tokenizer, text, windows)
    quantizing.apply(model, tokenizer, window=window, batch=arguments.batch)
    size = min(arguments.batch, len(windows)) if reference is None else 1
    runner = runner_for(model, kv_cache=arguments.kv_cache, batch=size, context=window)
    if reference is None:
        found: dict[str, Any] = {"perplexity": runner.perplexity(windows, size, shown()), **dict.fromkeys(_COMPARED)}
    else:
        found = _compared(reference, runner, windows)
    data = {"model": arguments.model, "scheme": arguments.scheme, "plan": arguments.plan and str(arguments.plan)}
    data |= {"bits": arguments.bits, "kv_cache": arguments.kv_cache, "text": str(arguments.text)}
    data |= {"windows": len(windows), "window": window}
    data |= {"device": str(runner.device), "runs_on": runner.name, "reference": arguments.reference}
    line = f"perplexity {found['perplexity']:.4f} on {len(windows)} windows of {window} tokens ({runner.device})"
    if reference is not None:
        line += (
            f"\nreference: perplexity {found['reference_perplexity']:.4f}; divergence {found['divergence']:.4g}, its "
            f"99.9 % quantile {found['divergence_999']:.4g}; same top token {100 * found['same_top']:.2f} %"
        )
    return Answer(data | found, line)


def _reference(arguments: argparse.Namespace, tokenizer: Any, text: str, windows: Tensor) -> Runner:
    """The runner of ``--reference``.

    Raises:
        QcutError: see `open_another`.
        ConfigError: its context is shorter than a window, or its tokenizer cuts the text into other tokens.
    """
    from qcut.cli.runners import runner_for

    name, window = f"--reference {arguments.reference}", windows.shape[1]
    reference, words = open_another(arguments, "--reference", arguments.reference, tokenizer)
    try:
        found, _ = cut_text(reference, words, text, f"--text {arguments.text}", window, arguments.max_windows)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    if not found.equal(windows):
        raise ConfigError(f"{name}: its tokenizer cuts --text {arguments.text} into other tokens than that of MODEL")
    return runner_for(reference, context=window)


def _compared(reference: Runner, runner: Runner, windows: Tensor) -> dict[str, Any]:
    from qcut.common.progress import with_progress
    from qcut.models.evaluation import compare_logits

    bar = with_progress(windows.split(1), "divergence", "window", shown=shown())
    return asdict(compare_logits((ids, reference.logits(ids), runner.logits(ids)) for ids in bar))
