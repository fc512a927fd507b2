"""``qcut plan``: measures which layers tolerate which scheme, and writes a plan and a page about it."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterable
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from qcut.cli.command import Answer, Command
from qcut.cli.models import (
    FIT_MEMORY,
    check_inputs,
    conversion_options,
    cut_text,
    data_options,
    device_options,
    fit_bytes,
    open_model,
    read_text,
    shown,
    window_options,
)
from qcut.errors import ConfigError
from qcut.schemes import parse_scheme

if TYPE_CHECKING:
    from qcut.conversion.planning.plan import LayerPlan, Plan

_DESCRIPTION = """\
Chooses a scheme for each layer: the fastest or smallest model with a loss of quality within --budget, or the model
with the least loss within --bits per weight or --step-us of time. Writes a file for `qcut quantize --plan`, which may
be edited, and with --report a page with the sensitivity of each layer to each scheme and the loss at other budgets. The
sensitivities are measured on a text: use a text like the model's inputs, and another one for evaluation.

--bits is an average over all stored weights, including norms and scales. --step-us is the time of one token's linear
layers, estimated for --gpu; no GPU is needed.
"""

_CANDIDATES = (
    "w8a8_static w8a8 w8a8_rotated w8a16 fp16; with --bits or --step-us codebook2 codebook3 codebook4 codebook4+4 w8a16"
)

_FIT_WINDOWS = 128
"""Windows for fitting codebooks, which gain from more windows than sensitivities do."""

_ARGUMENTS = f"""\
{data_options("measuring sensitivities", "lm_head", ", required")}\
| --budget LOSS: float
    allowed loss, as a fraction: 0.01 lets perplexity rise by 1 %% (default: 0.003)
| --bits B: positive_float
    allowed average of bits per weight, norms and scales included: codebook4 has 4.125 (default: no limit)
| --step-us US: positive_float
    allowed microseconds for one token's linear layers (default: no limit)
--gpu NAME
    GPU for the estimate of --step-us: a name such as 'NVIDIA L40S', or an architecture such as sm_90a (default:
    NVIDIA H200)
--objective time|memory
    with --budget: minimize time or memory (default: time)
--candidates NAME ...
    schemes to choose from; fp16 leaves a layer in float (default: {_CANDIDATES})
--measure model|gradient|layer = model
    how sensitivities are measured: by running the whole model with one layer quantized, or, much faster, by the error
    of the layer's output, weighted by gradients of one backward pass or unweighted (default: model)
--fit
    fit codebooks to the first {_FIT_WINDOWS} windows of the text; then give `qcut quantize` --fit and the text as well
{FIT_MEMORY}\
--apart
    with --bits or --step-us: allow different schemes for q, k and v, or gate and up, which the engine then computes
    separately (default: one scheme)
{conversion_options("FILE", "the plan to write, as JSON", window_options(4, 8))}{device_options()}\
--report FILE.html: Path
    also write a page about the plan (default: none)
