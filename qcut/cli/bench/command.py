"""``qcut bench``: speed, memory and loss of schemes on this machine."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from qcut.cli.command import Answer, Command, positive
from qcut.cli.models import MODEL, device_options, read_text, shown
from qcut.errors import ConfigError
from qcut.schemes import Scheme, parse_scheme

if TYPE_CHECKING:
    import torch

    from qcut.cli.bench.measuring import Measured
    from qcut.cli.bench.report import Recommendation, Row

_DESCRIPTION = """\
Measures a model in float and under several schemes on this machine, and recommends one: time to the first token,
tokens per second, memory, and perplexity on a text. Takes a few minutes on a GPU, most of them for building kernels
that the cache lacks; no speed includes them.

One model is in memory at a time: for each scheme it is loaded anew and quantized while it loads. A scheme that fails is
a row with the reason. qcut's engine runs the architectures of `qcut generate`, transformers all others; the output says
which did. A MODEL that is quantized already is the only row.

The rule: of the schemes with which perplexity rises by at most --budget, the one with the most tokens per second at the
smallest of --batches; if several are within 2 % of that, the one with the least weights. On a CPU speeds are those of
the reference, which checks results and says nothing about a GPU: there it is the scheme with the least weights; if
several are within 2 % of that, the one with the least perplexity.
"""

DEFAULT_SCHEMES = "w8a16,w8a8,codebook4,codebook4_int8"
DEFAULT_BATCHES = (1, 8)

_ARGUMENTS = f"""\
{MODEL}\
--schemes NAMES
    schemes to measure next to the float model, separated by commas (default: {DEFAULT_SCHEMES})
--text FILE: Path
    UTF-8 text for perplexity and prompts (default: the Python language reference, which comes with Python)
--budget LOSS: float = 0.01
    allowed loss, as a fraction: 0.01 lets perplexity rise by 1 %% (default: 0.01)
