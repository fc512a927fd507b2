"""Schemes and ranges as frozen data with a JSON round trip. Imports no torch.

A scheme says how one layer computes; `parse_scheme` turns the names users type into scheme objects.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from qcut.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

K_MAX = 131_071
"""Largest K with int8 products that cannot overflow int32: 2**14 * K < 2**31."""
K_MAX_ZERO_POINT = 66_311
"""Largest K with int8 products that cannot overflow int32 with a zero point, which widens one factor to 255 steps."""
K_ALIGNMENT = 16
"""Rows of int8 are zero padded to a multiple of this many columns, 16 bytes: one vector load."""

LEAST_ROTATED_GROUP = 32
"""Least columns of a group that `W8A8Rotated` rotates."""
E2M1_GROUP = 32
"""Columns that share a power of two in MXFP4."""
NVFP4_GROUP = 16
"""Columns that share an e4m3 scale in NVFP4."""
FP8_BLOCK = 128
"""Rows and columns that share a scale in ``fp8_blocks``."""
FP8_UNIT_ROWS = 16
"""Rows with a stored scale for each `FP8_BLOCK` columns in ``fp8_blocks``: those that kernels multiply at once."""

ACTIVATIONS = ("none", "relu", "gelu_erf", "gelu_tanh", "silu")
"""Names of the elementwise functions a layer can fuse after its bias."""


def padded_k(k: int) -> int:
    """Columns of an int8 operand with ``k`` values a row: k rounded up to a multiple of `K_ALIGNMENT`."""
    return (k + K_ALIGNMENT - 1) // K_ALIGNMENT * K_ALIGNMENT


def check_activation(activation: str) -> str:
    """Returns `activation`, or raises `ConfigError` listing the names that exist."""
    if activation not in ACTIVATIONS:
        raise ConfigError(f"activation {activation!r} does not exist; use one of {', '.join(ACTIVATIONS)}")
    return activation


class Scheme(ABC):
    """How one layer computes. Subclasses are frozen dataclasses: hashable, comparable, plain data.

    Attributes:
        kind: name of the class in JSON files. A subclass that defines a kind is registered under it.
        usual: scheme names that lists for users show: all names of the class, or examples if there are many.
    """

    kind: ClassVar[str]
    usual: ClassVar[tuple[str, ...]]
    _classes: ClassVar[dict[str, type[Scheme]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in cls.__dict__:
            Scheme._classes.setdefault(cls.kind, cls)

    @classmethod
    def from_name(cls, name: str) -> Scheme | None:
        """The scheme of this class called ``name``, or None."""
        return cls() if name == cls.kind else None

    @property
    def name(self) -> str:
        """The name users type and reports print; `parse_scheme` reads it back."""
        return self.kind

    @property
    def int8_products(self) -> bool:
        """Whether activations are quantized too, so that both factors of every product are int8."""
        return False

    @property
    def is_float(self) -> bool:
        """Whether the scheme leaves layers in floating point."""
        return False

    @property
    def needs_range(self) -> bool:
        """Whether a layer needs the calibrated `StaticRange` of its input."""
        return False

    @property
    def takes_second_moments(self) -> bool:
        """Whether a weight can be fitted to the second moment of its layer's input."""
        return False

    @property
    def passes(self) -> int:
        """How many times a product reads its input."""
        return 1

    @abstractmethod
    def weight_bytes(self, n: int, k: int) -> float:
        """Bytes of a weight ``[N, K]`` that a product reads, without padding and without values stored once per row."""

    def to_json(self) -> dict[str, Any]:
        """``{"kind": …}`` and every field, plain data for a JSON file; `scheme_from_json` reads it back."""
        return {"kind": self.kind, **asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True)
