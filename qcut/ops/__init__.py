"""The operators of ``torch.ops.qcut``. Importing this package registers all of them."""

from qcut.ops import activation, attention, codebook, embed, int8, next_token, norm, w8a8

__all__ = ["activation", "attention", "codebook", "embed", "int8", "next_token", "norm", "w8a8"]
