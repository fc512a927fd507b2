"""Inside vLLM, with CUDA graphs: steps of decoding and prompts, by vLLM's own methods and by qcut's.

A folder has the configuration of a model of a known shape, and vLLM makes up its weights. Each method runs in a process
of its own, which starts vLLM once. A step is timed as a user sees it: the time of answering many tokens less that of
one, divided by the number of further tokens. A prompt is the time to its first token. Routes of a mixture are drawn by
vLLM, all experts alike.

``--kernels`` also writes the GPU time of each kernel of a step of each batch, and of a prompt.

``--parallel FOLDER`` answers 64 prompts with a real model on several GPUs instead, and counts the answers that are
those of one GPU. Where one differs, the gap is between the log-probabilities of the two likeliest tokens on one GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import harness
from benchmarks.engine.held_process import HeldProcess, wait_for_turn
from benchmarks.harness import Timing


class Shape(NamedTuple):
    """Sizes of a Llama, or with experts of a Qwen3 mixture.

    Attributes:
        width, hidden, blocks, heads, kv_heads, vocabulary: sizes; ``hidden`` is the width of an expert too.
        experts: their number and those of a token; None: no mixture.
    """

    width: int
    hidden: int
    blocks: int
    heads: int
    kv_heads: int
    vocabulary: int
    experts: tuple[int, int] | None = None

    def config(self, context: int) -> dict[str, Any]:
        """A model's configuration, for so many tokens."""
        found: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.width,
            "intermediate_size": self.hidden,
            "num_hidden_layers": self.blocks,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": max(8192, context),
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "hidden_act": "silu",
            "torch_dtype": "float16",
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        if self.experts is not None:
            experts, top_k = self.experts
            found |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True}
            found |= {"num_experts": experts, "num_experts_per_tok": top_k, "moe_intermediate_size": self.hidden}
            found |= {"head_dim": min(128, self.width // 2), "decoder_sparse_step": 1, "mlp_only_layers": []}
        return found


SHAPES = {
    "llama-3-8b": Shape(4096, 14336, 32, 32, 8, 128256),
    "llama-3-70b": Shape(8192, 28672, 80, 64, 8, 128256),
    "qwen3-30b-a3b": Shape(2048, 768, 48, 32, 4, 151936, (128, 8)),
    "tiny": Shape(256, 512, 2, 8, 4, 1024),
    "tiny-mixture": Shape(256, 128, 2, 8, 4, 1024, (8, 2)),
}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
_W8A8 = {
    "targets": ["Linear"],
    "weights": {**_INT8, "strategy": "channel", "dynamic": False},
    "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
}
STORED: dict[str, dict[str, Any]] = {
    "vllm w8a8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": _W8A8},
        "ignore": ["lm_head"],
    },
    "vllm gptq4": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "sym": True,
        # Without weights to look at, vLLM would take every layer for a float one.
        "modules_in_block_to_quantize": [
            ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            ["self_attn.o_proj"],
            ["mlp.gate_proj", "mlp.up_proj"],
            ["mlp.down_proj"],
        ],
    },
}
"""vLLM's own methods, by the checkpoint's quantization method."""
KERNELS = {"vllm gptq4 marlin": ("vllm gptq4", "CutlassW4A8LinearKernel,MacheteLinearKernel,AllSparkLinearKernel")}
"""A method with other kernels than those that vLLM prefers: its name among `STORED`, and the kernels left out."""
ONLINE = {"vllm fp8": "fp8"}
"""vLLM's own methods that quantize float weights while loading, by the name that ``LLM`` takes."""
ROUTES = {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random"}
"""Made-up weights send the tokens of a batch to the same few experts, and those of each method to others."""
METHODS = ("fp16", *STORED, *KERNELS, *ONLINE, "qcut-w8a8", "qcut-w8a16", "qcut-codebook4", "qcut-codebook4_int8")
BATCHES, PROMPT, CONTEXT = (1, 8, 64), 2048, 128
ROUNDS, NEW = 3, 128
STEPS = 16
"""Number of steps to count kernels of."""
SHORTEST_US = 1.0
"""Of a kernel that gets a row, in a step or a prompt."""
NAME = 120
"""Characters of a kernel's name; kernels of one template that differ later are one."""
KEY = ("shape", "method", "gpus", "what", "batch")
PARALLEL_KEY = ("shape", "method", "gpus", "what")
PROMPTS, ANSWER = 64, 64
SETTINGS = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "NCCL_NVLS_ENABLE": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # multicast, like the line above
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # lets this process read the methods of the model's layers
}


