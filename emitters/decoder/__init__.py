"""Kernels between a decoder's projections: norms, activations, attention, quantization, embeddings, argmax."""