"""

FIELDS = {
    "model": "MODEL as given",
    "out, report": "paths of the files that were written; report is null without --report",
    "schemes": "number of layers by scheme",
    "cost": "sum of the layers' costs, in the unit of the plan's objective: µs for time and step, bytes for memory and "
    "stored",
    "bits_per_weight": "of all layers, norms and scales included; null unless the objective is stored",
    "plan": "contents of the file: {budget, limit, metric, objective, predicted, gap, measured, start, tokens, curve, "
    "uniform, siblings, fitted, layers}, see qcut.Plan",
}


COMMAND = Command(
    "plan",
    _ARGUMENTS,
    help="choose a scheme for each layer within a budget of quality, bits or time",
    description=_DESCRIPTION,
    example="qcut plan models/gpt2-5m --calibrate book.txt --budget 0.01 --out plan.json --report plan.html\n"
    "qcut quantize models/gpt2-5m --plan plan.json --out gpt2-mixed\n"
    "qcut plan models/gpt2-5m --calibrate book.txt --bits 3.5 --fit --out plan.json --report plan.html",
    fields=FIELDS,
)


def run(arguments: argparse.Namespace) -> Answer:
    """Run the command."""
    from qcut.common.files import replacing

    _check_file(arguments, "--out", arguments.out)
    if arguments.report is not None:
        _check_file(arguments, "--report", arguments.report)
        if arguments.report.resolve() == arguments.out.resolve():
            raise ConfigError(f"--report {arguments.report}: the same file as --out")
    schemes = None if arguments.candidates is None else [parse_scheme(name) for name in arguments.candidates]
    if arguments.gpu is not None and arguments.step_us is None:
        raise ConfigError("--gpu needs --step-us, the estimate that it is for")
    most_bytes = fit_bytes(arguments)
    text = read_text(arguments.calibrate, "--calibrate")
    import qcut
    from qcut.conversion.planning.costs import StepCost

    model, tokenizer = open_model(arguments)
    most = max(arguments.max_windows, _FIT_WINDOWS) if arguments.fit else arguments.max_windows
    windows, _ = cut_text(model, tokenizer, text, f"--calibrate {arguments.calibrate}", arguments.window, most)
    batches = windows[: arguments.max_windows].split(arguments.batch)
    moments = None
    if arguments.fit:
        moments = qcut.collect_curvature(model, windows.split(arguments.batch), most_bytes=most_bytes, progress=shown())
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
    if arguments.report is None:
        chosen.save(arguments.out)
    else:
        page = plan_page(chosen, arguments.model).encode()
        try:
            with replacing(arguments.report) as (file,):
                file.write(page)
                file.flush()
                chosen.save(arguments.out)  # both files or none
        except OSError as error:
            raise ConfigError(f"--report {arguments.report}: cannot be written: {error.strerror or error}") from error
    report = None if arguments.report is None else str(arguments.report)
    data = {"model": arguments.model, "out": str(arguments.out), "report": report}
    bits = chosen.bits_of(chosen.cost) if chosen.objective == "stored" else None
    data |= {"schemes": chosen.counts, "cost": chosen.cost, "bits_per_weight": bits, "plan": chosen.to_json()}
    written = " and ".join(filter(None, (str(arguments.out), report)))
    return Answer(data, f"{chosen}\nwritten: {written}")


def _check_file(arguments: argparse.Namespace, option: str, path: Path) -> None:
    """Check that a file may be written.

    Args:
        arguments: parsed command line.
        option: option with the path, for messages.
        path: path of the file.

    Raises:
        ConfigError: the file exists, is no file, or is read; or its folder is missing or not writable.
    """
    if path.is_dir():
        raise ConfigError(f"{option} {path}: there is a folder of that name")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{option} {path}: no permission to write to the folder {path.parent}")
    if (path.exists() or path.is_symlink()) and not path.is_file():
        raise ConfigError(f"{option} {path}: there is something that is no file; it is not replaced")
    check_inputs(arguments, option, path)
    if path.exists() and not arguments.overwrite:
        raise ConfigError(f"{option} {path}: the file exists already; --overwrite replaces it")


# ── the page: one HTML file that needs no other, for a screen of any size, light or dark ────────────

LEVELS = 9
"""Colours of the heat map; the last is for schemes that break the model."""

_HUE = 22
_CELL, _ROW, _LETTER = 92, 24, 7.2
_MOST_LETTERS = 56
_BAR_WIDTH, _BAR_ROW = 320, 50
_UNITS = {"time": "µs", "step": "µs a step, estimated", "memory": "bytes", "stored": "bytes"}
_CURVE = 560, 300


def plan_page(plan: Plan, model: str) -> str:
    """The page as HTML.

    Args:
        plan: a plan of `qcut.plan`, edited or without measurements too.
        model: name of the model. It and all layers' names are escaped.
    """
    schemes = _schemes(plan)
    page = Template(resources.files("qcut.cli").joinpath("plan.html").read_text(encoding="utf-8"))
    return page.substitute(
        title=escape(f"A plan for {model}"),
        subtitle=escape(f"{len(plan.layers)} layers: " + _counts(plan)),
        light=_colours(dark=False),
        dark=_colours(dark=True),
        levels="\n".join(
            f".h{i} {{ fill: var(--h{i}); }} .h{i} + text {{ fill: var(--t{i}); }} "
            f"td.h{i} {{ background: var(--h{i}); color: var(--t{i}); }}"
            for i in range(LEVELS)
        ),
        facts="\n".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in _facts(plan)),
        bought=escape(_bought(plan)),
        bars=_bars(plan),
        curve=_curve(plan),
        explained=escape(_explained(plan)),
        heat=_heat(plan, schemes),
        columns="".join(f'<th scope="col"><button>{escape(name)}</button></th>' for name in _columns(plan, schemes)),
        rows="\n".join(_row(name, layer, schemes, plan) for name, layer in plan.layers.items()),
    )


def _schemes(plan: Plan) -> list[str]:
    """The measured or chosen schemes, in the order of the plan."""
    found: dict[str, None] = {}
    for layer in plan.layers.values():
        found |= dict.fromkeys((*layer.sensitivity, layer.scheme))
    return list(found)


def _counts(plan: Plan) -> str:
    return ", ".join(f"{count} {scheme}" for scheme, count in sorted(plan.counts.items()))


def _facts(plan: Plan) -> list[tuple[str, str]]:
    facts = [] if plan.budget is None else [("loss allowed", _percent(plan.budget))]
    if plan.limit is not None:
        facts.append(("cost allowed", _cost(plan.limit, plan)))
    facts.append(("loss measured", _percent(plan.measured)))
    if plan.predicted is not None:
        facts.append(("sum of the layers' own losses", _percent(plan.predicted)))
    if plan.predicted is not None and plan.gap is not None:
        facts.append(("least such sum within this cost", _percent(plan.predicted - plan.gap)))
    facts.append(("loss with every layer on its cheapest scheme", _percent(plan.start)))
    if plan.cost and plan.objective == "stored":
        facts += [("bits a weight, norms and scales counted", f"{plan.bits_of(plan.cost):.3f}")]
        facts += [("bytes of these weights in a file", _bytes(plan.cost))]
    elif plan.cost:
        facts.append((f"cost (modelled {plan.objective})", _cost(plan.cost, plan)))
    return [*facts, ("tokens measured on", f"{plan.tokens:,}")]


def _bought(plan: Plan) -> str:
    moved = sum(bool(layer.reason) for layer in plan.layers.values())
    loss = "the relative increase of perplexity" if plan.metric == "perplexity" else "the relative error of the output"
    if not moved:
        text = "Every layer has its cheapest scheme: all of them together stay within the budget."
    else:
        layers = "1 layer has" if moved == 1 else f"{moved} layers have"
        text = f"{layers} a dearer scheme than the cheapest, and all others the cheapest."
    parted = len(plan.parted)
    if parted:
        text += (
            f" {parted} sets of layers that read the same input have several schemes; the engine computes such a set "
            "by several products in place of one."
        )
    return f"{text} The loss is {loss}."


def _explained(plan: Plan) -> str:
    what = (
        "the loss of the model with only that layer quantized"
        if plan.predicted is not None
        else "the error of the layer's own output on the text"
    )
    return (
        f"A cell is {what}; the darker on a light page, or the brighter on a dark one, the worse, by powers of ten. "
        "A frame and a tick are what the plan has."
    )


def _percent(value: float) -> str:
    if not math.isfinite(value):
        return "∞"
    percent = 100 * value
    size = abs(percent)
    if size == 0:
        return "0 %"
    if size < 1e-4:
        return "< 0.0001 %"
    digits = max(0, 2 - math.floor(math.log10(size)))
    return f"{percent:,.{min(digits, 5)}f} %"


def _cost(value: float, plan: Plan) -> str:
    if plan.objective == "memory":
        return _bytes(value)
    if plan.objective == "stored":
        return f"{plan.bits_of(value):.3f} bits"
    return f"{value:,.2f} {_UNITS.get(plan.objective, '')}".rstrip()


def _bytes(value: float) -> str:
    return f"{value / 1e6:,.2f} MB"


# ── bars: cheapest scheme for all layers, the plan, most expensive scheme for all layers ────────────────────


def _bars(plan: Plan) -> str:
    """Bars of costs, the plan's divided by scheme; counts of layers if costs are unknown."""
    layers = plan.layers.values()
    rows: list[tuple[str, list[tuple[str, float]], str]] = []
    if all(layer.cost for layer in layers) and plan.cost:
        by_scheme: dict[str, float] = {}
        for layer in layers:
            by_scheme[layer.scheme] = by_scheme.get(layer.scheme, 0.0) + layer.cost.get(layer.scheme, 0.0)
        cheapest = sum(min(layer.cost.values()) for layer in layers)
        dearest = sum(max(layer.cost.values()) for layer in layers)
        rows = [
            ("cheapest schemes", [("", cheapest)], _cost(cheapest, plan)),
            ("this plan", sorted(by_scheme.items()), _cost(plan.cost, plan)),
            ("dearest schemes", [("", dearest)], _cost(dearest, plan)),
        ]
    rows.append(("layers", [(s, float(n)) for s, n in sorted(plan.counts.items())], f"{len(plan.layers)}"))
    lines = []
    most = max((sum(value for _, value in parts) for _, parts, _ in rows[:-1]), default=0.0)
    for i, (name, parts, text) in enumerate(rows):
        total = most if i < len(rows) - 1 else float(len(plan.layers))
        lines += _bar(f"{name}: {text}", parts, total, i * _BAR_ROW)
    return _svg(_BAR_WIDTH, len(rows) * _BAR_ROW, "costs and numbers of layers by scheme", lines)