# ── the process that runs vLLM ───────────────────────────────────────────────────────────────────


def child(asked: dict[str, Any]) -> None:
    """Start vLLM and print the results, one line of JSON each."""
    from vllm import LLM, SamplingParams
    from vllm.version import __version__

    from benchmarks.engine import vllm

    start = time.perf_counter()
    llm = LLM(**asked["arguments"])
    started = round(time.perf_counter() - start, 1)
    layers = "+".join(sorted({name for names in llm.apply_model(vllm.methods_of) for name in names}))
    print(json.dumps({"vllm": __version__, "layers": layers, "start_s": started}), flush=True)
    wait_for_turn()

    def answer(prompts: list[list[int]], new: int, logprobs: int | None = None) -> list[Any]:
        sampling = SamplingParams(
            temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=logprobs, top_p=1.0
        )
        given: Any = [{"prompt_token_ids": ids} for ids in prompts]
        return [answered.outputs[0] for answered in llm.generate(given, sampling, use_tqdm=False)]

    if "prompts" in asked:
        for out in answer(asked["prompts"], asked["new"], logprobs=2):
            likeliest = [sorted((p.logprob for p in at.values()), reverse=True)[:2] for at in out.logprobs]
            gaps = [best - second for best, second in likeliest]
            print(json.dumps({"tokens": list(out.token_ids), "gaps": gaps}), flush=True)
        return

    def seconds(batch: int, length: int, new: int, salt: int) -> float:
        vocabulary = asked["vocabulary"]
        prompts = [[(7 * i + 13 * j + salt) % (vocabulary - 8) + 5 for i in range(length)] for j in range(batch)]
        start = time.perf_counter()
        answer(prompts, new)
        return time.perf_counter() - start

    new = asked["new"]
    for batch in asked["batches"]:
        seconds(batch, asked["context"], 8, 0)
        pairs = [(seconds(batch, asked["context"], n, 0) for n in (1 + new, 1)) for _ in range(ROUNDS)]
        steps = [(many - one) / new for many, one in pairs]
        print(json.dumps({"what": "step", "batch": batch, "seconds": steps}), flush=True)
    # Each round has another prompt, since vLLM caches prefixes.
    prompts = [seconds(1, asked["prompt"], 1, 1 + salt) for salt in range(ROUNDS + 1)][1:]
    print(json.dumps({"what": "prompt", "batch": 1, "seconds": prompts}), flush=True)
    if asked["kernels"]:
        for batch in asked["batches"]:
            many, before = (
                kernels_of(llm, functools.partial(seconds, batch, asked["context"], n, 0)) for n in (1 + STEPS, 1)
            )
            for name, (count, us) in many.items():
                less, less_us = before.get(name, (0, 0.0))
                found = {"kernel": name, "count": (count - less) / STEPS, "us": (us - less_us) / STEPS}
                print(json.dumps({"what": "step", "batch": batch, **found}), flush=True)
        last = functools.partial(seconds, 1, asked["prompt"], 1, ROUNDS + 2)
        for name, (count, us) in kernels_of(llm, last).items():
            print(json.dumps({"what": "prompt", "batch": 1, "kernel": name, "count": count, "us": us}), flush=True)


def methods_of(model: Any) -> list[str]:
    """What computes the linear layers and experts of a model that vLLM has loaded, but not its routers."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase

    named = model.named_modules()
    layers = [
        layer for name, layer in named if isinstance(layer, LinearBase | RoutedExperts) and not name.endswith(".gate")
    ]
    return [type(layer.quant_method).__name__ for layer in layers]


def kernels_of(llm: Any, work: Callable[[], object]) -> dict[str, tuple[int, float]]:
    """How often each kernel ran, and its microseconds in all, by name, on the first GPU; a CPU has none.

    Of several GPUs' kernels, those of an all-reduce include the wait for the other GPUs.
    """
    from benchmarks.engine import vllm

    llm.collective_rpc(vllm.start_profile)
    work()
    first: dict[str, tuple[int, float]] = llm.collective_rpc(vllm.stop_profile)[0]
    return first


_profile: Any = None


def start_profile(worker: Any) -> None:
    """Watch kernels in the process of one of vLLM's workers."""
    global _profile
    import torch

    _profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    if torch.cuda.is_available():
        _profile.start()