class Int8Products(Scheme):
    """int8 weights, and activations that make products of int8 with them; their scales come in two modes.

    Attributes:
        mode: ``dynamic`` scales each token by its own largest magnitude; ``static`` uses one calibrated `StaticRange`
            per layer.
    """

    mode: Literal["dynamic", "static"] = "dynamic"

    def __post_init__(self) -> None:
        if self.mode not in ("dynamic", "static"):
            raise ConfigError(f"{type(self).__name__} mode {self.mode!r} does not exist; use 'dynamic' or 'static'")

    @classmethod
    def from_name(cls, name: str) -> Self | None:
        """See `Scheme`."""
        modes: dict[str, Literal["dynamic", "static"]] = {cls.kind: "dynamic", f"{cls.kind}_static": "static"}
        return cls(modes[name]) if name in modes else None

    @property
    def name(self) -> str:
        """The kind, and ``_static`` in that mode."""
        return self.kind if self.mode == "dynamic" else f"{self.kind}_static"

    @property
    def int8_products(self) -> bool:
        """See `Scheme`."""
        return True

    @property
    def needs_range(self) -> bool:
        """Whether the mode is ``static``."""
        return self.mode == "static"

    def weight_bytes(self, n: int, k: int) -> float:
        """One byte a value."""
        return float(n * k)


@dataclass(frozen=True)
class W8A8(Int8Products):
    """int8 weights and int8 activations, int32 accumulation.

    Attributes:
        mode: ``dynamic`` scales each token by its own largest magnitude (symmetric); ``static``
            uses one calibrated `StaticRange` per layer (asymmetric, a zero point).
    """

    kind: ClassVar[str] = "w8a8"
    usual: ClassVar[tuple[str, ...]] = ("w8a8", "w8a8_static")


_ROTATED_NAME = re.compile(
    r"w8a8_rotated(?:_g(?P<group>[1-9]\d{0,8})|(?P<rows>_rows))?(?:_seed(?P<seed>\d{1,18}))?", re.ASCII
)


@dataclass(frozen=True)
class W8A8Rotated(Scheme):
    """int8 weights and int8 activations of `W8A8`, both rotated before they are quantized.

    A Hadamard rotation with random signs spreads an outlier over its group, so that the scale of a token, its largest
    magnitude, becomes smaller. Weights are rotated once, when they are quantized.

    Attributes:
        group_size: columns of a group, a power of two from 32 on; the last group may have fewer, also a power of two.
            None for whole rows.
        seed: of the signs; a group's seed is ``seed`` plus its first column.

    Raises:
        ConfigError: a value is not allowed.

    Exactness: see `qcut.layers.int8.W8A8RotatedLinear`.

    Source: docs/schemes.md, section 2.
    """

    group_size: int | None = 128
    seed: int = 42

    kind: ClassVar[str] = "w8a8_rotated"
    usual: ClassVar[tuple[str, ...]] = ("w8a8_rotated",)

    def __post_init__(self) -> None:
        size = self.group_size
        if size is not None and (type(size) is not int or size < LEAST_ROTATED_GROUP or size & (size - 1)):
            raise ConfigError(
                f"W8A8Rotated group_size is {size!r}; allowed: powers of two from {LEAST_ROTATED_GROUP} on, or None "
                "for whole rows"
            )
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 62:
            raise ConfigError(f"W8A8Rotated seed is {self.seed!r}; allowed: 0 to 2**62 - 1")

    @classmethod
    def from_name(cls, name: str) -> W8A8Rotated | None:
        """Reads `name`."""
        match = _ROTATED_NAME.fullmatch(name)
        if match is None:
            return None
        part = match.groupdict()
        return cls(None if part["rows"] else int(part["group"] or 128), int(part["seed"] or 42))

    @property
    def name(self) -> str:
        """The kind, then ``_g{group size}`` or ``_rows``, and ``_seed{seed}``, if they differ from the defaults."""
        group = "" if self.group_size == 128 else "_rows" if self.group_size is None else f"_g{self.group_size}"
        return self.kind + group + (f"_seed{self.seed}" if self.seed != 42 else "")

    def group_columns(self, k: int) -> int:
        """Columns of a full group in a row of k columns; k itself if a group is a whole row."""
        return k if self.group_size is None else self.group_size

    @property
    def int8_products(self) -> bool:
        """See `Scheme`."""
        return True

    def weight_bytes(self, n: int, k: int) -> float:
        """One byte a value."""
        return float(n * k)


@dataclass(frozen=True)
class W8A16(Scheme):
    """int8 weights, dequantized in registers; activations keep their floating-point type."""

    kind: ClassVar[str] = "w8a16"
    usual: ClassVar[tuple[str, ...]] = ("w8a16",)

    def weight_bytes(self, n: int, k: int) -> float:
        """One byte a value."""
        return float(n * k)


