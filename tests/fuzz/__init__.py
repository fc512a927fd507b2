"""Broken files for every format that qcut reads: ``python -m tests.fuzz --help``."""
