"""Options about the model of a command, and opening and quantizing the model accordingly."""

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
    from qcut.engine.drafters import Drafter
    from qcut.integrations.transformers.config import QcutConfig

MODEL = """\
MODEL
    a folder with a model, a GGUF file, or a model's name on the hub
"""


KV_CACHE = """\
--kv-cache auto|int8|int4|int8/int4 = auto
    type in which the engine keeps keys and values of earlier tokens: auto is the model's own, int8 takes half the
    memory of float16, int4 a little more than a quarter, int8/int4 is int8 keys and 4-bit values (default: auto)
"""


SPECULATE = """\
--speculate N: natural = 0
    verify up to N drafted tokens in a decode step, 1 to 15, found where prompt and text have had the last tokens
    before; tokens stay the same, and come faster if a text repeats itself; 0: none (default: 0)
--draft-model FOLDER
    with --speculate N, a smaller model of the same vocabulary drafts the tokens, in any text (default: none)
"""


def check_drafts(arguments: argparse.Namespace) -> None:
    """Check ``--speculate`` and ``--draft-model`` before anything is loaded.

    Raises:
        ConfigError: more drafts than a step can verify, or a draft model for none.
    """
    from qcut.engine.drafters import MOST_DRAFTS

    drafts = arguments.speculate
    if drafts > MOST_DRAFTS:
        raise ConfigError(f"--speculate {drafts}; allowed: 1 to {MOST_DRAFTS} drafted tokens, or 0 for none")
    if arguments.draft_model is not None and not drafts:
        raise ConfigError(f"--draft-model {arguments.draft_model} drafts nothing; allowed: with --speculate 1 to 15")


def open_drafter(
    arguments: argparse.Namespace, model: Any, tokenizer: Any, context: int | None
) -> tuple[Drafter | None, int | None]:
    """What finds drafts, by ``--speculate`` and ``--draft-model``, and the context of the model's engine.

    Args:
        arguments: parsed command line, checked by `check_drafts`.
        model: the model, quantized or not.
        tokenizer: of the model, or None.
        context: of the model's engine, or None.

    Raises:
        QcutError: the draft model cannot be opened, or has another vocabulary.
    """
    from qcut.engine.drafters import DraftModel, Lookup
    from qcut.engine.engine import DEFAULT_CONTEXT, Engine
    from qcut.engine.families import decoder_of
    from qcut.engine.families.fidelity import base_of

    if arguments.draft_model is None or not arguments.speculate:
        return (Lookup(arguments.speculate) if arguments.speculate else None), context
    smaller, _ = open_another(arguments, "--draft-model", arguments.draft_model, tokenizer)
    if context is None:
        context = min(DEFAULT_CONTEXT, *(decoder_of(base_of(each)).context for each in (model, smaller)))
    batch = getattr(arguments, "batch", 1)
    engine = Engine(smaller, batch=batch, context=context, kv_cache=arguments.kv_cache)
    return DraftModel(engine, arguments.speculate), context


def device_options(before: str = "", dtype: str = "float16 on a GPU, float32 on a CPU") -> str:
    """Options without a group: those in ``before``, ``--device``, and ``--dtype`` with the meaning of ``auto``."""
    return f"""\
options:
{before}\
--device D = auto
    where to compute: cpu, cuda, cuda:1, …, or auto, a GPU if there is one (default: auto)
--dtype auto|float16|bfloat16|float32 = auto
    type of the weights that are not quantized, and of activations (default: auto, {dtype})
"""


def data_options(use: str, skipped: str, required: str = "") -> str:
    """Options for the calibration text and for the layers.

    Args:
        use: purpose of the text.
        skipped: default of ``--skip``.
        required: ``, required`` if the text is mandatory.
    """
    return f"""\
--calibrate TEXT{required}: Path
    UTF-8 text similar to the model's inputs, for {use}
--include GLOB ...
    quantize only layers whose name or its end matches, such as '*.mlp.*' (default: all)
--skip GLOB ...
    leave layers in float whose name or its end matches (default: {skipped})
"""


_USE = "the ranges of w8a8_static, --bits, --smooth, --fit and --refine (default: none)"
FIT_MEMORY = """\
--fit-memory GB: positive_float
    with --fit, collect in turns what codebooks are fitted to, at most GB gigabytes at a time; each turn runs the model
    on the text again (default: all at once; a layer of K columns and N rows takes 4 (K² + N²) bytes)
"""
"""Option of commands that have ``--fit``; `fit_bytes` reads it."""

