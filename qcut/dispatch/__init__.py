"""Chooses the kernel of a product from sizes, types and the GPU. No module here takes a tensor."""
