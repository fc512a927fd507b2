"""Kernels between a router and its experts: the choice of experts, tiles of routes, and the sum of their results."""