QUANTIZING = f"""\
quantization:
| --scheme NAME
    one scheme for all layers, such as w8a8, w8a16 or codebook4
| --plan FILE: Path
    a scheme for each layer, from a file of `qcut plan`
| --bits B: positive_float
    a scheme for each layer, chosen on the text of --calibrate as `qcut plan --bits` does: allowed average of bits per
    weight, norms and scales included (default: none)
--smooth A: float
    move outliers of activations into the weights first, with SmoothQuant's alpha A between 0 and 1; 0.5 is usual
    (default: do not)
--fit
    fit the indices of codebooks to the text, which loses less quality than rounding to nearest
{FIT_MEMORY}\
--refine N: positive
    train codebook layers and norms toward the float model's predictions on the whole text, in N steps of a few windows
    each; 1500 are usual (default: do not)
--embeddings NAME
    scheme of token embeddings and classifier, such as w8a16 (default: both stay in float)
--[no-]verify
    compare each quantized layer with its float weight, and the model with the float model, before anything is written:
    on a part of the text of --calibrate or on 16 tokens of the vocabulary; for models of images or sound only the
    layers; --no-verify skips it (default: do)
{data_options(_USE, "lm_head; with --plan, none")}"""
"""Options of quantization; `Quantizing` reads them."""


def window_options(batch: int, most: int | None = None) -> str:
    """Options that cut a text into windows, with the defaults of ``--batch`` and ``--max-windows``; None: all."""
    default = "" if most is None else f" = {most}"
    return f"""\
--window N: positive
    cut the text into windows of N tokens (default: 512, or the model's context if shorter)
--max-windows N: positive{default}
    use only the first N windows of the text (default: {most or "all"})
--batch N: positive = {batch}
    windows per forward pass (default: {batch})
"""


def conversion_options(out: str, out_help: str, windows: str) -> str:
    """Arguments of commands that convert a float model with a text, except ``--device`` and ``--dtype``."""
    return f"""\
options:
{MODEL}--out {out}, required: Path
    {out_help}
--overwrite
    replace an existing result (default: refuse)
the text of --calibrate:
{windows}"""


_MOST_BYTES = 1 << 30
_WINDOW = 512

CALIBRATION_WINDOWS = 32
"""Default number of windows for calibration."""

PLAN_WINDOWS = 8
"""Default number of windows on which ``--bits`` measures sensitivities."""


def shown() -> bool:
    """Whether progress bars are shown."""
    return sys.stderr.isatty()


def check_inputs(arguments: argparse.Namespace, option: str, out: Path) -> None:
    """Check that what a command reads is not lost in a path that it replaces.

    Args:
        arguments: parsed command line.
        option: option with the path, for messages.
        out: the path.

    Raises:
        ConfigError: the model, the text or the plan is this path, or is in it.
    """
    for name, read in (("model", "MODEL"), ("calibrate", "--calibrate"), ("plan", "--plan")):
        given = getattr(arguments, name, None)
        if given is not None and Path(given).exists() and Path(given).resolve().is_relative_to(out.resolve()):
            raise ConfigError(f"{option} {out}: {read} {given} is there, and would be lost; allowed: another path")


def read_text(path: Path, option: str) -> str:
    """Read the text file of an option.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8, or has more than 1 GiB.
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
    """The model of ``MODEL``, ``--device`` and ``--dtype``, and its tokenizer.

    Args:
        arguments: parsed command line.
        dtype: meaning of ``--dtype auto``; None: float16 on a GPU, float32 on a CPU.

    Raises:
        QcutError: see `qcut.checkpoints.pretrained`.
    """
    from qcut.checkpoints.pretrained import device_of, dtype_for, load_pretrained

    device = device_of(arguments.device)
    if dtype is None or arguments.dtype != "auto":
        dtype = dtype_for(arguments.dtype, device)
    return load_pretrained(arguments.model, dtype=dtype, device=device, progress=shown())


def open_another(arguments: argparse.Namespace, option: str, name: str, tokenizer: Any) -> tuple[Any, Any]:
    """A model that an option names next to ``MODEL``, and its tokenizer, of the same vocabulary.

    Args:
        arguments: parsed command line, see `open_model`.
        option: the option.
        name: its value.
        tokenizer: of ``MODEL``, or None.

    Raises:
        QcutError: the model cannot be opened, or has another vocabulary.
    """
    from qcut.engine.drafters import check_words

    model, words = open_model(argparse.Namespace(**{**vars(arguments), "model": name}))
    check_words(words, tokenizer, f"{option} {name}: the tokenizer")
    return model, words


def open_quantized(
    arguments: argparse.Namespace, quantizing: Quantizing, dtype: torch.dtype
) -> tuple[Any, Any, Report]:
    """A quantized model of any task: quantized while loading, except if the float model has to run on a text first.

    Args:
        arguments: parsed command line, see `open_model`.
        quantizing: options with a scheme.
        dtype: meaning of ``--dtype auto``.

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