--prompt-tokens N: positive
    tokens of a prompt (default: 512 on a GPU, 32 on a CPU, or what the model's context leaves)
--new N: positive
    tokens that continue a prompt, at least 2 (default: 128 on a GPU, 8 on a CPU, or a quarter of the model's context)
--batches NUMBERS: batches
    numbers of sequences that are continued at once, separated by commas (default: 1,8)
--window N: positive
    cut the text into windows of N tokens (default: 512, or the model's context if shorter)
--max-windows N: positive
    use only the first N windows of the text (default: 40 on a GPU, 4 on a CPU)
"""

FIELDS = {
    "model": "MODEL as given",
    "device, gpu": "cpu or cuda:N; name of the GPU, or null",
    "dtype": "dtype of the float model",
    "text": "path of the text; null for the Python language reference",
    "windows, window": "number of windows and tokens per window",
    "prompt_tokens, new_tokens": "tokens of a prompt, and of its continuation",
    "budget": "--budget as given",
    "rows": "list of {scheme, error, runs_on, first_token_ms, tokens_per_s, weight_bytes, peak_bytes, perplexity, "
    "change, load_s, warm_up_s}, the model as it is first; error is empty if the row was measured, tokens_per_s has "
    "the rates after the first token by number of sequences, peak_bytes is null on a CPU, change is relative to "
    "reference, warm_up_s is the time of first calls, which build kernels",
    "reference": "scheme of the row that change is relative to: the first, or without a finite perplexity the row with "
    "the least one; null if there is none",
    "recommendation": "{scheme, by, prompts, batches, text}: by is speed, or memory on a CPU; prompts and batches have "
    "the fastest schemes for the first token and by number of sequences; null without a reference, and if MODEL is "
    "quantized itself",
}


def batches(text: str) -> tuple[int, ...]:
    """Numbers from 1 up, separated by commas, each once."""
    return tuple(sorted({positive(each.strip()) for each in text.split(",")}))


COMMAND = Command(
    "bench",
    _ARGUMENTS + device_options(),
    {"batches": batches},
    help="measure schemes on this machine and recommend one",
    description=_DESCRIPTION,
    example="qcut bench models/gpt2-5m\n"
    "qcut bench models/gpt2-5m --schemes w8a8,codebook4_pairs --text book.txt --batches 1,4 --json",
    fields=FIELDS,
)


def run(arguments: argparse.Namespace) -> Answer:
    """Run the command."""
    budget = arguments.budget
    if not 0 <= budget < math.inf:
        raise ConfigError(f"--budget {budget}; allowed: 0 and more")
    if arguments.new == 1:
        raise ConfigError("--new 1; allowed: 2 and more, since speed is that of the tokens after the first")
    schemes = _schemes(DEFAULT_SCHEMES if arguments.schemes is None else arguments.schemes)
    text = None if arguments.text is None else read_text(arguments.text, "--text")
    from qcut.checkpoints.pretrained import device_of, dtype_for
    from qcut.cli.bench.measuring import Request, measure_schemes
    from qcut.cli.bench.report import compared, recommend
    from qcut.models.evaluation import language_reference

    device = device_of(arguments.device)
    dtype = dtype_for(arguments.dtype, device)
    request = Request(
        arguments.model,
        device,
        dtype,
        arguments.batches or DEFAULT_BATCHES,
        language_reference() if text is None else text,
        "the built-in text" if text is None else f"--text {arguments.text}",
        arguments.prompt_tokens,
        arguments.new,
        arguments.window,
        arguments.max_windows,
    )
    measured = measure_schemes(request, schemes, only_float=arguments.schemes is not None, progress=shown())
    rows, reference = compared(measured.rows)
    found = None if measured.stored else recommend(rows, reference, budget, by_speed=device.type == "cuda")
    amounts, gpu = measured.amounts, _gpu(device)
    data = {
        "model": arguments.model,
        "device": str(measured.device),
        "gpu": gpu,
        "dtype": str(dtype).removeprefix("torch."),
    }
    data |= {"text": arguments.text and str(arguments.text)}
    data |= {"windows": len(measured.windows), "window": measured.windows.shape[1]}
    data |= {"prompt_tokens": amounts.prompt, "new_tokens": amounts.new, "budget": budget}
    data |= {"rows": [asdict(row) for row in rows], "reference": reference}
    data |= {"recommendation": None if found is None else asdict(found)}
    return Answer(data, _text(data, measured, rows, found))


def _schemes(names: str) -> list[Scheme]:
    """The schemes of ``--schemes``, each once.

    Raises:
        ConfigError: a scheme does not exist, leaves layers in float, or needs calibrated ranges.
    """
    found: dict[str, Scheme] = {}
    for name in names.split(","):
        scheme = parse_scheme(name.strip())
        if scheme.is_float:
            raise ConfigError(f"--schemes {scheme.name}: the float model is measured in any case; name quantized ones")
        if scheme.needs_range:
            raise ConfigError(
                f"--schemes {scheme.name}: its ranges come from a text; allowed: schemes without, or as MODEL the "
                f"folder of `qcut quantize --scheme {scheme.name} --calibrate TEXT`"
            )
        found[scheme.name] = scheme
    return list(found.values())


def _gpu(device: torch.device) -> str | None:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def _text(data: dict[str, Any], measured: Measured, rows: list[Row], found: Recommendation | None) -> str:
    """The table, what its columns mean, and the recommendation."""
    from qcut.cli.bench.report import table, wrapped

    reference, on_gpu, amounts = data["reference"], data["gpu"] is not None, measured.amounts
    where = f"{data['gpu']} ({data['device']})" if on_gpu else "the CPU"
    notes = [
        f"1st ms: milliseconds to the first token of a prompt of {amounts.prompt} tokens; tok/s xB: tokens a second "
        f"of B sequences together, {amounts.new - 1} of each after its first; medians of {amounts.rounds} repetitions"
    ]
    if on_gpu:
        notes.append(
            "model MB: weights; peak MB: with KV cache and all else while prompts are read and continued; build s: "
            "first calls, which build kernels"
        )
    else:
        notes[0] += " or fewer. They are speeds of the CPU reference and do not speak for a GPU"
    if any(not math.isfinite(rate) for row in rows for rate in row.tokens_per_s.values()):
        notes.append("-: repetitions differed by more than the tokens after the first take; other work disturbs them")
    text = data["text"] or "the Python language reference"
    several = "" if data["windows"] == 1 else "s"
    notes.append(f"perplexity: on {data['windows']} window{several} of {data['window']} tokens of {text}")
    if len(rows) > 1 and reference:
        notes[-1] += f"; change: relative to {reference}"
    lines = [*wrapped(f"{data['model']} in {data['dtype']} on {where}, {_runs_on(rows, measured.why)}"), ""]
    lines += [table(rows, reference), "", *(line for note in notes for line in wrapped(note, "  ")), ""]
    if measured.stored:
        advice = "the model is quantized already: no other scheme was measured; the float model has a choice"
    elif found is None:
        advice = "no recommendation: no perplexity is a finite number; --dtype bfloat16 or float32 may help"
    else:
        advice = f"recommended: {found.text}"
    for line in advice.splitlines():
        lines += wrapped(line, "  ")
    return "\n".join(lines)


def _runs_on(rows: list[Row], why: str) -> str:
    """What runs the model, and why if it is not the engine."""
    by_runner: dict[str, list[str]] = {}
    for row in rows:
        if not row.error:
            by_runner.setdefault(row.runs_on, []).append(row.scheme)
    if list(by_runner) == ["qcut"]:
        return "run by qcut's engine"
    which = "" if len(by_runner) == 1 else f" ({', '.join(by_runner['transformers'])})"
    return f"run by transformers{which}, since the engine does not support the model: {why}"
