"""Int8 arithmetic and sampling in plain torch: the definitions that kernels are compared with."""
