"""``qcut generate``: continues a prompt and writes only the text to standard output."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from qcut.cli.command import Answer, Command, UsageError
from qcut.cli.models import (
    KV_CACHE,
    QUANTIZING,
    SPECULATE,
    Quantizing,
    check_drafts,
    device_options,
    open_drafter,
    open_model,
    read_text,
)

if TYPE_CHECKING:
    from qcut.cli.runners import Runner
    from qcut.engine.sequence import Generated
    from qcut.text.constraint import Constraint

_DESCRIPTION = """\
Continues a prompt with the model's text, which goes to standard output token by token. Messages go to standard error.

MODEL is any causal language model of transformers, quantized or not: a folder of Hugging Face, of qcut or of the
turboquant-model package, a GGUF file, or a name on the hub. The engine runs GPT-2, GPT-NeoX, Llama, Mistral, Qwen2,
Qwen3, Gemma, Gemma 2, Gemma 3, Phi-3, Phi-4, OLMo 2, SmolLM3, Starcoder2, and the mixtures of experts Mixtral,
Qwen2-MoE, Qwen3-MoE, OLMoE, Granite-MoE, Ernie 4.5, Hunyuan and GPT-OSS; others run on transformers' own generate, with
a note on standard error.
--llama2c takes a checkpoint of llama2.c and its tokenizer instead; the model then runs in float32, and --steps counts
the tokens of the prompt too, as llama2.c does.
"""

FIELDS = {
    "model": "MODEL, or the file of --llama2c, as given",
    "prompt": "the prompt",
    "text": "the generated text",
    "prompt_tokens": "number of tokens of the prompt",
    "tokens": "ids of the new tokens",
    "reason": "why the text ends: stop at an EOS token or when its form is complete, length after --steps tokens, "
    "context if the model's context is full",
    "drafted_tokens": "drafted tokens that decode steps have verified",
    "accepted_tokens": "those that were right: so many of the new tokens took no step of their own",
    "runs_on": "qcut, its engine, or transformers",
    "device": "cpu or cuda:N",
}

_ARGUMENTS = """\
MODEL ?
    a folder with a model, a GGUF file, or a model's name on the hub
--llama2c FILE
    a checkpoint of llama2.c, in place of MODEL
--tokenizer FILE
    tokenizer of --llama2c
--prompt TEXT = ''
    text to continue (default: none, a new text begins)
--steps N: positive = 256
    add at most N tokens (default: 256)
sampling:
--temperature T: float = 0.0
    0 takes the most probable token; above 0 tokens are sampled, and higher values make improbable tokens more frequent;
    1 samples by the model's own probabilities (default: 0)
--top-k K: natural = 0
    sample only from the K most probable tokens; 0: from all (default: 0)
--top-p P: float = 1.0
    sample only from the fewest most probable tokens that together have probability P: 0.9 excludes the improbable
    tenth; 1: from all (default: 1)
--min-p P: float = 0.0
    sample only from tokens at least P times as probable as the most probable one (default: 0, all)
