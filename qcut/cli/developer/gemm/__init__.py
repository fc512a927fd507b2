"""``qcut gemm``: one int8 product of given sizes and layouts, checked, timed and compared."""
