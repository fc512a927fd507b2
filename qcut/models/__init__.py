"""A float model as torch has it: its linear layers, its norms, its quality on a text."""