def stop_profile(worker: Any) -> dict[str, tuple[int, float]]:
    """What ran since `start_profile`."""
    import torch

    found: dict[str, tuple[int, float]] = {}
    if not torch.cuda.is_available():
        return found
    torch.cuda.synchronize()
    _profile.stop()
    for event in _profile.key_averages():
        name = event.key[:NAME]
        count, us = found.get(name, (0, 0.0))
        if event.self_device_time_total > 0:
            found[name] = count + event.count, us + event.self_device_time_total
    return found


# ── the one that measures ────────────────────────────────────────────────────────────────────────


def start(asked: dict[str, Any]) -> HeldProcess:
    """A process that starts vLLM."""
    path = os.pathsep.join(filter(None, (str(harness.ROOT), os.environ.get("PYTHONPATH"))))
    settings = os.environ | {key: os.environ.get(key, value) for key, value in SETTINGS.items()} | {"PYTHONPATH": path}
    return HeldProcess(harness.command(__name__, "--child", json.dumps(asked)), settings | asked.get("settings", {}))


def run(asked: dict[str, Any], timeout: float, started: HeldProcess | None = None) -> list[dict[str, Any]]:
    """What a process prints, one that is started now or waits.

    Raises:
        RuntimeError: see `HeldProcess.results`.
    """
    with started or start(asked) as process:
        try:
            return process.results(timeout)
        except RuntimeError as error:
            raise RuntimeError(f"{asked['arguments']}: {error}") from None


def write_shape(folder: Path, shape: str, method: str, context: int) -> None:
    """Write the configuration of a model."""
    config = SHAPES[shape].config(context)
    if method in STORED:
        config["quantization_config"] = STORED[method]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))


