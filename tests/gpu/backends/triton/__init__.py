"""The Triton back end on a GPU."""
