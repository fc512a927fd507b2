"""Attention to a KV cache: decode and prefill."""
