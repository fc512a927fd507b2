"""Run a Llama in a quarter of its memory: quantize it, and generate from a batch of prompts of different lengths.

    python examples/llama.py --model meta-llama/Llama-3.1-8B --scheme codebook4 --embeddings w8a16
    python examples/llama.py --model ./mistral --prompt "The capital of France is" --prompt "Once upon a time"
    python examples/llama.py                         # random weights of a small shape

The float model is loaded on the CPU and only its quantized layers go to the GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch

import qcut
from qcut.checkpoints.pretrained import device_of, dtype_for, load_pretrained
from qcut.conversion.quantize import model_bytes
from qcut.errors import QcutError

PROMPTS = ("Once upon a time there was a", "The three most important things in numerical analysis are")


class Numbers:
    """A tokenizer for random weights: each character is a token, and each token is printed as its number."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        """Ids of a text, as tokenizers of transformers give them."""
        return {"input_ids": [ord(character) % 256 for character in text]}

    def decode(self, ids: list[int], **_: Any) -> str:
        """The ids, in digits."""
        return " ".join(map(str, ids))


def random_model(dtype: torch.dtype) -> Any:
    """A Llama of four layers with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "vocab_size": 256}
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=1024)
    return LlamaForCausalLM(config).to(dtype).eval()


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", metavar="MODEL", help="a directory, or a name on the hub [random weights]")
    parser.add_argument(
        "--scheme", default="codebook4", help="of the linear layers: w8a8, w8a16, codebook4, … [codebook4]"
    )
    parser.add_argument("--embeddings", help="of token embeddings and classifier: w8a16, codebook4, … [float]")
    parser.add_argument(
        "--kv-cache", choices=("auto", "int8", "int4", "int8/int4"), default="auto", help="of keys and values [auto]"
    )
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; may be repeated")
    parser.add_argument("--new-tokens", type=int, default=64, metavar="N", help="for each prompt [64]")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest [0]")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda[:N] [auto]")
    return parser.parse_args(argv)


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    """Load, quantize and generate; print texts and times."""
    device = device_of(args.device)
    dtype = dtype_for("auto", device)
    cpu = torch.device("cpu")
    model, tokenizer = (
        load_pretrained(args.model, dtype=dtype, device=cpu) if args.model else (random_model(dtype), Numbers())
    )
    before = model_bytes(model)
    qcut.quantize(model, args.scheme, embeddings=args.embeddings, device=device, progress=sys.stderr.isatty())
    model.to(device)
    print(f"{type(model).__name__} on {device}")
    print(f"{before / 1e6:,.1f} MB, as {args.scheme} {model_bytes(model) / 1e6:,.1f} MB")

    prompts = [list(tokenizer(text)["input_ids"]) for text in args.prompt or PROMPTS]
    longest = max(map(len, prompts))
    positions = model.config.max_position_embeddings
    engine = qcut.Engine(
        model, batch=len(prompts), context=min(positions, longest + args.new_tokens), kv_cache=args.kv_cache
    )
    sampling = qcut.Sampling(temperature=args.temperature)
    engine.generate(prompts, 2, sampling=sampling)  # builds kernels and captures graphs
    arrivals: list[float] = []
    start = time.perf_counter()
    results = engine.generate(
        prompts, args.new_tokens, sampling=sampling, on_token=lambda *_: arrivals.append(time.perf_counter())
    )
    for prompt, result in zip(prompts, results, strict=True):
        print(f"\n{tokenizer.decode([*prompt, *result.tokens], skip_special_tokens=True)}")
    first, last = arrivals[0] - start, arrivals[-1] - arrivals[0]
    later = len(arrivals) - len(prompts)
    print(f"\nprompts of {sum(map(len, prompts))} tokens read in {1e3 * first:,.1f} ms")
    if later:
        print(f"{later} more in {1e3 * last:,.1f} ms: {later / last:,.0f} tokens/s")


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        run(args)
    except QcutError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