def _bar(name: str, parts: list[tuple[str, float]], total: float, top: int) -> list[str]:
    """A line of text and a bar of parts, labelled if the labels fit."""
    lines = [f'<text class="number" x="0" y="{top + 13}">{escape(name)}</text>']
    left = 0.0
    for i, (scheme, value) in enumerate(parts):
        size = _BAR_WIDTH * value / total if total else 0.0
        tip = f"{scheme}: {value:,.0f}" if scheme else name
        shown = escape(scheme) if size > _LETTER * len(scheme) + 8 else ""
        lines.append(
            f'<g><title>{escape(tip)}</title><rect class="h{2 + 2 * (i % 3)}" x="{left:.1f}" y="{top + 18}" '
            f'width="{max(size - 1, 0.5):.1f}" height="22"/><text x="{left + 5:.1f}" y="{top + 33}">{shown}</text></g>'
        )
        left += size
    return lines


# ── curve: loss by budget ────────────────────────────────────────────────────────


def _curve(plan: Plan) -> str:
    """The section with the plot of loss by cost; empty for a plan without measurements."""
    from qcut.conversion.planning.plan import Point

    line = [point for point in plan.curve if 0 < point.loss < math.inf]
    dots = [point for point in plan.uniform if 0 < point.loss < math.inf]
    if len(line) < 2 or plan.cost <= 0:
        return ""
    here = [Point("this plan", plan.cost, plan.measured)] if 0 < plan.measured < math.inf else []
    across = _Axis((p.cost for p in (*line, *dots, *here)), _CURVE[0], 78, 16, log=False)
    up = _Axis((p.loss for p in (*line, *dots, *here)), -_CURVE[1], -40, -16, log=True)
    top = _CURVE[1]
    lines = []
    bit = plan.weights / 8 if plan.objective == "stored" else 1.0
    for value in across.ticks(lambda cost: f"{cost / bit:,.4g}", bit):
        x = across(value[0])
        lines.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="16" y2="{top - 40}"/>')
        lines.append(f'<text class="soft" x="{x:.1f}" y="{top - 22}" text-anchor="middle">{escape(value[1])}</text>')
    for value in up.ticks(_percent):
        y = top + up(value[0])
        lines.append(f'<line class="grid" x1="78" x2="{_CURVE[0] - 16}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text class="soft" x="72" y="{y + 4:.1f}" text-anchor="end">{escape(value[1])}</text>')
    path = " ".join(f"{across(p.cost):.1f},{top + up(p.loss):.1f}" for p in line)
    lines.append(
        f'<polyline class="curve" points="{path}"><title>predicted: the least for each cost</title></polyline>'
    )
    for point in (*dots, *here):
        x, y = across(point.cost), top + up(point.loss)
        text = escape(f"{point.scheme}: {_cost(point.cost, plan)}, measured {_percent(point.loss)}")
        kind, end = ("plan", "end") if point in here else ("uniform", "end" if x > _CURVE[0] / 2 else "start")
        shift = 9 if end == "start" else -9
        below = point in here or dots.index(point) % 2 > 0
        lines.append(
            f'<g><title>{text}</title><circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
            f'<text x="{x + shift:.1f}" y="{y + (17 if below else -8):.1f}" text-anchor="{end}">'
            f"{escape(_short(point.scheme, 18))}</text></g>"
        )
    unit = "bits a weight" if plan.objective == "stored" else _UNITS.get(plan.objective, "cost")
    lines.append(f'<text x="{_CURVE[0] // 2}" y="{top - 4}" text-anchor="middle">{escape(unit)}</text>')
    text = (
        "The line is predicted: for each cost, the least that the layers' own losses add up to. Dots are measured: "
        "one scheme for all layers, and this plan."
    )
    plot = _svg(*_CURVE, "loss against cost", lines)
    return f'<h2>What more or less would buy</h2>\n<p>{escape(text)}</p>\n<div class="wide">{plot}</div>'


