"""Models of transformers in two processes: jobs, what runs them under torchrun, and what each process makes of them.

``python -m torch.distributed.run … -m tests.support.parallel FOLDER`` runs the jobs in ``FOLDER/jobs.json``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

PROCESSES = 2
IDS = torch.arange(1, 13).view(1, 12)
NEW_TOKENS = 3


@dataclass(frozen=True)
class Job:
    """One ``from_pretrained`` in every process.

    Attributes:
        name: of the job's results.
        folder: of the model.
        config: arguments of `qcut.QcutConfig`; None for a folder that is quantized. ``calibrated`` and ``fitted`` ask
            for a calibration and second moments of the float model.
        dtype: of the model.
        distributed: arguments of ``DistributedConfig`` in place of ``tp_plan="auto"``.
        foreign: load another library's checkpoint.
        probed: call each layer by itself, too: one that takes and gives what Llama's do.
        refused: also try what models in parts refuse.
        hooked: a layer of a Llama whose result a hook doubles, which the model's constructor sets.
    """

    name: str
    folder: str
    config: dict[str, Any] | None = None
    dtype: str = "float32"
    distributed: dict[str, Any] = field(default_factory=dict)
    foreign: bool = False
    probed: bool = True
    refused: bool = False
    hooked: str = ""


def config_of(job: Job) -> dict[str, Any]:
    """What a job passes to ``from_pretrained``, in one process and in several."""
    from transformers import AutoModelForCausalLM

    import qcut

    options: dict[str, Any] = {"dtype": getattr(torch, job.dtype)}
    if job.foreign:
        options["config"] = qcut.foreign_config(job.folder)
    if job.config is None:
        return options
    given = dict(job.config)
    calibrated, fitted = given.pop("calibrated", False), given.pop("fitted", False)
    if calibrated or fitted:
        plain = AutoModelForCausalLM.from_pretrained(job.folder)
        if calibrated:
            given["calibration"] = qcut.calibrate(plain, [IDS], progress=False)
        if fitted:
            given["second_moments"] = qcut.collect_second_moments(plain, [IDS], progress=False)
    options["quantization_config"] = qcut.QcutConfig(**given)
    return options


def model_class(job: Job) -> Any:
    """The class by which a job's model is loaded."""
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    class Hooked(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.get_submodule(job.hooked).register_forward_hook(lambda layer, args, y: 2 * y)

    return Hooked if job.hooked else AutoModelForCausalLM


def rows_for(name: str, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Tokens ``[3, K]`` for a layer, of different magnitudes, the last one zero except for one column."""
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    x[1] *= 100
    x[2] = 0
    x[2, k - 1] = 1
    return x.to(dtype)


def answers(model: Any) -> tuple[Tensor, list[int]]:
    """Logits of `IDS`, and the tokens that the model goes on with."""
    ids = IDS.to(model.device)
    with torch.no_grad():
        logits = model(ids).logits
    tokens = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0]
    return logits.cpu(), tokens.tolist()


def is_rowwise(name: str) -> bool:
    """Whether the plan of Llama cuts a layer along its input channels."""
    return name.endswith(("o_proj", "down_proj"))


def slices(layer: Any, rowwise: bool, rank: int) -> dict[str, Tensor]:
    """What a process is to store of a whole layer, cut here in plain order."""
    from qcut.layers.int8 import Int8Linear
    from qcut.numerics.codebook import packing
    from qcut.schemes import padded_k

    n, k = layer.out_features, layer.in_features
    state: dict[str, Tensor] = layer.state_dict()
    if not rowwise:
        return {key: t.chunk(PROCESSES)[rank] if len(t) == n else t for key, t in state.items()}
    if rank > 0:
        state.pop("bias", None)
    if isinstance(layer, Int8Linear):
        codes = layer.codes.chunk(PROCESSES, 1)[rank]
        state["qweight"] = nn.functional.pad(codes, (0, padded_k(codes.shape[1]) - codes.shape[1]))
        if "colsum" in state:
            state["colsum"] = codes.long().sum(1).int()
        return state
    for p, bits in enumerate(layer.scheme.widths):
        prefix = "residual_" * p
        columns = packing.unpack(state[f"{prefix}indices"], bits, k).chunk(PROCESSES, 1)[rank]
        state[f"{prefix}indices"] = packing.pack(columns.contiguous(), bits)
        state[f"{prefix}norms"] = state[f"{prefix}norms"].chunk(PROCESSES, 1)[rank]
    return state


def run(jobs: Iterable[Job], folder: Path, *, cpu: bool, timeout: float = 300.0) -> list[dict[str, Any]]:
    """Run jobs in two processes.

    Args:
        jobs: what to load.
        folder: for jobs and results.
        cpu: hide GPUs, so that the processes talk through gloo.
        timeout: seconds.

    Returns:
        For each process, the result of each job by name: an ``error``, or what `_result` gives.
    """
    (folder / "jobs.json").write_text(json.dumps([asdict(job) for job in jobs]))
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(PROCESSES), "--standalone"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"CUDA_VISIBLE_DEVICES": ""} if cpu else {})
    ended = subprocess.run(
        [*words, "-m", __name__, str(folder)],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return read(folder)[1]


def read(folder: Path) -> tuple[dict[str, Job], list[dict[str, Any]]]:
    """The jobs that were run in a folder, by name, and what `run` returned."""
    jobs = [Job(**data) for data in json.loads((folder / "jobs.json").read_text())]
    return {job.name: job for job in jobs}, [torch.load(folder / f"results-{rank}.pt") for rank in range(PROCESSES)]


def _result(model: Any, watch: _Watch, *, probed: bool) -> dict[str, Any]:
    from qcut.layers.linear import Linear

    layers: dict[str, dict[str, Any]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, Linear) and layer.parts > 1:
            state = {key: tensor.cpu() for key, tensor in layer.state_dict().items()}
            layers[name] = {"state": state, "bytes": layer.weight_bytes}
            if not probed:
                continue
            x = rows_for(name, layer.in_features * (PROCESSES if is_rowwise(name) else 1), model.dtype)
            if is_rowwise(name):
                x = x.chunk(PROCESSES, -1)[torch.distributed.get_rank()]
            x = x.to(model.device)
            with torch.no_grad():
                own, hooked = type(layer).forward(layer, x), layer(x)
            layers[name] |= {"own": own.cpu(), "hooked": hooked.cpu()}
    whole = [name for name, m in model.named_modules() if isinstance(m, Linear) and m.parts == 1]
    logits, tokens = answers(model)
    return {"layers": layers, "whole": whole, "logits": logits, "tokens": tokens, "alive": watch.most}


def _refusals(model: Any, folder: Path) -> dict[str, str]:
    import qcut

    out = str(folder / f"out-{torch.distributed.get_rank()}")
    doors: dict[str, Callable[[], Any]] = {
        "save_pretrained": lambda: model.save_pretrained(out),
        "qcut.save": lambda: qcut.save(model, out),
        "dequantize": model.dequantize,
        "decode": lambda: qcut.Engine(model, batch=1),
    }
    return {name: _failure(door) for name, door in doors.items()}


def _failure(door: Callable[[], Any]) -> str:
    try:
        door()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class _Watch:
    """How many whole layers and whole stored tensors were alive when the next one came, at most."""

    def __init__(self) -> None:
        from qcut.common.safetensors import TensorFile
        from qcut.integrations.transformers.parallel import TensorParallel

        self._seen: list[weakref.ref[Any]] = []
        self.most = 0
        part, read = TensorParallel.part, TensorFile.read

        def watching_part(parallel: TensorParallel, name: str, layer: Any) -> Any:
            if parallel.is_cut(name):
                self._note(layer)
            return part(parallel, name, layer)

        def watching_read(file: TensorFile, name: str, **options: Any) -> Tensor:
            tensor = read(file, name, **options)
            if name.endswith(("qweight", "indices", "norms")):
                self._note(tensor.untyped_storage())
            return tensor

        TensorParallel.part = watching_part  # type: ignore[assignment, method-assign]
        TensorFile.read = watching_read  # type: ignore[assignment, method-assign]

    def _note(self, one: Any) -> None:
        self.most = max(self.most, sum(ref() is not None for ref in self._seen))
        self._seen.append(weakref.ref(one))

    def reset(self) -> None:
        self._seen, self.most = [], 0


def _load(job: Job) -> nn.Module:
    options = config_of(job)
    if job.distributed:
        from transformers.distributed import DistributedConfig

        options["distributed_config"] = DistributedConfig(**job.distributed)
    else:
        options["tp_plan"] = "auto"
    model: nn.Module = model_class(job).from_pretrained(job.folder, **options)
    return model


def main(folder: Path) -> None:
    """Run the jobs in this process, and write their results."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    watch = _Watch()
    results: dict[str, Mapping[str, Any]] = {}
    for data in json.loads((folder / "jobs.json").read_text()):
        job = Job(**data)
        watch.reset()
        try:
            model = _load(job)
        except Exception as error:
            results[job.name] = {"error": f"{type(error).__name__}: {error}"}
            continue
        results[job.name] = _result(model, watch, probed=job.probed) | (
            {"refused": _refusals(model, folder)} if job.refused else {}
        )
    torch.save(results, folder / f"results-{os.environ['RANK']}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
