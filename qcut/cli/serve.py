"""``qcut serve``: OpenAI's interface to a model, over `qcut.Scheduler`."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcut.cli.command import Answer, Command
from qcut.cli.models import (
    KV_CACHE,
    MODEL,
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
    from qcut.engine.scheduler import Scheduler

_DESCRIPTION = """\
Serves a model over HTTP with OpenAI's interface: /v1/completions, /v1/chat/completions and /v1/responses, all with
streaming, and /v1/models; /docs lists all endpoints, /health is a health check, /metrics has metrics for Prometheus,
and / is a page to chat with the model.

MODEL is a causal language model of an architecture that qcut's engine supports (see `qcut generate`). It runs on one
GPU, or on the CPU. Ctrl-C or SIGTERM ends the server after running requests have finished; a second one ends it at
once.
"""

FIELDS = {
    "model": "MODEL, as given",
    "address": "URL of the server",
    "finished": "whether all running requests finished before the server ended",
    "prompt_tokens": "tokens of all prompts",
    "new_tokens": "generated tokens",
}

KEY = "QCUT_API_KEY"
"""Environment variable with the API key."""

_ARGUMENTS = f"""\
{MODEL}\
access:
--host H = 127.0.0.1
    address to listen on; 0.0.0.0 for all addresses (default: 127.0.0.1, only this machine)
--port N: natural = 8000
    port; 0 for a free one (default: 8000)
--served-name NAME
    name of the model in requests and responses (default: MODEL as given)
--any-model
    accept any model name in requests (default: refuse other names)
--strict
    refuse unknown fields of requests (default: ignore them and log each once)
--api-key KEY
    API key that clients must send; command lines are visible to other users of this machine, --api-key-file and ${KEY}
    are not (default: none)
--api-key-file FILE: Path
    file with the key (default: none)
--allow-host NAME, again
    host name, in addition to localhost, that clients on this machine may use, such as a proxy's; may be repeated
    (default: none)
--allow-origin URL, again
    allow browser pages of another origin; may be repeated (default: none)
