"""Makes operators of ``torch.ops.qcut``: one class holds an operator's arguments, checks, fake and CPU function.

The class is a `NamedTuple` of the arguments, in the schema's order, with three methods: ``check`` raises on wrong
arguments, ``fake`` makes results without values, ``cpu`` computes results. `operator` derives the schema from the
fields and registers the class; `serves` marks the function in `qcut.backends.cuda` that computes the same on a GPU::

    @operator("silu_mul", returns="Tensor")
    class SiluMulOp(NamedTuple):
        gate: Tensor
        up: Tensor
        absmax: Annotated[Tensor | None, MUTATED] = None

    @serves(SiluMulOp)
    def silu_mul(call: SiluMulOp) -> Tensor: ...

An operator with a class that ends in the field `EARLY_READ` has an overload of this name besides ``default``, with the
same arguments. Its caller promises that weights are ready: no kernel queued just before writes them, so a kernel may
read them under programmatic dependent launch, while its predecessor on the stream still runs. Layers and the engine
call the overload; with ``default`` every argument may come from the kernel just before.

If all written tensors of an operator may be left out, it can come a second time without these arguments, as
`EARLY_READ` and with the suffix `PURE` after its name, for layers that are compiled: torch's compiler makes a wrong
graph of an operator that may write and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from pkgutil import iter_modules
from string import ascii_lowercase
from typing import Annotated, Any, Protocol, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from qcut.common.versions import require
from qcut.errors import UnsupportedError
from qcut.ops import gradients, paths
from qcut.ops.definition import define

require("torch")
library = torch.library.Library("qcut", "DEF")

MUTATED = "mutated"
"""Annotates a tensor that an operator writes: ``Annotated[Tensor, MUTATED]``."""

SYMBOLIC = "symbolic"
"""Annotates a size that torch.compile may leave open: ``Annotated[int, SYMBOLIC]``."""

EARLY_READ = "early_read"
"""The last field of an operator that may read its weights early: no argument, set by the overload of this name."""

PURE = "_pure"
"""Suffix of an operator's name without its written arguments: see above."""

_SCHEMA_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    Annotated[int, SYMBOLIC]: "SymInt",
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
    list[int]: "int[]",
    list[int] | None: "int[]?",
    list[Tensor]: "Tensor[]",
    torch.dtype: "ScalarType",
    torch.dtype | None: "ScalarType?",
}


class Call(Protocol):
    """The arguments of one call of an operator."""

    def check(self) -> None:
        """Raises on wrong arguments: on the CPU, while tracing, and wherever a CUDA implementation asks."""

    def fake(self) -> Any:
        """Makes the results without values."""

    def cpu(self) -> Any:
        """Computes the results in plain torch, arguments checked."""


C = TypeVar("C", bound=Call)
F = TypeVar("F", bound=Callable[..., Any])
_served: dict[tuple[type, str], Callable[[Any], Any]] = {}
_SIDES = {"cuda": "qcut.backends.cuda.operators", "triton": "qcut.backends.triton.operators"}
"""Modules that register what serves operators on a path, imported at a path's first call: they lie above this one."""


def arguments_of(call: type, *, pure: bool = False) -> dict[str, Any]:
    """Names and types of an operator's arguments; ``pure``: only of those that it reads."""
    hints = get_type_hints(call, include_extras=True)
    return {name: hint for name, hint in hints.items() if name != EARLY_READ and not (pure and _is_written(hint))}


def schema_of(name: str, call: type, returns: str, positional: int | None = None, *, pure: bool = False) -> str:
    """The schema of an operator from the fields of its class; those after ``positional`` are keyword-only."""
    hints, mutable, arguments = arguments_of(call, pure=pure), iter(ascii_lowercase), []
    defaults: dict[str, Any] = call._field_defaults  # type: ignore[attr-defined]
    for i, (field, hint) in enumerate(hints.items()):
        if i == positional:
            arguments.append("*")
        if _is_written(hint):
            kind = _SCHEMA_TYPES[get_args(hint)[0]].replace("Tensor", f"Tensor({next(mutable)}!)")
        else:
            kind = _SCHEMA_TYPES[hint]
        default = defaults.get(field, ...)
        value = "" if default is ... else f'="{default}"' if isinstance(default, str) else f"={default}"
        arguments.append(f"{kind} {field}{value}")
    return f"{name}({', '.join(arguments)}) -> {returns}"


