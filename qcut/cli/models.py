"""The model that a command names: its options, and the model opened and quantized as they say."""

from __future__ import annotations

import argparse
import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcut.errors import ConfigError
from qcut.schemes import Scheme, parse_scheme

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from qcut.conversion.planning.plan import Plan
    from qcut.conversion.report import Report
    from qcut.integrations.transformers.config import QcutConfig

MODEL = """\
MODEL
    a folder with a model, or a model's name on the hub
"""


KV_CACHE = """\
--kv-cache auto|int8|int4|int8/int4 = auto
    type in which the engine keeps keys and values of earlier tokens: auto is the model's own, int8 takes half the
    memory of float16, int4 a little more than a quarter, int8/int4 is int8 keys and 4-bit values (default: auto)
"""


def device_options(before: str = "", dtype: str = "float16 on a GPU, float32 on a CPU") -> str:
    """Options of no group: those ``before``, ``--device``, and ``--dtype``, whose help says what ``auto`` means."""
    return f"""\
options:
{before}\
--device D = auto
    where to compute: cpu, cuda, cuda:1, …, or auto, a GPU where there is one (default: auto)
--dtype auto|float16|bfloat16|float32 = auto
    type of the weights that are not quantized, and of activations (default: auto, {dtype})
"""


def data_options(use: str, skipped: str, required: str = "") -> str:
    """The text that a model is quantized by, and the layers.

    Args:
        use: what the text is for.
        skipped: the layers that ``--skip`` skips by default.
        required: ``, required`` where there has to be a text.
    """
    return f"""\
--calibrate TEXT{required}: Path
    UTF-8 text like that which the model will read, for {use}
--include GLOB ...
    take only layers whose name, or the end of it, matches, such as '*.mlp.*' (default: all)
--skip GLOB ...
    leave layers whose name, or the end of it, matches in float (default: {skipped})
"""


_USE = "what is derived from data: the ranges of w8a8_static, --bits, --smooth, --fit and --refine (default: none)"
QUANTIZING = f"""\
how to quantize:
| --scheme NAME
    one scheme for all layers, such as w8a8, w8a16 or codebook4
| --plan FILE: Path
    a scheme for each layer, from a file of `qcut plan`
| --bits B: positive_float
    a scheme for each layer, chosen by the text of --calibrate as `qcut plan --bits` does: bits a weight allowed on
    average, norms and scales counted (default: none)
--smooth A: float
    move outliers of activations into the weights first, with SmoothQuant's alpha A between 0 and 1; 0.5 is usual
    (default: do not)
--fit
    fit the indices of codebooks to the text, which loses less than rounding to the nearest
--refine N: positive
    tune codebook layers and norms toward the float model's predictions on the whole text, in N steps of a few windows
    each; 1500 are usual (default: do not)
--embeddings NAME
    scheme of the token table and of the classifier, such as w8a16 (default: both stay in float)
--[no-]verify
    hold each quantized layer to its float weight, and the model to the float one, before anything is written: on a part
    of the text of --calibrate or, without one, on 16 tokens of the vocabulary; of a model that reads images or sound,
    the layers alone; --no-verify leaves it out (default: do)
{data_options(_USE, "lm_head; with --plan, none")}"""
"""The options that say how a model is quantized; `Quantizing` reads them."""


def window_options(batch: int, most: int | None = None) -> str:
    """The options that cut a text into windows, with the defaults of ``--batch`` and ``--max-windows``; None: all."""
    default = "" if most is None else f" = {most}"
    return f"""\
--window N: positive
    cut the text into pieces of N tokens (default: 512, or the model's context where that is shorter)
--max-windows N: positive{default}
    use only the first N windows of the text (default: {most or "all"})
--batch N: positive = {batch}
    windows computed at a time (default: {batch})
"""


def conversion_options(out: str, out_help: str, windows: str) -> str:
    """What commands take that write something made of a float model by a text, ``--device`` and ``--dtype`` aside."""
    return f"""\
options:
{MODEL}--out {out}, required: Path
    {out_help}
--overwrite
    replace what is there (default: refuse)
the text of --calibrate:
{windows}"""


_MOST_BYTES = 1 << 30
_WINDOW = 512

CALIBRATION_WINDOWS = 32
"""Windows of the text that ranges are derived from, unless told otherwise."""

PLAN_WINDOWS = 8
"""Windows of the text that ``--bits`` tries layers on."""


def shown() -> bool:
    """Whether progress bars are shown."""
    return sys.stderr.isatty()


