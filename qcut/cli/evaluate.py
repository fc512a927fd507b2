"""``qcut eval``: perplexity of a model on a text."""

from __future__ import annotations

import argparse

from qcut.cli.command import Answer, Command
from qcut.cli.models import (
    KV_CACHE,
    MODEL,
    QUANTIZING,
    Quantizing,
    cut_text,
    device_options,
    open_model,
    read_text,
    shown,
    window_options,
)

_DESCRIPTION = """\
Measures the perplexity of a model on a text: the lower, the better; at 20 the model is as uncertain about each token as
about a choice among 20. The text is cut into windows without overlap; each token is predicted from the preceding tokens
of its window.

MODEL is any causal language model of transformers, quantized or not: a folder of Hugging Face, of qcut or of the
turboquant-model package, or a name on the hub. The engine runs GPT-2, GPT-NeoX, Llama, Mistral, Qwen2, Qwen3, Gemma,
Gemma 2, Gemma 3, Phi-3, Phi-4, OLMo 2, SmolLM3, Starcoder2, and the mixtures of experts Mixtral, Qwen2-MoE, Qwen3-MoE,
OLMoE, Granite-MoE, Ernie 4.5, Hunyuan and GPT-OSS; others run on transformers, with a note on standard error.
"""

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
}


_ARGUMENTS = MODEL + "--text FILE, required: Path\n    the UTF-8 text to predict\n"
COMMAND = Command(
    "eval",
    _ARGUMENTS + window_options(8) + QUANTIZING + device_options(KV_CACHE),
    help="measure how well a model predicts a text",
    description=_DESCRIPTION,
    example="qcut eval models/gpt2-5m --text book.txt\n"
    "qcut eval models/gpt2-5m --text book.txt --scheme codebook4 --json",
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
    quantizing.apply(model, tokenizer, window=window, batch=arguments.batch)
    size = min(arguments.batch, len(windows))
    runner = runner_for(model, kv_cache=arguments.kv_cache, batch=size, context=window)
    value = runner.perplexity(windows, size, shown())
    data = {"model": arguments.model, "scheme": arguments.scheme, "plan": arguments.plan and str(arguments.plan)}
    data |= {"bits": arguments.bits, "kv_cache": arguments.kv_cache, "text": str(arguments.text)}
    data |= {"windows": len(windows), "window": window}
    data |= {"device": str(runner.device), "runs_on": runner.name, "perplexity": value}
    return Answer(data, f"perplexity {value:.4f} on {len(windows)} windows of {window} tokens ({runner.device})")
