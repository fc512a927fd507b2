"""Random models of one's own, written as source, quantized and held to the float model.

``python -m tests.fuzz --models 2000`` makes as many. A case is right where the quantized model computes the float
model's result to what its scheme costs, refused where qcut raises an error of its own, and silent where it computes
something else and nothing says so.
"""

from __future__ import annotations

import collections
import contextlib
import linecache
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import qcut
from qcut.errors import QcutError, QuantizationError

WIDTH = 32
ROWS = 8
SCHEMES = ("int16x8", "w8a16", "int16x8", "codebook4+4")
MOST = 0.1
"""Relative difference that the schemes stay below in models of this size; faults are of 20 % and more."""
EXACT = 1e-4
"""The same of the float model after smoothing."""

GOOD = ("right", "refused", "raised")
BAD = ("silent", "alarm", "foreign")
"""raised: the quantized model's forward raises. alarm: ``verify`` refuses what is right. foreign: not qcut's error."""

PREAMBLE = "from tests.fuzz.own_classes import *\n\n"

LINEARS = (
    *["nn.Linear(W, W)"] * 12,
    *("nn.Linear(W, W, bias=False)", "LibraryConv1D(W, W)", "Conv1D(W, W)", "Linear(W, W)", "Plain(W, W)"),
    *("Called(W, W)", "Named(W, W)", "nn.utils.parametrizations.weight_norm(nn.Linear(W, W))"),
)
ACTIVATIONS = (
    *["nn.ReLU()", "nn.SiLU()", "nn.GELU()", "nn.GELU(approximate='tanh')"] * 2,
    *("nn.ReLU(inplace=True)", "ReLU()", "GELU()", "SiLU()", "Shifted()", "PytorchGELUTanh()", "nn.Tanh()"),
    *("nn.Identity()", "nn.Dropout(0.5)", "LibraryGELUTanh()", "nn.SiLU(inplace=True)"),
)
SEQUENTIALS = (*["nn.Sequential"] * 6, "Residual", "Tripled", "Built", "Twice")

QUESTIONS = (
    "isinstance(self.a, nn.Linear)",
    "type(self.a) is nn.Linear",
    "self.a.__class__ == nn.Linear",
    "type(self.a).__name__ == 'Linear'",
    "self.a._get_name() in ('Linear', 'Plain')",
    "is_plain(self.a)",
    "issubclass(type(self.b), (nn.Linear, nn.Conv2d))",
    "any(isinstance(m, nn.Linear) for m in self.net)",
    "count(self) > 3",
    "isinstance(self.a.weight, nn.Parameter)",
    "hasattr(self.a, 'qweight')",
    "hasattr(self.items[0], 'gain')",
    "isinstance(self.a, nn.Module)",
    "self.a.weight.dtype == torch.float32",
    "self.a.bias is not None",
    "hasattr(self.b, 'weight')",
    "isinstance(x, torch.Tensor)",
)

STATEMENTS = (
    "x = self.net(x)",
    "x = x + self.net(x)",
    "h = self.net[0](x); x = apply_all(list(self.net)[1:], h) + h",
    "x = apply_all(self.net, x)",
    "x = self.net[:2](x) + x",
    "x = self.net[1:](self.net[:1](x)) - self.net[0](x)",
    "x = functools.reduce(lambda h, m: m(h), self.net, x)",
    "x = self.net._modules[list(self.net._modules)[0]](x) + self.net(x)",
    "x = next(self.net.children())(x) + self.net(x)",
    "x = getattr(self, 'net')[0](x)",
    "for m in self.net: x = x + m(x)",
    "for i, m in enumerate(reversed(self.net)): x = m(x) + i",
    "net = self.net; x = net[-1](x) + net(x)",
    "x = self.act(self.a(x))",
    "h = self.a(x); x = self.act(h) + h",
    "h = self.a(x); y = self.act(h.clone()); x = self.b(y) + h",
    "x = F.relu(self.a(x)) + F.gelu(self.b(x))",
    "x = self.b(F.silu(self.a(x)))",
    "x = self.a(self.norm(x))",
    "h = self.norm(x); x = self.a(h) + self.b(h)",
    "h = self.norm(x); x = self.a(h) + h",
    "x = self.a(self.norm(x)) if flag else self.b(self.norm(x))",
    "h = self.norm(x); x = self.items[0](h) if flag else self.items[1](h)",
    "h = self.norm(x); x = self.a(h)\n        if flag: x = x + h",
    "x = self.items[int(flag)](self.norm(x))",
    "x = x + self.norm(x)",
    "x = self.items[0](x) + self.items[-1](x)",
    "for m in self.items: x = x + self.act(m(x))",
    "for i, m in enumerate(self.items[1:]): x = m(x) * (i + 1)",
    "x = self.table['p'](x) + x",
    "for key, m in self.table.items(): x = m(x) + len(key)",
    "x = self.mlp(x)",
    "if flag: x = self.b(x)",
    "x = self.a(x) if self.training else self.a(x) * 2",
    "x = F.linear(x, self.a.weight, self.a.bias) if hasattr(self.a, 'in_features') else self.a(x)",
    "x = self.plain[0](x) + x",
    "x = self.helper.run(x)",
    "x = self.body(self, x)",
    "x = self.partial(x) + x",
    "x = self.a(x).to(self.a.weight.dtype) * self.a.weight.shape[0] / W",
    "x = x * gain_of(self.a)",
    "x = x * factor(self.b)",
    "x = x * TABLE.get(type(self.a), 1.0)",
    "x = x * getattr(self.b, 'gain', 1.0)",
    "x = self.a(x) + sum(p.mean() for p in self.b.parameters())",
    "y = x\n        match self.a:\n            case nn.Linear(): x = x * 3\n            case _: x = x",
    "x = self.net(self.b(x)) + self.b(x)",
    "x = self.outer(x)",
)

