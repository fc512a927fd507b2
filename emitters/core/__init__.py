"""Shared by all kernel families: sources, parameters, constraints, epilogues."""
