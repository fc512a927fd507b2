"""Which kernel runs which product: sizes in, descriptions out, no tensors."""
