"""Mixtures with experts that are stored one by one: names, the tensors of each, and the stacks made of them."""