--repetition-penalty R: float
    divide positive logits of tokens in the prompt or the text by R, and multiply negative ones (default: the value in
    the model's generation_config.json, else 1)
--presence-penalty F: float = 0.0
    subtract F from the logits of generated tokens (default: 0)
--frequency-penalty F: float = 0.0
    subtract F times its count from the logit of each generated token (default: 0)
--seed S: natural = 0
    equal seeds give equal texts (default: 0)
form of the text:
| --json-schema FILE: Path
    choose only tokens with which the text becomes JSON of the JSON Schema in FILE; the text ends when it is complete
    (default: any text)
| --regex PATTERN
    the same for a regular expression that describes the whole text (default: any text)
"""

_NEXT_TEXT = 1
"""End token of llama2.c: the BOS token of the next text."""


COMMAND = Command(
    "generate",
    _ARGUMENTS + QUANTIZING + device_options(KV_CACHE + SPECULATE),
    help="continue a prompt",
    description=_DESCRIPTION,
    example='qcut generate models/gpt2-5m --prompt "The import statement" --steps 40\n'
    'qcut generate models/gpt2-5m --scheme codebook4 --prompt "Once" --temperature 0.8 --top-p 0.95',
    fields=FIELDS,
)


def run(arguments: argparse.Namespace) -> Answer:
    """Run the command."""
    sources = [arguments.model, arguments.llama2c]
    if sum(source is not None for source in sources) != 1 or (arguments.llama2c is None) != (
        arguments.tokenizer is None
    ):
        raise UsageError(arguments.parser, "name a MODEL, or --llama2c FILE with --tokenizer FILE")
    from qcut.errors import ConstraintError, shown
    from qcut.numerics.sampling import Sampling

    schema, given = arguments.json_schema, vars(arguments)
    form = f"--regex {shown(arguments.regex)}" if schema is None else f"--json-schema {schema}"
    try:
        constraint = _constraint(arguments, form)
        sampling = Sampling(**{field.name: given[field.name] for field in fields(Sampling) if field.name in given})
        continue_prompt: Any = _huggingface if arguments.llama2c is None else _llama2c
        check_drafts(arguments)
        return Answer(continue_prompt(arguments, sampling, Quantizing.of(arguments), constraint))
    except ConstraintError as error:
        raise ConstraintError(f"{form}: {error}") from error


def _constraint(arguments: argparse.Namespace, form: str) -> Constraint | None:
    """The form of the text, of which the option is ``form``."""
    from qcut.errors import ConfigError
    from qcut.text.constraint import Constraint

    schema, pattern = arguments.json_schema, arguments.regex
    if schema is None and pattern is None:
        return None
    if arguments.llama2c is not None:
        raise ConfigError(f"{form}: not with --llama2c")
    if schema is None:
        return Constraint.regex(pattern)
    return Constraint.json_schema(read_text(schema, "--json-schema"))


class _Output:
    """Standard output of generated text; with ``--json`` the text is only collected.

    The prompt waits for what follows it, since a failure before the first token writes nothing.
    """

    def __init__(self, silent: bool) -> None:
        self._silent = silent
        self._data: list[bytes] = []
        self._written = 0

    def __call__(self, text: str | bytes) -> None:
        self.hold(text)
        if not self._silent:
            sys.stdout.buffer.write(b"".join(self._data[self._written :]))
            sys.stdout.buffer.flush()
            self._written = len(self._data)

    def hold(self, text: str | bytes) -> None:
        """Write a text together with the next one."""
        self._data.append(text.encode("utf-8", "replace") if isinstance(text, str) else text)

    def text(self) -> str:
        """The text so far."""
        return b"".join(self._data).decode("utf-8", "replace")


def _huggingface(
    arguments: argparse.Namespace, sampling: Any, quantizing: Any, constraint: Constraint | None
) -> dict[str, Any]:
    from qcut.checkpoints.pretrained import token_ids
    from qcut.cli.runners import runner_for
    from qcut.errors import ConfigError, ContextError
    from qcut.text.detokenizer import Detokenizer

    model, tokenizer = open_model(arguments)
    ids = token_ids(tokenizer, arguments.prompt, "--prompt")
    if not ids:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else model.config.bos_token_id
        if start is None:
            raise ConfigError(f"{arguments.model} has no token for the start of a text; give it a --prompt")
        ids = [start]
    ends = getattr(model.generation_config, "eos_token_id", None)
    stop = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    quantizing.apply(model, tokenizer)
    speculate, context = open_drafter(arguments, model, tokenizer, None)
    named = None if constraint is None else tokenizer
    runner = runner_for(model, kv_cache=arguments.kv_cache, context=context, speculate=speculate, tokenizer=named)
    if runner.context is not None and len(ids) > runner.context:
        raise ContextError(f"the prompt has {len(ids)} tokens; the model's context is {runner.context}")
    write, added = _Output(arguments.json), _Output(True)
    write.hold(arguments.prompt)
    pieces = Detokenizer(tokenizer).incremental(ids)

    def show(token: int) -> None:
        piece = pieces.add(token)
        added(piece)
        write(piece)

    result = runner.generate(ids, arguments.steps, sampling, stop, show, constraint)
    rest = pieces.rest()
    added(rest)
    write(rest + "\n")
    return _fields(arguments, ids, added.text(), result, runner)


def _fields(
    arguments: argparse.Namespace, ids: Sequence[int], text: str, result: Generated, runner: Runner
) -> dict[str, Any]:
    """The answer's fields."""
    return {
        "model": arguments.model if arguments.llama2c is None else arguments.llama2c,
        "prompt": arguments.prompt,
        "text": text,
        "prompt_tokens": len(ids),
        "tokens": result.tokens,
        "reason": result.reason,
        "drafted_tokens": result.drafted_tokens,
        "accepted_tokens": result.accepted_tokens,
        "runs_on": runner.name,
        "device": str(runner.device),
    }


def _llama2c(arguments: argparse.Namespace, sampling: Any, quantizing: Any, constraint: None) -> dict[str, Any]:
    import torch

    from qcut.checkpoints.formats.llama2c.files import load_llama2c
    from qcut.checkpoints.formats.llama2c.tokenizer import Llama2cTokenizer
    from qcut.checkpoints.pretrained import device_of, dtype_for
    from qcut.cli.runners import runner_for
    from qcut.engine.sequence import Generated
    from qcut.errors import ConfigError

    if quantizing.text is not None:
        raise ConfigError("--calibrate: not with --llama2c")
    device = device_of(arguments.device)
    dtype = torch.float32 if arguments.dtype == "auto" else dtype_for(arguments.dtype, device)
    model = load_llama2c(arguments.llama2c, dtype=dtype, device=device)
    tokenizer = Llama2cTokenizer.from_file(arguments.tokenizer, model.config.vocab_size)
    ids = tokenizer.encode(arguments.prompt)
    quantizing.apply(model, tokenizer)
    if arguments.draft_model is not None:
        raise ConfigError(f"--draft-model {arguments.draft_model}: not with --llama2c")
    speculate, _ = open_drafter(arguments, model, None, None)
    runner = runner_for(model, kv_cache=arguments.kv_cache, speculate=speculate)
    write, added = _Output(arguments.json), _Output(True)
    previous = ids[0]
    for token in ids[1:]:
        write.hold(tokenizer.printed_piece(previous, token))
        previous = token
    steps = arguments.steps - (len(ids) - 1)
    result = Generated()
    if steps > 0:

        def show(token: int) -> None:
            nonlocal previous
            if token != _NEXT_TEXT:
                piece = tokenizer.printed_piece(previous, token)
                added(piece)
                write(piece)
            previous = token

        result = runner.generate(ids, steps, sampling, [_NEXT_TEXT], show)
    write("\n")
    return _fields(arguments, ids, added.text(), result, runner)
