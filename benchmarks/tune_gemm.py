"""Finds the fastest CUTLASS tile for each benchmark shape and writes the table that dispatch reads.

Every candidate is checked bitwise before it is timed; the best few then try every tile walk. The
epilogue is the whole dequantization (zero point, both scales, bias), once with float16 and once with
int8 output.

    python benchmarks/tune_gemm.py --out DIR [--build-only]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from benchmarks.shapes import Shape, gemm_shapes
from emitters.cutlass_gemm import emit_cutlass_gemm, validate
from emitters.epilogue import Epilogue
from emitters.gemm import GemmProblem, Schedule, TileConfig
from emitters.source import DType, EmitError, KernelSource
from qcut import dispatch, jit
from qcut.dispatch import Target

ARCH = "sm_90a"
OUTPUTS = {"f16": DType.F16, "s8": DType.S8}
KEEP_WITHIN = 2.0
"""Candidates whose model is this many times the best one's are not timed."""
WALKS = tuple((swizzle, raster) for raster in (1, 2) for swizzle in (1, 2, 4, 8))
FINALISTS = 4


def candidates() -> list[TileConfig]:
    """The tiles worth a build: for each kind of shape, the widths that fill 132 SMs in whole waves."""

    def tiles(schedule: Schedule, *specs: str) -> list[TileConfig]:
        return [_tile(schedule, *spec.split()) for spec in specs]

    return [
        *tiles(
            "pingpong",
            "128x128x128 c2x1 e64x64", "128x128x128 c2x1 e64x128", "128x128x128", "128x128x128 c1x2",
            "128x192x128 c2x1 e64x64", "128x64x128 c2x1", "128x96x128 c2x1", "64x128x128", "64x256x128 c2x1",
            "128x160x128", "128x160x128 c2x1", "128x160x128 e64x160", "128x80x128 c2x1", "64x160x128",
        ),
        *tiles(
            "cooperative",
            "128x256x128", "128x256x128 c2x1", "256x160x128", "256x160x128 c2x1", "256x160x128 e128x160",
            "128x224x128 c2x1",
        ),
        *tiles("warp_specialized", "64x32x256", "64x64x256", "64x128x256", "64x160x128", "64x112x256", "128x80x128"),
    ]  # fmt: skip


def _tile(schedule: Schedule, shape: str, *options: str) -> TileConfig:
    """``128x256x128`` with options ``c2x1`` (cluster) and ``e128x64`` (epilogue tile)."""
    m, n, k = map(int, shape.split("x"))
    pairs = {"c": (1, 1), "e": (0, 0)}
    for option in options:
        rows, columns = option[1:].split("x")
        pairs[option[0]] = (int(rows), int(columns))
    return TileConfig((m, n, k), cluster_shape=pairs["c"], schedule=schedule, epilogue_tile=pairs["e"])


def problem(out: DType) -> GemmProblem:
    """The whole dequantization: what the published figures fuse."""
    return GemmProblem(epilogue=Epilogue(out, "per_token", "per_channel", "per_token", bias=True))


def sources(outputs: Iterable[str] = OUTPUTS) -> dict[tuple[str, TileConfig], KernelSource]:
    """Every legal candidate with these outputs."""
    found = {}
    for out in outputs:
        dtype = OUTPUTS[out]
        for tile in candidates():
            try:
                validate(problem(dtype), tile, ARCH)
            except EmitError as error:
                print(f"left out: {error}")
                continue
            found[out, tile] = emit_cutlass_gemm(problem(dtype), tile, ARCH)
    return found


