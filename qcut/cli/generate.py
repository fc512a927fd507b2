"""``qcut generate``: text that a model continues, alone on standard output."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from qcut.cli.arguments import positive

_DESCRIPTION = """\
Continues a prompt and writes the text as it comes: alone on standard output, everything else on standard error.

MODEL is a directory of Hugging Face, of qcut or of the turboquant-model package, or a model's name on the hub: GPT-2 or
of Llama's shape. --llama2c takes a checkpoint of llama2.c instead, with its tokenizer; it runs in float32 and counts
steps as llama2.c does, those of the prompt included.
"""

_NEXT_TEXT = 1
"""The token that ends a text of llama2.c: the start of the next."""


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
    parser.add_argument("--prompt", default="", metavar="TEXT", help="what to continue (default: the start of a text)")
    parser.add_argument("--steps", type=positive, default=256, metavar="N", help="new tokens at most (default: 256)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest (default)")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="of the K likeliest; 0 for all (default)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="of the likeliest that make up P")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the draws (default: 0)")
    add_model_options(parser)
    parser.set_defaults(command=run)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options of every command that runs a model."""
    parser.add_argument("--scheme", metavar="NAME", help="quantize the model first: w8a8, codebook4, …")
    parser.add_argument("--kv-cache", choices=("auto", "int8"), default="auto", help="how keys and values are kept")
    parser.add_argument(
        "--device", default="auto", metavar="D", help="auto (a GPU where there is one), cpu or cuda[:N]"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float16", "bfloat16", "float32"),
        default="auto",
        help="of what is not quantized (default: float16 on a GPU, float32 on a CPU)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve the command; 2 for a wrong command line."""
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
    """An engine for one sequence on the model, quantized if asked for."""
    import qcut
    from qcut.engine.engine import Engine

    if arguments.scheme is not None:
        qcut.quantize(model, arguments.scheme, progress=sys.stderr.isatty())
    return Engine(model, kv_cache=arguments.kv_cache)


def _huggingface(arguments: argparse.Namespace, sampling: Any) -> None:
    from qcut.checkpoints.pretrained import device_of, dtype_for, load_pretrained
    from qcut.errors import ConfigError

    device = device_of(arguments.device)
    model, tokenizer = load_pretrained(arguments.model, dtype=dtype_for(arguments.dtype, device), device=device)
    ids = list(tokenizer(arguments.prompt)["input_ids"])
    if not ids:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else model.config.bos_token_id
        if start is None:
            raise ConfigError(f"{arguments.model} has no token for the start of a text; give it a --prompt")
        ids = [start]
    ends = getattr(model.generation_config, "eos_token_id", None)
    stop = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    engine = _prepare(model, arguments)
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
    """Text of tokens as they come, where one character may take several tokens.

    Args:
        decode: text of token ids.
        prompt: ids before the first piece, which decide on spaces; their text is not repeated.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: list[int]) -> None:
        self._decode, self._ids = decode, list(prompt)
        self._shown = len(decode(self._ids))

    def add(self, token: int) -> str:
        """The text that a token adds; none while its last character is incomplete."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith("\ufffd"):
            return ""
        return self._take(text)

    def rest(self) -> str:
        """The text left at the end, incomplete characters too."""
        return self._take(self._decode(self._ids))

    def _take(self, text: str) -> str:
        new, self._shown = text[self._shown :], len(text)
        return new
