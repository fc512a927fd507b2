"""Every exception qcut raises on purpose.

Each class also inherits the builtin exception that fits, so ``except ValueError`` keeps working.
Messages name the layer, operator or file, the value that was found, and what is allowed.
"""

from __future__ import annotations


def layer_prefix(name: str | None) -> str:
    """The beginning of a message about a layer: its name, or nothing if the name is not known."""
    return f"layer {name!r}: " if name else ""


def shown(value: object) -> str:
    """A value as messages show it: the beginning of what Python writes, which it refuses for the longest integers."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return f"{value!r:.60}"


class QcutError(Exception):
    """Base class of all qcut exceptions."""


class ConfigError(QcutError, ValueError):
    """An option, scheme name or configuration value that does not exist or contradicts another.

    Args:
        message: what was found and what is allowed.
        argument: name of the argument that the message is about, where callers need it next to the message.
    """

    def __init__(self, message: str, argument: str | None = None) -> None:
        super().__init__(message)
        self.argument = argument


class ConstraintError(ConfigError):
    """A constraint of an answer that is wrong or too large, or that the model's tokens cannot follow."""


class QuantizationError(QcutError, ValueError):
    """Data that cannot be quantized: NaN or Inf, an empty tensor, K beyond the exact range.

    Args:
        message: what was found and what is allowed.
        layer: qualified name of the layer, prefixed to the message when it is known.
    """

    def __init__(self, message: str, layer: str | None = None) -> None:
        super().__init__(layer_prefix(layer) + message)
        self.layer = layer

    def __reduce__(self) -> tuple[object, ...]:
        # Exception.__reduce__ would call __init__ with the prefixed message and lose the layer.
        return _rebuild, (type(self), self.args, self.__dict__.copy())


class ShapeError(QcutError, ValueError):
    """A tensor whose shape or layout the operation does not take."""


class RangeError(QcutError, IndexError):
    """An index outside of the table, the cache or the context that it points into."""


class DtypeError(QcutError, TypeError):
    """A tensor whose element type the operation does not take."""


class DeviceError(QcutError, RuntimeError):
    """Tensors on different devices, or on a device without an implementation."""


class UnsupportedError(QcutError, NotImplementedError):
    """A valid request that this GPU, toolchain or version of qcut cannot serve."""


class CheckpointError(QcutError, ValueError):
    """A checkpoint that is truncated, foreign, or does not match the model."""


class CalibrationError(QcutError, ValueError):
    """Calibration data that is missing, empty or not finite."""


class PlanError(QcutError, ValueError):
    """A plan that does not match the model, or a budget that no plan meets."""


class ContextError(QcutError, ValueError):
    """More tokens than an engine's context holds, or more sequences than its batch."""


class BusyError(QcutError, RuntimeError):
    """As many requests wait as may wait, or a callback that does not end holds an engine."""


class RequestError(QcutError, RuntimeError):
    """A request that its scheduler could not go on with; the cause is what has failed."""


class LaunchError(QcutError, RuntimeError):
    """The driver refused to load or launch a kernel."""


class BuildError(QcutError, RuntimeError):
    """A compiler failed on a kernel.

    Args:
        message: what happened.
        kernel: procedural name of the kernel, if one was being built.
        command: the compiler's command line, as typed.
        log: the compiler's output; the message shows its last 20 lines.
    """

    def __init__(self, message: str, *, kernel: str | None = None, command: str | None = None, log: str = "") -> None:
        parts = [f"kernel {kernel}: {message}" if kernel else message]
        if command:
            parts.append(f"command: {command}")
        if log:
            parts.append("\n".join(log.rstrip().splitlines()[-20:]))
        super().__init__("\n".join(parts))
        self.kernel = kernel
        self.command = command
        self.log = log

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, self.__dict__.copy())


class ToolchainError(BuildError):
    """A compiler or header set is missing; the message says what to install."""


class PathWarning(RuntimeWarning):
    """Layers run on another execution path than the fastest, because the GPU has no other."""


class QuantizationWarning(UserWarning):
    """Less of a model is quantized than was asked for, or with fewer bits; the message names what, and why."""


def _rebuild(cls: type[QcutError], args: tuple[object, ...], state: dict[str, object]) -> QcutError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error
