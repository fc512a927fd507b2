"""The operators of ``torch.ops.qcut``. Importing this package registers all of them."""

from qcut.ops import activation, codebook, decoder, embed, int8, w8a8

__all__ = ["activation", "codebook", "decoder", "embed", "int8", "w8a8"]