def operator(
    name: str,
    *,
    returns: str,
    positional: int | None = None,
    composed: bool = False,
    layers: bool = False,
    pure: bool = False,
) -> Callable[[type[C]], type[C]]:
    """Register a class as the operator ``torch.ops.qcut.<name>``.

    Args:
        name: name of the operator.
        returns: return type in the schema, such as ``Tensor`` or ``(Tensor, Tensor)``.
        positional: how many arguments may be given by position; None: all.
        composed: ``cpu`` calls only other operators, and serves CUDA too.
        layers: computes a layer or a part of one: `qcut.execution_path` says who serves it.
        pure: comes a second time, as `PURE`.
    """

    def register(call: type[C]) -> type[C]:
        written = [i for i, hint in enumerate(get_type_hints(call, include_extras=True).values()) if _is_written(hint)]

        def run(made: C, compute: Callable[[C], Any]) -> Any:
            if not torch.is_grad_enabled():
                return compute(made)
            x = _requires_grad(made)  # type: ignore[arg-type]
            if x is not None and returns == "()" and _any_floating(made[i] for i in written):  # type: ignore[index]
                raise UnsupportedError(f"qcut::{name}: writes to tensors of a graph; {gradients.ALLOWED}")
            # With gradients, torch would differentiate through the reference's rounding, and be wrong.
            with torch.no_grad():
                result = compute(made)
            return result if x is None or result is None else gradients.inference_only(result, x, f"qcut::{name}")

        def checked(made: C) -> Any:
            made.check()
            return made.cpu()

        sides: dict[str, Callable[[C], Any]] = {"reference": checked} if layers else {}

        def side(path: str) -> Callable[[C], Any]:
            """The function of a back end; operators that are no layers have CUDA's only."""
            if (found := sides.get(path)) is None:
                served_on = path if layers else "cuda"
                import_module(_SIDES[served_on])
                if (call, served_on) not in _served:
                    raise UnsupportedError(f"qcut::{name}: the back end {served_on} has no kernel for it")
                found = sides[path] = _served[call, served_on]
            return found

        def put(qualified: str, make: Callable[..., C], *, pure: bool = False) -> None:
            """Define and implement one overload; ``make`` makes its calls of the arguments."""

            def on_cpu(*args: Any, **kwargs: Any) -> Any:
                made = make(*args, **kwargs)
                return run(made, side("triton") if layers and paths.path.name == "triton" else checked)

            def fake(*args: Any, **kwargs: Any) -> Any:
                made = make(*args, **kwargs)
                made.check()
                # A compiler would leave the gradient out.
                if torch.is_grad_enabled() and _requires_grad(made) is not None:  # type: ignore[arg-type]
                    allowed = gradients.ALLOWED
                    raise UnsupportedError(f"qcut::{name}: an argument to be compiled has gradients; {allowed}")
                return made.fake()

            def on_cuda(*args: Any, **kwargs: Any) -> Any:
                made = make(*args, **kwargs)
                if paths.is_usual():
                    return run(made, side("cuda"))
                device = next(value.device for value in made if isinstance(value, Tensor))  # type: ignore[attr-defined]
                if not layers and (reason := paths.refusals().get(device.index)) is not None:
                    raise UnsupportedError(f"qcut::{name}: {reason}; only layers run on others, in Triton")
                return run(made, side(paths.path_on(device)))

            own_name = qualified.partition(".")[0]
            define(library, own_name, schema_of(qualified, call, returns, positional, pure=pure))
            library.impl(qualified, on_cpu, "CPU")
            library.impl(qualified, on_cpu if composed else on_cuda, "CUDA")
            _keep_from_autocast(own_name, qualified)
            torch.library.register_fake(f"qcut::{qualified}", fake, lib=library)

        put(name, call)
        if EARLY_READ in call._fields:  # type: ignore[attr-defined]
            put(f"{name}.{EARLY_READ}", partial(call, early_read=True))  # type: ignore[call-arg]
        if pure:
            names = list(arguments_of(call, pure=True))

            def make_pure(*args: Any, **kwargs: Any) -> C:
                given = dict(zip(names, args, strict=False))
                return call(**given, **kwargs, early_read=True)  # type: ignore[call-arg]

            put(f"{name}{PURE}", make_pure, pure=True)
        return call

    return register


def _keep_from_autocast(name: str, qualified: str) -> None:
    """Compute an overload inside autocast as outside: of its arguments' types, what is composed in it included."""
    overload = qualified.partition(".")[2] or "default"
    for device in ("CPU", "CUDA"):
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device}"))

        def run(*args: Any, _keys: torch._C.DispatchKeySet = keys, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(_keys):
                return getattr(getattr(torch.ops.qcut, name), overload)(*args, **kwargs)

        library.impl(qualified, run, f"Autocast{device}")


def _requires_grad(arguments: Iterable[Any]) -> Tensor | None:
    """The first tensor that requires a gradient, lists of tensors included; None: none does."""
    for value in arguments:
        if isinstance(value, Tensor):
            if value.requires_grad:
                return value
        elif isinstance(value, list | tuple) and (found := _requires_grad(value)) is not None:
            return found
    return None


def _is_written(hint: Any) -> bool:
    return get_origin(hint) is Annotated and get_args(hint)[1] == MUTATED


def _any_floating(values: Iterable[Any]) -> bool:
    return any(isinstance(value, Tensor) and value.is_floating_point() for value in values)


def serves(call: type, path: str = "cuda") -> Callable[[F], F]:
    """Mark the function that computes an operator on a path, given the operator's call."""

    def register(function: F) -> F:
        _served[call, path] = function
        return function

    return register


def import_modules(package: str) -> None:
    """Import all modules of a package and of those in it; each may register something."""
    for module in iter_modules(import_module(package).__path__):
        import_module(f"{package}.{module.name}")
        if module.ispkg:
            import_modules(f"{package}.{module.name}")
