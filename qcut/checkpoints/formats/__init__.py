"""Checkpoints of other libraries, read as qcut layers, and one of their formats written.

Source: docs/foreign-checkpoints.md.
"""