def context_of(model: Any) -> int | None:
    """Most tokens of a sequence that a model was made for; None if its configuration has no bound."""
    context = getattr(model.config, "max_position_embeddings", None)
    return context if isinstance(context, int) and context > 1 else None


def cut_text(
    model: Any, tokenizer: Any, text: str, what: str, window: int | None, most: int | None
) -> tuple[Tensor, int]:
    """Cut a text into windows of tokens.

    Args:
        model: its context bounds the window.
        tokenizer: tokenizer of the model.
        text: the text.
        what: option and file, for messages.
        window: tokens per window; None: 512, or the model's context if shorter.
        most: number of windows; None: all.

    Returns:
        int64 ``[windows, window]``, and the window.

    Raises:
        ConfigError: the text is too short, or the window too short or longer than the model's context.
    """
    import torch

    from qcut.checkpoints.pretrained import token_ids
    from qcut.models.evaluation import windows_of

    limit = context_of(model)
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
    """The options of quantization, read and checked before the model is loaded.

    Attributes:
        options: parsed command line with the options of `QUANTIZING`.
        scheme: scheme of all layers, or a plan; None: no quantization except by ``--bits``.
        embeddings: scheme of token embeddings and classifier, or None.
        text: calibration text, or None.
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
        fit_bytes(options)
        if options.smooth is not None and not 0 <= options.smooth <= 1:
            raise ConfigError(f"--smooth {options.smooth}; allowed: 0 to 1")
        if options.bits is not None and options.smooth is not None:
            raise ConfigError("--smooth: not allowed with --bits, since the plan is made for the unsmoothed model")
        text = None if options.calibrate is None else read_text(options.calibrate, "--calibrate")
        return cls(options, scheme, embeddings, text)

    def while_loading(self) -> QcutConfig | None:
        """The configuration for quantizing while loading in transformers; None if the float model is needed.

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
            model: from `open_model`.
            tokenizer: from `open_model`.
            window: tokens per window; None: see `cut_text`.
            most: number of windows; None: `CALIBRATION_WINDOWS`.
            batch: windows per forward pass.

        Returns:
            The report, or None if there is nothing to do.

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
                moments = qcut.collect_curvature(model, batches, most_bytes=fit_bytes(given), progress=shown())
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
    """Refuse calibration by text for a model that has other inputs too."""
    if tokenizer is None:
        raise ConfigError("--calibrate TEXT needs a tokenizer; the model's folder has none")
    reads = getattr(model, "main_input_name", "input_ids")
    if reads != "input_ids" or model.config.is_encoder_decoder:
        what = "a text and its continuation" if reads == "input_ids" else reads
        raise ConfigError(
            f"--calibrate TEXT: {type(model).__name__} reads {what}, not only text; qcut.calibrate takes such "
            "batches in Python"
        )


def fit_bytes(arguments: argparse.Namespace) -> float | None:
    """The bytes of ``--fit-memory``; None if it is not given.

    Raises:
        ConfigError: ``--fit`` is not given.
    """
    if arguments.fit_memory is None:
        return None
    if not arguments.fit:
        raise ConfigError(f"--fit-memory {arguments.fit_memory:g} needs --fit")
    return 1e9 * float(arguments.fit_memory)


def _check_needs(arguments: argparse.Namespace, scheme: Scheme | Plan | None) -> None:
    """Refuse options with missing prerequisites, before anything is read or computed."""
    given = {
        f"--{name}": getattr(arguments, name)
        for name in ("calibrate", "smooth", "refine", "embeddings", "include", "skip", "verify")
    }
    given["--fit"] = arguments.fit or None
    if scheme is None and arguments.bits is None:
        for option, value in given.items():
            if value is not None:
                raise ConfigError(f"{option} needs --scheme, --plan or --bits")
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
