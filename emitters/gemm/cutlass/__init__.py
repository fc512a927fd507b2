"""CUTLASS's int8 products, through nvidia-cutlass."""
