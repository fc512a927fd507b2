"""CUDA implementations of the operators on codebook weights, imported at the first CUDA call.

A call is a dictionary look-up, the allocation of its results and one launch on the current stream (two where dense
rotations end as int8, or where no kernel rotates a token itself); a miss makes a launch plan first. Kernels:
`qcut.dispatch.codebook` and `qcut.emitters.codebook.rotate`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qcut import jit
from qcut.codebooks.layout import Geometry
from qcut.cuda import plans as launch_plans
from qcut.cuda.int8 import dense
from qcut.cuda.plans import DTYPES, LaunchPlan, target
from qcut.dispatch import codebook as codebook_dispatch
from qcut.dispatch import gemm as dispatch
from qcut.dispatch.codebook import CodebookChoice, Rotation, problem_of
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.source import DType, EmitError, KernelSource
from qcut.emitters.families import CODEBOOK_MMA
from qcut.ops import codebook as codebook_ops
from qcut.ops.codebook import CodebookCall

_plans: dict[tuple[Any, ...], LaunchPlan] = {}
_without_gemv: set[tuple[Any, ...]] = set()
"""Keys of products that no kernel takes together with the rotation."""
_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream


def _plan(key: tuple[Any, ...], make: Callable[[], LaunchPlan]) -> LaunchPlan:
    with launch_plans.lock:
        plan = _plans.get(key)
        if plan is None:
            plan = _plans[key] = make()
    return plan


# ── rotation ─────────────────────────────────────────────────────────────────────────────────────


def _rotate_plan(desc: Rotation, k_padded: int, device: int) -> LaunchPlan:
    kernel = launch_plans.load(codebook_dispatch.emit_rotation(desc), device)
    return LaunchPlan(kernel, lambda m: desc.grid(m, k_padded), pdl=architecture(desc.arch).pdl)


def rotate_tokens(
    x: Tensor, operands: Tensor, kind: str, group_size: int, seeds: Sequence[int], out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    codebook_ops._check_rotate(x, operands, kind, group_size, seeds, out_dtype)
    blocks, scale = codebook_ops._rotate_fake(x, operands, kind, group_size, seeds, out_dtype)
    (m, k), passes, device = x.shape, len(seeds), x.get_device()
    if m == 0:
        return blocks, scale
    if x.stride(1) != 1 and k > 1:
        x = x.contiguous()
    stride = x.stride(0) if m > 1 else k
    aligned = x.data_ptr() % 16 == 0 and (m == 1 or stride * x.element_size() % 16 == 0)
    bucket = codebook_dispatch.bucket(m)
    key = ("rotate", kind, x.dtype, out_dtype, bucket, k, group_size, passes, aligned, device)
    plans: Any = _plans.get(key)
    k_padded = Geometry(k, group_size).k_padded
    if plans is None:
        gpu = target(device)
        kernels = codebook_dispatch.select_rotation(
            kind, DTYPES[x.dtype], DTYPES[out_dtype], bucket, k, group_size, passes, gpu, aligned=aligned
        )
        columns = (k_padded, passes * k_padded)
        with launch_plans.lock:
            plans = tuple(_rotate_plan(desc, n, device) for desc, n in zip(kernels, columns, strict=False))
            _plans[key] = plans
    stream = _stream(device)
    scales = (scale.data_ptr(),) if out_dtype is torch.int8 else ()
    matrices = (operands.data_ptr(),) if kind != "none" else ()
    if len(plans) == 1:
        # Dense kernels have no scale, and Hadamard ones read their signs after it.
        plans[0].launch(m, (x.data_ptr(), blocks.data_ptr(), *scales, *matrices, stride, m, k, k_padded), stream)
        return blocks, scale
    width = passes * k_padded
    rows = torch.empty((m, width), dtype=torch.float32, device=x.device)
    plans[0].launch(m, (x.data_ptr(), rows.data_ptr(), *matrices, stride, m, k, k_padded), stream)
    plans[1].launch(m, (rows.data_ptr(), blocks.data_ptr(), *scales, width, m, width, width), stream)
    return blocks, scale


# ── product ──────────────────────────────────────────────────────────────────────────────────────


def gemm_plan(
    problem: CodebookProblem,
    m: int,
    n: int,
    units: int,
    device: int,
    *,
    choice: CodebookChoice | None = None,
    pdl: bool = True,
) -> LaunchPlan:
    """Plan of a product of up to m tokens, on dispatch's choice of kernel unless one is given.

    ``pdl`` launches it so that it may begin before its predecessor has ended, where the GPU can.
    """
    gpu = target(device)
    if choice is None:
        choice = codebook_dispatch.select(problem, m, n, units, gpu)
    kernel = launch_plans.load(codebook_dispatch.emit(choice, problem, gpu.arch), device)
    # ``codebook_mma`` goes without, as ``w8a16_mma`` must; not measured for itself.
    pdl = pdl and architecture(gpu.arch).pdl and choice.family != CODEBOOK_MMA.name
    return LaunchPlan(kernel, codebook_dispatch.grid(choice, n, gpu.sm_count), pdl=pdl)


def codebook_gemm(
    x: Tensor,
    row_scale: Tensor | None,
    m: int,
    units: Tensor,
    norms: Tensor,
    fold: Tensor | None,
    col_scale: Tensor,
    book: Sequence[int],
    bias: Tensor | None,
    bits: int,
    activation: str,
    residual: Tensor | None,
    out_dtype: torch.dtype,
    *,
    choice: CodebookChoice | None = None,
) -> Tensor:
    """The operator; with ``choice``, on that kernel whatever dispatch thinks of it."""
    codebook_ops._check_gemm(
        x, row_scale, m, units, norms, fold, col_scale, book, bias, bits, activation, residual, out_dtype
    )
    out = torch.empty((m, len(col_scale)), dtype=out_dtype, device=x.device)
    if m == 0:
        return out
    residual = dense(residual) if residual is not None else None
    key = _product_key(x, m, units, norms, bits, bias, activation, residual, out, choice)
    plan = _plans.get(key)
    if plan is None:
        plan = _plan(key, lambda: gemm_plan(_problem(key), key.bucket, key.n, key.units, key.device, choice=choice))
    # Named, so that they live until the launch.
    tensors = [dense(t) for t in (x, units, norms, fold) if t is not None]
    vectors = [dense(t) for t in (row_scale, col_scale, bias, residual) if t is not None]
    sizes = (m, key.n, key.units, key.n)
    plan.launch(m, (*_addresses(tensors), out.data_ptr(), *sizes, *book, *_addresses(vectors)), _stream(key.device))
    return out


def codebook_gemv(
    x: Tensor,
    operands: Tensor,
    group_size: int,
    seeds: Sequence[int],
    units: Tensor,
    norms: Tensor,
    col_scale: Tensor,
    book: Sequence[int],
    bias: Tensor | None,
    bits: int,
    activation: str,
    residual: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    codebook_ops._check_gemv(
        x, operands, group_size, seeds, units, norms, col_scale, book, bias, bits, activation, residual, out_dtype
    )
    out = torch.empty((1, len(col_scale)), dtype=out_dtype, device=x.device)
    residual = dense(residual) if residual is not None else None
    key = _product_key(x, 1, units, norms, bits, bias, activation, residual, out, None, rotates=True)
    plan = _plans.get(key)
    if plan is None and key not in _without_gemv:
        try:
            plan = _plan(key, lambda: gemm_plan(_problem(key), 1, key.n, key.units, key.device))
        except EmitError:  # K is longer than the warps of one kernel hold
            _without_gemv.add(key)
    if plan is None:
        blocks, _ = rotate_tokens(x, operands, "hadamard", group_size, seeds, x.dtype)
        return codebook_gemm(
            blocks, None, 1, units, norms, None, col_scale, book, bias, bits, activation, residual, out_dtype
        )
    tensors = [dense(t) for t in (x, operands, units, norms)]
    vectors = [dense(t) for t in (col_scale, bias, residual) if t is not None]
    sizes = (1, key.n, key.units, x.shape[1], key.units // len(seeds), key.n)
    plan.launch(1, (*_addresses(tensors), out.data_ptr(), *sizes, *book, *_addresses(vectors)), _stream(key.device))
    return out


class _ProductKey(NamedTuple):
    """What chooses a product's kernel."""

    x: torch.dtype
    bits: int
    slots: int
    out: torch.dtype
    bias: bool
    activation: str
    residual: bool
    rotates: bool
    bucket: int
    n: int
    units: int
    choice: CodebookChoice | None
    device: int