class _Axis:
    """Maps values to positions between two margins.

    Args:
        values: positive values that are shown.
        length: length of the plot; negative for a vertical axis.
        first: position of the least value.
        last: distance of the greatest value from the other end.
        log: whether the axis is logarithmic.
    """

    def __init__(self, values: Iterable[float], length: int, first: int, last: int, log: bool) -> None:
        self._log = log
        scaled = [math.log10(value) if log else value for value in values]
        self._low, self._high = min(scaled), max(scaled)
        if log:  # whole powers of ten
            self._low, self._high = math.floor(self._low), math.ceil(self._high)
        self._first, self._room = first, length - first - last

    def __call__(self, value: float) -> float:
        scaled = math.log10(value) if self._log else value
        return self._first + self._room * (scaled - self._low) / max(self._high - self._low, 1e-12)

    def ticks(self, text: Callable[[float], str], unit: float = 1.0) -> list[tuple[float, str]]:
        """Ticks and labels of an axis: powers of ten, or round numbers of a unit."""
        if self._log:
            marks = [10.0**power for power in range(int(self._low), int(self._high) + 1)]
        else:
            low, high = self._low / unit, self._high / unit
            power = 10 ** math.floor(math.log10(max(high - low, 1e-9)))
            step = next(s for s in (0.2 * power, 0.5 * power, power, 2 * power) if (high - low) / s <= 7)
            marks = [i * step * unit for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
        return [(mark, text(mark)) for mark in marks]


# ── the heat map ────────────────────────────────────────────────────────────────────────────────────


def _heat(plan: Plan, schemes: list[str]) -> str:
    level = _scale(plan)
    longest = max((min(len(name), _MOST_LETTERS) for name in plan.layers), default=0)
    left = int(longest * _LETTER) + 12
    lines = [
        f'<text x="{left + i * _CELL + _CELL // 2}" y="14" text-anchor="middle">{escape(_short(scheme, 12))}'
        f"<title>{escape(scheme)}</title></text>"
        for i, scheme in enumerate(schemes)
    ]
    for j, (name, layer) in enumerate(plan.layers.items()):
        top = 22 + j * _ROW
        lines.append(
            f'<text x="0" y="{top + 16}">{escape(_short(name, _MOST_LETTERS))}<title>{escape(name)}</title></text>'
        )
        for i, scheme in enumerate(schemes):
            lines.append(_heat_cell(name, layer, scheme, left + i * _CELL, top, level))
    return _svg(left + len(schemes) * _CELL + 2, 24 + len(plan.layers) * _ROW, "sensitivity by layer and scheme", lines)


def _heat_cell(name: str, layer: LayerPlan, scheme: str, x: int, y: int, level: _Scale) -> str:
    chosen = layer.scheme == scheme
    value = _sensitivity(layer, scheme)
    middle = f'x="{x + _CELL // 2}" y="{y + 16}" text-anchor="middle"'
    if value is None:
        body = f'<text class="soft" {middle}>{"✓ " if chosen else ""}–</text>'
    else:
        body = (
            f'<rect class="h{level(value)}" x="{x + 1}" y="{y + 1}" width="{_CELL - 2}" height="{_ROW - 2}"/>'
            f'<text class="number" {middle}>{"✓ " if chosen else ""}{_percent(value)}</text>'
        )
    frame = f'<rect class="chosen" x="{x + 2}" y="{y + 2}" width="{_CELL - 4}" height="{_ROW - 4}"/>' if chosen else ""
    text = "not tried" if value is None else _percent(value)
    return f"<g><title>{escape(f'{name}, {scheme}: {text}')}</title>{body}{frame}</g>"


def _sensitivity(layer: LayerPlan, scheme: str) -> float | None:
    """The loss under a scheme; None if not measured, 0 for float."""
    if scheme in layer.sensitivity:
        return layer.sensitivity[scheme]
    return 0.0 if layer.sensitivity and parse_scheme(scheme).is_float else None


class _Scale:
    """Levels of sensitivities by powers of ten between the least and the greatest.

    Args:
        values: sensitivities that are shown.
    """

    def __init__(self, values: Iterable[float]) -> None:
        logs = [math.log10(value) for value in values if 0 < value < math.inf]
        self._low, self._high = (min(logs), max(logs)) if logs else (0.0, 0.0)

    def __call__(self, value: float) -> int:
        if not math.isfinite(value):
            return LEVELS - 1
        if value <= 0:
            return 0
        share = (math.log10(value) - self._low) / max(self._high - self._low, 1e-9)
        return 1 + min(LEVELS - 3, max(0, int(share * (LEVELS - 2))))


def _scale(plan: Plan) -> _Scale:
    return _Scale(value for layer in plan.layers.values() for value in layer.sensitivity.values())


def _short(name: str, most: int) -> str:
    """A name cut to its last letters, which identify the layer."""
    return name if len(name) <= most else f"…{name[1 - most :]}"


def _svg(width: int, height: int, what: str, lines: list[str]) -> str:
    head = f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" aria-label="{what}">'
    return "\n".join([head, *lines, "</svg>"])


def _colours(dark: bool) -> str:
    """Custom properties of fill and text of each level."""
    lines = []
    for i in range(LEVELS):
        light = 16 + 6.5 * i if dark else 95 - 7.5 * i
        text = "#15171a" if (light > 48) else "#fff"
        lines.append(f"    --h{i}: hsl({_HUE} {40 + 5 * i}% {light:g}%); --t{i}: {text};")
    return "\n".join(lines)


# ── the table ───────────────────────────────────────────────────────────────────────────────────────


def _columns(plan: Plan, schemes: list[str]) -> list[str]:
    reason = ["why it is not on the cheapest"] if _has_reasons(plan) else []
    return ["layer", "scheme", "N", "K", _UNITS.get(plan.objective, "cost"), *schemes, *reason]


def _has_reasons(plan: Plan) -> bool:
    return any(layer.reason for layer in plan.layers.values())


def _row(name: str, layer: LayerPlan, schemes: list[str], plan: Plan) -> str:
    level, cost = _scale(plan), layer.cost.get(layer.scheme)
    cells = [
        _data(layer.scheme, layer.scheme, "text"),
        _data(str(layer.out_features), str(layer.out_features)),
        _data(str(layer.in_features), str(layer.in_features)),
        _data("-1" if cost is None else repr(cost), "–" if cost is None else f"{cost:,.2f}".removesuffix(".00")),
    ]
    for scheme in schemes:
        value = _sensitivity(layer, scheme)
        if value is None:
            cells.append(_data("-1", "–"))
        else:
            mark = " best" if scheme == layer.scheme else ""
            number = repr(value) if math.isfinite(value) else "Infinity"
            cells.append(_data(number, _percent(value), f"h{level(value)}{mark}"))
    if _has_reasons(plan):
        cells.append(_data(layer.reason, layer.reason, "reason"))
    return f'<tr><th scope="row" data-value="{escape(name)}">{escape(name)}</th>{"".join(cells)}</tr>'


def _data(value: str, text: str, kind: str = "") -> str:
    return f'<td{f" class={chr(34)}{kind}{chr(34)}" if kind else ""} data-value="{escape(value)}">{escape(text)}</td>'
