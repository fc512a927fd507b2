"""Quantize a GPT-2 in place, and print its perplexity before and after, its size, and a sample.

    python examples/gpt2_int8.py                                          # the checkpoint in models/gpt2-5m
    python examples/gpt2_int8.py openai-community/gpt2-large codebook4    # any GPT-2 or Llama, any scheme

`make demo` compares all schemes, with speed and memory: benchmarks/demo.py.
"""

from __future__ import annotations

import pydoc_data.topics
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import qcut
from qcut.models.evaluation import perplexity

MODEL = Path(__file__).resolve().parents[1] / "models" / "gpt2-5m"


def main(model_name: str = str(MODEL), scheme: str = "w8a8") -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=dtype).eval().to(device)

    # Real text: the topics of Python's help, which are part of every CPython.
    text = "\n\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"][: 8 * 512])
    before = perplexity(model, tokens, progress=False)

    report = qcut.quantize(model, scheme, progress=False)  # in place
    print(report)
    after = perplexity(model, tokens, progress=False)
    print(f"\nperplexity {before:.3f} in {dtype}, {after:.3f} in {scheme}, on {device}\n")

    engine = qcut.Engine(model)
    prompt = tokenizer("The with statement")["input_ids"]
    (result,) = engine.generate([prompt], 40, sampling=qcut.Sampling(temperature=0.8, top_k=40))
    print(tokenizer.decode(prompt + result.tokens))


if __name__ == "__main__":
    main(*sys.argv[1:])
