"""What every family of kernels shares: sources, parameters, constraints, epilogues."""
