"""A process that starts vLLM, answers prompts of token ids, and prints the answers: ``… answering JSON``."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main(asked: dict[str, Any]) -> None:
    """Answer greedily; ``asked`` has ``prompts``, ``tokens`` and the arguments of ``LLM``."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_PLUGINS": "qcut"}
    from vllm import LLM, SamplingParams

    llm = LLM(skip_tokenizer_init=True, enforce_eager=True, max_model_len=128, dtype="float32", **asked["arguments"])
    sampling = SamplingParams(temperature=0, max_tokens=asked["tokens"], ignore_eos=True, detokenize=False)
    prompts: Any = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    answers = llm.generate(prompts, sampling, use_tqdm=False)
    print("ANSWERS", json.dumps([list(answer.outputs[0].token_ids) for answer in answers]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