@dataclass
class Operands:
    """Random operands of one shape, weights in copies, and the exact result of copy 0."""

    shape: Shape
    a: torch.Tensor
    b: list[torch.Tensor]
    vectors: list[torch.Tensor]
    expected: dict[str, torch.Tensor]

    @classmethod
    def of(cls, shape: Shape) -> Operands:
        """Full-range operands, seeded by the shape, and what torch makes of them."""
        generator = torch.Generator("cuda").manual_seed(shape.m * 31 + shape.n * 7 + shape.k)

        def ints(*size: int) -> torch.Tensor:
            return torch.randint(-128, 128, size, dtype=torch.int8, device="cuda", generator=generator)

        a = ints(shape.m, shape.k)
        copies = min(32, harness.rotation(shape.n * shape.k))
        b = [ints(shape.n, shape.k) for _ in range(copies)]
        zero_point = torch.randint(-128, 128, (shape.m,), dtype=torch.int32, device="cuda", generator=generator)
        colsum = b[0].sum(1, dtype=torch.int32)
        row = torch.rand(shape.m, device="cuda", generator=generator) * 1e-2
        col = torch.rand(shape.n, device="cuda", generator=generator) * 1e-2
        bias = torch.randn(shape.n, device="cuda", generator=generator)
        # _int_mm wants more than 16 rows; a zero row changes nothing for the others.
        rows = torch.nn.functional.pad(a, (0, 0, 0, max(0, 32 - shape.m)))
        acc = torch._int_mm(rows, b[0].t())[: shape.m]
        v = (acc - zero_point[:, None] * colsum).float() * row[:, None] * col + bias
        requantized = torch.round(v.double() * 0.5) + 3.0
        expected = {"f16": v.half(), "s8": requantized.clamp(-128, 127).to(torch.int8)}
        return cls(shape, a, b, [zero_point, colsum, row, col, bias], expected)


def variant(
    name: str, out: str, tile: TileConfig, kernel: jit.Kernel, x: Operands, sm_count: int, walk: tuple[int, int]
) -> harness.Variant:
    """One kernel on one shape, as the harness wants it."""
    s = x.shape
    d = torch.full((s.m, s.n), 77, dtype=torch.int8 if out == "s8" else torch.float16, device="cuda")
    vectors = [v.data_ptr() for v in x.vectors]
    tail = [0.5, 3.0] if out == "s8" else []
    swizzle, raster = walk
    a, pd = x.a.data_ptr(), d.data_ptr()
    args = [
        [a, b.data_ptr(), pd, s.m, s.n, s.k, s.k, s.k, s.n, *vectors, *tail, sm_count, swizzle, raster, 1] for b in x.b
    ]
    workspace_bytes = kernel.query(2, (*args[0], 0))
    workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device="cuda")
    for arg in args:
        arg.append(workspace.data_ptr())

    def call(i: int) -> torch.Tensor:
        kernel.launch((1, 1, 1), args[i], torch.cuda.current_stream().cuda_stream, pdl=tile.schedule != "stream_k")
        return workspace  # keeps it alive as long as the closure

    def check() -> None:
        call(0)
        if not torch.equal(d, x.expected[out]):
            wrong = int((d != x.expected[out]).sum())
            raise harness.CheckError(f"{wrong} of {d.numel()} elements differ at {s.name}")

    return harness.Variant(name, call, len(args), check)


def tune_shape(
    out: str,
    x: Operands,
    kernels: dict[TileConfig, jit.Kernel],
    gpu: Target,
    clock: harness.Clock,
    report: Callable[[str], None],
) -> list[tuple[float, TileConfig, tuple[int, int]]]:
    """Times the candidates of one shape; returns (µs, tile, walk), fastest first."""
    s = x.shape
    bits = OUTPUTS[out].bits
    model = {tile: dispatch.model_cycles(tile, bits, s.m, s.n, s.k, gpu) for tile in kernels}
    kept = [tile for tile in kernels if model[tile] <= KEEP_WITHIN * min(model.values())]

    def timed(
        pairs: list[tuple[TileConfig, tuple[int, int]]], rounds: int
    ) -> list[tuple[float, TileConfig, tuple[int, int]]]:
        variants = {
            f"{tile.name} s{walk[0]} r{walk[1]}": (
                tile,
                walk,
                variant("", out, tile, kernels[tile], x, gpu.sm_count, walk),
            )
            for tile, walk in pairs
        }
        named = []
        for name, (_, _, v) in variants.items():
            v.name = name
            named.append(v)
        good, _ = harness.checked(named, report)
        if not good:
            return []
        times = harness.measure(good, clock, rounds=rounds, min_rounds=rounds, target_us=300.0)
        return sorted(((t.median_us, *variants[name][:2]) for name, t in times.items()), key=lambda r: r[0])

    first = timed([(tile, (1, 0)) for tile in kept], 4)
    if not first:
        return []
    final = timed([(tile, walk) for _, tile, _ in first[:FINALISTS] for walk in ((1, 0), *WALKS)], 7)
    return final + first[FINALISTS:]


