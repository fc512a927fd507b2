"""vLLM's quantization method ``qcut``: see docs/serving.md."""
