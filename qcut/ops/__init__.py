"""The operators of ``torch.ops.qcut``. The first look at one registers its module's, or all if only a name is given.

Every operator is for inference only (see `qcut.ops.gradients`) and returns new tensors, row-major unless an argument
asks for another order. An operator writes to no argument unless its schema says so. The tensors of one call live on one
device and may have any strides. An operator's class holds its arguments, checks, fake and CPU implementation
(`qcut.ops.registry`); `qcut.backends.cuda` has a module of the same name for CUDA, imported at the first CUDA call.
"""