def _product_key(
    x: Tensor,
    m: int,
    units: Tensor,
    norms: Tensor,
    bits: int,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    out: Tensor,
    choice: CodebookChoice | None,
    *,
    rotates: bool = False,
) -> _ProductKey:
    return _ProductKey(
        x.dtype,
        bits,
        norms.shape[2],
        out.dtype,
        bias is not None,
        activation,
        residual is not None,
        rotates,
        codebook_dispatch.bucket(m),
        out.shape[1],
        units.shape[1],
        choice,
        x.get_device(),
    )


def _problem(key: _ProductKey) -> CodebookProblem:
    return problem_of(
        DTYPES[key.x],
        key.bits,
        key.slots,
        DTYPES[key.out],
        key.bias,
        key.activation,
        key.residual,
        dispatch.alignment_of(key.n),
        key.rotates,
    )


def _addresses(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    return tuple(t.data_ptr() for t in tensors)


# ── ahead of time ────────────────────────────────────────────────────────────────────────────────


def prebuild(calls: Iterable[CodebookCall], device: int, progress: bool = True) -> None:
    """Build, in parallel, the kernels of these layers where they are not in the cache.

    Raises:
        BuildError: the first kernel that does not compile.
    """
    gpu = target(device)
    sources: dict[str, KernelSource] = {}
    for call in calls:
        rows, out = codebook_dispatch.bucket(call.m), DTYPES[call.dtype]
        tokens = DType.S8 if call.int8 else out
        alignment = dispatch.alignment_of(call.n)
        problem = problem_of(tokens, call.bits, call.slots, out, call.bias, call.activation, False, alignment)
        if call.m == 1 and not call.int8 and codebook_ops.can_rotate(call.kind, call.group_size, call.k):
            alone = replace(problem, rotates=True)
            with suppress(EmitError):
                choice = codebook_dispatch.select(alone, 1, call.n, call.units, gpu)
                source = codebook_dispatch.emit(choice, alone, gpu.arch)
                sources[source.name] = source
                continue
        kernels = codebook_dispatch.select_rotation(
            call.kind, out, tokens, rows, call.k, call.group_size, call.passes, gpu
        )
        found = [codebook_dispatch.emit_rotation(desc) for desc in kernels]
        choice = codebook_dispatch.select(problem, rows, call.n, call.units, gpu)
        found.append(codebook_dispatch.emit(choice, problem, gpu.arch))
        sources |= {source.name: source for source in found}
    for result in jit.build_many(sources.values(), progress=progress and sys.stderr.isatty()).values():
        if isinstance(result, Exception):
            raise result
