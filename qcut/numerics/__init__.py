"""All quantization mathematics, as plain torch: the definitions that kernels are held to."""
