"""``qcut eval``: perplexity of a model on a text."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from qcut.cli.arguments import positive
from qcut.cli.generate import add_model_options

_DESCRIPTION = """\
Computes the perplexity of a model on a text. The text is cut into windows that do not overlap; the model predicts each
token of a window from the tokens before it in the same window.

MODEL is a directory written by Hugging Face, qcut or the turboquant-model package, or the name of a model on the hub.
The model is a GPT-2, Llama, Mistral or Qwen2.
"""


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of ``qcut``."""
    parser = commands.add_parser(
        "eval",
        help="perplexity of a model on a text",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a directory, or a name on the hub")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="UTF-8 text")
    parser.add_argument("--window", type=positive, default=512, metavar="N", help="tokens in a window (default: 512)")
    parser.add_argument("--max-windows", type=positive, metavar="N", help="use only the first N windows (default: all)")
    parser.add_argument(
        "--batch", type=positive, default=8, metavar="N", help="windows computed at a time (default: 8)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_model_options(parser)
    parser.set_defaults(command=run)


_LARGEST_EXPONENT = 700.0
_MOST_BYTES = 1 << 30


def _read(path: Path) -> str:
    from qcut.errors import ConfigError

    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ConfigError(f"--text {path}: more than {_MOST_BYTES} bytes")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path}: {error}") from error


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    import torch

    import qcut
    from qcut.checkpoints.pretrained import device_of, dtype_for, load_pretrained, token_ids
    from qcut.engine.engine import Engine
    from qcut.models.evaluation import windows_of
    from qcut.process.progress import with_progress

    text = _read(arguments.text)
    device = device_of(arguments.device)
    bar = sys.stderr.isatty()
    model, tokenizer = load_pretrained(
        arguments.model, dtype=dtype_for(arguments.dtype, device), device=device, progress=bar
    )
    tokens = torch.tensor(token_ids(tokenizer, text, f"--text {arguments.text}"), dtype=torch.int64)
    windows = windows_of(tokens, arguments.window, arguments.max_windows)
    if arguments.scheme is not None:
        qcut.quantize(model, arguments.scheme, progress=bar)
    size = min(arguments.batch, len(windows))
    engine = Engine(model, batch=size, context=arguments.window, kv_cache=arguments.kv_cache)
    total = 0.0
    for batch in with_progress(windows.split(size), "perplexity", "batch", shown=bar):
        total += sum(float(scores.double().sum()) for scores in engine.score(batch))
    mean = total / (len(windows) * (arguments.window - 1))
    value = math.inf if mean > _LARGEST_EXPONENT else math.exp(mean)
    if arguments.json:
        result = {"model": arguments.model, "scheme": arguments.scheme, "kv_cache": arguments.kv_cache}
        result |= {"text": str(arguments.text), "windows": len(windows), "window": arguments.window}
        print(json.dumps({**result, "device": str(device), "perplexity": value}))
    else:
        print(f"perplexity {value:.4f} on {len(windows)} windows of {arguments.window} tokens ({device})")
    return 0
