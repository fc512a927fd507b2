"""``qcut plan``: measures which layers tolerate which scheme, and writes a plan and a page about it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from qcut.cli.answer import Answer
from qcut.cli.arguments import add_command, add_data_options, add_making_options
from qcut.config import parse_scheme
from qcut.errors import ConfigError

_DESCRIPTION = """\
Chooses a scheme for each layer, so that the model loses no more quality than you allow and is as fast, or as small, as
it can be. Writes a file for `qcut quantize --plan`, which may be edited, and with --report a page that shows how each
layer bears each scheme and what the budget bought. The layers are tried on a text: take one like that which the model
will read, and not the one that you will evaluate on.
"""

_CANDIDATES = "w8a8_static w8a8 w8a16 fp16"

FIELDS = {
    "model": "MODEL as given",
    "out, report": "paths of the files that were written; report is null without --report",
    "schemes": "number of layers by scheme",
    "cost": "sum of the layers' costs, in the unit of the plan's objective: µs for time, bytes for memory",
    "plan": "what the file holds: {budget, metric, objective, predicted, measured, start, tokens, layers}, "
    "see qcut.Plan",
}


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of ``qcut``."""
    parser = add_command(
        commands,
        "plan",
        help="choose a scheme for each layer within a budget of quality",
        description=_DESCRIPTION,
        example="qcut plan models/gpt2-5m --calibrate book.txt --budget 0.01 --out plan.json --report plan.html\n"
        "qcut quantize models/gpt2-5m --plan plan.json --out gpt2-mixed",
        fields=FIELDS,
    )
    add_data_options(parser, "trying the layers on", "lm_head", required=True)
    parser.add_argument(
        "--budget",
        type=float,
        default=0.003,
        metavar="LOSS",
        help="the loss allowed, as a fraction: 0.01 lets perplexity rise by 1 %% (default: 0.003)",
    )
    parser.add_argument(
        "--objective",
        choices=("time", "memory"),
        default="time",
        help="make the model as fast or as small as the budget lets (default: time)",
    )
    parser.add_argument(
        "--candidates",
        nargs="+",
        default=_CANDIDATES.split(),
        metavar="NAME",
        help=f"schemes to choose from; fp16 leaves a layer in float (default: {_CANDIDATES})",
    )
    parser.add_argument(
        "--measure",
        choices=("model", "layer"),
        default="model",
        help="how a layer's sensitivity is measured: by running the whole model with that layer quantized, or, much "
        "quicker, by the error of the layer's own output (default: model)",
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
    from qcut.storage.files import write_text

    check_file(arguments.out, "--out", arguments.overwrite)
    if arguments.report is not None:
        check_file(arguments.report, "--report", arguments.overwrite)
        if arguments.report.resolve() == arguments.out.resolve():
            raise ConfigError(f"--report {arguments.report}: the same file as --out")
    schemes = [parse_scheme(name) for name in arguments.candidates]
    text = read_text(arguments.calibrate, "--calibrate")
    import qcut

    model, tokenizer = open_model(arguments)
    windows, _ = cut_text(
        model, tokenizer, text, f"--calibrate {arguments.calibrate}", arguments.window, arguments.max_windows
    )
    chosen = qcut.plan(
        model,
        windows.split(arguments.batch),
        budget=arguments.budget,
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
    data |= {"schemes": chosen.counts, "cost": chosen.cost, "plan": chosen.to_json()}
    written = " and ".join(filter(None, (str(arguments.out), report)))
    return Answer(data, f"{chosen}\nwritten: {written}")
