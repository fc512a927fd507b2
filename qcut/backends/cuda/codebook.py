"""`qcut.ops.codebook` on CUDA.

A call is a dictionary look-up, the allocation of its results and one launch on the current stream (two if dense
rotations end as int8, or if no kernel rotates a token itself); a miss makes a plan first, and hands it to
`qcut.backends.cuda.launch.native`. Its C++ serves the calls that follow. A `Rotation` or a `Product` holds all that
chooses a kernel and is the key of its plan; `CodebookLayer` lists the kernels of a layer before its first call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from qcut.backends.cuda.gemm import has_cutlass
from qcut.backends.cuda.launch import native
from qcut.backends.cuda.launch.plans import DTYPES, LaunchPlan, LaunchSpec, PlanCache, hand_over, m_bucket, target
from qcut.backends.cuda.launch.streams import current_stream
from qcut.backends.cuda.operands import dense, int8_rows, parameters, row_major
from qcut.dispatch import ahead_of_time
from qcut.dispatch import codebook as dispatch
from qcut.dispatch.gemm import alignment_of
from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics.tiled import CUTLASS_TOKENS
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.source import EmitError, KernelSource
from qcut.emitters.families import CODEBOOK_MMA, CODEBOOK_STREAM, CODEBOOK_STREAM_ROUNDS, CUTLASS_FAMILIES
from qcut.numerics.codebook import rotation
from qcut.numerics.codebook.layout import UNIT_COLUMNS, Geometry
from qcut.numerics.codebook.products import is_mirrored_book, is_pair_book
from qcut.ops.codebook import CodebookGemmOp, CodebookGemvOp, QuantizeRotatedOp, RotateTokensOp, can_rotate
from qcut.ops.registry import serves
from qcut.schemes import padded_k

# ── what chooses kernels ─────────────────────────────────────────────────────────────────────────


class Rotation(NamedTuple):
    """The rotation of up to ``rows`` tokens: all that chooses its kernels.

    Attributes:
        kind: ``hadamard``, ``qr`` or ``none``.
        x: dtype of the tokens.
        out: dtype of the blocks.
        rows: tokens that the kernels are chosen for, a `qcut.dispatch.buckets.m_bucket`.
        k: number of columns.
        group_size: columns of a group.
        passes: number of rotations of the same tokens.
        aligned: whether rows start at multiples of 16 bytes.
        early_read: whether the signs or matrices are ready, as those of a layer are.
        routed: whether rows of the blocks are routes to experts. Kernels then wait before they read anything.
        natural: whether int8 columns lie in natural order.
        row_major: whether int8 columns lie in rows and not in blocks.
    """

    kind: str
    x: torch.dtype
    out: torch.dtype
    rows: int
    k: int
    group_size: int
    passes: int
    aligned: bool = True
    early_read: bool = True
    routed: bool = False
    natural: bool = False
    row_major: bool = False

    def specs(self, gpu: Target) -> tuple[LaunchSpec, ...]:
        """The launches in order: two for dense rotations to int8, else one."""
        kernels = dispatch.select_rotation(
            self.kind,
            DTYPES[self.x],
            DTYPES[self.out],
            self.rows,
            self.k,
            self.group_size,
            self.passes,
            gpu,
            aligned=self.aligned,
            routed=self.routed,
            natural=self.natural,
            row_major=self.row_major,
        )
        k_padded = Geometry(self.k, self.group_size, self.kind).k_padded
        early = (self.early_read or self.kind == rotation.NO_ROTATION) and dispatch.starts_early(self.rows, self.k)
        early = architecture(gpu.arch).pdl and (self.routed or early)

        def spec(kernel: dispatch.Rotation, columns: int) -> LaunchSpec:
            return LaunchSpec(kernel.emit(), dispatch.rotation_grid(kernel, columns), pdl=early)

        return tuple(map(spec, kernels, (k_padded, self.passes * k_padded)))

    def load(self, device: int) -> tuple[LaunchPlan, ...]:
        """The launch plans in order, handed to C++ except of routes."""
        plans = tuple(spec.load(device) for spec in self.specs(target(device)))
        if self.routed:
            return plans
        key = native.key(
            "quantize_rotated" if self.row_major else "rotate_tokens",
            n=self.group_size,
            k=self.k,
            rows=self.rows,
            dtype=self.x,
            name=self.kind,
            device=device,
            out=self.out,
            passes=self.passes,
            aligned=self.aligned,
            early_read=self.early_read,
        )
        hand_over(key, plans, Geometry(self.k, self.group_size, self.kind).k_padded)
        return plans


class Product(NamedTuple):
    """The product of up to ``rows`` tokens with a codebook weight: all that chooses its kernel.

    Attributes:
        x: dtype of the tokens.
        rows: tokens that the kernel is chosen for, a `qcut.dispatch.buckets.m_bucket`.
        n: number of output channels.
        units: units of 128 columns along K, all passes together.
        bits: bits of an index.
        slots: norms per 128 columns.
        out: dtype of the result.
        bias: whether a bias is added.
        activation: activation after the bias.
        residual: whether a residual is added.
        rotates: dtype of the one token that the kernel rotates; None: tokens were rotated before.
        early_read: whether the weight and the signs are ready, as those of a layer are.
        row_norm: whether all norms of a row are one, and all rows have the same int8 values.
        offsets: whether norms have offsets.
        pairs: whether the codebook is of pairs.
        mirrored: whether the codebook, of 4 bits and for int8 tokens, is mirrored.
    """

    x: torch.dtype
    rows: int
    n: int
    units: int
    bits: int
    slots: int
    out: torch.dtype
    bias: bool
    activation: str
    residual: bool = False
    rotates: torch.dtype | None = None
    early_read: bool = True
    row_norm: bool = False
    offsets: bool = False
    pairs: bool = False
    mirrored: bool = False

    @property
    def problem(self) -> CodebookProblem:
        """The product as emitters see it."""
        return dispatch.problem_of(
            x=DTYPES[self.x],
            bits=self.bits,
            slots=self.slots,
            out=DTYPES[self.out],
            bias=self.bias,
            activation=self.activation,
            residual=self.residual,
            alignment_n=alignment_of(self.n),
            rotates=None if self.rotates is None else DTYPES[self.rotates],
            row_norm=self.row_norm,
            offsets=self.offsets,
            pairs=self.pairs,
            mirrored=self.mirrored,
        )

    def spec(self, gpu: Target) -> LaunchSpec:
        """The launch.

        Raises:
            EmitError: no kernel takes the product on this GPU.
        """
        return gemm_spec(self.problem, self.rows, self.n, self.units, gpu, early=self.early_read)

    def load(self, device: int) -> LaunchPlan:
        """The launch plan, handed to C++.

        Raises:
            EmitError: no kernel takes the product on this GPU.
        """
        plan = self.spec(target(device)).load(device)
        key = native.key(
            "codebook_gemm" if self.rotates is None else "codebook_gemv",
            n=self.n,
            k=self.units,
            rows=self.rows,
            dtype=self.rotates or self.x,
            name=self.activation,
            device=device,
            out=self.out,
            bits=self.bits,
            slots=self.slots,
            early_read=self.early_read,
            bias=self.bias,
            residual=self.residual,
            row_norm=self.row_norm,
            offsets=self.offsets,
            pairs=self.pairs,
            mirrored=self.mirrored,
            fold=self.x is torch.int8,
        )
        hand_over(key, [plan])
        return plan


def gemm_spec(
    problem: CodebookProblem, m: int, n: int, units: int, gpu: Target, *, early: bool = True, nvcc: bool = True
) -> LaunchSpec:
    """The launch of a product of up to m tokens, on the kernel that dispatch chooses.

    Args:
        problem: types, norms and epilogue.
        m: number of tokens.
        n: number of output channels.
        units: units of a row of weights.
        gpu: the GPU.
        early: the kernel may begin, and read the weight, before its predecessor has ended, if the GPU supports this.
        nvcc: whether the kernel may be one that nvcc builds.

    Raises:
        EmitError: no kernel takes the product on this GPU.
    """
    prompts = nvcc and problem.row_norm and m >= CUTLASS_TOKENS and architecture(gpu.arch).wgmma
    cutlass = prompts and ahead_of_time.serves_cutlass(problem, gpu, has_cutlass)
    choice = dispatch.select(problem, m, n, units, gpu, cutlass=cutlass)
    fallback = None
    if choice.family in CUTLASS_FAMILIES:
        fallback = partial(gemm_spec, problem, m, n, units, gpu, early=early, nvcc=False)
    # codebook_mma starts late, as w8a16_mma must; an early start was not measured.
    early = early and architecture(gpu.arch).pdl and choice.family != CODEBOOK_MMA.name
    by_element = choice.family in (CODEBOOK_STREAM.name, CODEBOOK_STREAM_ROUNDS.name)
    problem, tail = ahead_of_time.bounded_problem(problem, gpu, element_stores=by_element)
    source, grid = dispatch.emit(choice, problem, gpu.arch), dispatch.grid(choice, n, gpu.sm_count)
    if choice.family in CUTLASS_FAMILIES:
        tail = (*tail, gpu.sm_count, 1, 0, 1)
    return LaunchSpec(source, grid, tail=tail, pdl=early, fallback=fallback)


@lru_cache(maxsize=4096)
def has_kernel(product: Product, gpu: Target) -> bool:
    """Whether a kernel takes the product: kernels that rotate their token take a limited number of columns."""
    try:
        dispatch.select(product.problem, product.rows, product.n, product.units, gpu)
    except EmitError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class CodebookLayer:
    """A layer whose passes have one width, at one number of rows.

    Attributes:
        rows: tokens of a call.
        n: number of output channels.
        k: columns of the input.
        dtype: dtype of input and output.
        bits: bits of an index.
        passes: number of passes of the weight.
        kind: kind of the rotation: ``hadamard``, ``qr`` or ``none``.
        group_size: columns of a group.
        int8: whether products are int8.
        bias: whether a bias is added.
        activation: activation after the bias.
        row_norm: whether all norms of a row are one, and all rows have the same int8 values.
        offsets: whether norms have offsets.
        pairs: whether the codebook is of pairs.
        mirrored: see `Product`.
    """

    rows: int
    n: int
    k: int
    dtype: torch.dtype
    bits: int
    passes: int
    kind: str
    group_size: int
    int8: bool
    bias: bool
    activation: str
    row_norm: bool = False
    offsets: bool = False
    pairs: bool = False
    mirrored: bool = False

    @property
    def rotation(self) -> Rotation:
        """The rotation whose plan `rotate_tokens` uses for the layer."""
        return Rotation(
            kind=self.kind,
            x=self.dtype,
            out=self.tokens,
            rows=m_bucket(self.rows),
            k=self.k,
            group_size=self.group_size,
            passes=self.passes,
        )

    @property
    def product(self) -> Product:
        """The product whose plan `codebook_gemm` uses for the layer."""
        geometry = Geometry(self.k, self.group_size, self.kind)
        return Product(
            x=self.tokens,
            rows=m_bucket(self.rows),
            n=self.n,
            units=self.passes * geometry.units,
            bits=self.bits,
            slots=UNIT_COLUMNS // geometry.slot,
            out=self.dtype,
            bias=self.bias,
            activation=self.activation,
            row_norm=self.row_norm,
            offsets=self.offsets,
            pairs=self.pairs,
            mirrored=self.mirrored,
        )

    @property
    def tokens(self) -> torch.dtype:
        """Dtype of the rotated tokens."""
        return torch.int8 if self.int8 else self.dtype

    def specs(self, gpu: Target) -> tuple[LaunchSpec, ...]:
        """The launches of a call, in order."""
        is_half = self.dtype in (torch.float16, torch.bfloat16)
        if self.rows == 1 and is_half and can_rotate(self.kind, self.group_size, self.k):
            whole = self.product._replace(rotates=self.dtype)
            if has_kernel(whole, gpu):
                return (whole.spec(gpu),)
        return *self.rotation.specs(gpu), self.product.spec(gpu)

    def sources(self, device: int) -> list[KernelSource]:
        """The kernels that a call launches on a device."""
        return [spec.source for spec in self.specs(target(device))]

    def launches(self, device: int) -> tuple[LaunchSpec, ...]:
        """The launches of a call on a device, in order."""
        return self.specs(target(device))

    @property
    def calls_native(self) -> bool:
        """Whether C++ serves calls: all, except those with one token that has more columns than a kernel holds."""
        return True


# ── rotation ─────────────────────────────────────────────────────────────────────────────────────

_rotation_plans = PlanCache(Rotation.load, on_clear=partial(native.clear, "rotate_tokens", "quantize_rotated"))


@serves(RotateTokensOp)
def rotate_tokens(call: RotateTokensOp) -> tuple[Tensor, Tensor]:
    call.check()
    return rotate(call)


def rotate(call: RotateTokensOp) -> tuple[Tensor, Tensor]:
    """What `rotate_tokens` computes of arguments that were checked."""
    blocks, scale = call.fake()
    x, (m, k), passes, device = call.x, call.x.shape, len(call.seeds), call.x.get_device()
    if m == 0:
        return blocks, scale
    if x.stride(1) != 1 and k > 1:
        x = x.contiguous()
    stride = x.stride(0) if m > 1 else k
    aligned = x.data_ptr() % 16 == 0 and (m == 1 or stride * x.element_size() % 16 == 0)
    operands = dense(call.operands)
    options = (call.group_size, passes, aligned, call.early_read and operands is call.operands)
    described = Rotation(call.kind, x.dtype, call.out_dtype, m_bucket(m), k, *options)
    plans = _rotation_plans[described, device]
    k_padded = blocks.shape[0] * blocks.shape[3] // passes
    stream = current_stream(device)
    scales = (scale.data_ptr(),) if call.out_dtype is torch.int8 else ()
    matrices = (operands.data_ptr(),) if call.kind != "none" else ()
    if len(plans) == 1:
        # Dense kernels take no scale; Hadamard kernels take the signs after the scale.
        plans[0].launch(m, (x.data_ptr(), blocks.data_ptr(), *scales, *matrices, stride, m, k, k_padded), stream)
        return blocks, scale
    width = passes * k_padded
    rows = torch.empty((m, width), dtype=torch.float32, device=x.device)
    plans[0].launch(m, (x.data_ptr(), rows.data_ptr(), *matrices, stride, m, k, k_padded), stream)
    plans[1].launch(m, (rows.data_ptr(), blocks.data_ptr(), *scales, width, m, width, width), stream)
    return blocks, scale


def rows_of_int8(x: torch.dtype, rows: int, k: int, group_size: int, aligned: bool, early_read: bool) -> Rotation:
    """The rotation whose plan `quantize_rotated` uses; see `Rotation` for the arguments."""
    options = {"routed": False, "natural": True, "row_major": True}
    return Rotation("hadamard", x, torch.int8, m_bucket(rows), k, group_size, 1, aligned, early_read, **options)


@serves(QuantizeRotatedOp)
def quantize_rotated(call: QuantizeRotatedOp) -> tuple[Tensor, Tensor]:
    call.check()
    q, scale = rotated(call)
    m, k_padded = q.shape
    if m:
        (x, stride), device = row_major(call.x), q.get_device()
        aligned = (x.data_ptr() | stride * x.element_size()) % 16 == 0
        signs = dense(call.operands)
        early_read = call.early_read and signs is call.operands
        (plan,) = _rotation_plans[rows_of_int8(x.dtype, m, x.shape[1], call.group_size, aligned, early_read), device]
        args = (x.data_ptr(), q.data_ptr(), scale.data_ptr(), signs.data_ptr(), stride, m, x.shape[1], k_padded)
        plan.launch(m, args, current_stream(device))
    return q, scale


def rotated(call: RotateTokensOp | QuantizeRotatedOp) -> tuple[Tensor, Tensor]:
    """Tensors for rotated tokens, in blocks or `int8_rows`, and for their scales."""
    if isinstance(call, RotateTokensOp):
        return call.fake()
    m, k = call.x.shape
    return int8_rows(m, padded_k(k), call.x.device)


def rotate_apart(call: RotateTokensOp | QuantizeRotatedOp) -> tuple[Tensor, Tensor]:
    """The rotation of rows that the kernel which made them does not rotate; arguments were checked."""
    return quantize_rotated(call) if isinstance(call, QuantizeRotatedOp) else rotate(call)


@lru_cache(maxsize=1 << 12)
def rotates_rows(gpu: Target, describe: Callable[..., object], *shape: Hashable, **flags: Hashable) -> bool:
    """Whether a kernel that makes rows has registers to rotate them, too; no such kernel is built ahead of time.

    Args:
        gpu: the GPU.
        describe: describes the kernel that rotates, or raises `EmitError`.
        shape: arguments of ``describe``.
        flags: further ones.
    """
    try:
        describe(*shape, **flags)
    except EmitError:
        return False
    return not gpu.ahead_of_time


# ── product ──────────────────────────────────────────────────────────────────────────────────────

_product_plans = PlanCache(Product.load, on_clear=partial(native.clear, "codebook_gemm", "codebook_gemv"))


@serves(CodebookGemmOp)
def codebook_gemm(call: CodebookGemmOp) -> Tensor:
    call.check()
    return _multiply(call)


def _multiply(call: CodebookGemmOp) -> Tensor:
    m = call.m
    y = call.fake()
    if m == 0:
        return y
    weight = parameters(call.units, call.norms, call.fold)
    product = _product_of(call, m_bucket(m), call.early_read and not weight.copied)
    plan = _product_plans[product, call.x.get_device()]
    x, vectors = dense(call.x), parameters(call.row_scale, call.col_scale, call.bias, call.residual)
    sizes = (m, product.n, product.units, product.n)
    args = (x.data_ptr(), *weight.addresses, y.data_ptr(), *sizes, *call.book, *vectors.addresses)
    plan.launch(m, args, current_stream(call.x.get_device()))
    return y


@serves(CodebookGemvOp)
def codebook_gemv(call: CodebookGemvOp) -> Tensor:
    call.check()
    weight, device = parameters(call.operands, call.units, call.norms, call.fold), call.x.get_device()
    product = _product_of(call, 1, call.early_read and not weight.copied, rotates=call.x.dtype)
    plan = _product_plans.get((product, device))
    if plan is None:
        if not has_kernel(product, target(device)):
            return _multiply(call.product(*rotate(call.rotation)))
        plan = _product_plans[product, device]
    y = call.fake()
    x, vectors = dense(call.x), parameters(call.col_scale, call.bias, call.residual)
    sizes = (1, product.n, product.units, call.x.shape[1], product.units // len(call.seeds), product.n)
    args = (x.data_ptr(), *weight.addresses, y.data_ptr(), *sizes, *call.book, *vectors.addresses)
    plan.launch(1, args, current_stream(device))
    return y


def _product_of(
    call: CodebookGemmOp | CodebookGemvOp, rows: int, early_read: bool, *, rotates: torch.dtype | None = None
) -> Product:
    return Product(
        x=call.tokens,
        rows=rows,
        n=call.col_scale.shape[0],
        units=call.units.shape[1],
        bits=call.bits,
        slots=call.norms.shape[2],
        out=call.out_dtype,
        bias=call.bias is not None,
        activation=call.activation,
        residual=call.residual is not None,
        rotates=rotates,
        early_read=early_read,
        row_norm=isinstance(call, CodebookGemmOp) and call.row_norm,
        offsets=isinstance(call, CodebookGemmOp) and call.offsets,
        pairs=is_pair_book(call.book),
        mirrored=call.tokens is torch.int8 and call.bits == 4 and is_mirrored_book(call.book),
    )