def read_text(path: Path, option: str) -> str:
    """Read a text that an option names.

    Raises:
        ConfigError: the file cannot be read, is no UTF-8, or has more than a gibibyte.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ConfigError(f"{option} {path}: more than {_MOST_BYTES} bytes")
        return data.decode()
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        why = error.strerror or error if isinstance(error, OSError) else error
        raise ConfigError(f"{option} {path}: {why}") from error


def open_model(arguments: argparse.Namespace, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """The model that ``MODEL``, ``--device`` and ``--dtype`` name, and its tokenizer.

    Args:
        arguments: the parsed command line.
        dtype: what ``--dtype auto`` means; None: float16 on a GPU, float32 on a CPU.

    Raises:
        QcutError: see `qcut.checkpoints.pretrained`.
    """
    from qcut.checkpoints.pretrained import device_of, dtype_for, load_pretrained

    device = device_of(arguments.device)
    if dtype is None or arguments.dtype != "auto":
        dtype = dtype_for(arguments.dtype, device)
    return load_pretrained(arguments.model, dtype=dtype, device=device, progress=shown())


def open_quantized(
    arguments: argparse.Namespace, quantizing: Quantizing, dtype: torch.dtype
) -> tuple[Any, Any, Report]:
    """A model for any task, quantized: while it is loaded, unless a text has to be run through the float model first.

    Args:
        arguments: the parsed command line; `open_model` says which of it counts.
        quantizing: with a scheme.
        dtype: what ``--dtype auto`` means.

    Returns:
        The model, its tokenizer or None, and the report.

    Raises:
        QcutError: see `qcut.checkpoints.pretrained.load_any` and `Quantizing.apply`.
    """
    from qcut.checkpoints.pretrained import device_of, dtype_for, load_any

    device = device_of(arguments.device)
    if arguments.dtype != "auto":
        dtype = dtype_for(arguments.dtype, device)
    config = quantizing.while_loading()
    model, tokenizer = load_any(arguments.model, dtype=dtype, device=device, quantization=config, progress=shown())
    report = getattr(getattr(model, "hf_quantizer", None), "report", None)
    if report is None:
        report = quantizing.apply(
            model, tokenizer, window=arguments.window, most=arguments.max_windows, batch=arguments.batch
        )
    assert report is not None, "a scheme was given"
    return model, tokenizer, report


def cut_text(
    model: Any, tokenizer: Any, text: str, what: str, window: int | None, most: int | None
) -> tuple[Tensor, int]:
    """Cut a text into windows of tokens.

    Args:
        model: whose context is the longest window.
        tokenizer: the model's.
        text: the text.
        what: option and file, for messages.
        window: tokens in a window; None takes 512, or the model's context where that is shorter.
        most: windows that are used; None: all.

    Returns:
        int64 ``[windows, window]``, and the window.

    Raises:
        ConfigError: the text is too short, or the window too short or longer than the model's context.
    """
    import torch

    from qcut.checkpoints.pretrained import token_ids
    from qcut.models.evaluation import windows_of

    context = getattr(model.config, "max_position_embeddings", None)
    limit = context if isinstance(context, int) and context > 1 else None
    if window is None:
        window = min(_WINDOW, limit or _WINDOW)
    if window < 2 or (limit is not None and window > limit):
        raise ConfigError(f"--window {window}: allowed: 2 to {limit or 'any number'}, the model's context")
    tokens = torch.tensor(token_ids(tokenizer, text, what), dtype=torch.int64, device="cpu")
    if len(tokens) < window:
        raise ConfigError(
            f"{what}: found {len(tokens)} tokens, fewer than one window of {window}; give a longer text, or --window"
        )
    return windows_of(tokens, window, most), window


@dataclass(frozen=True)
class Quantizing:
    """How a model is quantized: what the options say, read and checked before the model is.

    Attributes:
        options: the parsed command line, with the options of `QUANTIZING`.
        scheme: for all layers, or a plan; None: the model stays as it is, unless there are bits.
        embeddings: scheme of tables and classifier, or None.
        text: what data-driven options calibrate on, or None.
    """

    options: argparse.Namespace
    scheme: Scheme | Plan | None
    embeddings: Scheme | None
    text: str | None

    @classmethod
    def of(cls, options: argparse.Namespace) -> Quantizing:
        """Read the options of `QUANTIZING`.

        Raises:
            ConfigError: an unknown scheme, options that need a text or a scheme and have none, or an unreadable text.
            PlanError: the plan cannot be read.
        """
        scheme: Scheme | Plan | None = None
        if options.plan is not None:
            from qcut.conversion.planning.plan import Plan

            scheme = Plan.load(options.plan)
        elif options.scheme is not None:
            scheme = parse_scheme(options.scheme)
        embeddings = None if options.embeddings is None else parse_scheme(options.embeddings)
        _check_needs(options, scheme)
        if options.bits is not None and options.smooth is not None:
            raise ConfigError("--smooth: not with --bits, whose plan holds for the model that it was made on")
        text = None if options.calibrate is None else read_text(options.calibrate, "--calibrate")
        return cls(options, scheme, embeddings, text)

    def while_loading(self) -> QcutConfig | None:
        """What transformers needs to quantize the model while it loads; None where the float model is needed.

        Raises:
            ConfigError: see `qcut.QcutConfig`.
        """
        import qcut

        if self.scheme is None or self.text is not None:
            return None
        given = self.options
        return qcut.QcutConfig(
            self.scheme,
            include=given.include,
            modules_to_not_convert=given.skip,
            embeddings=self.embeddings,
            verify=given.verify is not False,
            report=True,
        )

    def apply(
        self, model: Any, tokenizer: Any, *, window: int | None = None, most: int | None = None, batch: int = 8
    ) -> Report | None:
        """Quantize a model in place.

        Args:
            model: of `open_model`.
            tokenizer: of `open_model`.
            window: tokens in a window of the text; None: see `cut_text`.
            most: windows of the text that are used; None: `CALIBRATION_WINDOWS`.
            batch: windows computed at a time.

        Returns:
            The report, or None where there is nothing to do.

        Raises:
            QcutError: see `qcut.quantize`, `qcut.calibrate`, `qcut.collect_curvature` and `qcut.refine`.
        """
        import qcut

        given, scheme = self.options, self.scheme
        if scheme is None and given.bits is None:
            return None
        calibration = moments = None
        what = f"--calibrate {given.calibrate}"
        if self.text is not None:
            _check_reads_text(model, tokenizer)
            windows, _ = cut_text(model, tokenizer, self.text, what, window, most or CALIBRATION_WINDOWS)
            batches = windows.split(batch)
            calibration = qcut.calibrate(model, batches, progress=shown())
            if given.fit:
                moments = qcut.collect_curvature(model, batches, progress=shown())
            if given.bits is not None:
                few = windows[:PLAN_WINDOWS].split(batch)
                chosen: dict[str, Any] = {} if given.skip is None else {"skip": given.skip}
                scheme = qcut.plan(
                    model,
                    few,
                    bits=given.bits,
                    calibration=calibration,
                    second_moments=moments,
                    include=given.include,
                    progress=shown(),
                    **chosen,
                )
        assert scheme is not None, "bits need a text"
        reference = None if given.refine is None else copy.deepcopy(model)
        report = qcut.quantize(
            model,
            scheme,
            calibration=calibration,
            second_moments=moments,
            smooth=given.smooth,
            include=given.include,
            skip=given.skip,
            embeddings=self.embeddings,
            verify=given.verify is not False,
            progress=shown(),
        )
        if reference is not None and self.text is not None:
            windows, _ = cut_text(model, tokenizer, self.text, what, window, None)
            qcut.refine(model, reference, windows.split(batch), steps=given.refine, progress=shown())
        return report


def _check_reads_text(model: Any, tokenizer: Any) -> None:
    """Refuse to run a text through a model that does not read text, or needs another one beside it."""
    if tokenizer is None:
        raise ConfigError("--calibrate TEXT needs a tokenizer, and there is none beside the model")
    reads = getattr(model, "main_input_name", "input_ids")
    if reads != "input_ids" or model.config.is_encoder_decoder:
        what = "a text and its continuation" if reads == "input_ids" else reads
        raise ConfigError(
            f"--calibrate TEXT: {type(model).__name__} reads {what}, and not text alone; qcut.calibrate takes such "
            "batches in Python"
        )


def _check_needs(arguments: argparse.Namespace, scheme: Scheme | Plan | None) -> None:
    """Refuse options that lack what they need, before anything is read or computed."""
    given = {
        f"--{name}": getattr(arguments, name)
        for name in ("calibrate", "smooth", "refine", "embeddings", "include", "skip", "verify")
    }
    given["--fit"] = arguments.fit or None
    if scheme is None and arguments.bits is None:
        for option, value in given.items():
            if value is not None:
                raise ConfigError(f"{option} says how to quantize; it goes with --scheme, --plan or --bits")
        return
    if arguments.calibrate is None:
        given["--bits"] = arguments.bits
        for option in ("--bits", "--smooth", "--fit", "--refine"):
            if given[option] is not None:
                raise ConfigError(f"{option} needs --calibrate TEXT, a text like that which the model will read")
        if isinstance(scheme, Scheme) and scheme.needs_range:
            raise ConfigError(
                f"scheme {scheme.name} needs --calibrate TEXT: its ranges come from a text like that which the model "
                "will read"
            )
