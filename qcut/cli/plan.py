"""``qcut plan``: measures which layers tolerate which scheme, and writes a plan and a page about it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from qcut.cli.answer import Answer
from qcut.cli.arguments import add_command, add_data_options, add_making_options, positive_float
from qcut.errors import ConfigError
from qcut.schemes import parse_scheme

_DESCRIPTION = """\
Chooses a scheme for each layer: so that the model loses no more quality than --budget allows and is as fast, or as
small, as it can be, or so that it loses the least within --bits a weight or --step-us of time. Writes a file for `qcut
quantize --plan`, which may be edited, and with --report a page that shows how each layer bears each scheme, what the
budget bought, and what more or less would buy. The layers are tried on a text: take one like that which the model will
read, and not the one that you will evaluate on.

--bits is an average over all weights, as a file holds them, norms and scales counted. --step-us is the time of one
token's linear layers, estimated for --gpu; no GPU is needed.
"""

_CANDIDATES = "w8a8_static w8a8 w8a16 fp16; with --bits or --step-us codebook2 codebook3 codebook4 codebook4+4 w8a16"

_FIT_WINDOWS = 128
"""Windows of the text that codebooks are fitted to: as many as gain by it, while few do to try layers on."""

FIELDS = {
    "model": "MODEL as given",
    "out, report": "paths of the files that were written; report is null without --report",
    "schemes": "number of layers by scheme",
    "cost": "sum of the layers' costs, in the unit of the plan's objective: µs for time and step, bytes for memory and "
    "stored",
    "bits_per_weight": "of all layers, norms and scales counted; null where the objective is another than stored",
    "plan": "what the file holds: {budget, limit, metric, objective, predicted, gap, measured, start, tokens, curve, "
    "uniform, siblings, fitted, layers}, see qcut.Plan",
}


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of ``qcut``."""
    parser = add_command(
        commands,
        "plan",
        help="choose a scheme for each layer within a budget of quality, bits or time",
        description=_DESCRIPTION,
        example="qcut plan models/gpt2-5m --calibrate book.txt --budget 0.01 --out plan.json --report plan.html\n"
        "qcut quantize models/gpt2-5m --plan plan.json --out gpt2-mixed\n"
        "qcut plan models/gpt2-5m --calibrate book.txt --bits 3.5 --fit --out plan.json --report plan.html",
        fields=FIELDS,
    )
    add_data_options(parser, "trying the layers on", "lm_head", required=True)
    limits = parser.add_mutually_exclusive_group()
    limits.add_argument(
        "--budget",
        type=float,
        metavar="LOSS",
        help="the loss allowed, as a fraction: 0.01 lets perplexity rise by 1 %% (default: 0.003)",
    )
    limits.add_argument(
        "--bits",
        type=positive_float,
        metavar="B",
        help="bits a weight allowed on average, norms and scales counted: codebook4 has 4.125 (default: no limit)",
    )
    limits.add_argument(
        "--step-us",
        type=positive_float,
        metavar="US",
        help="microseconds allowed for one token's linear layers (default: no limit)",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="the GPU that --step-us is estimated for: a name such as 'NVIDIA L40S', or an architecture such as sm_90a "
        "(default: NVIDIA H200)",
    )
    parser.add_argument(
        "--objective",
        choices=("time", "memory"),
        help="with --budget: make the model as fast or as small as it lets (default: time)",
    )
    parser.add_argument(
        "--candidates",
        nargs="+",
        metavar="NAME",
        help=f"schemes to choose from; fp16 leaves a layer in float (default: {_CANDIDATES})",
    )
    parser.add_argument(
        "--measure",
        choices=("model", "gradient", "layer"),
        default="model",
        help="how a layer's sensitivity is measured: by running the whole model with that layer quantized, or, much "
        "quicker, by the error of the layer's own output, weighted by gradients of one backward pass or not at all "
        "(default: model)",
    )
    parser.add_argument(
        "--fit",
        action="store_true",
        help=f"fit codebooks to the first {_FIT_WINDOWS} windows of the text; then give `qcut quantize` --fit and the "
        "text, too",
    )
    parser.add_argument(
        "--apart",
        action="store_true",
        help="with --bits or --step-us: let q, k and v, or gate and up, have different schemes, which the engine then "
        "computes by several products (default: one scheme)",
    )
    dtype = "float16 on a GPU, float32 on a CPU"
    add_making_options(parser, "FILE", "the plan to write, as JSON", most=8, batch=4, dtype=dtype)
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="also write a page about it (default: none)")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> Answer:
    """Run the command."""
    from qcut.cli.out_folder import check_file
    from qcut.cli.plan_page import plan_page
    from qcut.cli.quantizing import cut_text, open_model, read_text, shown
    from qcut.common.files import write_text

    check_file(arguments.out, "--out", arguments.overwrite)
    if arguments.report is not None:
        check_file(arguments.report, "--report", arguments.overwrite)
        if arguments.report.resolve() == arguments.out.resolve():
            raise ConfigError(f"--report {arguments.report}: the same file as --out")
    schemes = None if arguments.candidates is None else [parse_scheme(name) for name in arguments.candidates]
    if arguments.gpu is not None and arguments.step_us is None:
        raise ConfigError("--gpu goes with --step-us, whose estimate it is for")
    text = read_text(arguments.calibrate, "--calibrate")
    import qcut
    from qcut.conversion.planning.costs import StepCost

    model, tokenizer = open_model(arguments)
    most = max(arguments.max_windows, _FIT_WINDOWS) if arguments.fit else arguments.max_windows
    windows, _ = cut_text(model, tokenizer, text, f"--calibrate {arguments.calibrate}", arguments.window, most)
    batches = windows[: arguments.max_windows].split(arguments.batch)
    moments = None
    if arguments.fit:
        moments = qcut.collect_curvature(model, windows.split(arguments.batch), progress=shown())
    chosen = qcut.plan(
        model,
        batches,
        budget=arguments.budget,
        bits=arguments.bits,
        step_us=arguments.step_us,
        cost=None if arguments.gpu is None else StepCost(arguments.gpu),
        together=False if arguments.apart else None,
        second_moments=moments,
        objective=arguments.objective,
        candidates=schemes,
        measure=arguments.measure,
        include=arguments.include,
        **({} if arguments.skip is None else {"skip": arguments.skip}),
        progress=shown(),
    )
    chosen.save(arguments.out)
    if arguments.report is not None:
        try:
            write_text(arguments.report, plan_page(chosen, arguments.model))
        except OSError as error:
            raise ConfigError(f"--report {arguments.report}: cannot be written: {error.strerror or error}") from error
    report = None if arguments.report is None else str(arguments.report)
    data = {"model": arguments.model, "out": str(arguments.out), "report": report}
    bits = chosen.bits_of(chosen.cost) if chosen.objective == "stored" else None
    data |= {"schemes": chosen.counts, "cost": chosen.cost, "bits_per_weight": bits, "plan": chosen.to_json()}
    written = " and ".join(filter(None, (str(arguments.out), report)))
    return Answer(data, f"{chosen}\nwritten: {written}")