--chat-template FILE: Path
    Jinja chat template (default: the tokenizer's)
--tool-parser auto|hermes|llama3|mistral|harmony|none = auto
    how calls of tools are found in answers: auto takes the form that the chat template has, none leaves them in the
    text (default: auto)
--reasoning-parser auto|think|mistral|harmony|none = auto
    how reasoning is found in answers: auto takes the form that the chat template has, none leaves it in the text
    (default: auto)
limits:
--batch N: positive = 16
    most sequences decoded at once (default: 16)
--context N: positive
    most tokens of a sequence, prompt included (default: the model's context, up to 4096)
--chunk N: positive = 512
    tokens per chunk of chunked prefill between two decode steps (default: 512)
--prefixes N: natural = 8
    sequences in the prefix cache; new prompts with the same prefix reuse their keys and values; each takes the memory
    of a running sequence (default: 8)
--max-waiting N: positive = 1024
    most waiting prompts; further ones get 503 (default: 1024)
--max-tokens N: positive
    most new tokens of a sequence, whatever the request sets (default: up to the context)
--max-body N: positive = 2097152
    most bytes of a request (default: 2097152)
--grace S: positive_float
    seconds for running requests after Ctrl-C (default: unlimited)
logging:
--log-level debug|info|warning|error = info
    info logs one line per request, warning one per refused request, error neither (default: info)
"""


COMMAND = Command(
    "serve",
    _ARGUMENTS + QUANTIZING + device_options(KV_CACHE + SPECULATE),
    help="serve a model over HTTP",
    description=_DESCRIPTION,
    example="qcut serve models/gpt2-5m --scheme w8a8\n"
    "qcut serve folder --scheme codebook4 --batch 64 --context 8192 --kv-cache int8 --host 0.0.0.0",
    fields=FIELDS,
)


def run(arguments: argparse.Namespace) -> Answer:
    """Run the command."""
    try:
        from qcut.server import running
        from qcut.server.application import Settings, application
        from qcut.server.guards import is_loopback
        from qcut.server.limits.connections import ConnectionLimits
        from qcut.server.metrics import Metrics
    except ModuleNotFoundError as error:
        from qcut.common.versions import install
        from qcut.errors import UnsupportedError

        raise UnsupportedError(f"{error.name} is not installed: {install('serve')}") from error

    settings = Settings(
        name=arguments.served_name or arguments.model,
        key=_key(arguments),
        hosts=tuple(arguments.allow_host),
        origins=tuple(arguments.allow_origin),
        most_body=arguments.max_body,
        most_tokens=arguments.max_tokens,
        most_prompts=arguments.max_waiting,
        any_model=arguments.any_model,
        strict=arguments.strict,
        tool_parser=arguments.tool_parser,
        reasoning_parser=arguments.reasoning_parser,
    )
    with (
        _logging(arguments.log_level),
        running.listening(arguments.host, arguments.port) as found,
    ):  # before loading the model, since the port may be in use
        scheduler = _scheduler(arguments)
        _say(_several(arguments))
        where = running.address(found)
        found.listen(running.BACKLOG)  # before printing the address, which clients may use at once
        _say(_ready(scheduler, settings.name, where))
        if not is_loopback(found.getsockname()[0]) and settings.key is None:
            _say(f"anyone who can reach this address is served; set ${KEY} to require an API key")
        metrics = Metrics(scheduler)
        limits = ConnectionLimits(connections=2 * (arguments.max_waiting + arguments.batch))
        app = application(scheduler, settings, metrics)
        server = running.server(app, metrics, grace_s=arguments.grace, limits=limits)
        finished = running.run(server, scheduler, found)
    load = scheduler.load
    _say(f"served {load.new_tokens:,} tokens, and read {load.prompt_tokens:,}")
    fields = {
        "model": arguments.model,
        "address": where,
        "finished": finished,
        "prompt_tokens": load.prompt_tokens,
        "new_tokens": load.new_tokens,
    }
    return Answer(fields, status=0 if finished else 1)


def _key(arguments: argparse.Namespace) -> str | None:
    """The API key: from the command line, a file or the environment."""
    from qcut.errors import ConfigError

    if arguments.api_key is not None and arguments.api_key_file is not None:
        raise ConfigError("--api-key and --api-key-file are both given; allowed: one of them")
    if arguments.api_key is not None:
        return str(arguments.api_key)
    if arguments.api_key_file is not None:
        return read_text(arguments.api_key_file, "--api-key-file").rstrip("\r\n")
    return os.environ.get(KEY)


@contextmanager
def _logging(level: str) -> Iterator[None]:
    """Log qcut's loggers with timestamps to standard error."""
    log, handler = logging.getLogger("qcut"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = log.level
    log.addHandler(handler)
    log.setLevel(level.upper())
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def _scheduler(arguments: argparse.Namespace) -> Scheduler:
    """The scheduler over the model of the command line."""
    from qcut.engine.engine import Engine
    from qcut.engine.scheduler import Scheduler

    check_drafts(arguments)
    quantizing = Quantizing.of(arguments)
    template = None if arguments.chat_template is None else read_text(arguments.chat_template, "--chat-template")
    model, tokenizer = open_model(arguments)
    if template is not None:
        tokenizer.chat_template = template
        _check_template(tokenizer, arguments.chat_template)
    quantizing.apply(model, tokenizer)
    speculate, context = open_drafter(arguments, model, tokenizer, arguments.context)
    engine = Engine(
        model,
        tokenizer=tokenizer,
        batch=arguments.batch,
        context=context,
        kv_cache=arguments.kv_cache,
        speculate=speculate,
    )
    scheduler = Scheduler(
        engine, chunk=arguments.chunk, prefix_cache=arguments.prefixes, max_waiting=arguments.max_waiting
    )
    if engine.decoder.device.type == "cuda":
        _say("building kernels that the cache lacks, and warming up")
        scheduler.warm_up()
    return scheduler


def _check_template(tokenizer: Any, file: Path) -> None:
    """Check that a tokenizer's chat template renders the simplest chat.

    Raises:
        ConfigError: it does not, so that no chat could be answered.
    """
    from qcut.errors import ConfigError, QcutError
    from qcut.numerics.sampling import MAX_VOCABULARY
    from qcut.text.prompts import chat_ids

    try:
        chat_ids(tokenizer, [{"role": "user", "content": "A"}], MAX_VOCABULARY)
    except QcutError as error:
        found = f"found {error}" if tokenizer.chat_template else "found an empty file"
        raise ConfigError(f"--chat-template {file}: {found}; allowed: a Jinja template for chats") from error


def _several(arguments: argparse.Namespace) -> str:
    """Advice for serving on several GPUs."""
    scheme = f" --quantization qcut-{arguments.scheme}" if arguments.scheme else ""
    return (
        "one GPU, or the processor, serves here; more than one: "
        f"vllm serve {arguments.model}{scheme} --tensor-parallel-size N (docs/serving.md)"
    )


def _ready(scheduler: Scheduler, name: str, where: str) -> str:
    engine = scheduler.engine
    return (
        f"{where} serves {name} on {engine.decoder.device}: {engine.batch} sequences of {engine.context} tokens, "
        f"{scheduler.cache_bytes / 2**20:,.0f} MiB of keys and values"
    )


def _say(text: str) -> None:
    """Print a line and flush."""
    print(text, flush=True)