BODIES = (
    "lambda m, x: m.net[0](x) + x",
    "lambda m, x: m.net(x)",
    "lambda m, x: m.a(x) * 2 if isinstance(m.a, nn.Linear) else m.a(x)",
    "apply_body",
)

PATCHES = (
    "model.a.forward = types.MethodType(lambda self, x: F.linear(x, self.weight) * 2, model.a)",
    "model.net.forward = lambda x: model.net[0](x) * 2",
    "model.net[0].register_forward_hook(lambda m, args, y: y * 2)",
    "model.net[0].register_forward_pre_hook(lambda m, args: (args[0] + 1,))",
    "model.net[1].register_forward_hook(lambda m, args, kwargs, y: y + args[0], with_kwargs=True)",
    "model.a.register_forward_hook(lambda m, args, y: y + 1 if isinstance(m, nn.Linear) else y)",
    "model.register_forward_hook(lambda m, args, y: y + m.net[0](args[0]))",
    "model.net.register_forward_hook(lambda m, args, y: y + m[0](args[0]))",
    "model.act.forward = lambda x: x * 2",
    "model.norm.register_forward_hook(lambda m, args, y: y * 2)",
    "old = Model.forward; Model.forward = lambda self, x, flag=False: old(self, x, flag) + self.net[0](x)",
    "model.a.gain = 3.0",
    "model.b.weight = model.a.weight",
    "model.b = model.a",
    "model.net.append(model.a)",
    "model.net.insert(1, nn.ReLU())",
    "model.net[0] = model.a",
    "model.outer = nn.Sequential(model.net[0], nn.Sigmoid())",
    "model.outer = nn.Sequential(model.net, nn.ReLU(), nn.Sequential(nn.Linear(W, W), nn.SiLU()))",
)


CHAIN_PATCHES = (
    "net[0].register_forward_hook(lambda m, args, y: y * 2)",
    "net[1].register_forward_pre_hook(lambda m, args: (args[0] + 1,))",
    "net.register_forward_hook(lambda m, args, y: y * 2)",
    "net.forward = lambda x: x",
    "net[1].forward = lambda x: x",
    "net.append(net[0])",
    "net[2] = net[0]",
    "net[0].weight = net[2].weight",
)


@dataclass(frozen=True)
class Outcome:
    """What came of one case."""

    seed: int
    what: str
    result: str
    message: str = ""
    layers: int = 0
    fused: int = 0


