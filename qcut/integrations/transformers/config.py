"""`QcutConfig`: what ``from_pretrained(quantization_config=…)`` takes, and what ``config.json`` holds afterwards."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qcut.common import schema, versions
from qcut.errors import CheckpointError
from qcut.models.selection import globs
from qcut.schemes import Scheme, parse_scheme

versions.transformers()

from transformers.utils.quantization_config import QuantizationConfigMixin  # noqa: E402  (after the check)

if TYPE_CHECKING:
    from torch import Tensor

    from qcut.conversion.calibration.calibrate import Calibration
    from qcut.conversion.planning.plan import Plan
    from qcut.numerics.codebook.fitting.curvature import Curvature

_METHOD, _VERSION = "qcut", 1
_GLOBS = schema.nothing_or(schema.items(schema.text()))
_REQUEST = schema.record(
    {"quant_method": schema.anything(), "scheme": schema.anything()},
    {
        "format_version": (schema.anything(), _VERSION),
        "include": (_GLOBS, None),
        "modules_to_not_convert": (_GLOBS, None),
        "embeddings": (schema.anything(), None),
        "fuse": (schema.boolean(), True),
        "allow_growth": (schema.boolean(), False),
    },
)


_SERVING = schema.record(
    {"quant_method": schema.anything(), "foreign": schema.table(schema.anything())},
    {"format_version": (schema.anything(), _VERSION)},
)
_WHERE = "quantization_config"


class QcutConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """How transformers' ``from_pretrained`` quantizes a model while it loads: one layer's float weight at a time.

    Of a mixture, the float weights of one block's experts are in memory at a time.

    ``AutoModelForCausalLM.from_pretrained(folder, quantization_config=qcut.QcutConfig("codebook4"))`` gives the layers
    that `qcut.quantize` with the same arguments makes of the loaded float model. What ``save_pretrained`` then writes
    loads without a configuration.

    Args:
        scheme: one for all layers, or a `Plan`.
        include: globs of layers to quantize; None takes all (of the plan).
        modules_to_not_convert: globs of layers to leave in float; None means ``["lm_head"]``, or none with a plan.
        embeddings: scheme of the tables of tokens and of the classifier; None leaves them as they are otherwise.
        calibration: `qcut.calibrate` of the float model; ``w8a8_static`` needs it.
        second_moments: `qcut.collect_curvature` or `qcut.collect_second_moments` of the float model, by layer:
            codebooks are fitted to them.
        fuse: let a layer compute the activation that follows.
        allow_growth: also quantize layers that take as many bytes as before or more.
        verify: a batch, as `qcut.calibrate` takes them: each layer is held to its float weight while both exist, on the
            calibration's tokens or else on random ones. How the layers are put together is then held, on the batch, to
            the model's own modules, which compute with the quantized layers' weights, one at a time. None and True are
            those of `qcut.quantize`; False leaves the proof out.
        report: keep, as ``model.hf_quantizer.report``, the report that `qcut.quantize` returns, except the errors of
            outputs. Measuring the errors of weights takes time.

    Raises:
        ConfigError: an unknown scheme, ``fp16`` for the whole model, ``w8a8_static`` without a calibration, or a glob
            that is no string.
        UnsupportedError: transformers is missing, or too old.

    With ``tp_plan="auto"`` each process keeps its parts of the layers; see docs/transformers.md.

    Exactness: bitwise that of `qcut.quantize` on the model that the same call loads without a configuration.
    """

    def __init__(
        self,
        scheme: str | Scheme | Plan = "w8a8",
        *,
        include: Sequence[str] | None = None,
        modules_to_not_convert: Sequence[str] | None = None,
        embeddings: str | Scheme | None = None,
        calibration: Calibration | None = None,
        second_moments: Mapping[str, Tensor | Curvature] | None = None,
        fuse: bool = True,
        allow_growth: bool = False,
        verify: Any = None,
        report: bool = False,
    ) -> None:
        self.quant_method = _METHOD
        self.scheme: Any = _checked(scheme, calibration, second_moments)
        self.include = None if include is None else globs(include, "include")
        kept = modules_to_not_convert
        self.modules_to_not_convert = None if kept is None else globs(kept, "modules_to_not_convert")
        self.embeddings = None if embeddings is None else parse_scheme(embeddings)
        self.calibration = calibration
        self.second_moments = second_moments
        self.fuse = fuse
        self.allow_growth = allow_growth
        self.verify = verify
        self.report = report
        self.stored: dict[str, Any] | None = None
        self.foreign: dict[str, Any] | None = None

    @classmethod
    def describing(cls, stored: Mapping[str, Any]) -> QcutConfig:
        """The configuration of a model that is quantized already, as `qcut.checkpoints.quantization_config` has it."""
        config = cls()
        config.stored = dict(stored)
        return config

    @classmethod
    def serving(cls, foreign: Mapping[str, Any]) -> QcutConfig:
        """The request to load what another library's ``quantization_config`` describes; see `qcut.foreign_config`."""
        config = cls()
        config.foreign = dict(foreign)
        return config

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Read what `to_dict` wrote. A description of quantized layers is checked when the model is there.

        Raises:
            CheckpointError: unknown keys, values of a wrong type, or a newer version.
            ConfigError: an unknown scheme.
        """
        data = dict(config_dict)
        if "foreign" in data:
            config = cls.serving(_conforming(data, _SERVING)["foreign"])
        else:
            config = cls._requested(data) if "scheme" in data else cls.describing(data)
        return (config, kwargs) if return_unused_kwargs else config

    @classmethod
    def _requested(cls, data: dict[str, Any]) -> QcutConfig:
        given = _conforming(data, _REQUEST)
        scheme = given.pop("scheme")
        if isinstance(scheme, dict):
            from qcut.conversion.planning.plan import Plan

            scheme = Plan.from_json(scheme, f"{_WHERE}.scheme")
        return cls(scheme, **given)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the description of a quantized model, or else the request, without calibration."""
        if self.stored is not None:
            return copy.deepcopy(self.stored)
        if self.foreign is not None:
            return {"quant_method": _METHOD, "format_version": _VERSION, "foreign": copy.deepcopy(self.foreign)}
        return {
            "quant_method": _METHOD,
            "format_version": _VERSION,
            "scheme": self.scheme.name if isinstance(self.scheme, Scheme) else self.scheme.to_json(),
            "include": None if self.include is None else list(self.include),
            "modules_to_not_convert": (
                None if self.modules_to_not_convert is None else list(self.modules_to_not_convert)
            ),
            "embeddings": None if self.embeddings is None else self.embeddings.name,
            "fuse": self.fuse,
            "allow_growth": self.allow_growth,
        }


def _conforming(data: dict[str, Any], fields: schema.Check) -> dict[str, Any]:
    """A request's fields except method and version, which are checked."""
    given: dict[str, Any] = schema.conform(data, fields, _WHERE, CheckpointError)
    if given.pop("format_version") != _VERSION or given.pop("quant_method") != _METHOD:
        raise CheckpointError(f"{_WHERE}: found {data}; quant_method {_METHOD!r} version {_VERSION} is needed")
    return given


def _checked(scheme: str | Scheme | Plan, calibration: Calibration | None, second_moments: Any) -> Scheme | Plan:
    from qcut.conversion.planning.plan import Plan
    from qcut.conversion.tasks import check_given, uniform_scheme

    check_given(calibration, second_moments)
    if isinstance(scheme, Plan):
        scheme.check()
        return scheme
    return uniform_scheme(scheme, calibration)