def arguments_of(folder: Path, method: str, gpus: int, options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``LLM``."""
    given = {
        "model": str(folder),
        "quantization": method if method.startswith("qcut") else ONLINE.get(method),
        "dtype": options.dtype,
        "tensor_parallel_size": gpus,
        "gpu_memory_utilization": options.memory,
        "skip_tokenizer_init": True,
        **json.loads(options.arguments),
    }
    return given


def asked_of(folder: Path, method: str, options: argparse.Namespace) -> dict[str, Any]:
    """What a process is asked to measure, with a model's configuration in a new folder."""
    prompt = min(PROMPT, options.prompt)
    longest = max(prompt, CONTEXT + NEW) + 64
    stored, left_out = KERNELS.get(method, (method, ""))
    write_shape(folder, options.shape, stored, longest)
    arguments = arguments_of(folder, method, options.gpus, options)
    return {
        "arguments": {**arguments, "load_format": "dummy", "max_model_len": longest},
        "batches": options.batches,
        "prompt": prompt,
        "context": CONTEXT,
        "new": NEW,
        "kernels": options.kernels,
        "settings": ROUTES | ({"VLLM_DISABLED_KERNELS": left_out} if left_out else {}),
        "vocabulary": SHAPES[options.shape].vocabulary,
    }


def measure(options: argparse.Namespace, results: harness.Results) -> tuple[list[list[object]], int]:
    """Time each method, and keep its rows; returns the lines of a table, and how many methods failed."""
    lines: list[list[object]] = []
    failed = 0
    kernels = harness.Results("vllm_kernels", results.env)

    def keep(method: str, first: dict[str, Any], found: list[dict[str, Any]]) -> None:
        """Add a method's rows, and write them."""
        for one in found:
            columns = {"shape": options.shape, "method": method, "gpus": options.gpus, "what": one["what"]}
            columns["batch"] = one["batch"]
            if "kernel" in one:
                rounded = {key: round(one[key], 2) for key in ("count", "us")}
                if one["us"] < SHORTEST_US:
                    continue
                kernels.rows.append({"bench": kernels.bench, **columns, "kernel": one["kernel"], **rounded})
                continue
            tokens = one["batch"] * (asked[method]["prompt"] if one["what"] == "prompt" else 1)
            timing = Timing.of([s * 1e6 for s in one["seconds"]], "wall")
            rate = round(tokens / statistics.median(one["seconds"]), 1)
            results.add(timing, **columns, tokens_s=rate, **first)
            lines.append([method, options.gpus, one["what"], one["batch"], timing.median_us, rate])
            print(*lines[-1], flush=True)
        results.write_csv(options.out, KEY)
        if kernels.rows:
            kernels.write_csv(options.out, KEY)  # a cell's kernels replace its older rows

    with tempfile.TemporaryDirectory() as top, contextlib.ExitStack() as started:
        asked = {method: asked_of(Path(top, method), method, options) for method in options.methods.split(",")}
        waiting = {method: started.enter_context(start(one)) for method, one in asked.items() if options.together}
        for process in waiting.values():
            process.wait_until_ready(options.timeout)
        for method, one in asked.items():
            try:
                first, *found = run(one, options.timeout, waiting.get(method))
                layers = first.pop("layers")
                if ("Unquantized" in layers) != (method == "fp16"):
                    raise RuntimeError(f"its linear layers are of {layers}")
            except RuntimeError as error:
                print(f"FAILED {method}: {error}", file=sys.stderr, flush=True)
                failed += 1
                continue
            keep(method, first, found)
    return lines, failed


def prompts_of(vocabulary: int) -> list[list[int]]:
    """The prompts; their answers are compared."""
    return [[(31 * i + 17 * j * j + 5) % vocabulary for i in range(8 + j)] for j in range(PROMPTS)]


def gaps_between(alone: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[float]:
    """For each answer that differs, the gap between the two likeliest tokens at the first different token."""
    gaps = []
    for one, other in zip(alone, others, strict=True):
        pairs = zip(one["tokens"], other["tokens"], one["gaps"], strict=True)
        gaps += [next(gap for a, b, gap in pairs if a != b)] if one["tokens"] != other["tokens"] else []
    return gaps


def compare(options: argparse.Namespace, results: harness.Results) -> list[list[object]]:
    """Count the answers on several GPUs that are those of one; returns the lines of a table."""
    vocabulary = json.loads((options.parallel / "config.json").read_text())["vocab_size"]
    prompts = prompts_of(vocabulary)
    lines: list[list[object]] = []
    for method in options.methods.split(","):
        answers: list[list[dict[str, Any]]] = []
        for gpus in (1, options.gpus):
            arguments = arguments_of(options.parallel, method, gpus, options) | {"max_model_len": 256}
            first, *found = run({"arguments": arguments, "prompts": prompts, "new": ANSWER}, options.timeout)
            first.pop("layers")
            answers.append(found)
        gaps = gaps_between(*answers)
        apart = json.loads(options.arguments).get("enable_expert_parallel", False)
        what = "answers" + ", experts apart" * apart
        columns = {"shape": options.parallel.name, "method": method, "gpus": options.gpus, "what": what}
        same, gap = PROMPTS - len(gaps), round(max(gaps, default=0.0), 4)
        results.rows.append({"bench": results.bench, **columns, "same": same, "of": PROMPTS, "gap": gap, **first})
        results.write_csv(options.out, PARALLEL_KEY)
        lines.append([method, options.gpus, what, PROMPTS, same, gap])
    return lines


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    options.add_argument("--methods", default=",".join(METHODS), help="comma-separated [all]")
    options.add_argument("--gpus", type=int, default=1, help="tensor parallel [1]")
    options.add_argument("--batches", type=lambda text: [int(b) for b in text.split(",")], default=list(BATCHES))
    options.add_argument("--prompt", type=int, default=PROMPT, help="tokens of a prompt [2048]")
    options.add_argument("--dtype", default="float16")
    options.add_argument("--memory", type=float, default=0.6, help="share of the GPU's memory that vLLM may take")
    options.add_argument("--arguments", default="{}", metavar="JSON", help="further ones of LLM")
    options.add_argument("--parallel", type=Path, metavar="FOLDER", help="compare answers of a real model")
    options.add_argument("--kernels", action="store_true", help="write the kernels of steps and prompts, too")
    options.add_argument(
        "--together",
        action="store_true",
        help="start all methods at once, and time each in its turn; give each its share of the memory",
    )
    options.add_argument("--timeout", type=float, default=900.0, metavar="SECONDS", help="most for one method")
    options.add_argument("--child", help=argparse.SUPPRESS)


@harness.script(harness.timing_options, add_options)
def main(given: argparse.Namespace) -> int:
    """Run the benchmark; exit status 1 where a method failed."""
    if given.child:
        child(json.loads(given.child))
        return 0
    bench = "vllm_parallel" if given.parallel else "bench_vllm"
    results = harness.Results(bench, harness.environment())
    lines, failed = (compare(given, results), 0) if given.parallel else measure(given, results)
    path = results.write_csv(given.out, PARALLEL_KEY if given.parallel else KEY)
    last = ["same", "gap"] if given.parallel else ["µs", "tokens/s"]
    print(harness.table(["method", "GPUs", "what", "batch", *last], lines))
    print(f"rows in {path}")
    return 1 if failed else 0