@dataclass(frozen=True)
class FP8(Scheme):
    """Weights of 8-bit floats (e4m3), and activations in their own floating-point type or in 8-bit floats too.

    Attributes:
        blocks: whether blocks of `FP8_BLOCK` rows and columns have a scale each, and not rows.
        tokens: ``float`` multiplies the weights, as 16-bit floats, with activations of their own type; ``dynamic``
            quantizes each token to e4m3 by its own largest magnitude; ``static`` quantizes all tokens with one scale,
            from the larger bound of one calibrated `StaticRange` per layer.

    Raises:
        ConfigError: ``blocks`` with quantized tokens, or a value that is not allowed.
    """

    blocks: bool = False
    tokens: Literal["float", "dynamic", "static"] = "float"

    kind: ClassVar[str] = "fp8"
    usual: ClassVar[tuple[str, ...]] = ("fp8", "fp8_blocks", "fp8_dynamic", "fp8_static")

    def __post_init__(self) -> None:
        if type(self.blocks) is not bool:
            raise ConfigError(f"FP8 blocks is {self.blocks!r}; allowed: true, false")
        if self.tokens not in ("float", "dynamic", "static"):
            raise ConfigError(f"FP8 tokens is {self.tokens!r}; allowed: 'float', 'dynamic', 'static'")
        if self.blocks and self.tokens != "float":
            raise ConfigError(f"FP8 of blocks: tokens is {self.tokens!r}; allowed: 'float'")

    @classmethod
    def from_name(cls, name: str) -> Self | None:
        """See `Scheme`."""
        schemes = (cls(), cls(True), cls(tokens="dynamic"), cls(tokens="static"))
        return next((scheme for scheme in schemes if scheme.name == name), None)

    @property
    def name(self) -> str:
        """The kind, with ``_blocks``, ``_dynamic`` or ``_static``."""
        if self.blocks:
            return f"{self.kind}_blocks"
        return self.kind if self.tokens == "float" else f"{self.kind}_{self.tokens}"

    @property
    def needs_range(self) -> bool:
        """Whether tokens are ``static``."""
        return self.tokens == "static"

    def scale_shape(self, n: int, k: int) -> tuple[int, ...]:
        """Shape of the scales of a weight ``[N, K]``."""
        return (-(-n // FP8_UNIT_ROWS), -(-k // FP8_BLOCK)) if self.blocks else (n,)

    def weight_bytes(self, n: int, k: int) -> float:
        """One byte a value."""
        return float(n * k)


@dataclass(frozen=True)
class Int16x8(Int8Products):
    """int16 activations, int8 weights; sums are exact integers, rounded once. An int16 is two int8.

    Attributes:
        mode: ``dynamic`` scales each token by its own largest magnitude; ``static`` uses the larger bound of one
            calibrated `StaticRange` per layer. Both are symmetric.
    """

    kind: ClassVar[str] = "int16x8"
    usual: ClassVar[tuple[str, ...]] = ("int16x8", "int16x8_static")

    @property
    def passes(self) -> int:
        """Two: the weight is multiplied by both halves of the activations."""
        return 2


@dataclass(frozen=True)
class Float(Scheme):
    """The layer stays as it is, in the model's own floating-point type."""

    kind: ClassVar[str] = "fp16"
    usual: ClassVar[tuple[str, ...]] = ("fp16",)

    @property
    def is_float(self) -> bool:
        """See `Scheme`."""
        return True

    def weight_bytes(self, n: int, k: int) -> float:
        """Two bytes a value."""
        return n * k * 2.0


_CODEBOOK_NAME = re.compile(
    r"(?:codebook(?P<bits>[234])(?:\+(?P<residual_bits>[234]))?(?P<pairs>_pairs)?|int(?P<int_bits>[234])|(?P<float4>mxfp4|nvfp4))"
    r"(?:_g(?P<group>[1-9]\d{0,8})|(?P<rows>_rows))?(?:_(?P<rotation>qr|none))?(?:_seed(?P<seed>\d{1,18}))?"
    r"(?:_residual_seed(?P<residual_seed>\d{1,18}))?(?P<norms>_fp32norms)?(?P<int8>_int8)?",
    re.ASCII,
)


_USUAL: dict[tuple[str, bool], tuple[int, str]] = {
    ("normal", False): (128, "hadamard"),
    ("steps", False): (128, "none"),
    ("e2m1", False): (E2M1_GROUP, "none"),
    ("e2m1", True): (NVFP4_GROUP, "none"),
}
"""By levels, and whether norms are e4m3, the group size and the rotation that a name leaves out."""


@dataclass(frozen=True)
class Codebook(Scheme):
    """Indices into a codebook, a norm for each row and group of columns, and a rotation for each group.

    Attributes:
        bits: bits of an index: 2, 3 or 4.
        residual_bits: bits of an index in a second pass, which quantizes the error of the first; None for one pass.
        group_size: columns of a group; the last group may have fewer; None for whole rows.
        rotation: ``hadamard`` (every group a power of two), ``qr`` (any size) or ``none``.
        seed: seed of the first pass's rotations.
        residual_seed: seed of the second pass's rotations.
        activation: type of the activations in products: ``fp16`` keeps the input's own 16-bit type, ``int8`` quantizes
            each token after its rotation.
        norm_dtype: how norms are stored: ``fp16``, ``fp32``, or ``e4m3`` with a float64 factor for each row, which
            NVFP4 has. Kernels read float16 either way.
        levels: what indices stand for. ``normal``: values for normally distributed weights. ``steps``: the integers
            from ``-2**(bits - 1)`` to ``2**(bits - 1) - 1``; a group's largest magnitude becomes
            ``2**(bits - 1) - 1``, so the least integer is not used. ``e2m1``: floats of 4 bits, times a power of two
            for each 32 columns (MXFP4), or an e4m3 scale for each 16 and a factor of the tensor (NVFP4); see
            `qcut.numerics.codebook.float4`. Others than ``normal`` need the rotation ``none`` and a single pass.
        pairs: use a codebook of 256 pairs of values, an index for two neighbouring columns together
            (`qcut.numerics.codebook.pairs`). Needs 4 bits, a rotation, a single pass and groups of an even number of
            columns.

    Raises:
        ConfigError: a value is not allowed.

    Exactness: see `qcut.numerics.codebook.quantizer.quantize` for quantizing, `qcut.layers.codebook.CodebookLinear` for
    computing.

    Source: docs/schemes.md, section 4.
    """

    bits: int = 4
    residual_bits: int | None = None
    group_size: int | None = 128
    rotation: Literal["hadamard", "qr", "none"] = "hadamard"
    seed: int = 42
    residual_seed: int = 1042
    activation: Literal["fp16", "int8"] = "fp16"
    norm_dtype: Literal["fp16", "fp32", "e4m3"] = "fp16"
    levels: Literal["normal", "steps", "e2m1"] = "normal"
    pairs: bool = False
    kind: ClassVar[str] = "codebook"
    usual: ClassVar[tuple[str, ...]] = (
        *("codebook4", "codebook3", "codebook2", "codebook4+4", "codebook4_int8", "codebook4+4_int8"),
        *("codebook4_pairs", "codebook4_pairs_int8", "int4", "mxfp4", "nvfp4"),
    )

    def __post_init__(self) -> None:
        for name, allowed in (
            ("bits", (2, 3, 4)),
            ("residual_bits", (None, 2, 3, 4)),
            ("rotation", ("hadamard", "qr", "none")),
            ("activation", ("fp16", "int8")),
            ("norm_dtype", ("fp16", "fp32", "e4m3")),
            ("levels", ("normal", "steps", "e2m1")),
            ("pairs", (False, True)),
        ):
            value = getattr(self, name)
            if not any(type(value) is type(one) and value == one for one in allowed):
                raise ConfigError(f"Codebook {name} is {value!r}; allowed: {', '.join(map(str, allowed))}")
        size = self.group_size
        if size is not None and (type(size) is not int or size < 1):
            raise ConfigError(f"Codebook group_size is {size!r}; allowed: 1 and more, or None for whole rows")
        for name in ("seed", "residual_seed"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value < 1 << 62:
                raise ConfigError(f"Codebook {name} is {value!r}; allowed: 0 to 2**62 - 1")
        if self.rotation == "hadamard" and size is not None and size & (size - 1):
            raise ConfigError(f"Codebook group_size is {size}; the rotation 'hadamard' takes powers of two")
        if self.levels != "normal" and (self.rotation != "none" or self.residual_bits is not None):
            raise ConfigError(
                f"Codebook of levels {self.levels!r}: rotation is {self.rotation!r} and residual_bits "
                f"{self.residual_bits}; allowed: 'none' and None"
            )
        e4m3 = self.norm_dtype == "e4m3"
        if self.levels == "e2m1" and (self.bits, size) != (4, NVFP4_GROUP if e4m3 else E2M1_GROUP):
            raise ConfigError(
                f"Codebook of levels 'e2m1': bits is {self.bits} and group_size {size} with norms of "
                f"{self.norm_dtype}; allowed: 4 and {E2M1_GROUP}, or 4 and {NVFP4_GROUP} with e4m3"
            )
        if e4m3 and self.levels != "e2m1":
            raise ConfigError(f"Codebook of levels {self.levels!r}: norm_dtype is 'e4m3'; allowed: fp16, fp32")
        if self.pairs and (self.bits != 4 or self.residual_bits is not None or self.rotation == "none"):
            raise ConfigError(
                f"Codebook of pairs: bits is {self.bits}, residual_bits {self.residual_bits} and rotation "
                f"{self.rotation!r}; allowed: 4, None, and 'hadamard' or 'qr'"
            )
        if self.pairs and size is not None and size % 2:
            raise ConfigError(f"Codebook of pairs: group_size is {size}; allowed: even numbers, or None for whole rows")

    @classmethod
    def from_name(cls, name: str) -> Codebook | None:
        """Reads `name`."""
        match = _CODEBOOK_NAME.fullmatch(name)
        if match is None:
            return None
        part = match.groupdict()
        levels: Any = "e2m1" if part["float4"] else "steps" if part["int_bits"] else "normal"
        e4m3 = part["float4"] == "nvfp4"
        group_size, rotation = _USUAL[levels, e4m3]
        return cls(
            bits=int(part["int_bits"] or part["bits"] or 4),
            residual_bits=int(part["residual_bits"]) if part["residual_bits"] else None,
            group_size=None if part["rows"] else int(part["group"] or group_size),
            rotation=cast(Any, part["rotation"] or rotation),
            seed=int(part["seed"] or 42),
            residual_seed=int(part["residual_seed"] or 1042),
            activation="int8" if part["int8"] else "fp16",
            norm_dtype="fp32" if part["norms"] else "e4m3" if e4m3 else "fp16",
            levels=levels,
            pairs=bool(part["pairs"]),
        )

    @property
    def name(self) -> str:
        """The name, such as ``codebook4``, ``codebook4+4_int8``, ``codebook3_g64_qr_seed7``, ``int4`` or ``mxfp4``.

        A name begins with ``codebook{bits}[+{residual bits}]``, or by its levels with ``int{bits}``, ``mxfp4`` or
        ``nvfp4``.
        Options that differ from the defaults follow in this order: ``_pairs``, ``_g{group size}`` or ``_rows``,
        ``_qr`` or ``_none``, ``_seed{seed}``, ``_residual_seed{residual seed}``, ``_fp32norms``, ``_int8``.
        """
        residual = "" if self.residual_bits is None else f"+{self.residual_bits}"
        e4m3 = self.norm_dtype == "e4m3"
        float4 = "nvfp4" if e4m3 else "mxfp4"
        begins = {"normal": f"codebook{self.bits}{residual}", "steps": f"int{self.bits}", "e2m1": float4}
        parts, (group_size, rotation) = [begins[self.levels]], _USUAL[self.levels, e4m3]
        if self.pairs:
            parts.append("pairs")
        if self.group_size != group_size:
            parts.append("rows" if self.group_size is None else f"g{self.group_size}")
        if self.rotation != rotation:
            parts.append(self.rotation)
        if self.seed != 42:
            parts.append(f"seed{self.seed}")
        if self.residual_seed != 1042:
            parts.append(f"residual_seed{self.residual_seed}")
        if self.norm_dtype == "fp32":
            parts.append("fp32norms")
        if self.activation == "int8":
            parts.append("int8")
        return "_".join(parts)

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits of each pass."""
        return (self.bits,) if self.residual_bits is None else (self.bits, self.residual_bits)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seed of each pass."""
        return (self.seed,) if self.residual_bits is None else (self.seed, self.residual_seed)

    def group_columns(self, k: int) -> int:
        """Columns of a full group in a row of k columns; k itself if a group is a whole row."""
        return k if self.group_size is None else self.group_size

    @property
    def int8_products(self) -> bool:
        """See `Scheme`."""
        return self.activation == "int8"

    @property
    def takes_second_moments(self) -> bool:
        """Whether weights are rotated: only rotated weights can be fitted."""
        return self.rotation != "none"

    @property
    def passes(self) -> int:
        """One, or two with residual bits."""
        return len(self.widths)

    def weight_bytes(self, n: int, k: int) -> float:
        """The indices, and a float16 norm for each group, which kernels read, of all passes."""
        groups = -(-k // self.group_columns(k))
        return n * (k * sum(self.widths) / 8 + 2 * groups * self.passes)


@dataclass(frozen=True)
class ShiftedCodebook(Codebook):
    """A codebook without rotation, with an offset for each norm, or with columns in an order of the layer's own.

    Quantizing never chooses it: it holds what other libraries wrote with zero points, or sorted by activation.

    Attributes:
        shifted: every norm has a number that is added to the values it multiplies, as a zero point is.
        ordered: groups are of columns in an order that the layer holds, in place of neighbours.

    Raises:
        ConfigError: neither of both, a rotation, int8 products, or two passes of different widths.
    """

    rotation: Literal["hadamard", "qr", "none"] = "none"
    shifted: bool = False
    ordered: bool = False
    kind: ClassVar[str] = "shifted_codebook"
    usual: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        flags = self.shifted, self.ordered
        if any(type(flag) is not bool for flag in flags) or not any(flags):
            raise ConfigError(
                f"ShiftedCodebook shifted and ordered are {flags}; allowed: true for one of them, or both"
            )
        if self.rotation != "none" or self.int8_products or len(set(self.widths)) > 1 or self.norm_dtype == "e4m3":
            raise ConfigError(
                f"ShiftedCodebook {self.name}: allowed: the rotation 'none', 16-bit products, passes of one width, and "
                "norms of fp16 or fp32"
            )

    @classmethod
    def from_name(cls, name: str) -> Codebook | None:
        """Reads `name`."""
        plain, ordered = name.removesuffix("_ordered"), name.endswith("_ordered")
        plain, shifted = plain.removesuffix("_shifted"), plain.endswith("_shifted")
        base = Codebook.from_name(plain) if shifted or ordered else None
        return None if base is None else cls(**asdict(base), shifted=shifted, ordered=ordered)

    @property
    def name(self) -> str:
        """The codebook's name, ``_shifted`` and ``_ordered``, such as ``int4_g32_shifted``."""
        return super().name + "_shifted" * self.shifted + "_ordered" * self.ordered

    def weight_bytes(self, n: int, k: int) -> float:
        """That of the codebook, and a float16 offset for each norm."""
        groups = -(-k // self.group_columns(k))
        return super().weight_bytes(n, k) + 2 * n * groups * self.passes * self.shifted


SCHEME_NAMES = tuple(name for cls in Scheme._classes.values() for name in cls.usual)
"""Names for lists that users read. `parse_scheme` knows more names of codebooks: see `Codebook.name`."""
ALLOWED_SCHEMES = "use w8a8, w8a8_static, w8a16, int16x8 or a codebook such as codebook4"
"""The end of messages about a scheme that quantizes nothing."""


_SAME = {
    "w8a8_dynamic": "w8a8",
    "int8_w8a8": "w8a8",
    "int8_weight_only": "w8a16",
    "int4_w4a16": "int4",
    "16x8": "int16x8",
}
"""Other names of a scheme that mean the same thing."""

_NEAR = {
    "int8": "w8a8 (weights and activations in int8) or w8a16 (only weights)",
    "8bit": "w8a8 (weights and activations in int8) or w8a16 (only weights)",
    "int16": "int16x8 (int16 activations, int8 weights)",
    "w8": "w8a16 (int8 weights, activations as they are)",
    "a8w8": "w8a8",
    "int8_dynamic": "w8a8",
    "int8_static": "w8a8_static",
    "smoothquant": "w8a8 with smooth=0.5 and a calibration, or w8a8_rotated without one",
    "quarot": "w8a8_rotated",
    "w8a8_fp8": "fp8_dynamic (weights and activations in 8-bit floats) or fp8 (only weights)",
    "4bit": "codebook4 (the more exact) or int4 (equal steps)",
    "w4a16": "int4 (equal steps, groups of 128) or codebook4 (the more exact)",
    "w4a8": "codebook4_int8 (4-bit weights, int8 products)",
    "w4": "codebook4 (the more exact) or int4 (equal steps)",
    "nf4": "codebook4 (16 levels for normally distributed values too, after a rotation; another format)",
    "fp4": "nvfp4 (an e4m3 scale for 16 columns), mxfp4 (a power of two for 32), or codebook4 (the more exact)",
    "gptq": "codebook4 with second_moments=qcut.collect_second_moments(model, batches)",
    "awq": "codebook4 or int4 (names of schemes, not of methods)",
    "turboquant": "codebook4 (with _qr for any K)",
    "3bit": "codebook3 or int3",
    "int3_w3a16": "int3",
    "2bit": "codebook2 or int2",
    "bf16": "fp16, which leaves layers in the model's own type",
    "float": "fp16, which leaves layers in the model's own type",
    "float16": "fp16, which leaves layers in the model's own type",
    "bfloat16": "fp16, which leaves layers in the model's own type",
}
"""Names that users bring from elsewhere, and what comes near them here."""


def parse_scheme(scheme: str | Scheme) -> Scheme:
    """The scheme object for a name; a scheme object passes through.

    Capitals, and ``-`` for ``_``, make no difference.

    Raises:
        ConfigError: the name does not exist; the message says which comes near, and lists names that do.
    """
    if isinstance(scheme, Scheme):
        return scheme
    plain = scheme.lower().replace("-", "_") if isinstance(scheme, str) and scheme.isascii() else str(scheme)
    plain = _SAME.get(plain, plain)
    for cls in Scheme._classes.values():
        if (named := cls.from_name(plain)) is not None:
            return named
    names = f"{', '.join(SCHEME_NAMES)} (codebooks: codebook{{2,3,4}}[+{{2,3,4}}][_g64|_rows][_qr|_none]…[_int8])"
    near = _NEAR.get(plain) or next(iter(get_close_matches(plain, SCHEME_NAMES, 1, 0.7)), None)
    hint = f"did you mean {near}? " if near else ""
    raise ConfigError(f"scheme {scheme!r} does not exist; {hint}use one of {names}")


def scheme_from_json(data: dict[str, Any]) -> Scheme:
    """Reads what `Scheme.to_json` wrote.

    Raises:
        ConfigError: not a mapping, an unknown kind, or fields the kind does not have.
    """
    classes = Scheme._classes
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in classes:
        raise ConfigError(f"not a scheme: {data!r}; 'kind' is one of {', '.join(classes)}")
    try:
        return classes[kind](**{key: value for key, value in data.items() if key != "kind"})
    except TypeError:
        raise ConfigError(f"scheme of kind {kind!r} has unknown fields: {data!r}") from None


@dataclass(frozen=True)
class StaticRange:
    """Calibrated range ``[lo, hi]`` of a layer's input; ``lo <= 0 <= hi`` so that zero is exact.

    Raises:
        ConfigError: a bound is not finite, or zero lies outside the range.
    """

    lo: float
    hi: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lo) and math.isfinite(self.hi) and self.lo <= 0.0 <= self.hi):
            raise ConfigError(f"static range [{self.lo}, {self.hi}] is not finite with lo <= 0 <= hi")

    @classmethod
    def including_zero(cls, lo: float, hi: float) -> StaticRange:
        """The smallest valid range that holds ``[lo, hi]``."""
        return cls(min(lo, 0.0), max(hi, 0.0))

    def to_json(self) -> dict[str, float]:
        """``{"lo": …, "hi": …}``; JSON keeps Python floats exactly."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StaticRange:
        """Reads what `to_json` wrote.

        Raises:
            ConfigError: fields are missing, not numbers, or do not form a valid range.
        """
        try:
            lo, hi = float(data["lo"]), float(data["hi"])
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"not a static range: {data!r}; it holds two numbers, 'lo' and 'hi'") from None
        return cls(lo, hi)