def source_of(rng: Random) -> str:
    """The source of a class ``Model``, and of a function ``patched`` that changes an object of it."""

    def container() -> str:
        items = [rng.choice(LINEARS), rng.choice(ACTIVATIONS), rng.choice(LINEARS)]
        if rng.random() < 0.4:
            items.append(rng.choice(ACTIVATIONS))
        if rng.random() < 0.2:
            items.insert(0, rng.choice(ACTIVATIONS))
        if rng.random() < 0.2:
            items.append(f"nn.Sequential({rng.choice(LINEARS)}, {rng.choice(ACTIVATIONS)})")
        kind = rng.choice(SEQUENTIALS)
        if kind == "nn.Sequential" and rng.random() < 0.2:
            named = ", ".join(f"('{name}', {item})" for name, item in zip("fghijk", items, strict=False))
            return f"nn.Sequential(OrderedDict([{named}]))"
        return f"{kind}({', '.join(items)})"

    def question() -> str:
        test = rng.choice(QUESTIONS)
        return rng.choice((f"if {test}: x = x * 2 + 1", f"x = x * 3 if {test} else x", f"x = x * (1 + int({test}))"))

    count = rng.randint(1, 3)
    body = [rng.choice(STATEMENTS) if rng.random() < 0.8 else question() for _ in range(count)]
    lines = [
        "class Model(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        f"        self.net = {container()}",
        f"        self.a, self.b = {rng.choice(LINEARS)}, {rng.choice(LINEARS)}",
        f"        self.act, self.norm = {rng.choice(ACTIVATIONS)}, {rng.choice(('nn.LayerNorm(W)', 'nn.RMSNorm(W)'))}",
        f"        self.items = nn.ModuleList([{rng.choice(LINEARS)}, {rng.choice(LINEARS)}])",
        f"        self.table = nn.ModuleDict({{'p': {container()}, 'q': {rng.choice(LINEARS)}}})",
        "        self.mlp = GPT2MLP()",
        f"        self.outer = {container()}",
        *(["        self.plain = [self.a]"] if any("plain" in s for s in body) else []),
        *(["        self.helper = Helper(self.b)"] if any("helper" in s for s in body) else []),
        *(
            ["        self.partial = functools.partial(apply_all, self.net)"]
            if any("partial" in s for s in body)
            else []
        ),
        *([f"        self.body = {rng.choice(BODIES)}"] if any("body" in s for s in body) else []),
        "        with torch.no_grad(): self.norm.weight[::4] *= 30",
        "    def forward(self, x, flag=False):",
        *(f"        {statement}" for statement in body),
        "        return x",
        "def apply_body(model, x): return model.net[0](x) + model.net(x)",
        "def patched(model):",
        *(f"    {rng.choice(PATCHES)}" for _ in range(rng.choice((0, 0, 0, 1, 1, 2)))),
        "    return model",
    ]
    return PREAMBLE + "\n".join(lines) + "\n"


def build(seed: int) -> nn.Module:
    """The model of a seed; the same each time."""
    rng = Random(f"models {seed}")
    source = source_of(rng)
    name = f"<model {seed}>"
    if rng.random() < 0.85:  # code without source is read as bytecode
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space: dict[str, Any] = {"__name__": f"model_{seed}"}
    sys.modules[f"model_{seed}"] = module = types.ModuleType(f"model_{seed}")
    module.__dict__.update(space)
    module.__file__ = name
    exec(compile(source, name, "exec"), module.__dict__)
    torch.manual_seed(seed)
    model: nn.Module = module.patched(module.Model())
    return model.eval()


def text_of(seed: int) -> str:
    """The model's own part of the source."""
    return source_of(Random(f"models {seed}")).removeprefix(PREAMBLE)


def run_case(seed: int) -> Iterator[Outcome]:
    """Quantize, smooth and chain one model, and hold each result to the float model."""
    try:
        model = build(seed)
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            wanted = [use() for use in _uses(model, x)]
    except Exception:  # a random model need not run
        return
    scheme = SCHEMES[seed % len(SCHEMES)]
    yield _quantized(seed, scheme, x, wanted)
    yield _smoothed(seed, x, wanted)
    yield _chained(seed, x)


def _uses(model: Any, x: Tensor) -> list[Callable[[], Tensor]]:
    """Calls of a model and, from outside, of parts of it."""
    return [
        lambda: model(x.clone()),
        lambda: model(x.clone(), True),
        lambda: model.net(x.clone()),
        lambda: next(iter(model.net._modules.values()))(x.clone()),
        lambda: model.table["p"](x.clone()),
        lambda: _watched(model.net, x),
    ]


def _watched(net: Any, x: Tensor) -> Tensor:
    """What a hook on the first child of a container sees."""
    seen: list[Tensor] = []
    first = next(iter(net._modules.values()))
    handle = first.register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    try:
        net(x.clone())
    finally:
        handle.remove()
    return seen[0]


