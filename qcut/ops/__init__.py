"""The operators of ``torch.ops.qcut``. Importing this package registers all of them."""

from qcut.ops import codebook, decoder, embed, int8, w8a8

__all__ = ["codebook", "decoder", "embed", "int8", "w8a8"]
