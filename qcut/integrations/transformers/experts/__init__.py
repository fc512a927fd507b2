"""Mixtures of experts through transformers."""