def main() -> None:
    options = harness.parser(__doc__ or "")
    options.add_argument("--build-only", action="store_true", help="compile the candidates and stop; needs no GPU")
    options.add_argument("--outputs", default=",".join(OUTPUTS), help="which to tune; the table keeps the others' rows")
    options.add_argument("--jobs", type=int, default=None, help="compilers at a time")
    args = options.parse_args()
    outputs = args.outputs.split(",")
    wanted = sources(outputs)
    started = time.monotonic()
    built = jit.build_many(wanted.values(), jobs=args.jobs, progress=sys.stderr.isatty())
    failed = {name: error for name, error in built.items() if isinstance(error, Exception)}
    for name, error in failed.items():
        print(f"FAILED {name}: {str(error)[-300:]}")
    print(f"{len(built) - len(failed)} kernels in {time.monotonic() - started:.0f} s")
    if args.build_only:
        return
    harness.require_gpu()
    from qcut._launch_plans import target

    gpu = target(0)
    kernels: dict[str, dict[TileConfig, jit.Kernel]] = {out: {} for out in outputs}
    for (out, tile), source in wanted.items():
        if source.name not in failed:
            kernels[out][tile] = jit.load(built[source.name], source, 0)  # type: ignore[arg-type]
    clock = harness.CudaClock()
    results = harness.Results("tune_gemm", harness.environment())
    choices = [row for row in dispatch.tuned_rows(gpu.name) if row["out"] not in outputs]
    deadline = time.monotonic() + args.time_budget
    for shape in gemm_shapes(args.quick):
        x = Operands.of(shape)
        for out in outputs:
            ranked = tune_shape(out, x, kernels[out], gpu, clock, print)
            for rank, (us, tile, (swizzle, raster)) in enumerate(ranked):
                timing = harness.Timing(us, us, us, 1)
                kernel = kernels[out][tile].name
                results.add(
                    timing,
                    shape=shape.name,
                    out=out,
                    rank=rank,
                    kernel=kernel,
                    tile=tile.name,
                    swizzle=swizzle,
                    raster=raster,
                )
            if not ranked:
                continue
            us, tile, (swizzle, raster) = ranked[0]
            print(f"{shape.name:18} {out:4} {us:8.2f} us  {tile.name} swizzle {swizzle} raster {raster}", flush=True)
            choice = {"out": out, "m": shape.m, "n": shape.n, "k": shape.k, "tile": dispatch.tile_to_json(tile)}
            choices.append({**choice, "swizzle": swizzle, "raster": raster, "splits": 1, "time_us": round(us, 2)})
        if time.monotonic() > deadline:
            print(f"time budget spent after {shape.name}")
            break
    results.write_csv(args.out)
    environment = results.env.__dict__
    rows = ",\n".join(json.dumps(choice) for choice in choices)
    head = f'"gpu": {json.dumps(gpu.name)},\n"environment": {json.dumps(environment)},\n'
    (args.out / dispatch.table_name(gpu.name)).write_text("{\n" + head + f'"choices": [\n{rows}\n]\n}}\n')


if __name__ == "__main__":
    main()
