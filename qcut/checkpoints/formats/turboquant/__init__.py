"""Directories of the turboquant-model package, read and written."""
