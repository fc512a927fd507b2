"""``qcut generate``: continues a prompt and writes the text, and nothing else, to standard output."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from qcut.cli.arguments import positive

_DESCRIPTION = """\
Continues a prompt. The text goes to standard output token by token; messages go to standard error.

MODEL is a directory written by Hugging Face, qcut or the turboquant-model package, or the name of a model on the hub.
The model is a GPT-2, Llama, Mistral or Qwen2. --llama2c takes a llama2.c checkpoint and its tokenizer instead; the
model then runs in float32, and --steps counts the tokens of the prompt too, as llama2.c does.
"""

_NEXT_TEXT = 1
"""Token that ends a text of llama2.c: the token with which the next text starts."""


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of ``qcut``."""
    parser = commands.add_parser(
        "generate",
        help="continue a prompt",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a directory, or a name on the hub")
    parser.add_argument("--llama2c", metavar="FILE", help="a checkpoint of llama2.c")
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenizer of --llama2c")
    parser.add_argument(
        "--prompt", default="", metavar="TEXT", help="text to continue (default: none, a new text begins)"
    )
    parser.add_argument(
        "--steps", type=positive, default=256, metavar="N", help="at most this many new tokens (default: 256)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="divide logits by T and draw tokens at random; 0 always takes the likeliest token (default: 0)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="draw from the K likeliest tokens only; 0 draws from all (default: 0)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the smallest set of likeliest tokens whose probabilities sum to P or more (default: 1, all)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the random draws (default: 0)")
    add_model_options(parser)
    parser.set_defaults(command=run)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every command which runs a model has."""
    parser.add_argument(
        "--scheme", metavar="NAME", help="quantize the model first, with w8a8, codebook4, … (default: no)"
    )
    parser.add_argument(
        "--kv-cache",
        choices=("auto", "int8"),
        default="auto",
        help="type of cached keys and values: auto keeps the model's own, int8 quantizes (default: auto)",
    )
    parser.add_argument(
        "--device", default="auto", metavar="D", help="auto (a GPU where there is one), cpu or cuda[:N]"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float16", "bfloat16", "float32"),
        default="auto",
        help="type of activations and of weights that are not quantized (default: float16 on a GPU, float32 on a CPU)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit status, 2 for a wrong command line."""
    sources = [arguments.model, arguments.llama2c]
    if sum(source is not None for source in sources) != 1 or (arguments.llama2c is None) != (
        arguments.tokenizer is None
    ):
        print("qcut generate: name a MODEL, or --llama2c FILE with --tokenizer FILE", file=sys.stderr)
        return 2
    from qcut.numerics.sampling import Sampling

    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
    if arguments.llama2c is not None:
        _llama2c(arguments, sampling)
    else:
        _huggingface(arguments, sampling)
    return 0


def _write(text: str | bytes) -> None:
    if isinstance(text, str):
        text = text.encode("utf-8", "replace")
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()


def _prepare(model: Any, arguments: argparse.Namespace) -> Any:
    """An engine for one sequence, on the model quantized as ``--scheme`` says."""
    import qcut
    from qcut.engine.engine import Engine

    if arguments.scheme is not None:
        qcut.quantize(model, arguments.scheme, progress=sys.stderr.isatty())
    return Engine(model, kv_cache=arguments.kv_cache)


def _huggingface(arguments: argparse.Namespace, sampling: Any) -> None:
    from qcut.checkpoints.pretrained import device_of, dtype_for, load_pretrained, token_ids
    from qcut.errors import ConfigError, ContextError

    device = device_of(arguments.device)
    model, tokenizer = load_pretrained(arguments.model, dtype=dtype_for(arguments.dtype, device), device=device)
    ids = token_ids(tokenizer, arguments.prompt, "--prompt")
    if not ids:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else model.config.bos_token_id
        if start is None:
            raise ConfigError(f"{arguments.model} has no token for the start of a text; give it a --prompt")
        ids = [start]
    ends = getattr(model.generation_config, "eos_token_id", None)
    stop = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    engine = _prepare(model, arguments)
    if len(ids) > engine.context:  # before the prompt is printed
        raise ContextError(f"the prompt has {len(ids)} tokens; the model's context is {engine.context}")
    _write(arguments.prompt)
    pieces = TextPieces(lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True), ids)
    engine.generate(
        [ids], arguments.steps, sampling=sampling, stop=stop, on_token=lambda _, token: _write(pieces.add(token))
    )
    _write(pieces.rest() + "\n")


def _llama2c(arguments: argparse.Namespace, sampling: Any) -> None:
    import torch

    from qcut.checkpoints.llama2c.files import load_llama2c
    from qcut.checkpoints.llama2c.tokenizer import Llama2cTokenizer
    from qcut.checkpoints.pretrained import device_of, dtype_for

    device = device_of(arguments.device)
    dtype = torch.float32 if arguments.dtype == "auto" else dtype_for(arguments.dtype, device)
    model = load_llama2c(arguments.llama2c, dtype=dtype, device=device)
    tokenizer = Llama2cTokenizer.from_file(arguments.tokenizer, model.config.vocab_size)
    ids = tokenizer.encode(arguments.prompt)
    engine = _prepare(model, arguments)
    previous = ids[0]
    for token in ids[1:]:
        _write(tokenizer.printed_piece(previous, token))
        previous = token
    steps = arguments.steps - (len(ids) - 1)
    if steps > 0:

        def show(_: int, token: int) -> None:
            nonlocal previous
            if token != _NEXT_TEXT:
                _write(tokenizer.printed_piece(previous, token))
            previous = token

        engine.generate([ids], steps, sampling=sampling, stop=[_NEXT_TEXT], on_token=show)
    _write("\n")


class TextPieces:
    """Turns tokens into text one by one, and holds text back while a character of several tokens is incomplete.

    Args:
        decode: returns the text of token ids.
        prompt: ids before the first new token. They decide whether a space comes first; their text is left out.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: list[int]) -> None:
        self._decode, self._ids = decode, list(prompt)
        self._shown = len(decode(self._ids))

    def add(self, token: int) -> str:
        """The text that a token adds; empty while the last character is incomplete."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith("\ufffd"):
            return ""
        return self._take(text)

    def rest(self) -> str:
        """The text held back so far, incomplete characters included."""
        return self._take(self._decode(self._ids))

    def _take(self, text: str) -> str:
        new, self._shown = text[self._shown :], len(text)
        return new
