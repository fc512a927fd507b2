"""The portable path on a GPU."""