def _judge(model: Any, x: Tensor, wanted: list[Tensor], most: float) -> tuple[str, str]:
    for i, (use, want) in enumerate(zip(_uses(model, x), wanted, strict=True)):
        try:
            with torch.no_grad():
                found = use()
        except Exception as error:
            return "raised", f"use {i}: {type(error).__name__}: {error}"
        difference = ((found - want).norm() / want.norm().clamp_min(1e-6)).item()
        if not difference <= most:
            return "silent", f"use {i}: differs by {difference:.0%}"
    return "right", ""


def _quantized(seed: int, scheme: str, x: Tensor, wanted: list[Tensor]) -> Outcome:
    what, refusal = f"quantize {scheme}", ""

    def quantize(verify: Any) -> tuple[nn.Module, qcut.Report]:
        model = build(seed)
        return model, qcut.quantize(model, scheme, skip=(), allow_growth=True, verify=verify, progress=False)

    try:
        try:
            model, report = quantize(x)
        except QuantizationError as error:
            if "verify:" not in str(error):
                raise
            refusal = str(error)
            model, report = quantize(False)
    except QcutError as error:
        return Outcome(seed, what, "refused", str(error))
    except Exception:
        return Outcome(seed, what, "foreign", traceback.format_exc())
    result, message = _judge(model, x, wanted, MOST)
    if refusal:
        result, message = ("alarm" if result == "right" else "refused"), f"{message} {refusal}"
    fused = sum(layer.activation != "none" for layer in model.modules() if isinstance(layer, qcut.Linear))
    return Outcome(seed, what, result, message, len(report.layers), fused)


def _smoothed(seed: int, x: Tensor, wanted: list[Tensor]) -> Outcome:
    model = build(seed)
    layers = [name for name, m in model.named_modules() if type(m) is nn.Linear]
    reached: list[str] = []
    handles = [
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: reached.append(name)) for name in layers
    ]
    with torch.no_grad():
        model(x.clone())
    for handle in handles:
        handle.remove()
    try:
        calibration = qcut.calibrate(
            build(seed), [x.clone()], layers=sorted(set(reached)) or None, skip=(), progress=False
        )
        model = build(seed)
        qcut.smooth(model, calibration)
    except QcutError as error:
        return Outcome(seed, "smooth", "refused", str(error))
    except Exception:
        return Outcome(seed, "smooth", "foreign", traceback.format_exc())
    return Outcome(seed, "smooth", *_judge(model, x, wanted, EXACT))


def _chained(seed: int, x: Tensor) -> Outcome:
    rng = Random(f"chain {seed}")
    items = [rng.choice(("nn.Linear(W, W)", "LibraryConv1D(W, W)", "nn.Linear(W, W)")), "nn.ReLU()", "nn.Linear(W, W)"]
    items += rng.sample(("nn.ReLU()", "nn.Dropout()", "nn.Identity()", "nn.ReLU(inplace=True)"), rng.randint(0, 2))
    if rng.random() < 0.4:
        items.insert(rng.randint(1, len(items)), rng.choice((*LINEARS, *ACTIVATIONS)))
    kind = rng.choice(("nn.Sequential", "nn.Sequential", "nn.Sequential", *SEQUENTIALS))
    space: dict[str, Any] = dict(vars(sys.modules[build(seed).__module__]))
    torch.manual_seed(seed)
    exec(f"net = {kind}({', '.join(items)}).eval()", space)
    net = space["net"]
    if rng.random() < 0.3:
        with contextlib.suppress(AttributeError):  # not every patch fits every chain
            exec(rng.choice(CHAIN_PATCHES), space)
    try:
        chain = qcut.IntegerChain.from_float(net, [x], bits=16)
    except QcutError as error:
        return Outcome(seed, "chain", "refused", str(error))
    except Exception:
        return Outcome(seed, "chain", "foreign", traceback.format_exc())
    with torch.no_grad():
        difference = ((chain(x) - net(x.clone())).norm() / net(x.clone()).norm()).item()
    return Outcome(seed, "chain", "right" if difference <= MOST else "silent", f"differs by {difference:.0%}")


def run_models(seeds: Iterable[int]) -> tuple[collections.Counter[tuple[str, str]], list[Outcome], list[Outcome]]:
    """Run cases; counts by what was done and its result, all outcomes, and those that are failures."""
    count: collections.Counter[tuple[str, str]] = collections.Counter()
    outcomes: list[Outcome] = []
    for seed in seeds:
        for outcome in run_case(seed):
            count[outcome.what.split()[0], outcome.result] += 1
            outcomes.append(outcome)
        linecache.cache.pop(f"<model {seed}>", None)
    return count, outcomes, [outcome for outcome in outcomes if outcome.result in BAD]
